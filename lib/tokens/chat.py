"""From a conversation to tokens and to which of them are trained.

A template writes the text; which part of it is the assistant's is read from its `{% generation %}`
marks, or found by rendering the turns up to an answer with and without it. Nothing is guessed: each
text up to a boundary has to be a prefix, as text and as tokens, of the one that goes on. Where a
template rewrites earlier turns (a thinking model's, which drops thoughts), each answer becomes a
sample of its own, rendered as the model would see it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lib.core.conversation import Conversation
from lib.tokens.encode import Encoder
from lib.tokens.template import Rendered, Span, Template, TemplateError

ASSISTANT, LAST, ALL = TRAIN_ON = ("assistant", "last", "all")
DROP, SPLIT = TOO_LONG = ("drop", "split")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatPolicy(NamedTuple):
    """Says how conversations become samples.

    template: in Jinja. train_on: of TRAIN_ON. too_long: of TOO_LONG, for what has more tokens than
    `longest`.
    """

    template: str
    train_on: str
    too_long: str
    longest: int


class Dropped(NamedTuple):
    """Names a conversation that gave no sample. number: its place in what was to be encoded."""

    number: int
    kind: str
    message: str


class EncodedChats(NamedTuple):
    """Holds samples, one after the other.

    tokens: uint32 [N]. trained: bool [N], never the first token of a sample. lengths: int64
    [samples]. owners: int64 [samples], the number of the conversation that each is from. stops: how
    many samples end in each token, of those that end in a special token which is trained.
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    dropped: list[Dropped]
    stops: Counter[int]


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
    """Encodes conversations as a policy says; UsageError where its template cannot be compiled."""

    def __init__(self, policy: ChatPolicy, encoder: Encoder) -> None:
        self._policy, self._encoder, self._bos = policy, encoder, encoder.bos
        special = [str(token) for token in encoder.tokenizer.added_tokens_decoder.values()
                   if token.special]
        self._template = Template(policy.template, encoder.tokenizer.special_tokens_map)
        self._has_marks = bool(_MARKED.search(policy.template))
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._special, self._tail = re.compile(tokens), re.compile(rf"(?:{tokens}|\s)+\Z")
        self._closing: str | None = None
        self._stops = {encoder.tokenizer.convert_tokens_to_ids(text) for text in special}

    def encode(self, conversations: Sequence[Conversation]) -> EncodedChats:
        """Return the samples of some conversations, and which of them gave none."""
        samples: list[ChatSample] = []
        owners: list[int] = []
        dropped: list[Dropped] = []
        for number, each in enumerate(conversations):
            try:
                found = self.samples(each)
            except TemplateError as error:
                dropped.append(Dropped(number, "template", str(error)))
                continue
            except Unmaskable as error:
                dropped.append(Dropped(number, "no boundary", f"{error}: {error.first!r} and "
                                                              f"{error.second!r}"))
                continue
            if any(len(sample.tokens) > self._policy.longest for sample in found):
                dropped.append(Dropped(number, "too long", "it has more tokens than a sample"))
                continue
            if not found:
                dropped.append(Dropped(number, "nothing trained", "no answer of it is trained"))
            samples += found
            owners += [number] * len(found)
        stops = Counter(int(sample.tokens[at[-1]]) for sample in samples
                        if len(at := np.flatnonzero(sample.trained))
                        and int(sample.tokens[at[-1]]) in self._stops)
        lengths = np.fromiter((len(sample.tokens) for sample in samples), np.int64, len(samples))
        empty = ChatSample(np.empty(0, np.uint32), np.empty(0, bool))
        tokens, trained = (np.concatenate(parts) for parts in zip(empty, *samples, strict=True))
        return EncodedChats(tokens, trained, lengths, np.array(owners, np.int64), dropped, stops)

    def samples(self, conversation: Conversation) -> list[ChatSample]:
        """Return one sample, or one per answer where the template rewrites earlier turns.

        There is none where no answer is trained. Raises TemplateError where the template refuses
        the conversation, Unmaskable where it shows no boundary.
        """
        messages, tools, weights = conversation
        whole = self._template.render(messages, tools)
        if self._policy.train_on == ALL:
            return [self._sample(_Turn(whole.text, [(0, len(whole.text))]))]
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        chosen = answers[-1:] if self._policy.train_on == LAST else answers
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
            return found.end()
        return len(text)

    def _sample(self, turn: _Turn) -> ChatSample:
        """Return the tokens; raises Unmaskable where a boundary lies within one."""
        text, spans = turn
        cuts = sorted({place for span in spans for place in span} - {0, len(text)})
        flat, lengths = self._encoder.encode_bare([part.encode() for part in (
            text, *(text[:cut] for cut in cuts))])
        ids, *parts = np.split(flat, np.cumsum(lengths)[:-1])
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
        trained[:1] = False  # nothing stands before it
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
