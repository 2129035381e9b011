"""From conversations to samples: tokens, and which of them are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lib.core import units
from lib.core.conversation import Conversation
from lib.core.errors import UsageError
from lib.tokens.chat import cutting, sandbox
from lib.tokens.chat.boundaries import Boundaries, Coded
from lib.tokens.chat.control_tokens import ControlToken
from lib.tokens.chat.mask import Marked, Masker, Unmaskable
from lib.tokens.chat.policy import DROP, LAST, ChatPolicy
from lib.tokens.chat.template import Template, TemplateError
from lib.tokens.encode import Encoder


class Dropped(NamedTuple):
    """Names a conversation that gave no sample. number: its place in what was to be encoded.

    kind: template, no boundary, control token, too long or nothing trained. lines: of a boundary
    that is not shown, the two that differ. tokens: how many are lost, where they were counted.
    partly: only some of its answers are lost, the others gave samples.
    """

    number: int
    kind: str
    message: str
    lines: tuple[str, str] = ("", "")
    tokens: int = 0
    partly: bool = False


class EncodedChats(NamedTuple):
    """Holds samples, one after the other.

    tokens: uint32 [N]. trained: bool [N], never the first token of a sample. lengths: int64
    [samples]. owners: int64 [samples], the number of the conversation that each is from. stops: how
    many samples end in each token, of those whose last trained token is a special one. left_out:
    what the template did not write, by what it is.
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    dropped: list[Dropped]
    stops: Counter[int]
    left_out: Counter[str]


