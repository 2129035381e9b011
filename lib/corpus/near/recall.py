"""Estimate which share of the similar pairs of a corpus was compared, from the pairs themselves.

A pair is compared if it shares the key of at least one band, so the missed pairs are never seen.
How many there are follows from the pairs that share one or two bands: if each of b bands finds a
pair with the same probability, independently of the others, then the expected number of missed
pairs is (b − 1) ÷ b · once² ÷ (2 · twice). This is Chao's estimate of unseen species. It does not
use the formula of the probability curve, so it is a check of that formula. If the pairs of a bin
differ in their probability, more pairs are missed than it says.

The sample contains every pair of some documents with the earlier kept documents that share a key
with them, also those that the walk needs not compare. Otherwise, pairs that share few bands would
be too rare in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lib.corpus.near.minhash import Bands

_FIRST = 10  # the first bin begins at 10 ÷ 20
_BINS = 20  # between the similarities 0 and 1
_SAMPLED = 8000  # documents, at most about twice as many
_MIXER = 0x9E3779B97F4A7C15  # odd, so the products of consecutive numbers are spread evenly
ENOUGH = 30  # pairs from which a recall is estimated


class Recall(NamedTuple):
    """Describe the pairs of one bin, which begins at `similarity`.

    pairs: sampled pairs. expected: the recall by the formula, for the similarities of these pairs.
    measured: the recall by the estimate, None for too few pairs.
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
    """Collect pairs of documents.

    documents: number of documents that share a key with another one. threshold: from which a
    document is dropped; the pairs from it on are also counted together.
    """

    def __init__(self, bands: Bands, documents: int, threshold: float) -> None:
        self._bands = bands
        self._threshold = threshold
        self._step = max(1, documents // _SAMPLED)
        # By bin: pairs, pairs that share one band, two bands, and the estimated pairs with those
        # that the bands have missed by the formula. The last bin begins at the threshold.
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
    """Return the recall of each bin with pairs, and of all pairs from the threshold on (or None).

    counts: of a RecallSample.
    """
    starts = [*(number / _BINS for number in range(_FIRST, _BINS)), threshold]
    bins = list(_estimate(starts, counts, bands))
    has_total = bool(counts and counts[-1][0])
    return (bins[:-1], bins[-1]) if has_total else (bins, None)


def _estimate(
    starts: Sequence[float], counts: Sequence[Sequence[float]], bands: Bands
) -> Iterator[Recall]:
    for start, (pairs, once, twice, estimated) in zip(starts, counts, strict=True):
        if not pairs:
            continue
        # Chao's estimate in the form that is defined, and nearly unbiased, without such pairs.
        missed = (bands.number - 1) / bands.number * once * (once - 1) / (2 * (twice + 1))
        yield Recall(
            start,
            int(pairs),
            pairs / estimated,
            pairs / (pairs + missed) if pairs >= ENOUGH and bands.number > 1 else None,
        )
