"""Find the lines and tokens of texts, in flat arrays, while the words of the texts are found.

A line is the text between two newlines, without surrounding white space; blank lines are left out.
A token is the text between two characters of white space. Lines and tokens are compared in lower
case and NFC. A line of more than 131,072 characters counts as several lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lib.curate import words
from lib.curate.words import Piece, WordGroup, Words

if TYPE_CHECKING:
    import numpy as np

_ELLIPSIS = 0x2026
# Flags of a line, combined in one number.
BULLET, END_MARK, ELLIPSIS = (1 << bit for bit in range(3))


class Layout(NamedTuple):
    """Contains the words, lines and tokens of several texts.

    Positions are indices in the joined texts, int64. Arrays with an entry for each line: starts,
    ends, hashes (uint64), flags (uint8), numbers (newlines before the line, so a blank line leaves
    a gap) and longest (characters of the longest token). Arrays of positions: tokens, plain (tokens
    without a letter), newlines, braces (`{`), hash_signs (`#`), ellipses, and breaks (the ends of
    sentences).
    """

    words: Words
    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    flags: np.ndarray
    numbers: np.ndarray
    longest: np.ndarray
    tokens: np.ndarray
    plain: np.ndarray
    newlines: np.ndarray
    braces: np.ndarray
    hash_signs: np.ndarray
    ellipses: np.ndarray
    breaks: np.ndarray

    def count_by_text(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of positions in each text (int [texts]). positions: increasing."""
        import numpy as np

        edges = np.searchsorted(positions, self.words.edges)
        return edges[1:] - edges[:-1]

    def number_texts(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the text with each position. positions: increasing."""
        import numpy as np

        return np.repeat(np.arange(len(self.words.text_ends)), self.count_by_text(positions))

    def find_lines(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the line of each position; a line must begin before it."""
        import numpy as np

        return np.searchsorted(self.starts, positions, "right") - 1


def find_layouts(texts: Sequence[str]) -> list[tuple[list[int], Layout]]:
    """Return the layout of each group of `words.find_words`, with the numbers of its texts."""
    finders: list[_LayoutFinder] = []

    def visit(group: int, piece: Piece) -> None:
        if group == len(finders):
            finders.append(_LayoutFinder())
        finders[group].add(piece)

    groups = words.find_words(texts, visit)
    finders += [_LayoutFinder() for _ in groups[len(finders) :]]
    return [
        (group.members, finder.finish(group)) for group, finder in zip(groups, finders, strict=True)
    ]


class _LayoutFinder:
    """Collects the lines and tokens of the pieces of a group of texts."""

    def __init__(self) -> None:
        self._found: list[tuple[np.ndarray, ...]] = []
        self._newlines = 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        import numpy as np

        newlines = np.flatnonzero(piece.codes == 10)
        token_starts, token_ends = _find_tokens(piece.marks)
        first_tokens = np.searchsorted(token_starts, np.append(0, newlines))
        numbers = np.flatnonzero(np.diff(first_tokens, append=len(token_starts)))
        first_tokens = first_tokens[numbers]
        starts = token_starts[first_tokens]
        ends = (
            token_ends[np.append(first_tokens[1:], len(token_starts)) - 1]
            if len(starts)
            else starts
        )
        is_plain = _find_plain(piece.marks, token_starts, token_ends)
        sentence_ends = np.flatnonzero((piece.marks & np.uint8(words.SENTENCE_END)) != 0)
        dots = sentence_ends[piece.codes[sentence_ends] == ord(".")]
        first = piece.first
        self._found.append(
            (
                starts + first,
                ends + first,
                piece.hash_spans(starts, ends),
                _flag_lines(piece, starts, ends),
                numbers + self._newlines,
                np.maximum.reduceat(token_ends - token_starts, first_tokens)
                if len(starts)
                else starts,
                token_starts + first,
                token_starts[is_plain] + first,
                newlines + first,
                np.flatnonzero(piece.codes == ord("{")) + first,
                np.flatnonzero(piece.codes == ord("#")) + first,
                _find_ellipses(piece.codes, dots) + first,
                _find_breaks(piece, sentence_ends) + first,
            )
        )
        self._newlines += len(newlines)

    def finish(self, group: WordGroup) -> Layout:
        """Return the layout of all pieces. group: the words of the texts."""
        import numpy as np

        if not self._found:
            self.add(words.make_empty_piece())
        if len(self._found) == 1:
            return Layout(group.words, *self._found[0])
        return Layout(group.words, *map(np.concatenate, zip(*self._found, strict=True)))


def _find_tokens(marks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the tokens of a piece start and end."""
    import numpy as np

    padded = np.zeros(len(marks) + 2, bool)
    np.equal(marks & np.uint8(words.SPACE), 0, out=padded[1:-1])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return edges[::2], edges[1::2]


def _find_plain(marks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return which tokens contain no letter."""
    import numpy as np

    letters = np.zeros(len(marks) + 1, np.int32)
    np.cumsum((marks & np.uint8(words.ALPHABETIC)) != 0, dtype=np.int32, out=letters[1:])
    return letters[starts] == letters[ends]


def _find_ellipses(codes: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """Return the positions of `...` and `…`; a run of 7 dots contains two ellipses."""
    import numpy as np

    is_follower = np.diff(dots, prepend=-2) == 1
    if is_follower.any():
        order = np.arange(len(dots))
        run_starts = np.maximum.accumulate(np.where(is_follower, 0, order))
        ellipses = dots[(order - run_starts) % 3 == 2]
    else:
        ellipses = dots[:0]
    if codes.dtype != np.uint8:
        ellipses = np.union1d(ellipses, np.flatnonzero(codes == _ELLIPSIS))
    return ellipses


def _flag_lines(piece: Piece, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the flags of lines."""
    import numpy as np

    codes = piece.codes
    flags = np.where(piece.marks[starts] & words.BULLET, np.uint8(BULLET), np.uint8(0))
    last = ends - 1
    is_end = (piece.marks[last] & (words.SENTENCE_END | words.QUOTE)) != 0
    flags[is_end] |= np.uint8(END_MARK)
    has_ellipsis = codes[last] == _ELLIPSIS
    dotted = np.flatnonzero((codes[last] == 46) & (ends - starts >= 3))
    end = last[dotted]
    has_ellipsis[dotted[(codes[end - 1] == 46) & (codes[end - 2] == 46)]] = True
    flags[has_ellipsis] |= np.uint8(ELLIPSIS)
    return flags


def _find_breaks(piece: Piece, sentence_ends: np.ndarray) -> np.ndarray:
    """Return the positions after the ends of sentences.

    A sentence ends with an end mark and perhaps a closing quotation mark before white space. After
    a wide end mark, as in Chinese, no white space is needed.
    """
    import numpy as np

    marks = np.append(piece.marks, np.uint8(words.SPACE))
    after = sentence_ends + 1
    is_wide = (marks[after - 1] & words.WIDE_END) != 0
    after += (marks[after] & words.QUOTE) != 0
    is_break = (marks[after] & words.SPACE) != 0
    is_break |= is_wide & ((marks[after] & words.SENTENCE_END) == 0)
    return after[is_break]
