"""From a conversation to texts, and to which of their characters are trained.

Which part is the assistant's is read from the template's `{% generation %}` marks, or found by
rendering the turns up to an answer with and without it. Nothing is guessed: each text up to a
boundary has to be a prefix of the one that goes on, so each prefix is rendered separately. Where a
template rewrites earlier turns (a thinking model's, which drops
thoughts), an answer becomes a sample of its own, rendered as the model would see it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lib.core.conversation import Conversation, Message
from lib.core.errors import UsageError
from lib.tokens.chat import left_out, sandbox
from lib.tokens.chat.control_tokens import ControlTokens, alternatives
from lib.tokens.chat.policy import ALL, ASSISTANT, LAST
from lib.tokens.chat.sandbox import LimitError, TemplateError, TokenError
from lib.tokens.chat.template import Rendered, Span, Template

# Tokens that an answer may spell although they are special: they stand around thoughts.
_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)
_RUNS = 4  # of the endings of answers that are remembered
_WORD = "Kingfisher"  # an answer that no template changes
_USER = {"role": "user", "content": "Which bird?"}
_ANSWER = {"role": "assistant", "content": _WORD}
_TRIED = (
    [_USER, _ANSWER],
    [_USER, _ANSWER, _USER, _ANSWER],
    [{"role": "system", "content": "Be brief."}, _USER, _ANSWER],
)


class Unmaskable(Exception):
    """Says that a template does not show which text is the assistant's. lines: two that differ."""

    def __init__(self, reason: str, first: str = "", second: str = "") -> None:
        super().__init__(reason)
        self.lines = (first, second)


class Marked(NamedTuple):
    """Holds a text and the spans of characters in it that are trained."""

    text: str
    spans: list[Span]


