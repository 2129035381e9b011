# covers: lib/curate/near/minhash.py
"""Band keys find pairs with the probability of the formula, in every batch alike."""

from __future__ import annotations

import numpy as np
import pytest

from lib.curate import shingles
from lib.curate.near import minhash
from lib.curate.near.minhash import Bands
from lib.curate.shingles import Shingles

BANDS = Bands(20, 8)


@pytest.mark.parametrize("size", [30, 400])
@pytest.mark.parametrize("similarity", [0.6, 0.7, 0.85])
def test_pairs_share_a_band_as_often_as_the_formula_says(size, similarity):
    draw = np.random.default_rng(size)
    pairs = 600
    common = round(size * 2 * similarity / (1 + similarity))
    sets = []
    for _ in range(pairs):
        shared = draw.integers(0, 2**64, common, dtype=np.uint64)
        for _ in range(2):
            distinct = draw.integers(0, 2**64, size - common, dtype=np.uint64)
            sets.append(np.concatenate([distinct, shared]))
    keys = minhash.compute_keys(
        Shingles(np.concatenate(sets), np.cumsum([size] * len(sets))), BANDS
    )
    share = (keys[::2] == keys[1::2]).any(axis=1).mean()
    expected = BANDS.find_probability(common / (2 * size - common))
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / pairs) + 0.01


def test_the_curve_of_the_defaults():
    curve = [round(BANDS.find_probability(similarity), 3) for similarity in minhash.CURVE]
    assert curve == [0.075, 0.287, 0.695, 0.975, 0.998, 1.0]


def test_the_keys_of_a_row_do_not_depend_on_its_batch():
    texts = ["one two three", "", "é", "word " * 30_000, "!", "one, TWO: three"]

    def compute(*rows: str) -> np.ndarray:
        return minhash.compute_keys(shingles.hash_texts(rows, 5), BANDS)

    keys = compute(*texts)
    assert (keys == np.concatenate([compute(text) for text in texts])).all()
    assert (keys[[1, 4]] == minhash.NO_KEY).all() and keys[[0, 2, 3, 5]].all()
    assert (keys[0] == keys[5]).all() and (keys[0] != keys[2]).all()
