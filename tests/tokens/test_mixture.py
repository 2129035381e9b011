# covers: lib/tokens/mixture.py, lib/tokens/samples.py, lib/tokens/order.py, lib/tokens/dataset.py
"""Several corpora in one stream: exact shares in every prefix, every sample once, O(1) state."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import StageError, UsageError
from lib.tokens import mixture, order
from lib.tokens.dataset import Dataset
from lib.tokens.mixture import Corpus, Mixture
from lib.tokens.samples import Windows

T = 4


def parts(*samples: int) -> list[Windows]:
    """Return windows whose tokens contain corpus and place: corpus · 10,000 + place."""
    return [
        Windows(np.arange(n * T + 1, dtype=np.uint16) + corpus * 10_000, T)
        for corpus, n in enumerate(samples)
    ]


def corpora(*weights: str | None) -> list[Corpus]:
    return [
        Corpus(weight and Fraction(weight), Dataset(Path(f"corpus_{i}"), f"f{i}", {}, True))
        for i, weight in enumerate(weights)
    ]


@pytest.mark.parametrize(
    "weights",
    [
        [7, 3],
        [1, 1, 1],
        [5, 0, 2],
        [1, 999_999],
        [999_999, 1],
        [3, 1, 4, 1, 5, 9],
        [333_333, 333_333, 333_334],
    ],
)
def test_every_prefix_of_a_mixture_has_the_shares(weights: list[int]) -> None:
    count = 5000
    corpus, place = order.interleave_corpora(np.arange(count), weights)
    for i, weight in enumerate(weights):
        mine = corpus == i
        assert place[mine].tolist() == list(range(mine.sum()))  # its own stream, without a gap
        expected = np.arange(1, count + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(mine) - expected).max() < len(weights)


def test_interleaving_needs_no_history_and_at_most_64_bits() -> None:
    weights = [1_999_999_999, 1_000_000_001]
    first = 10**15
    corpus, place = order.interleave_corpora(np.arange(first, first + 100), weights)
    before = first * weights[0] // sum(weights)
    assert place[corpus == 0].tolist() == list(range(before, before + (corpus == 0).sum()))
    assert place[corpus == 1].tolist() == list(
        range(first - before, first - before + (corpus == 1).sum())
    )


def test_a_stream_may_be_cut_anywhere() -> None:
    mixed = Mixture(["a", "b", "c"], parts(10, 7, 23), [5, 2, 3])
    expected = mixed.stream(0, 300, seed=1)
    for size in (1, 7, 64):
        pieces = [mixed.stream(at, min(size, 300 - at), seed=1) for at in range(0, 300, size)]
        assert np.array_equal(np.concatenate(pieces), expected)


def test_without_weights_an_epoch_contains_every_sample_once() -> None:
    mixed = mixture.mix_samples(corpora(None, None, None), parts(10, 7, 23))
    assert len(mixed) == 40
    for epoch in range(3):
        assert sorted(mixed.stream(epoch * 40, 40, seed=0)) == list(range(40))


def test_with_weights_each_corpus_keeps_its_own_epochs() -> None:
    mixed = mixture.mix_samples(corpora("0.5", "0.25", "0.25"), parts(10, 7, 23))
    seen = mixed.stream(0, 400, seed=0)
    of_first = seen[seen < 10]
    assert len(of_first) == 200
    assert all(sorted(of_first[i : i + 10]) == list(range(10)) for i in range(0, 200, 10))
    of_second = seen[(seen >= 10) & (seen < 17)][:98]
    assert all(sorted(of_second[i : i + 7]) == list(range(10, 17)) for i in range(0, 98, 7))


def test_samples_are_read_in_the_given_order() -> None:
    mixed = Mixture(["a", "b"], parts(10, 7), [1, 1])
    numbers = np.array([12, 0, 16, 9, 10])
    rows = mixed.read_samples(numbers)
    assert rows.inputs[:, 0].tolist() == [10_008, 0, 10_024, 36, 10_000]
    assert np.array_equal(rows.labels, rows.inputs + 1) and rows.positions is None
    assert mixed.token_counts(numbers) == (5 * T, 5 * T)


def test_a_single_corpus_ignores_its_weight() -> None:
    [alone] = parts(10)
    assert mixture.mix_samples(corpora("0.3"), [alone]) is alone
    assert mixture.fingerprint_corpora(corpora("0.3")) == "f0"


def test_the_fingerprint_covers_shares_but_not_their_spelling() -> None:
    same = {
        mixture.fingerprint_corpora(corpora(*weights))
        for weights in (("0.7", "0.3"), ("7", "3"), ("70", "30.0"), ("7e-1", "3e-1"))
    }
    others = {
        mixture.fingerprint_corpora(corpora(*weights))
        for weights in ((None, None), ("0.6", "0.4"), ("0.3", "0.7"), ("1", "1"))
    }
    assert len(same) == 1 and len(others) == 4 and not same & others


def test_impossible_mixtures_are_refused() -> None:
    with pytest.raises(UsageError, match="shorter than one sample"):
        mixture.mix_samples(corpora("1", "1"), parts(10, 0))
    with pytest.raises(UsageError, match="too many digits"):
        mixture.mix_samples(corpora("1", "1e-12"), parts(10, 10))


def test_bad_dataset_arguments_are_refused(of_stage_02: Path, tmp_path: Path) -> None:
    other = tmp_path / "name=with sign"
    other.symlink_to(of_stage_02)
    [one] = mixture.open_corpora([str(other)])
    assert one.weight is None
    [one] = mixture.open_corpora([f"{of_stage_02}=0.25"])
    assert one.weight == Fraction(1, 4)
    for bad, says in (
        (["{}=x"], "'x' is not a weight"),
        (["{}=-1"], "not a weight"),
        (["{}=nan"], "not a weight"),
        (["{}=1/0"], "not a weight"),
        (["{}=1", "{}"], "others have none"),
        (["{}=1", "{}=2"], "given twice"),
        (["{}=1", "none_such=1", "{}=y"], "2 problems"),
    ):
        with pytest.raises(StageError) as error:
            mixture.open_corpora([argument.format(of_stage_02) for argument in bad])
        assert says in error.value.render()