class Masker:
    """Finds what is trained. special, added: the texts of the tokenizer's tokens of these kinds.

    closing: the tokens that end an answer. left_out: what the template did not write. Raises
    UsageError where the template cannot serve with this tokenizer.
    """

    def __init__(
        self,
        template: Template,
        train_on: str,
        special: Sequence[str],
        added: Sequence[str],
        bos: str | None,
    ) -> None:
        self._template = template
        self._train_on = train_on
        self.left_out: Counter[str] = Counter()
        tried = list(self._try())
        behind = [text.rpartition(_WORD)[2] for text in tried]
        # But for white space and words, which some tokenizers have added too.
        pattern = alternatives(
            token for token in added if not token.strip().isalnum() and token.strip()
        )
        written = {found for text in tried for found in pattern.findall(text)}
        self.closing = {found[0] for text in behind if (found := pattern.match(text.lstrip()))}
        if tried and not self.closing:
            _refuse_closing(behind[0])
        if bos and any(text.startswith(bos * 2) for text in tried):
            raise UsageError(
                "the chat template writes two BOS tokens in front",
                found=repr(tried[0][: len(bos) * 2 + 20]),
            )
        control = {*special, *written} - {""}
        self._ends = tuple(
            sorted(
                (token for token in control if not _THOUGHT.search(token) or token in self.closing),
                key=len,
                reverse=True,
            )
        )
        # What was found behind answers, and how many of its characters belong to them.
        self._runs: dict[str, int] = {}
        self._last_letters = {token[-1] for token in self._ends}
        marks = {sandbox.BEGIN, sandbox.END} if template.has_marks else set()
        self.control = ControlTokens({*self._ends, *marks}, {*self._ends, *special, *marks})

    def _try(self) -> Iterator[str]:
        """Yield the text of simple conversations, except those that the template refuses."""
        for messages in _TRIED:
            try:
                yield self._template.render(messages).text
            except TemplateError as error:
                if isinstance(error, LimitError):
                    raise
                if isinstance(error, TokenError):
                    raise UsageError(
                        f"the chat template does not fit the tokenizer: {error}", hint=_OTHERS
                    ) from None

    def marked(self, conversation: Conversation) -> list[Marked]:
        """Return the texts of a conversation: one, or more where the template rewrites turns.

        There is none where no answer is trained. Raises TemplateError where the template refuses
        the conversation, Unmaskable where it shows no boundary, ControlToken.
        """
        messages, tools, weights = conversation
        if any("reasoning_content" in message for message in messages):
            messages = list(map(_with_thoughts, messages))
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if self._train_on == ALL:
            return self._all(messages, tools, weights)
        chosen = answers[-1:] if self._train_on == LAST else answers
        trained = [i for i in chosen if weights is None or weights[i]]
        if not trained:
            return []
        messages = messages[: trained[-1] + 1]  # what comes later is context of nothing
        whole = self._template.render(messages, tools)
        left_out.require_tools(tools, whole.text)
        if left_out.is_lost(messages[0], whole.text):
            self.left_out["system prompt"] += 1
        found: list[Marked] = []
        for i in reversed(trained):
            answer = self._answer(messages, tools, whole, answers, i)
            end = answer.spans[-1][1]
            if len(messages[i]) > 2:  # role and content
                left_out.require_calls(messages[i], i + 1, answer.text[answer.spans[0][0] : end])
                if left_out.are_thoughts_lost(messages[i], answer.text):
                    self.left_out["thoughts"] += 1
            if found and (
                answer.text is found[-1].text or found[-1].text.startswith(answer.text[:end])
            ):
                found[-1].spans.extend(answer.spans)
            else:
                found.append(answer)
        return found[::-1]

    def _all(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        weights: Sequence[float] | None,
    ) -> list[Marked]:
        """Return the whole text, trained but for the turns of weight 0."""
        whole = self._template.render(messages, tools).text
        left_out.require_tools(tools, whole)
        spans = []
        start = 0
        for i in (i for i in range(len(messages)) if weights is not None and not weights[i]):
            spans.append((start, self._end_of(messages[:i], tools, whole)))
            start = (
                len(whole)
                if i == len(messages) - 1
                else self._end_of(messages[: i + 1], tools, whole)
            )
        return [Marked(whole, [*spans, (start, len(whole))])]

    def _end_of(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, whole: str
    ) -> int:
        """Return the end of the first messages in the text of a conversation.

        What a template writes after the last message does not count: it depends on whether an
        answer is asked for. Raises Unmaskable if the text does not begin with that of the messages.
        """
        if not messages:
            return 0
        text, asked = (
            self._template.render(messages, tools, prompt).text for prompt in (False, True)
        )
        end = shared_length(text, asked)
        if end < min(len(text), len(asked)):  # go back to the start of a token that both cut
            end = min(
                (
                    end - cut
                    for token in self._ends
                    for cut in range(1, len(token))
                    for each in (text, asked)
                    if each[:end].endswith(token[:cut]) and each.startswith(token, end - cut)
                ),
                default=end,
            )
        if not whole.startswith(text[:end]):
            raise Unmaskable("it does not show where a turn of weight 0 begins and ends")
        return end

    def _answer(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        whole: Rendered,
        answers: list[int],
        i: int,
    ) -> Marked:
        """Return the text that ends with an answer, and where the answer is.

        whole: the text of all messages.
        """
        text, marks = (
            whole if i == len(messages) - 1 else self._template.render(messages[: i + 1], tools)
        )
        if not self._template.has_marks:
            before = self._template.render(messages[:i], tools, prompt=True).text
            return Marked(text, self._spans(text, marks, before))
        asked = self._template.render(messages[:i], tools) if i else Rendered("", [])
        _require_behind(marks, shared_length(asked.text, text), text)
        marks = marks[-1:] if len(marks) == answers.index(i) + 1 else marks[len(asked.marks) :]
        return Marked(text, self._spans(text, marks, ""))

    def _spans(self, text: str, marks: list[Span], before: str) -> list[Span]:
        """Return where the answer is that ends a text. before: what is written to have it begun."""
        if self._template.has_marks:
            marks = [mark for mark in marks if mark[0] < mark[1]]
            if not marks:
                raise Unmaskable("it marks nothing of an answer as the assistant's")
            return [*marks[:-1], *(self._closed(text, *mark) for mark in marks[-1:])]
        if not text.startswith(before):
            raise Unmaskable(
                "what it writes before an answer is not what stands there once the answer is given",
                *_differing_lines(before, text),
            )
        end = self._end(text, len(before))
        if end < 0:
            raise _unclosed(text[len(before) :])
        return [(len(before), end)]

    def _closed(self, text: str, start: int, end: int) -> Span:
        """Return the span of a mark, up to the answer's closing token and no further."""
        closed = self._end(text, start)
        if closed == end:
            return start, end
        if closed < 0 or (closed > end and text[end:closed].strip() not in self._ends):
            closed = self._end(text[:end], start)
        if closed < 0:
            raise _unclosed(text[start:end])
        return start, closed

    def _end(self, text: str, start: int) -> int:
        """Return where an answer ends that goes on from `start`: behind its closing token.

        White space and further tokens behind that are the template's, and no part of the answer.
        Less than 0 where there is no such token.
        """
        for run, kept in self._runs.items():
            before = text[len(text) - len(run) - 1 : len(text) - len(run)]
            if (
                text.endswith(run, start + 1)
                and not before.isspace()
                and before not in self._last_letters
            ):
                return len(text) - len(run) + kept
        at = len(text)
        found = []
        while True:
            while at > start and text[at - 1].isspace():
                at -= 1
            if at <= start or text[at - 1] not in self._last_letters:
                break
            token = next((each for each in self._ends if text.endswith(each, start, at)), None)
            if token is None:
                break
            found.append((at, token))
            at -= len(token)
        if not found:
            return -1
        end = next((end for end, token in reversed(found) if token in self.closing), found[-1][0])
        if len(self._runs) < _RUNS and not text[at - 1].isspace():
            self._runs[text[at:]] = end - at
        return end