class ChatEncoder:
    """Encodes conversations as a policy says.

    Raises UsageError where its template cannot be compiled or does not fit the tokenizer.
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
            with sandbox.limited() as begin:
                begin()
                self._masker = Masker(
                    Template(policy.template, encoder.tokenizer.special_tokens_map),
                    policy.train_on,
                    special,
                    [token.content for token in tokens],
                    encoder.tokenizer.bos_token,
                )
        except (TemplateError, MemoryError) as error:
            raise UsageError(
                "the chat template cannot be used",
                found=str(error) or "it took more memory than it may",
            ) from None
        encoder.read_special_tokens()
        self._boundaries = Boundaries(encoder)
        self._is_stop = np.zeros(encoder.vocab_size, bool)
        self._is_stop[
            encoder.tokenizer.convert_tokens_to_ids([*special, *self._masker.closing])
        ] = True

    def tune(self, conversations: Sequence[Conversation]) -> None:
        """Take the fastest way that gives the tokenizer's ids on a sample of the corpus."""
        texts = self._texts(conversations)[0]
        self._encoder.tune([text.encode("utf-8", "replace") for text, _ in texts], spelled=True)

    def encode(self, conversations: Sequence[Conversation]) -> EncodedChats:
        """Return the samples of some conversations, and which of them gave none."""
        self._masker.left_out.clear()
        coded, owners, dropped = self._encoded(conversations)
        left_out = Counter(self._masker.left_out)  # before parts of long ones are looked at again
        parts: dict[int, list[Coded]] = {}
        for number in np.unique(owners[coded.lengths > self._policy.longest]).tolist():
            if number not in dropped:
                parts[number], lost = self._fitting(
                    conversations[number], number, coded.lengths[owners == number]
                )
                dropped |= {number: lost} if lost else {}
        is_kept = (coded.labels() > 0) & ~np.isin(owners, [*dropped, *parts])
        coded, owners = _joined(coded.chosen(is_kept), owners[is_kept], parts)
        for number in set(range(len(conversations))) - set(owners.tolist()) - dropped.keys():
            dropped[number] = Dropped(number, "nothing trained", "no answer of it is trained")
        return EncodedChats(
            coded.ids,
            coded.trained,
            coded.lengths,
            owners,
            [dropped[number] for number in sorted(dropped)],
            self._stops(coded),
            left_out,
        )

    def _fitting(
        self, conversation: Conversation, number: int, sizes: np.ndarray
    ) -> tuple[list[Coded], Dropped | None]:
        """Return what becomes of a conversation with too many tokens, and what is lost of it."""
        longest = self._policy.longest
        tokens = int(sizes.sum())
        said = f"it has {sizes.max():,} tokens, and a sample has at most {longest:,}"
        if self._policy.too_long == DROP:
            return [], Dropped(number, "too long", said, tokens=tokens)

        def code(part: Conversation) -> Coded | None:
            coded, _, dropped = self._encoded([part])
            is_fit = not dropped and (coded.lengths <= longest).all()
            return coded.chosen(coded.labels() > 0) if is_fit else None

        parts, lost = cutting.split(
            conversation, code, longest / max(1, int(sizes.max())), self._policy.train_on == LAST
        )
        if not lost:
            return parts, None
        kept = sum(len(part.ids) for part in parts)
        return parts, Dropped(
            number,
            "too long",
            f"{said}; {units.counted(lost, 'answer')} of it with the question before did not fit",
            tokens=max(0, tokens - kept),
            partly=bool(kept),
        )

    def _encoded(
        self, conversations: Sequence[Conversation]
    ) -> tuple[Coded, np.ndarray, dict[int, Dropped]]:
        """Return all texts as tokens, whose they are, and what is wrong with conversations."""
        texts, owned, dropped = self._texts(conversations)
        coded = self._with_bos(self._boundaries.encode(texts))
        for text, error in coded.wrong.items():
            dropped.setdefault(owned[text], _boundless(owned[text], error))
        begins = coded.begins()
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
        coded.trained[begins[coded.lengths > 0]] = False  # nothing stands before it
        return coded, np.array(owned, np.int64), dropped

    def _texts(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[Marked], list[int], dict[int, Dropped]]:
        """Return texts, the numbers of their conversations, and those that gave none."""
        texts: list[Marked] = []
        owned: list[int] = []
        dropped = {}
        are_plain = self._masker.control.are_plain(conversations)
        with sandbox.limited() as begin:
            for number, each in enumerate(conversations):
                begin()
                try:
                    if not are_plain:
                        self._masker.control.require_plain(each)
                    found = self._masker.marked(each)
                except TemplateError as error:
                    dropped[number] = Dropped(number, "template", str(error))
                except Unmaskable as error:
                    dropped[number] = _boundless(number, error)
                except ControlToken as error:
                    dropped[number] = Dropped(number, "control token", str(error))
                else:
                    texts += found
                    owned += [number] * len(found)
        return texts, owned, dropped

    def _with_bos(self, coded: Coded) -> Coded:
        """Put BOS in front of each text where the tokenizer does so and the template did not."""
        bos = self._encoder.bos
        begins = coded.begins()
        if bos is None or not len(begins):
            return coded
        is_without = (np.append(coded.ids, 0)[begins] != bos) | (coded.lengths == 0)
        places = begins[is_without]
        return Coded(
            np.insert(coded.ids, places, bos),
            np.insert(coded.trained, places, False),
            coded.lengths + is_without,
            coded.wrong,
        )

    def _stops(self, coded: Coded) -> Counter[int]:
        """Return how many samples end in each token, of their last trained ones."""
        labels = np.flatnonzero(coded.trained)
        last = labels[np.searchsorted(labels, np.cumsum(coded.lengths)) - 1]
        return Counter(token for token in coded.ids[last].tolist() if self._is_stop[token])


def _boundless(number: int, error: Unmaskable) -> Dropped:
    first, second = error.lines
    told = f"{error}: {first!r} and {second!r}" if first or second else str(error)
    return Dropped(number, "no boundary", told, error.lines)


def _joined(
    coded: Coded, owners: np.ndarray, parts: dict[int, list[Coded]]
) -> tuple[Coded, np.ndarray]:
    """Put the parts of conversations at their places among others; owners: of the others."""
    if not any(parts.values()):
        return coded, owners
    whole = np.split(np.arange(len(coded.ids)), np.cumsum(coded.lengths)[:-1])
    several = (
        [
            (number, coded.ids[at], coded.trained[at])
            for number, at in zip(owners.tolist(), whole, strict=True)
        ]
        if len(owners)
        else []
    )
    for number, found in parts.items():
        for part in found:
            ends = np.cumsum(part.lengths)[:-1]
            several += [
                (number, *both)
                for both in zip(np.split(part.ids, ends), np.split(part.trained, ends), strict=True)
            ]
    several.sort(key=lambda sample: sample[0])
    numbers, ids, trained = zip(*several, strict=True)
    lengths = np.array([len(one) for one in ids], np.int64)
    return Coded(np.concatenate(ids), np.concatenate(trained), lengths, {}), np.array(numbers)
