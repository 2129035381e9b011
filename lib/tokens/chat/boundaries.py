"""Turn spans of trained characters into trained tokens.

A span must begin and end between two tokens. This must hold at inference too, where the rest of the
text does not exist yet: the ids of the text up to that place must be the first ids of the whole
text. Special tokens always split a text. So only the text from the last special token to the place
is encoded again. It is nearly always the same text (`<|im_start|>assistant` and a line break).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lib.tokens.chat.answers import NoAnswerBoundary, TextWithSpans
from lib.tokens.encode import Encoder

# The white space that a token with lstrip or rstrip takes in.
_SPACE = "[\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"


class EncodedTexts(NamedTuple):
    """Holds the tokens of several texts, concatenated.

    ids: uint32 [N]. trained: bool [N]. lengths: int64 [texts]. errors: index of a text → its error,
    for texts with a span that begins or ends inside a token.
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    errors: dict[int, NoAnswerBoundary]

    def find_starts(self) -> np.ndarray:
        """Return the index of the first token of each text, int64 [texts]."""
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


class _Edge(NamedTuple):
    """Describes where a span begins or ends.

    number: the index of the text. token: the index of the last special token before the edge, or of
    the text's first token if there is none. head: the characters from that token to the edge.
    place: the position of the edge in the text, in characters.
    """

    number: int
    token: int
    head: str
    place: int


class SpanEncoder:
    """Encodes texts and marks the tokens inside their trained spans."""

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

    def encode(self, texts: Sequence[TextWithSpans]) -> EncodedTexts:
        """Return the tokens of texts, with the trained ones marked."""
        ids, lengths = self._encode_texts([text for text, _ in texts])
        starts = [0, *np.cumsum(lengths).tolist()]
        edges = self._find_edges(texts, ids, starts)
        # Nearly all edges of a batch have the same head, so each head is encoded once.
        heads = sorted({edge.head for edge in edges})
        id_bytes = dict(zip(heads, self._encode_to_bytes(heads), strict=True))
        all_bytes = ids.tobytes()
        places = []
        errors = {}
        for edge in edges:
            head = id_bytes[edge.head]
            begin = edge.token * ids.itemsize
            end = begin + len(head)
            if all_bytes[begin:end] != head or end > starts[edge.number + 1] * ids.itemsize:
                errors[edge.number] = NoAnswerBoundary(
                    "an answer begins or ends within a token",
                    *_find_lines(texts[edge.number].text, edge.place),
                )
                end = starts[edge.number] * ids.itemsize
            places.append(end // ids.itemsize)
        trained = np.zeros(len(ids), bool)
        for start, stop in zip(places[0::2], places[1::2], strict=True):
            trained[start:stop] = True
        return EncodedTexts(ids, trained, lengths, errors)

    def _encode_texts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts, uint32 [N], and their numbers of tokens, int64 [texts]."""
        return self._encoder.encode_bare([text.encode("utf-8", "replace") for text in texts])

    def _encode_to_bytes(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text as bytes."""
        ids, lengths = self._encode_texts(texts)
        ends = np.cumsum(lengths)
        return [
            ids[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)
        ]

    def _find_edges(
        self, texts: Sequence[TextWithSpans], ids: np.ndarray, starts: list[int]
    ) -> list[_Edge]:
        """Return the two edges of every span.

        starts: the index of each text's first token, then the total number of tokens.
        """
        special = np.flatnonzero(self._is_special[ids])
        firsts = np.searchsorted(special, starts).tolist()
        tokens = special.tolist()
        edges = []
        for number, (text, spans) in enumerate(texts):
            first = firsts[number]
            places = [match.start() for match in self._special.finditer(text)]
            if len(places) != firsts[number + 1] - first:  # the tokenizer reads some as plain text
                places = []
            for span in spans:
                for place in span:
                    last = bisect_left(places, place) - 1
                    edges.append(
                        _Edge(number, tokens[first + last], text[places[last] : place], place)
                        if last >= 0
                        else _Edge(number, starts[number], text[:place], place)
                    )
        return edges


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
