# covers: lib/tokens/samples.py, lib/tokens/store.py, lib/tokens/packing.py, lib/tokens/mixture.py
"""Samples of a store with a label mask: windows, packs, and mixtures with text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lib.tokens import packing
from lib.tokens.mixture import Mixture
from lib.tokens.samples import IGNORED, Samples, Windows
from lib.tokens.store import Labels, Split, TokenStore

T = 16


def split_of(lengths: list[int], seed: int) -> Split:
    """Return documents of random tokens; the first is no label, at least one other is."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths).astype(np.int64)
    begins = ends - lengths
    labels = rng.random(ends[-1]) < 0.3
    labels[begins + rng.integers(1, np.array(lengths))] = True
    labels[begins] = False
    tokens = rng.integers(1, 999, ends[-1]).astype(np.uint16)
    return Split(
        tokens, ends, Labels(np.packbits(labels, bitorder="little"), len(labels), int(labels.sum()))
    )


def packs_of(split: Split, tmp_path: Path, name: str) -> packing.Packs:
    return packing.prepare_packs(TokenStore(tmp_path / name, name, 999, {}, {"train": split}), T)[
        "train"
    ]


def require_matching_counts(samples: Samples) -> None:
    """Assert that counts and means match the rows."""
    chosen = np.array([3, 0, len(samples) - 1, 3])
    rows = samples.read_samples(chosen)
    assert samples.token_counts(chosen)[0] == (rows.labels != IGNORED).sum()
    if not isinstance(samples, Mixture):
        every = np.arange(len(samples))
        labels, tokens = samples.token_counts(every)
        not_counted = 0 if isinstance(samples, packing.Packs) else T + 1
        assert samples.mean_counts()[0] * len(samples) == pytest.approx(labels, abs=not_counted)
        assert samples.mean_counts()[1] * len(samples) == pytest.approx(tokens)


@pytest.mark.parametrize("seed", range(4))
def test_labels_are_those_of_the_store(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.tokens.store._CHUNK", 20)
    longest = T + 21 if seed == 3 else T + 1
    lengths = np.random.default_rng(seed).integers(2, longest, 60).tolist()
    split = split_of(lengths, seed)
    bits = split.labels[:]
    windows = Windows(split.tokens, T, split.labels)
    rows = windows.read_samples(np.arange(len(windows)))
    end = len(windows) * T
    assert np.array_equal(
        rows.labels.ravel(),
        np.where(bits[1 : end + 1], split.tokens[1 : end + 1].astype(np.int64), IGNORED),
    )
    packs = packs_of(split, tmp_path, "a")
    rows = packs.read_samples(np.arange(len(packs)))
    assert (rows.labels != IGNORED).any(1).all()
    if seed < 3:  # nothing is cut
        assert (rows.labels != IGNORED).sum() == bits.sum()
    trained = np.sort(rows.labels[rows.labels != IGNORED])
    assert seed == 3 or np.array_equal(trained, np.sort(split.tokens[bits]))
    for samples in (windows, packs):
        require_matching_counts(samples)
    plain = Split(split.tokens, split.ends)
    require_matching_counts(
        Mixture(["chat", "text"], [packs, packs_of(plain, tmp_path, "b")], [2, 1])
    )
    require_matching_counts(Mixture(["chat", "text"], [windows, Windows(split.tokens, T)], [2, 1]))
