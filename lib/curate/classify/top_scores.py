"""Find the rows with the highest scores, by counting on disk instead of sorting in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

BINS = 20  # bins of the histogram of scores in the report
_HALF = 16  # bits of a score that are counted in one pass


class ScoreThreshold(NamedTuple):
    """Finds the rows to keep: all rows above a score, and the first `ties` rows with that score.

    bits: the score as the bits of a float32 that is not negative.
    """

    bits: int
    ties: int

    @property
    def score(self) -> float:
        """Return the lowest score that is kept."""
        import numpy as np

        return float(np.array([self.bits], np.uint32).view(np.float32)[0])


def count_kept(rows: int, share: float) -> int:
    """Return the number of rows to keep: the rounded share, but at least one of any rows."""
    return min(rows, max(1, math.floor(rows * share + 0.5)))


def find_threshold(read_blocks: Callable[[], Iterable[np.ndarray]], count: int) -> ScoreThreshold:
    """Return the threshold that keeps the `count` highest scores; among equal scores, the first.

    read_blocks: returns the scores block by block, float32 values, none of them negative. The bits
    of such floats are in the order of their values. So two passes find the threshold exactly: the
    first counts the upper half of the bits, the second the lower half.
    """
    import numpy as np

    if not count:
        return ScoreThreshold(0, 0)
    high = _count_halves(read_blocks(), None)
    upper, rest = _find_bin(high, count)
    low = _count_halves(read_blocks(), upper)
    lower, ties = _find_bin(low, rest)
    return ScoreThreshold(int(np.uint32(upper << _HALF | lower)), ties)


def _count_halves(blocks: Iterable[np.ndarray], upper: int | None) -> np.ndarray:
    """Return, for each value of the upper 16 bits, the number of scores with it (int [65,536]).

    upper: if given, count the lower 16 bits instead, of the scores with these upper bits.
    """
    import numpy as np

    counts = np.zeros(1 << _HALF, np.int64)
    for scores in blocks:
        bits = scores.view(np.uint32)
        halves = bits >> np.uint32(_HALF)
        if upper is not None:
            halves = bits[halves == upper] & np.uint32((1 << _HALF) - 1)
        counts += np.bincount(halves, minlength=1 << _HALF)
    return counts


def _find_bin(counts: np.ndarray, count: int) -> tuple[int, int]:
    """Return the bin of the lowest kept value, and how many values of that bin are kept.

    count: number of values to keep, from the highest bin down.
    """
    import numpy as np

    above = np.cumsum(counts[::-1])
    index = int(np.searchsorted(above, count))
    before = int(above[index - 1]) if index else 0
    return len(counts) - 1 - index, count - before


def count_bins(scores: np.ndarray) -> np.ndarray:
    """Return the number of scores in each of BINS equal parts of the range from 0 to 1."""
    import numpy as np

    # fastText adds 0.00001 to a probability, so a score may be above 1.
    numbers = np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    return np.bincount(numbers, minlength=BINS)


class Selector:
    """Selects rows by a threshold, block by block in their order."""

    def __init__(self, threshold: ScoreThreshold) -> None:
        self._threshold = threshold
        self._ties = threshold.ties

    def select(self, scores: np.ndarray) -> np.ndarray:
        """Return which of the next scores are kept (bool [n]). scores: float32 [n]."""
        import numpy as np

        bits = np.ascontiguousarray(scores, np.float32).view(np.uint32)
        equal = bits == self._threshold.bits
        is_early = np.cumsum(equal) <= self._ties
        self._ties = max(0, self._ties - int(equal.sum()))
        return (bits > self._threshold.bits) | (equal & is_early)
