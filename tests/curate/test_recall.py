# covers: lib/curate/near/recall.py
"""The measured recall is near the true one, and finds bands that miss more than they should."""

from __future__ import annotations

import random

import pytest

from lib.curate.near.minhash import Bands
from lib.curate.near.recall import RecallSample, estimate_recall

BANDS = Bands(20, 8)


def draw_pairs(similarity: float, probability: float, pairs: int) -> tuple[RecallSample, float]:
    """Return a sample of pairs that share a band with a probability, and the true recall."""
    draw = random.Random(round(similarity * 100))
    sample = RecallSample(BANDS, 1, 0.8)
    matches = 0
    for _ in range(pairs):
        shared = sum(draw.random() < probability for _ in range(BANDS.number))
        if shared:
            sample.add(similarity, shared)
            matches += 1
    return sample, matches / pairs


@pytest.mark.parametrize("similarity", [0.62, 0.72, 0.77, 0.82, 0.92])
def test_the_estimate_is_near_the_truth_and_the_formula(similarity):
    sample, truth = draw_pairs(similarity, similarity**8, 5000)
    bins, above = estimate_recall(sample.counts, BANDS, 0.8)
    (recall,) = bins
    assert recall.similarity <= similarity < recall.similarity + 0.05
    assert recall.measured == pytest.approx(truth, abs=0.03)
    assert recall.expected == pytest.approx(BANDS.find_probability(similarity), abs=1e-9)
    assert (above is None) == (similarity < 0.8)
    assert above is None or above[1:] == recall[1:]


def test_bands_that_fail_are_noticed():
    """The signatures behave as if the similarity were 0.6; the formula does not notice it."""
    sample, truth = draw_pairs(0.82, 0.6**8, 5000)
    (recall,), _ = estimate_recall(sample.counts, BANDS, 0.8)
    assert recall.expected > 0.98 and truth < 0.35
    assert recall.measured == pytest.approx(truth, abs=0.05)


def test_few_pairs_give_no_estimate_and_no_pairs_no_bin():
    sample = RecallSample(BANDS, 1, 0.8)
    assert estimate_recall(sample.counts, BANDS, 0.8) == ([], None)
    sample.add(0.3, 1)  # below all bins
    sample.add(1.0, 20)
    (recall,), above = estimate_recall(sample.counts, BANDS, 0.8)
    assert (recall.similarity, recall.pairs, recall.measured) == (0.95, 1, None)
    assert above is not None and above.pairs == 1


def test_the_sample_of_documents_is_bounded_and_spread():
    sample = RecallSample(BANDS, 1_000_000, 0.8)
    taken = [number for number in range(1_000_000) if sample.selects(number)]
    assert 7000 < len(taken) < 9000
    assert 0.4 < sum(number < 500_000 for number in taken) / len(taken) < 0.6
    assert all(RecallSample(BANDS, 5000, 0.8).selects(number) for number in range(100))
