"""From characters that are trained to tokens that are trained.

A span may begin and end only where tokens do, also for who has seen nothing of what follows: the
ids of the text up to there have to be the first ids of the whole. Special tokens always split a
text, so it is enough to encode what stands between the last of them and the place, which is nearly
always the same few words (`<|im_start|>assistant` and a line break).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lib.tokens.chat.mask import Marked, Unmaskable
from lib.tokens.encode import Encoder

# What tokenizers take for white space around a token that strips it.
_SPACE = "[\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
# Heads whose ids are remembered.
_SHORT = 200  # characters of one, at most
_MOST = 1 << 14  # how many


class Coded(NamedTuple):
    """Holds texts as tokens, one after the other.

    ids: uint32 [N]. trained: bool [N]. lengths: int64 [texts]. wrong: what is to be said of texts
    whose spans do not begin and end where tokens do, by their number.
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    wrong: dict[int, Unmaskable]

    def begins(self) -> np.ndarray:
        """Return where each text begins, int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths

    def labels(self) -> np.ndarray:
        """Return how many tokens of each text are trained, int64 [texts]."""
        edges = np.append(self.begins(), len(self.ids))
        return np.diff(np.searchsorted(np.flatnonzero(self.trained), edges))

    def chosen(self, are: np.ndarray) -> Coded:
        """Return some of the texts; are: bool [texts]."""
        if are.all():
            return self
        is_token = np.repeat(are, self.lengths)
        return Coded(self.ids[is_token], self.trained[is_token], self.lengths[are], {})


class Boundaries:
    """Encodes texts and finds which tokens belong to their spans."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        splitting = {
            number: token
            for number, token in encoder.tokenizer.added_tokens_decoder.items()
            if (token.special or not token.normalized)
            and token.content.strip()
            and not token.single_word
        }
        self._is_special = np.zeros(encoder.vocab_size, bool)
        self._is_special[list(splitting)] = True
        longest_first = sorted(splitting.values(), key=lambda token: -len(token.content))
        self._special = re.compile("|".join(map(_shape, longest_first)) or "(?!)")
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[Marked]) -> Coded:
        """Return the tokens of texts and which of them are trained."""
        ids, lengths = self._encoder.encode_bare(
            [text.encode("utf-8", "replace") for text, _ in texts]
        )
        begins = [0, *np.cumsum(lengths).tolist()]
        cuts = self._cuts(texts, ids, begins)
        heads = self._heads({head for _, _, head, _ in cuts})
        coded = ids.tobytes()
        size = ids.itemsize
        places = []
        wrong = {}
        for number, at, head, place in cuts:
            known = heads[head]
            begin = at * size
            end = at * size + len(known)
            if coded[begin:end] != known or end > begins[number + 1] * size:
                wrong[number] = Unmaskable(
                    "an answer begins or ends within a token", *_lines(texts[number].text, place)
                )
                end = begins[number] * size
            places.append(end // size)
        trained = np.zeros(len(ids), bool)
        for start, stop in zip(places[0::2], places[1::2], strict=True):
            trained[start:stop] = True
        return Coded(ids, trained, lengths, wrong)

    def _cuts(
        self, texts: Sequence[Marked], ids: np.ndarray, begins: list[int]
    ) -> list[tuple[int, int, str, int]]:
        """Return the beginnings and ends of all spans: the text's number, the number of a token,
        the characters that lead from it to the place, and the place."""
        special = np.flatnonzero(self._is_special[ids])
        firsts = np.searchsorted(special, begins).tolist()
        at = special.tolist()
        cuts = []
        for number, (text, spans) in enumerate(texts):
            first = firsts[number]
            starts = [found.start() for found in self._special.finditer(text)]
            if len(starts) != firsts[number + 1] - first:  # a tokenizer that reads them otherwise
                starts = []
            for span in spans:
                for place in span:
                    last = bisect_left(starts, place) - 1
                    cuts.append(
                        (number, at[first + last], text[starts[last] : place], place)
                        if last >= 0
                        else (number, begins[number], text[:place], place)
                    )
        return cuts

    def _heads(self, heads: set[str]) -> dict[str, bytes]:
        """Return the ids of texts, as bytes."""
        if len(self._known) > _MOST:
            self._known.clear()
        found = {head: self._known[head] for head in heads if head in self._known}
        new = [*(heads - found.keys())]
        ids, lengths = self._encoder.encode_bare([head.encode("utf-8", "replace") for head in new])
        coded = ids.tobytes()
        ends = (np.cumsum(lengths) * ids.itemsize).tolist()
        for head, begin, end in zip(new, [0, *ends], ends, strict=False):
            found[head] = coded[begin:end]
        self._known |= {head: found[head] for head in new if len(head) <= _SHORT}
        return found


def _shape(token: Any) -> str:
    """Return the pattern of a special token, with the white space that it takes in."""
    return (
        (_SPACE if token.lstrip else "")
        + re.escape(token.content)
        + (_SPACE if token.rstrip else "")
    )


def _lines(text: str, place: int) -> tuple[str, str]:
    """Return the line around a place: up to it, and whole. An empty one adds the previous."""
    start = text.rfind("\n", 0, max(0, place - 1)) + 1
    end = text.find("\n", place)
    whole = text[start:end] if end >= 0 else text[start:]
    return text[start:place], whole
