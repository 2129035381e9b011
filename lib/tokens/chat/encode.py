"""Turn conversations into samples: tokens with a loss mask.

A conversation that is longer than a sample is split before a turn of the user. Each part starts
with the system prompt (and the tools) and ends with an answer in the loss. Only the answers of a
part are in its loss, so each answer is trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lib.core import units
from lib.core.conversation import Conversation
from lib.core.errors import UsageError
from lib.tokens.chat import render
from lib.tokens.chat.answers import AnswerFinder, NoAnswerBoundary, TextWithSpans
from lib.tokens.chat.boundaries import EncodedTexts, SpanEncoder
from lib.tokens.chat.policy import DROP, LAST, ChatPolicy
from lib.tokens.chat.render import Template, TemplateError
from lib.tokens.encode import Encoder

EncodePart = Callable[[Conversation], EncodedTexts | None]  # None: the part does not fit


class DroppedChat(NamedTuple):
    """Describes a dropped conversation. number: its index among the conversations to encode.

    kind: template, no boundary, control token, too long or nothing trained. lines: for `no
    boundary`, the two lines that differ. tokens: the number of lost tokens, 0 if unknown. partly:
    only some answers are lost; the others are in samples.
    """

    number: int
    kind: str
    message: str
    lines: tuple[str, str] = ("", "")
    tokens: int = 0
    partly: bool = False


class EncodedChats(NamedTuple):
    """Holds samples, concatenated.

    tokens: uint32 [N]. trained: bool [N], never the first token of a sample. lengths: int64
    [samples]. owners: int64 [samples], the index of each sample's conversation. stops: special
    token → the number of samples whose last trained token it is. template_omissions: how often the
    template omitted the system prompt or thoughts. longest: tokens of the longest text that is too
    long for a sample, 0 if none is.
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    dropped: list[DroppedChat]
    stops: Counter[int]
    template_omissions: Counter[str]
    longest: int = 0


