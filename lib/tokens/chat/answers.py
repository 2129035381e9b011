"""Render a conversation and find the characters that are trained.

The template's `{% generation %}` blocks mark the assistant's text. For a template without them,
the turns up to an answer are rendered with and without the answer. The shorter text must be a
prefix of the longer one; otherwise the conversation is dropped, since nothing is guessed. Some
templates rewrite earlier turns: for example, templates of thinking models drop thoughts. An answer
that would be rewritten becomes a separate sample, rendered as the model would see it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lib.core.conversation import CALLS, Conversation, Message
from lib.core.errors import UsageError
from lib.tokens.chat import render
from lib.tokens.chat.calls import fit_calls
from lib.tokens.chat.conversations import ControlTokens, compile_alternatives
from lib.tokens.chat.policy import ALL, ASSISTANT, LAST
from lib.tokens.chat.render import LimitError, Rendered, Span, Template, TemplateError, TokenError

# Special tokens that an answer may contain: they enclose thoughts.
_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)
_OPENING = "<think>"
_CLOSING = "</think>"
_WORD = "Kingfisher"  # no template changes this answer
_USER = {"role": "user", "content": "Which bird?"}
_ANSWER = {"role": "assistant", "content": _WORD}
_TRIALS = (
    [_USER, _ANSWER],
    [_USER, _ANSWER, _USER, _ANSWER],
    [{"role": "system", "content": "Be brief."}, _USER, _ANSWER],
)


class NoAnswerBoundary(Exception):
    """Raised if the rendered text does not show where an answer begins or ends.

    lines: the first two lines that differ between the two renderings.
    """

    def __init__(self, reason: str, first: str = "", second: str = "") -> None:
        super().__init__(reason)
        self.lines = (first, second)


class TextWithSpans(NamedTuple):
    """Holds a rendered text and the spans of its characters that are trained."""

    text: str
    spans: list[Span]


class _Writer(NamedTuple):
    """Renders the messages of one conversation, with its tools and variables."""

    template: Template
    tools: Sequence[Message] | None
    variables: Mapping[str, Any]

    def render(self, messages: Sequence[Message], prompt: bool = False) -> Rendered:
        """Return the text of messages. prompt: add the generation prompt at the end."""
        return self.template.render(messages, self.tools, prompt, self.variables)

    def fit_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with their calls in the form that the template takes."""
        return fit_calls(messages, lambda turns: self.render(turns).text)


