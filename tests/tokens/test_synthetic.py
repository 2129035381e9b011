# covers: lib/tokens/synthetic.py, lib/tokens/order.py
"""Test the tokens of `-d synthetic`: a function of the seed and the position alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import UsageError
from lib.tokens import packing
from lib.tokens.samples import Windows
from lib.tokens.store import Split
from lib.tokens.synthetic import SyntheticText, SyntheticTokens, find_synthetic

FIRST_TOKENS = [6840, 7972, 130, 692, 6531, 49, 1092, 19116]  # of seed 0 in a vocabulary of 32,000


def test_a_token_depends_on_the_seed_and_its_position_alone() -> None:
    tokens = SyntheticTokens(10**12, 32_000, seed=7)
    assert len(tokens) == 10**12
    read = tokens[1000:1010]
    assert read.tolist() == [tokens[i] for i in range(1000, 1010)]
    assert read.tolist() == tokens[np.arange(1000, 1010)].tolist()
    assert SyntheticTokens(2000, 32_000, seed=7)[1000:1010].tolist() == read.tolist()
    assert SyntheticTokens(2000, 32_000, seed=8)[1000:1010].tolist() != read.tolist()
    assert tokens[10**12 - 3 : 10**12 + 5].shape == (3,)


def test_tokens_stay_the_same_in_later_versions() -> None:
    # A resumed run reads them anew.
    assert SyntheticTokens(100, 32_000, seed=0)[:8].tolist() == FIRST_TOKENS


@pytest.mark.parametrize("vocabulary", [2, 3, 258, 4096, 128_256])
def test_every_vocabulary_is_used_and_small_ids_are_frequent(vocabulary: int) -> None:
    tokens = SyntheticTokens(10**9, vocabulary, seed=0)[:400_000]
    assert tokens.dtype == np.int64 and tokens.min() == 0 and tokens.max() < vocabulary
    counts = np.bincount(tokens, minlength=vocabulary)
    assert counts[0] >= counts.mean()
    shares = counts[counts > 0] / len(tokens)
    entropy = -(shares * np.log(shares)).sum()
    if vocabulary > 100:  # so the loss of a model can fall
        assert 0.5 * math.log(vocabulary) < entropy < 0.85 * math.log(vocabulary)
        assert (tokens >= vocabulary // 2).any()


def test_documents_fill_all_tokens_and_are_the_same_in_every_prefix() -> None:
    ends = SyntheticText(50_000).cut_documents(seed=3)
    lengths = np.diff(np.concatenate([[0], ends]))
    assert ends[-1] == 50_000 and (lengths > 0).all()
    assert (lengths[:-1] >= 64).all() and (lengths < 4096).all()
    longer = SyntheticText(90_000).cut_documents(seed=3)
    assert longer[: len(ends) - 1].tolist() == ends[:-1].tolist()
    assert SyntheticText(10).cut_documents(seed=3).tolist() == [10]


def test_windows_and_packs_read_the_tokens() -> None:
    text = SyntheticText(5000)
    split = Split(text.make_tokens(512, seed=0), text.cut_documents(seed=0))
    windows = Windows(split.tokens, 32)
    assert len(windows) == (5000 - 1) // 32
    sample = windows.read_samples(np.array([4]))
    assert sample.inputs[0].tolist() == split.tokens[128:160].tolist()
    assert sample.labels[0].tolist() == split.tokens[129:161].tolist()
    packs = packing.pack_in_memory(split, 32)
    read = packs.read_samples(np.arange(len(packs)))
    assert int(read.lengths.sum()) == 5000
    assert packs.token_counts(np.arange(len(packs)))[1] == 5000
    assert len(Windows(SyntheticTokens(10, 512, 0), 32)) == 0


@pytest.mark.parametrize(
    ("typed", "tokens", "shown"),
    [
        ("synthetic", 100_000_000, "synthetic:100M"),
        ("synthetic:10", 10, "synthetic:10"),
        ("synthetic:1_000,000", 1_000_000, "synthetic:1M"),
        ("synthetic:1.5b", 1_500_000_000, "synthetic:1.5B"),
        ("synthetic:2K", 2000, "synthetic:2K"),
        ("synthetic:8.2M", 8_200_000, "synthetic:8.2M"),
        ("synthetic:1.005b", 1_005_000_000, "synthetic:1B"),
        ("synthetic:3T", 3 * 10**12, "synthetic:3T"),
    ],
)
def test_numbers_of_tokens_are_read(typed: str, tokens: int, shown: str) -> None:
    text = find_synthetic([typed])
    assert text is not None and text.tokens == tokens and str(text) == shown


@pytest.mark.parametrize(
    "typed", ["synthetic:", "synthetic:0", "synthetic:abc", "synthetic:-1", "synthetic:1e9",
              "synthetic:999T", "synthetic:0.1", "synthetic:5 M"],
)  # fmt: skip
def test_other_numbers_are_refused(typed: str) -> None:
    with pytest.raises(UsageError, match="number of tokens") as caught:
        find_synthetic([typed])
    assert "100M or 1.5B" in caught.value.expected


def test_datasets_and_mixtures_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_synthetic([]) is None
    assert find_synthetic(["corpus", "./synthetic", "hf_datasets/synthetic"]) is None
    with pytest.raises(UsageError, match="cannot be mixed"):
        find_synthetic(["corpus", "synthetic"])
    for place in ("synthetic", "hf_datasets/synthetic"):
        (tmp_path / place).mkdir(parents=True)
        with pytest.raises(UsageError, match="stands for synthetic tokens") as caught:
            find_synthetic(["synthetic"])
        assert f"-d ./{place} for" in caught.value.expected
        assert find_synthetic(["synthetic:5M"]) == SyntheticText(5_000_000)
        (tmp_path / place).rmdir()


def test_too_many_documents_are_refused() -> None:
    with pytest.raises(UsageError, match="too many documents"):
        SyntheticText(10**13).cut_documents(seed=0)


def test_tokens_are_the_same_in_another_process() -> None:
    code = (
        "from lib.tokens.synthetic import SyntheticTokens as S; "
        "print(S(10**9, 50257, 5)[777:797].tolist())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str(SyntheticTokens(10**9, 50_257, 5)[777:797].tolist())
