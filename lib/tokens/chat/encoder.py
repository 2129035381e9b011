"""Turn conversations into samples: tokens with a loss mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lib.core import units
from lib.core.conversation import Conversation
from lib.core.errors import UsageError
from lib.tokens.chat import cutting, sandbox
from lib.tokens.chat.boundaries import Boundaries, EncodedTexts
from lib.tokens.chat.control_tokens import ControlToken
from lib.tokens.chat.mask import AnswerFinder, NoAnswerBoundary, TextWithSpans
from lib.tokens.chat.policy import DROP, LAST, ChatPolicy
from lib.tokens.chat.template import Template, TemplateError
from lib.tokens.encode import Encoder


class Dropped(NamedTuple):
    """Describes a dropped conversation. number: its place among the encoded ones.

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
    [samples]. owners: int64 [samples], the number of each sample's conversation. stops: special
    token → the number of samples whose last trained token it is. template_omissions: how often the
    template omitted the system prompt or thoughts.
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    dropped: list[Dropped]
    stops: Counter[int]
    template_omissions: Counter[str]


class ChatEncoder:
    """Encodes conversations according to a policy.

    Raises UsageError if its template cannot be compiled or does not fit the tokenizer.
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
            with sandbox.limit_rendering() as begin:
                begin()
                self._finder = AnswerFinder(
                    Template(policy.template, encoder.tokenizer.special_tokens_map),
                    policy.train_on,
                    special,
                    [token.content for token in tokens],
                    encoder.tokenizer.bos_token,
                )
        except (TemplateError, MemoryError) as error:
            raise UsageError(
                "the chat template cannot be used",
                found=str(error) or "it exceeded the memory limit",
            ) from None
        encoder.read_special_tokens()
        self._boundaries = Boundaries(encoder)
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
        coded, owners, dropped = self._encode_all(conversations)
        template_omissions = Counter(
            self._finder.template_omissions
        )  # before parts of long conversations are rendered again
        parts: dict[int, list[EncodedTexts]] = {}
        for number in np.unique(owners[coded.lengths > self._policy.longest]).tolist():
            if number not in dropped:
                parts[number], lost = self._split_long(
                    conversations[number], number, coded.lengths[owners == number]
                )
                dropped |= {number: lost} if lost else {}
        is_kept = (coded.label_counts() > 0) & ~np.isin(owners, [*dropped, *parts])
        coded, owners = _merge_parts(coded.select(is_kept), owners[is_kept], parts)
        for number in set(range(len(conversations))) - set(owners.tolist()) - dropped.keys():
            dropped[number] = Dropped(number, "nothing trained", "no answer of it is trained")
        return EncodedChats(
            coded.ids,
            coded.trained,
            coded.lengths,
            owners,
            [dropped[number] for number in sorted(dropped)],
            self._count_stops(coded),
            template_omissions,
        )

    def _split_long(
        self, conversation: Conversation, number: int, sizes: np.ndarray
    ) -> tuple[list[EncodedTexts], Dropped | None]:
        """Return the parts of a conversation with too many tokens, and the loss if there is any.

        sizes: the tokens of each text of the conversation.
        """
        longest = self._policy.longest
        tokens = int(sizes.sum())
        reason = f"it has {sizes.max():,} tokens, and a sample has at most {longest:,}"
        if self._policy.too_long == DROP:
            return [], Dropped(number, "too long", reason, tokens=tokens)

        def encode_part(part: Conversation) -> EncodedTexts | None:
            coded, _, dropped = self._encode_all([part])
            is_fit = not dropped and (coded.lengths <= longest).all()
            return coded.select(coded.label_counts() > 0) if is_fit else None

        parts, lost = cutting.split_conversation(
            conversation,
            encode_part,
            longest / max(1, int(sizes.max())),
            self._policy.train_on == LAST,
        )
        if not lost:
            return parts, None
        kept = sum(len(part.ids) for part in parts)
        return parts, Dropped(
            number,
            "too long",
            f"{reason}; {units.counted(lost, 'answer')} of it with the question before did not fit",
            tokens=max(0, tokens - kept),
            partly=bool(kept),
        )

    def _encode_all(
        self, conversations: Sequence[Conversation]
    ) -> tuple[EncodedTexts, np.ndarray, dict[int, Dropped]]:
        """Return the encoded texts, their conversations, and the dropped conversations."""
        texts, owned, dropped = self._render_texts(conversations)
        coded = self._add_bos(self._boundaries.encode(texts))
        for text, error in coded.wrong.items():
            dropped.setdefault(owned[text], _drop_without_boundary(owned[text], error))
        begins = coded.find_starts()
        if self._bos is not None and len(coded.ids):
            doubled = (
                (coded.lengths > 1)
                & (coded.ids[begins] == self._bos)
                & (coded.ids[np.minimum(begins + 1, len(coded.ids) - 1)] == self._bos)
            )
            for number in (owned[text] for text in np.flatnonzero(doubled).tolist()):
                dropped.setdefault(
                    number, Dropped(number, "template", "it writes two BOS tokens in front")
                )
        coded.trained[begins[coded.lengths > 0]] = False  # no token predicts the first one
        return coded, np.array(owned, np.int64), dropped

    def _render_texts(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[TextWithSpans], list[int], dict[int, Dropped]]:
        """Return the rendered texts, their conversations, and the dropped conversations."""
        texts: list[TextWithSpans] = []
        owned: list[int] = []
        dropped = {}
        are_plain = self._finder.control.are_plain(conversations)
        with sandbox.limit_rendering() as begin:
            for number, conversation in enumerate(conversations):
                begin()
                try:
                    if not are_plain:
                        self._finder.control.require_plain(conversation)
                    rendered = self._finder.find_texts(conversation)
                except TemplateError as error:
                    dropped[number] = Dropped(number, "template", str(error))
                except NoAnswerBoundary as error:
                    dropped[number] = _drop_without_boundary(number, error)
                except ControlToken as error:
                    dropped[number] = Dropped(number, "control token", str(error))
                else:
                    texts += rendered
                    owned += [number] * len(rendered)
        return texts, owned, dropped

    def _add_bos(self, coded: EncodedTexts) -> EncodedTexts:
        """Insert BOS before each text if the tokenizer adds it and the template did not."""
        bos = self._encoder.bos
        begins = coded.find_starts()
        if bos is None or not len(begins):
            return coded
        is_without = (np.append(coded.ids, 0)[begins] != bos) | (coded.lengths == 0)
        places = begins[is_without]
        return EncodedTexts(
            np.insert(coded.ids, places, bos),
            np.insert(coded.trained, places, False),
            coded.lengths + is_without,
            coded.wrong,
        )

    def _count_stops(self, coded: EncodedTexts) -> Counter[int]:
        """Return stop token → the number of samples whose last trained token it is."""
        labels = np.flatnonzero(coded.trained)
        last = labels[np.searchsorted(labels, np.cumsum(coded.lengths)) - 1]
        return Counter(token for token in coded.ids[last].tolist() if self._is_stop[token])


def _drop_without_boundary(number: int, error: NoAnswerBoundary) -> Dropped:
    first, second = error.lines
    message = f"{error}: {first!r} and {second!r}" if first or second else str(error)
    return Dropped(number, "no boundary", message, error.lines)


def _merge_parts(
    coded: EncodedTexts, owners: np.ndarray, parts: dict[int, list[EncodedTexts]]
) -> tuple[EncodedTexts, np.ndarray]:
    """Merge split conversations with the other samples, in the order of the conversations.

    owners: the number of the conversation of each sample in `coded`.
    """
    if not any(parts.values()):
        return coded, owners
    places = np.split(np.arange(len(coded.ids)), np.cumsum(coded.lengths)[:-1])
    samples = (
        [
            (number, coded.ids[at], coded.trained[at])
            for number, at in zip(owners.tolist(), places, strict=True)
        ]
        if len(owners)
        else []
    )
    for number, pieces in parts.items():
        for part in pieces:
            ends = np.cumsum(part.lengths)[:-1]
            samples += [
                (number, *both)
                for both in zip(np.split(part.ids, ends), np.split(part.trained, ends), strict=True)
            ]
    samples.sort(key=lambda sample: sample[0])
    numbers, ids, trained = zip(*samples, strict=True)
    lengths = np.array([len(one) for one in ids], np.int64)
    return EncodedTexts(np.concatenate(ids), np.concatenate(trained), lengths, {}), np.array(
        numbers
    )