class ChatEncoder:
    """Encodes conversations according to a policy.

    Raises UsageError if its template cannot be compiled or used, or does not fit the tokenizer.
    """

    def __init__(self, policy: ChatPolicy, encoder: Encoder) -> None:
        self._policy = policy
        self._encoder = encoder
        tokens = [
            token for token in encoder.tokenizer.added_tokens_decoder.values() if token.content
        ]
        special = [token.content for token in tokens if token.special]
        self._bos: int | None = encoder.tokenizer.bos_token_id
        try:
            with render.limit_rendering() as restart:
                restart()
                self._finder = AnswerFinder(
                    Template(policy.template, encoder.tokenizer.special_tokens_map),
                    policy.train_on,
                    special,
                    [token.content for token in tokens],
                    encoder.tokenizer.bos_token,
                    policy.parse_variables(),
                )
        except (TemplateError, MemoryError) as error:
            raise UsageError(
                "the chat template cannot be used",
                found=str(error) or "it exceeded the memory limit",
            ) from None
        encoder.read_special_tokens()
        self._span_encoder = SpanEncoder(encoder)
        self._is_stop = np.zeros(encoder.vocab_size, bool)
        self._is_stop[
            encoder.tokenizer.convert_tokens_to_ids([*special, *self._finder.closing])
        ] = True

    def tune(self, conversations: Sequence[Conversation]) -> None:
        """Choose the fastest encoder that gives the tokenizer's ids on a sample of the corpus."""
        texts = self._render_texts(conversations)[0]
        self._encoder.tune([text.encode("utf-8", "replace") for text, _ in texts], spelled=True)

    def encode(self, conversations: Sequence[Conversation]) -> EncodedChats:
        """Return the samples of conversations, and the dropped conversations."""
        self._finder.template_omissions.clear()
        encoded, owners, dropped = self._encode_all(conversations)
        # Counted here, before parts of long conversations are rendered again.
        template_omissions = Counter(self._finder.template_omissions)
        too_long = encoded.lengths[encoded.lengths > self._policy.longest]
        parts: dict[int, list[EncodedTexts]] = {}
        for number in np.unique(owners[encoded.lengths > self._policy.longest]).tolist():
            if number not in dropped:
                parts[number], lost = self._split_long(
                    conversations[number], number, encoded.lengths[owners == number]
                )
                dropped |= {number: lost} if lost else {}
        is_kept = (encoded.label_counts() > 0) & ~np.isin(owners, [*dropped, *parts])
        encoded, owners = _merge_parts(encoded.select(is_kept), owners[is_kept], parts)
        for number in set(range(len(conversations))) - set(owners.tolist()) - dropped.keys():
            dropped[number] = DroppedChat(number, "nothing trained", "no answer of it is trained")
        return EncodedChats(
            encoded.ids,
            encoded.trained,
            encoded.lengths,
            owners,
            [dropped[number] for number in sorted(dropped)],
            self._count_stops(encoded),
            template_omissions,
            int(too_long.max(initial=0)),
        )

    def _split_long(
        self, conversation: Conversation, number: int, sizes: np.ndarray
    ) -> tuple[list[EncodedTexts], DroppedChat | None]:
        """Return the samples of a conversation that is too long, and what was dropped, if anything.

        sizes: the tokens of each text of the conversation.
        """
        longest = self._policy.longest
        tokens = int(sizes.sum())
        reason = f"it has {sizes.max():,} tokens, and a sample has at most {longest:,}"
        if self._policy.too_long == DROP:
            return [], DroppedChat(number, "too long", reason, tokens=tokens)

        def encode_part(part: Conversation) -> EncodedTexts | None:
            encoded, _, dropped = self._encode_all([part])
            is_fit = not dropped and (encoded.lengths <= longest).all()
            return encoded.select(encoded.label_counts() > 0) if is_fit else None

        parts, lost = _split_conversation(
            conversation,
            encode_part,
            longest / max(1, int(sizes.max())),
            self._policy.train_on == LAST,
        )
        if not lost:
            return parts, None
        kept_tokens = sum(len(part.ids) for part in parts)
        return parts, DroppedChat(
            number,
            "too long",
            f"{reason}; {units.counted(lost, 'answer')} of it with the question before did not fit",
            tokens=max(0, tokens - kept_tokens),
            partly=bool(kept_tokens),
        )

    def _encode_all(
        self, conversations: Sequence[Conversation]
    ) -> tuple[EncodedTexts, np.ndarray, dict[int, DroppedChat]]:
        """Return the encoded texts, their conversations, and the dropped conversations."""
        texts, owners, dropped = self._render_texts(conversations)
        encoded = self._add_bos(self._span_encoder.encode(texts))
        for text, error in encoded.errors.items():
            dropped.setdefault(owners[text], _drop_without_boundary(owners[text], error))
        starts = encoded.find_starts()
        if self._bos is not None and len(encoded.ids):
            doubled = (
                (encoded.lengths > 1)
                & (encoded.ids[starts] == self._bos)
                & (encoded.ids[np.minimum(starts + 1, len(encoded.ids) - 1)] == self._bos)
            )
            for number in (owners[text] for text in np.flatnonzero(doubled).tolist()):
                dropped.setdefault(
                    number, DroppedChat(number, "template", "it writes two BOS tokens in front")
                )
        encoded.trained[starts[encoded.lengths > 0]] = False  # no token predicts the first one
        return encoded, np.array(owners, np.int64), dropped

    def _render_texts(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[TextWithSpans], list[int], dict[int, DroppedChat]]:
        """Return the rendered texts, their conversations, and the dropped conversations."""
        texts: list[TextWithSpans] = []
        owners: list[int] = []
        dropped = {
            number: DroppedChat(number, "control token", problem)
            for number, problem in self._finder.control.find_all(conversations).items()
        }
        with render.limit_rendering() as restart:
            for number, conversation in enumerate(conversations):
                if number in dropped:
                    continue
                restart()
                try:
                    rendered = self._finder.find_texts(conversation)
                except TemplateError as error:
                    dropped[number] = DroppedChat(number, "template", str(error))
                except NoAnswerBoundary as error:
                    dropped[number] = _drop_without_boundary(number, error)
                else:
                    texts += rendered
                    owners += [number] * len(rendered)
        return texts, owners, dropped

    def _add_bos(self, encoded: EncodedTexts) -> EncodedTexts:
        """Insert BOS before each text if the tokenizer adds it and the template did not."""
        bos = self._encoder.bos
        starts = encoded.find_starts()
        if bos is None or not len(starts):
            return encoded
        is_without = (np.append(encoded.ids, 0)[starts] != bos) | (encoded.lengths == 0)
        places = starts[is_without]
        return EncodedTexts(
            np.insert(encoded.ids, places, bos),
            np.insert(encoded.trained, places, False),
            encoded.lengths + is_without,
            encoded.errors,
        )

    def _count_stops(self, encoded: EncodedTexts) -> Counter[int]:
        """Return, by stop token, the number of samples whose last trained token it is."""
        labels = np.flatnonzero(encoded.trained)
        last = labels[np.searchsorted(labels, np.cumsum(encoded.lengths)) - 1]
        return Counter(token for token in encoded.ids[last].tolist() if self._is_stop[token])


def _drop_without_boundary(number: int, error: NoAnswerBoundary) -> DroppedChat:
    first, second = error.lines
    message = f"{error}: {first!r} and {second!r}" if first or second else str(error)
    return DroppedChat(number, "no boundary", message, error.lines)


