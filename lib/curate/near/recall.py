"""Estimate which share of the similar pairs of a corpus was compared, from the compared pairs.

A pair is compared if it shares the key of at least one band, so a missed pair is never seen. But
the number of missed pairs can be estimated from the pairs that share one or two bands. If each of b
bands finds a pair with the same probability, independently of the others, then the expected number
is (b − 1) ÷ b · once² ÷ (2 · twice). This is Chao's estimate of unseen species. It does not use the
formula of the probability curve, so it checks that formula. If the pairs of a bin differ in their
probability, the estimate is too low.

The sample contains, for some documents, the pairs with at most 31 of the earlier kept documents
that share a key with them, including pairs that the walk need not compare. Otherwise, pairs that
share few bands would be too rare in the sample. Documents with a key that has its largest number of
leaders are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lib.curate.near.minhash import Bands

_FIRST = 10  # the first bin begins at 10 ÷ 20
_BINS = 20  # between the similarities 0 and 1
_SAMPLED = 8000  # documents in the sample; at most about twice as many
_MIXER = 0x9E3779B97F4A7C15  # odd, so the products of consecutive numbers are spread evenly
ENOUGH = 30  # the fewest pairs from which a recall is estimated


class Recall(NamedTuple):
    """Describes the pairs of one bin, which begins at `similarity`.

    pairs: number of sampled pairs. expected: the recall that the formula predicts for their
    similarities. measured: the estimated recall, None if there are too few pairs.
    """

    similarity: float
    pairs: int
    expected: float
    measured: float | None

    def summarize(self) -> dict[str, Any]:
        """Return the values for the manifest."""
        measured = None if self.measured is None else round(self.measured, 4)
        return {**self._asdict(), "expected": round(self.expected, 4), "measured": measured}


class RecallSample:
    """Collects pairs of documents.

    documents: number of documents that share a key with another one. threshold: the similarity from
    which a document is dropped; pairs at or above it are also counted together.
    """

    def __init__(self, bands: Bands, documents: int, threshold: float) -> None:
        self._bands = bands
        self._threshold = threshold
        self._step = max(1, documents // _SAMPLED)
        # For each bin, the number of pairs, of pairs that share one band, of pairs that share two
        # bands, and of all pairs that the formula expects, including missed ones. The last bin
        # begins at the threshold.
        self.counts: list[list[float]] = [[0, 0, 0, 0.0] for _ in range(_BINS - _FIRST + 1)]

    def selects(self, document: int) -> bool:
        """Return whether the pairs of a document belong to the sample."""
        return (document * _MIXER % (1 << 64) >> 32) % self._step == 0

    def add(self, similarity: float, shared: int) -> None:
        """Add a pair. shared: number of its shared bands."""
        number = min(int(similarity * _BINS), _BINS - 1) - _FIRST
        bins = [self.counts[number]] if number >= 0 else []
        if similarity >= self._threshold:
            bins.append(self.counts[-1])
        for counts in bins:
            counts[0] += 1
            counts[1] += shared == 1
            counts[2] += shared == 2
            counts[3] += 1 / self._bands.find_probability(similarity)


def estimate_recall(counts: Sequence[Sequence[float]], bands: Bands, threshold: float) -> Any:
    """Return the recall of each bin with pairs, and the recall of all pairs from the threshold on.

    counts: the counts of a RecallSample. The second result is None without such pairs.
    """
    starts = [*(number / _BINS for number in range(_FIRST, _BINS)), threshold]
    bins = list(_estimate_recall(starts, counts, bands))
    has_total = bool(counts and counts[-1][0])
    return (bins[:-1], bins[-1]) if has_total else (bins, None)


def _estimate_recall(
    starts: Sequence[float], counts: Sequence[Sequence[float]], bands: Bands
) -> Iterator[Recall]:
    for start, (pairs, once, twice, estimated) in zip(starts, counts, strict=True):
        if not pairs:
            continue
        # This form of Chao's estimate is nearly unbiased, and defined for `twice` = 0 as well.
        missed = (bands.number - 1) / bands.number * once * (once - 1) / (2 * (twice + 1))
        yield Recall(
            start,
            int(pairs),
            pairs / estimated,
            pairs / (pairs + missed) if pairs >= ENOUGH and bands.number > 1 else None,
        )
