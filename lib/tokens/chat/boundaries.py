"""Turn spans of trained characters into trained tokens.

A span must begin and end between two tokens. This must hold at inference too, where the rest of the
text does not exist yet: the ids of the text up to that place must be the first ids of the whole
text. Special tokens always split a text. So only the text from the last special token to the place
is encoded again, and that is nearly always the same (`<|im_start|>assistant` and a line break).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lib.tokens.chat.mask import NoAnswerBoundary, TextWithSpans
from lib.tokens.encode import Encoder

# The white space that a token with lstrip or rstrip takes in.
_SPACE = "[\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
# The cache of heads: the text between a special token and the edge of a span, with its ids.
_LONGEST_HEAD = 200  # characters of a head
_MOST_HEADS = 1 << 14  # heads


class EncodedTexts(NamedTuple):
    """Holds the tokens of several texts, concatenated.

    ids: uint32 [N]. trained: bool [N]. lengths: int64 [texts]. wrong: number of a text → the error,
    for texts with a span that begins or ends inside a token.
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    wrong: dict[int, NoAnswerBoundary]

    def find_starts(self) -> np.ndarray:
        """Return the first token of each text, int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths

    def label_counts(self) -> np.ndarray:
        """Return the number of trained tokens in each text, int64 [texts]."""
        edges = np.append(self.find_starts(), len(self.ids))
        return np.diff(np.searchsorted(np.flatnonzero(self.trained), edges))

    def select(self, is_kept: np.ndarray) -> EncodedTexts:
        """Return the texts where `is_kept` (bool [texts]) is true."""
        if is_kept.all():
            return self
        is_token = np.repeat(is_kept, self.lengths)
        return EncodedTexts(self.ids[is_token], self.trained[is_token], self.lengths[is_kept], {})


class Boundaries:
    """Encodes texts and finds the tokens inside their trained spans."""

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
        self._special = re.compile("|".join(map(_make_token_pattern, longest_first)) or "(?!)")
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[TextWithSpans]) -> EncodedTexts:
        """Return the tokens of texts, with the trained ones marked."""
        ids, lengths = self._encoder.encode_bare(
            [text.encode("utf-8", "replace") for text, _ in texts]
        )
        begins = [0, *np.cumsum(lengths).tolist()]
        edges = self._find_edges(texts, ids, begins)
        heads = self._encode_heads({head for _, _, head, _ in edges})
        coded = ids.tobytes()
        size = ids.itemsize
        places = []
        wrong = {}
        for number, at, head, place in edges:
            known = heads[head]
            begin = at * size
            end = at * size + len(known)
            if coded[begin:end] != known or end > begins[number + 1] * size:
                wrong[number] = NoAnswerBoundary(
                    "an answer begins or ends within a token",
                    *_find_lines(texts[number].text, place),
                )
                end = begins[number] * size
            places.append(end // size)
        trained = np.zeros(len(ids), bool)
        for start, stop in zip(places[0::2], places[1::2], strict=True):
            trained[start:stop] = True
        return EncodedTexts(ids, trained, lengths, wrong)

    def _find_edges(
        self, texts: Sequence[TextWithSpans], ids: np.ndarray, begins: list[int]
    ) -> list[tuple[int, int, str, int]]:
        """Return the two edges of every span, as tuples of four values.

        These are the number of the text, the number of the last special token before the edge (or
        of the first token), the characters between that token and the edge, and the character
        position of the edge.
        """
        special = np.flatnonzero(self._is_special[ids])
        firsts = np.searchsorted(special, begins).tolist()
        at = special.tolist()
        edges = []
        for number, (text, spans) in enumerate(texts):
            first = firsts[number]
            starts = [match.start() for match in self._special.finditer(text)]
            if (
                len(starts) != firsts[number + 1] - first
            ):  # this tokenizer reads some of them as plain text
                starts = []
            for span in spans:
                for place in span:
                    last = bisect_left(starts, place) - 1
                    edges.append(
                        (number, at[first + last], text[starts[last] : place], place)
                        if last >= 0
                        else (number, begins[number], text[:place], place)
                    )
        return edges

    def _encode_heads(self, heads: set[str]) -> dict[str, bytes]:
        """Return the ids of each head as bytes, from the cache or by encoding it."""
        if len(self._known) > _MOST_HEADS:
            self._known.clear()
        id_bytes = {head: self._known[head] for head in heads if head in self._known}
        new = [*(heads - id_bytes.keys())]
        ids, lengths = self._encoder.encode_bare([head.encode("utf-8", "replace") for head in new])
        coded = ids.tobytes()
        ends = (np.cumsum(lengths) * ids.itemsize).tolist()
        for head, begin, end in zip(new, [0, *ends], ends, strict=False):
            id_bytes[head] = coded[begin:end]
        self._known |= {head: id_bytes[head] for head in new if len(head) <= _LONGEST_HEAD}
        return id_bytes


def _make_token_pattern(token: Any) -> str:
    """Return the pattern of a special token, including the white space it takes in."""
    return (
        (_SPACE if token.lstrip else "")
        + re.escape(token.content)
        + (_SPACE if token.rstrip else "")
    )


def _find_lines(text: str, place: int) -> tuple[str, str]:
    """Return the line around a place, first up to the place and then whole.

    At the start of a line, the previous line is included.
    """
    start = text.rfind("\n", 0, max(0, place - 1)) + 1
    end = text.find("\n", place)
    line = text[start:end] if end >= 0 else text[start:]
    return text[start:place], line