def _merge_parts(
    encoded: EncodedTexts, owners: np.ndarray, parts: dict[int, list[EncodedTexts]]
) -> tuple[EncodedTexts, np.ndarray]:
    """Merge split conversations with the other samples, in the order of the conversations.

    owners: the index of the conversation of each sample in `encoded`.
    """
    if not any(parts.values()):
        return encoded, owners
    samples = [
        *zip(owners.tolist(), _list_samples(encoded), strict=True),
        *(
            (number, sample)
            for number, pieces in parts.items()
            for part in pieces
            for sample in _list_samples(part)
        ),
    ]
    samples.sort(key=lambda sample: sample[0])
    ids = [ids for _, (ids, _) in samples]
    trained = [trained for _, (_, trained) in samples]
    lengths = np.array([len(sample) for sample in ids], np.int64)
    merged = EncodedTexts(np.concatenate(ids), np.concatenate(trained), lengths, {})
    return merged, np.array([number for number, _ in samples])


def _list_samples(encoded: EncodedTexts) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the ids and the loss mask of each text."""
    ends = np.cumsum(encoded.lengths).tolist()
    return [
        (encoded.ids[start:end], encoded.trained[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _split_conversation(
    conversation: Conversation, encode: EncodePart, share: float, last: bool
) -> tuple[list[EncodedTexts], int]:
    """Return the parts that fit, and the number of trained answers that are in no part.

    share: about the fraction of the conversation that fits a sample. last: train only the last
    answer, so return one part with the last turns.
    """
    groups = _TurnGroups(conversation)
    if last:
        return _take_last_turns(groups, encode, share)
    parts = []
    lost = 0
    first = 0
    count = len(groups.starts) - 1
    budget = share * groups.size(0, count)
    while first < count:
        end = first + 1
        while end < count and groups.size(first, end + 1) <= budget:
            end += 1
        encoded = encode(groups.join(first, end))
        while encoded is None and end > first + 1:
            end -= 1
            encoded = encode(groups.join(first, end))
        if encoded is None:
            encoded, missed = _shorten_group(groups, first, encode)
            lost += missed
        if encoded is not None and len(encoded.ids):
            parts.append(encoded)
        first = end
    return parts, lost


def _take_last_turns(
    groups: _TurnGroups, encode: EncodePart, share: float
) -> tuple[list[EncodedTexts], int]:
    """Return as many of the last turns as fit, and the number of lost answers."""
    count = len(groups.starts) - 1
    budget = share * groups.size(0, count)
    first = next((n for n in range(count) if groups.size(n, count) <= budget), count - 1)
    for start in range(first, count):
        encoded = encode(groups.join(start, count))
        if encoded is not None:
            return ([encoded] if len(encoded.ids) else []), 0
    return [], 1


def _shorten_group(
    groups: _TurnGroups, group: int, encode: EncodePart
) -> tuple[EncodedTexts | None, int]:
    """Return the turns of one question up to the last answer that fits, and the lost answers."""
    answers = groups.trained_messages(group)
    for count in range(len(answers) - 1, 0, -1):
        encoded = encode(groups.join(group, group + 1, answers[count - 1] + 1))
        if encoded is not None:
            return encoded, len(answers) - count
    return None, len(answers)


class _TurnGroups:
    """Divides a conversation into groups: a question and the turns up to the next question.

    starts: the index of each group's first message, then the total number of messages.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._messages, self._tools, weights, self._kwargs = conversation
        self._weights = weights or [1.0] * len(self._messages)
        roles = [message["role"] for message in self._messages]
        self._head = next(
            (i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles)
        )
        questions = [i for i in range(self._head, len(roles)) if roles[i] == "user"]
        self.starts = [self._head, *(i for i in questions if i > self._head), len(roles)]
        self._sizes = [len(str(message)) for message in self._messages]

    def size(self, first: int, end: int) -> int:
        """Return about how many characters groups [first, end) have, with the system prompt."""
        return sum(self._sizes[: self._head]) + sum(
            self._sizes[self.starts[first] : self.starts[end]]
        )

    def trained_messages(self, group: int) -> list[int]:
        """Return the indices of the trained messages in a group."""
        return [
            i
            for i in range(self.starts[group], self.starts[group + 1])
            if self._messages[i]["role"] == "assistant" and self._weights[i]
        ]

    def join(self, first: int, end: int, until: int | None = None) -> Conversation:
        """Return groups [first, end) as a conversation.

        until: index of a message to stop before, instead of at the end of the groups.
        """
        stop = self.starts[end] if until is None else until
        places = [*range(self._head), *range(self.starts[first], stop)]
        return Conversation(
            [self._messages[i] for i in places],
            self._tools,
            [self._weights[i] for i in places],
            self._kwargs,
        )