def _require_behind(marks: list[Span], place: int, text: str) -> None:
    """Raise Unmaskable where a mark of an answer begins before what was said before it ends."""
    for start, end in marks:
        if start < place < end:
            raise Unmaskable(
                "what it marks as the assistant's begins before an answer",
                text[start:place].strip()[:80],
                text[place:end].strip()[:80],
            )


def shared_length(one: str, other: str) -> int:
    """Return how many characters two texts share at their beginning."""
    least = 0
    most = min(len(one), len(other))
    if one.startswith(other[:most]):
        return most
    while least < most:  # they share `least`, and at most `most`
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _with_thoughts(message: Message) -> Message:
    """Give thoughts the name that gpt-oss has for them, too, as transformers does."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, **message}


_OTHERS = "chat_templates/plain.jinja needs nothing but an eos token (--chat-template)"


def _unclosed(answer: str) -> Unmaskable:
    return Unmaskable("no token ends an answer", answer.rstrip().rsplit("\n", 1)[-1][-80:])


def _refuse_closing(behind: str) -> None:
    found = (
        f"{behind.strip()!r} behind an answer, which is no token of the tokenizer"
        if behind.strip()
        else "nothing behind an answer"
    )
    raise UsageError(
        "the chat template ends an answer with no token: a model would not learn to stop",
        found=found,
        hint=_OTHERS,
    )


def _differing_lines(one: str, other: str) -> tuple[str, str]:
    """Return the first line of each text that the other has not at its place."""
    lines = one.split("\n")
    others = other.split("\n")
    for number, line in enumerate(lines):
        beside = others[number] if number < len(others) else ""
        if line != beside and not (number == len(lines) - 1 and beside.startswith(line)):
            return line, beside
    return "", ""