class AnswerFinder:
    """Finds the trained characters of conversations.

    special, added: the texts of the tokenizer's special tokens and added tokens. variables: further
    variables of the template; those of a conversation replace them.

    closing: the tokens that end an answer. template_omissions: how often the template omitted the
    system prompt or thoughts. Raises UsageError if the template does not work with this tokenizer.
    """

    def __init__(
        self,
        template: Template,
        train_on: str,
        special: Sequence[str],
        added: Sequence[str],
        bos: str | None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = template
        self._variables = variables or {}
        self._train_on = train_on
        self.template_omissions: Counter[str] = Counter()
        trials = list(self._render_trials())
        endings = [text.rpartition(_WORD)[2] for text in trials]
        # Some tokenizers add white space and words as tokens: those control nothing.
        pattern = compile_alternatives(
            token for token in added if not token.strip().isalnum() and token.strip()
        )
        written = {token for text in trials for token in pattern.findall(text)}
        self.closing = {match[0] for text in endings if (match := pattern.match(text.lstrip()))}
        if trials and not self.closing:
            _refuse_template(endings[0])
        if bos and any(text.startswith(bos * 2) for text in trials):
            raise UsageError(
                "the chat template writes two BOS tokens at the start",
                expected="at most one",
                found=repr(trials[0][: len(bos) * 2 + 20]),
            )
        control = {*special, *written} - {""}
        self._ends = {
            token for token in control if not _THOUGHT.search(token) or token in self.closing
        }
        self._end_lengths = sorted(set(map(len, self._ends)), reverse=True)
        marks = {render.BEGIN, render.END} if template.has_marks else set()
        self.control = ControlTokens({*self._ends, *marks}, {*self._ends, *special, *marks})

    def _render_trials(self) -> Iterator[str]:
        """Yield the texts of the trial conversations that the template accepts."""
        for messages in _TRIALS:
            try:
                yield self._template.render(messages, variables=self._variables).text
            except TemplateError as error:
                if isinstance(error, LimitError):
                    raise
                if isinstance(error, TokenError):
                    raise UsageError(
                        f"the chat template does not fit the tokenizer: {error}", hint=_PLAIN_HINT
                    ) from None

    def find_texts(self, conversation: Conversation) -> list[TextWithSpans]:
        """Render a conversation; return its texts with their trained spans.

        There are several texts if the template rewrites earlier turns, and none if no answer is
        trained. Raises TemplateError if the template refuses the conversation, and NoAnswerBoundary
        if the text does not show where an answer begins or ends.
        """
        messages, tools, weights, kwargs = conversation
        writer = _Writer(self._template, tools, {**self._variables, **(kwargs or {})})
        if any("reasoning_content" in message for message in messages):
            messages = list(map(_add_thinking, messages))
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if self._train_on == ALL:
            return self._train_on_all_turns(writer.fit_calls(messages), writer, weights)
        chosen = answers[-1:] if self._train_on == LAST else answers
        trained = [i for i in chosen if weights is None or weights[i]]
        if not trained:
            return []
        # Later turns are no context of a trained answer.
        messages = writer.fit_calls(messages[: trained[-1] + 1])
        full = writer.render(messages)
        _require_tools(tools, full.text)
        if _is_system_prompt_missing(messages[0], full.text):
            self.template_omissions["system prompt"] += 1
        texts: list[TextWithSpans] = []
        for i in reversed(trained):
            answer = self._find_answer(messages, writer, full, answers, i)
            end = answer.spans[-1][1]
            if len(messages[i]) > 2 or CALLS in messages[i]:  # not only role and content
                _require_calls(messages[i], i + 1, answer.text[answer.spans[0][0] : end])
                if _are_thoughts_missing(messages[i], answer.text):
                    self.template_omissions["thoughts"] += 1
            if _is_opening_missing(messages[i], answer.text[:end]):
                self.template_omissions[f"{_OPENING} before thoughts"] += 1
            if texts and (
                answer.text is texts[-1].text or texts[-1].text.startswith(answer.text[:end])
            ):
                texts[-1].spans.extend(answer.spans)
            else:
                texts.append(answer)
        return texts[::-1]

    def _train_on_all_turns(
        self,
        messages: Sequence[Message],
        writer: _Writer,
        weights: Sequence[float] | None,
    ) -> list[TextWithSpans]:
        """Return the text of all turns, trained except for turns of weight 0."""
        full = writer.render(messages).text
        _require_tools(writer.tools, full)
        spans = []
        start = 0
        for i in (i for i in range(len(messages)) if weights is not None and not weights[i]):
            spans.append((start, self._find_turns_end(messages[:i], writer, full)))
            start = (
                len(full)
                if i == len(messages) - 1
                else self._find_turns_end(messages[: i + 1], writer, full)
            )
        return [TextWithSpans(full, [*spans, (start, len(full))])]

    def _find_turns_end(self, messages: Sequence[Message], writer: _Writer, full: str) -> int:
        """Return where `messages`, the first ones of a conversation, end in its full text.

        The template's text after the last message is excluded, since it depends on
        `add_generation_prompt`. Raises NoAnswerBoundary if the full text does not begin with the
        text of these messages.
        """
        if not messages:
            return 0
        text, prompted = (writer.render(messages, prompt).text for prompt in (False, True))
        end = find_shared_length(text, prompted)
        if end < min(len(text), len(prompted)):
            # The texts may differ inside a token: go back to its start.
            end = min(
                (
                    end - cut
                    for token in self._ends
                    for cut in range(1, len(token))
                    for rendered in (text, prompted)
                    if rendered[:end].endswith(token[:cut])
                    and rendered.startswith(token, end - cut)
                ),
                default=end,
            )
        if not full.startswith(text[:end]):
            raise NoAnswerBoundary("it does not show where a turn of weight 0 begins and ends")
        return end

    def _find_answer(
        self,
        messages: Sequence[Any],
        writer: _Writer,
        full: Rendered,
        answers: list[int],
        i: int,
    ) -> TextWithSpans:
        """Return the text that ends with answer `i`, and the spans of that answer.

        full: the text of all messages.
        """
        text, marks = full if i == len(messages) - 1 else writer.render(messages[: i + 1])
        if not self._template.has_marks:
            before = writer.render(messages[:i], prompt=True).text
            return TextWithSpans(text, self._find_spans(text, marks, before))
        earlier = writer.render(messages[:i]) if i else Rendered("", [])
        _require_marks_after(marks, find_shared_length(earlier.text, text), text)
        marks = marks[-1:] if len(marks) == answers.index(i) + 1 else marks[len(earlier.marks) :]
        return TextWithSpans(text, self._find_spans(text, marks, ""))

    def _find_spans(self, text: str, marks: list[Span], before: str) -> list[Span]:
        """Return the spans of the answer at the end of a text.

        before: the text up to the answer, with the generation prompt.
        """
        if self._template.has_marks:
            marks = [mark for mark in marks if mark[0] < mark[1]]
            if not marks:
                raise NoAnswerBoundary("it marks nothing of an answer as the assistant's")
            return [*marks[:-1], *(self._clip_mark(text, *mark) for mark in marks[-1:])]
        if not text.startswith(before):
            raise NoAnswerBoundary(
                "what it writes before an answer is not what stands there once the answer is given",
                *_find_differing_lines(before, text),
            )
        end = self._find_answer_end(text, len(before))
        if end < 0:
            raise _make_closing_error(text[len(before) :])
        return [(len(before), end)]

    def _clip_mark(self, text: str, start: int, end: int) -> Span:
        """Return a marked span that ends with the closing token of its answer."""
        closed = self._find_answer_end(text, start)
        if closed == end:
            return start, end
        if closed < 0 or (closed > end and text[end:closed].strip() not in self._ends):
            closed = self._find_answer_end(text[:end], start)
        if closed < 0:
            raise _make_closing_error(text[start:end])
        return start, closed

    def _find_answer_end(self, text: str, start: int) -> int:
        """Return the end of the answer that begins at `start`: the end of its closing token.

        White space and further tokens after it belong to the template. Returns a negative number
        if there is no closing token.
        """
        tokens: list[tuple[int, str]] = []  # those at the end of the text, with their ends
        end = start + len(text[start:].rstrip())
        while token := self._find_token_before(text, start, end):
            tokens.insert(0, (end, token))
            end = start + len(text[start : end - len(token)].rstrip())
        ends = [end for end, token in tokens if token in self.closing] or [end for end, _ in tokens]
        return ends[0] if ends else -1

    def _find_token_before(self, text: str, start: int, end: int) -> str:
        """Return the longest token in `text[start:end]` that ends there, "" if none does."""
        lengths = (length for length in self._end_lengths if start <= end - length)
        tokens = (text[end - length : end] for length in lengths)
        return next((token for token in tokens if token in self._ends), "")


def _require_marks_after(marks: list[Span], place: int, text: str) -> None:
    """Raise NoAnswerBoundary if a mark begins before the answer does.

    place: the end of the text before the answer.
    """
    for start, end in marks:
        if start < place < end:
            raise NoAnswerBoundary(
                "what it marks as the assistant's begins before an answer",
                text[start:place].strip()[:80],
                text[place:end].strip()[:80],
            )


def find_shared_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    least = 0
    most = min(len(one), len(other))
    if one.startswith(other[:most]):
        return most
    while least < most:  # the common prefix has `least` to `most` characters
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _add_thinking(message: Message) -> Message:
    """Add the thoughts under their other names as well: gpt-oss reads `thinking`."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, "reasoning": thoughts, **message}


_PLAIN_HINT = (
    "chat_templates/plain.jinja (--chat-template) works with any tokenizer that has an EOS token"
)


def _make_closing_error(answer: str) -> NoAnswerBoundary:
    return NoAnswerBoundary("no token ends an answer", answer.rstrip().rsplit("\n", 1)[-1][-80:])


def _refuse_template(ending: str) -> None:
    found = (
        f"{ending.strip()!r} after an answer, which is not a token of the tokenizer"
        if ending.strip()
        else "nothing after an answer"
    )
    raise UsageError(
        "the chat template ends answers without a token, so a model would not learn to stop",
        found=found,
        hint=_PLAIN_HINT,
    )


def _find_differing_lines(one: str, other: str) -> tuple[str, str]:
    """Return the first pair of lines in which two texts differ."""
    lines = one.split("\n")
    others = other.split("\n")
    for number, line in enumerate(lines):
        other_line = others[number] if number < len(others) else ""
        if line != other_line and not (number == len(lines) - 1 and other_line.startswith(line)):
            return line, other_line
    return "", ""


def _require_tools(tools: Sequence[Message] | None, text: str) -> None:
    """Raise TemplateError if the text does not name every tool."""
    for tool in tools or ():
        if _find_function_name(tool) not in text:
            raise TemplateError(f"it leaves out the tool {_find_function_name(tool)}")


def _require_calls(message: Message, number: int, text: str) -> None:
    """Raise TemplateError if the text does not name every function that a message calls."""
    for call in message.get(CALLS) or ():
        if _find_function_name(call) not in text:
            raise TemplateError(
                f"it leaves out the call of {_find_function_name(call)} in turn {number}"
            )


def _find_function_name(described: Any) -> str:
    """Return the function name in a tool or a call, "" if there is none."""
    function = described.get("function", described) if isinstance(described, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _is_system_prompt_missing(message: Message, text: str) -> bool:
    """Return whether a message is a system prompt that the text does not contain."""
    return (
        message["role"] in ("system", "developer")
        and (message.get("content") or "").strip() not in text
    )


def _is_opening_missing(message: Message, text: str) -> bool:
    """Return whether thoughts that an answer only closes have no beginning in the text.

    A prompt may open the thoughts, so that answers contain only their end. Some templates take this
    for an answer without thoughts. text: the rendered text up to the end of the answer.
    """
    content = str(message.get("content"))
    is_only_closed = _CLOSING in content and _OPENING not in content
    return is_only_closed and text.count(_CLOSING) > text.count(_OPENING)


def _are_thoughts_missing(message: Message, text: str) -> bool:
    """Return whether the text does not contain the thoughts of an answer."""
    return (message.get("reasoning_content") or "").strip() not in text
