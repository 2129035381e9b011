"""From a conversation to tokens and to which of them are trained.

A template writes the text; which part of it is the assistant's is read from its `{% generation %}`
marks, or found by rendering the turns up to an answer with and without it. Nothing is guessed: each
text up to a boundary has to be a prefix, as text and as tokens, of the one that goes on. Where a
template rewrites earlier turns (a thinking model's, which drops thoughts), each answer becomes a
sample of its own, rendered as the model would see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lib.tokens.template import Message, Rendered, Span, Template

ASSISTANT = "assistant"
POLICIES = (ASSISTANT, "all", "last")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Encode = Callable[[Sequence[str]], list[np.ndarray]]  # texts → uint32 [tokens] of each, none added


class Conversation(NamedTuple):
    """Holds messages (role, content, …), tools as JSON schemas, and a weight for each message."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    weights: Sequence[float] | None = None


class ChatSample(NamedTuple):
    """Holds a rendered conversation. tokens: uint32 [T]; trained: bool [T], what is a label."""

    tokens: np.ndarray
    trained: np.ndarray


class Unmaskable(Exception):
    """Says that a template does not show which text is the assistant's. first, second: lines that
    should be the same."""

    def __init__(self, reason: str, first: str = "", second: str = "") -> None:
        super().__init__(reason)
        self.first, self.second = first, second


class ChatEncoder:
    """Encodes conversations by a template.

    encode: gives the ids of texts, with special tokens read as such. bos: its id where the
    tokenizer itself puts one in front of a text. special: the texts of special tokens. policy: of
    POLICIES.
    stops: the special tokens that ended answers so far.
    """

    def __init__(self, template: Template, encode: Encode, bos: int | None,
                 special: Sequence[str], policy: str = ASSISTANT) -> None:
        self._template, self._encode, self._bos, self._policy = template, encode, bos, policy
        self._has_marks = bool(_MARKED.search(template.source))
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._special, self._tail = re.compile(tokens), re.compile(rf"(?:{tokens}|\s)+\Z")
        self._closing: str | None = None
        self.stops: set[str] = set()

    def samples(self, conversation: Conversation) -> list[ChatSample]:
        """Return one sample, or one per answer where the template rewrites earlier turns.

        There is none where no answer is trained. Raises TemplateError where the template refuses
        the conversation, Unmaskable where it shows no boundary.
        """
        messages, tools, weights = conversation
        whole = self._template.render(messages, tools)
        if self._policy == "all":
            return [self._sample(_Turn(whole.text, [(0, len(whole.text))]))]
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        chosen = answers[-1:] if self._policy == "last" else answers
        trained = [i for i in chosen if weights is None or weights[i]]
        if not trained:
            return []
        if self._has_marks and (len(whole.marks) == len(answers) or trained == answers):
            return [self._sample(self._marked(conversation, whole, answers, trained))]
        turns = [self._turn(conversation, i) for i in trained]
        if all(whole.text.startswith(turn.text[:turn.spans[0][1]]) for turn in turns):
            return [self._sample(_Turn(whole.text, [turn.spans[0] for turn in turns]))]
        return list(map(self._sample, turns))

    def _marked(self, conversation: Conversation, whole: Rendered, answers: list[int],
                trained: list[int]) -> _Turn:
        """Return the text with the spans that the template marks, each up to its closing token."""
        if self._closing is None:  # what follows the mark of a text that ends with an answer
            text, marks = self._template.render(conversation.messages[:answers[-1] + 1],
                                                conversation.tools)
            found = self._special.match(text, marks[-1][1])
            self._closing = found[0] if found else ""
        spans = []
        for number, (start, end) in enumerate(whole.marks):
            if len(whole.marks) == len(answers) and answers[number] not in trained:
                continue
            if whole.text.startswith(self._closing, end):
                end += len(self._closing)
            spans.append((start, self._end(whole.text[:end], start)))
        return _Turn(whole.text, spans)

    def _turn(self, conversation: Conversation, i: int) -> _Turn:
        """Return the text up to an answer's end, and where the answer is, by two renderings."""
        messages, tools, _ = conversation
        before = self._template.render(messages[:i], tools, prompt=True).text
        after = self._template.render(messages[:i + 1], tools).text
        if not after.startswith(before):
            first, second = _differing_lines(before, after)
            raise Unmaskable("what it writes before an answer is not what stands there once the "
                             "answer is given", first, second)
        return _Turn(after, [(len(before), self._end(after, len(before)))])

    def _end(self, text: str, start: int) -> int:
        """Return where an answer ends that goes on from `start`: behind its closing token.

        White space and further tokens behind that are the template's, and no part of the answer.
        """
        end = start + len(self._tail.sub("", text[start:]))
        if found := self._special.search(text, end):
            self.stops.add(found[0])
            return found.end()
        return len(text)

    def _sample(self, turn: _Turn) -> ChatSample:
        """Return the tokens; raises Unmaskable where a boundary lies within one."""
        text, spans = turn
        cuts = sorted({place for span in spans for place in span} - {0, len(text)})
        ids, *parts = self._encode([text, *(text[:cut] for cut in cuts)])
        at = {0: 0, len(text): len(ids)}
        for cut, part in zip(cuts, parts, strict=True):
            if not np.array_equal(ids[:len(part)], part):
                line = text[:cut].rsplit("\n", 1)[-1]
                raise Unmaskable("an answer begins or ends within a token", line,
                                 line + text[cut:].split("\n", 1)[0])
            at[cut] = len(part)
        trained = np.zeros(len(ids), bool)
        for start, end in spans:
            trained[at[start]:at[end]] = True
        if self._bos is not None and (not len(ids) or ids[0] != self._bos):
            ids = np.concatenate([np.array([self._bos], ids.dtype), ids])
            trained = np.concatenate([[False], trained])
        elif self._bos is not None and list(ids[:2]) == [self._bos] * 2:
            raise Unmaskable("it writes two BOS tokens in front", text[:80])
        return ChatSample(ids, trained)


class _Turn(NamedTuple):
    """Holds a text and the spans of characters in it that are trained."""

    text: str
    spans: list[Span]


def _differing_lines(one: str, other: str) -> tuple[str, str]:
    """Return the first line of each text that the other has not at its place."""
    lines, others = one.split("\n"), other.split("\n")
    for number, line in enumerate(lines):
        beside = others[number] if number < len(others) else ""
        if line != beside and not (number == len(lines) - 1 and beside.startswith(line)):
            return line, beside
    return "", ""
