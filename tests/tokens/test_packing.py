# covers: lib/tokens/packing.py, lib/tokens/store.py, lib/tokens/samples.py
"""Packs of whole documents: best fit, every token once, no label across a boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lib.tokens import packing, store
from lib.tokens.samples import IGNORED
from lib.tokens.store import Split, TokenStore


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """Return the room left in each bin after plain best-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= length]
        if not fits:
            rooms.append(capacity)
            fits = [len(rooms) - 1]
        best = min(fits, key=lambda i: rooms[i])
        rooms[best] -= length
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_packing_equals_best_fit_decreasing(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, capacity + 1, 300)
    if seed % 2:
        lengths = np.minimum(lengths, rng.integers(1, capacity + 1, 300))  # more short ones
    bins = packing.best_fit(lengths, capacity)
    filled = np.bincount(bins, lengths)
    assert filled.max() <= capacity and (filled > 0).all()
    assert sorted((capacity - filled).astype(int).tolist()) == one_by_one(lengths, capacity)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_longer_documents_are_counted(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are read in parts, since a store may have many documents."""
    monkeypatch.setattr(store, "_CHUNK", chunk)
    split = Split(np.arange(30), np.cumsum([8, 9, 1, 0, 12]))
    assert [store.count_longer(split, length) for length in (7, 8, 11, 12)] == [3, 2, 1, 0]
    assert store.count_longer(Split(np.arange(0), np.arange(0)), 1) == 0


def test_an_empty_split_gives_no_packs() -> None:
    nothing = np.array([], np.int64)
    assert len(packing.split_overfull_packs(packing.best_fit(nothing, 8), 64)) == 0


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([1024] * 199 + [1] * 1000, (1000, 334)),  # 2 % of the packs: two further ones
        ([1024] * 99 + [1] * 1000, (1000, 500)),
        ([1024] * 50 + [1] * 1000, (1000, 1000)),  # 1 % is not a whole pack
        ([16] * 64 * 200, (64, 64)),
        ([1024 // n for n in range(1, 513)] * 200, (512, 512)),  # too many hold as many
        ([n**4 // 1024**3 + 1 for n in range(1023)] * 100, (1024, 106)),
    ],
)
def test_a_pack_of_tiny_documents_is_split(lengths: list[int], most: tuple[int, int]) -> None:
    """most: documents of the fullest pack before and after. Other packs do not change."""
    lengths = np.clip(np.array(lengths, np.int64), 1, 1024)
    packs = packing.best_fit(lengths, 1024)
    bins = packing.split_overfull_packs(packs, 64)
    before = np.bincount(packs)
    after = np.bincount(bins)
    assert (before.max(), after.max()) == most
    assert len(before) <= len(after) <= 1.01 * len(before) and after.min() > 0
    assert (len(before) == len(after)) == np.array_equal(packs, bins)
    stays = before[packs] <= most[1]
    assert np.array_equal(bins[stays], packs[stays])


@pytest.mark.parametrize("seed", range(20))
def test_as_many_packs_with_another_limit_are_the_same_packs(seed: int) -> None:
    """So a run recognises packs of an earlier version, with a lower limit, by their number."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / rng.integers(1, 40), 8000), 1024)
    packs = packing.best_fit(lengths, 1024)
    before, now = (
        packing.split_overfull_packs(packs, fewest) for fewest in (8, rng.integers(8, 200))
    )
    assert before.max() >= now.max()
    assert (before.max() == now.max()) == np.array_equal(before, now)


@pytest.mark.parametrize(("seq_length", "most"), [(1024, 64), (2048, 64), (8192, 256)])
def test_packs_below_the_limit_stay_unchanged(tmp_path: Path, seq_length: int, most: int) -> None:
    assert packing.choose_document_limit(seq_length) == most
    documents = [seq_length // most] * most + [seq_length] * 2
    _, packs = make_packs(documents, tmp_path, seq_length)
    assert packs.most_documents == most + 1 and len(packs) == 3


@pytest.mark.parametrize("limit", [1000, 40], ids=["divided none", "divided more"])
def test_packs_of_an_earlier_version_are_used_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Their index has the same kind and identity, whichever packs it has split."""
    documents = [1] * 100 + [128] * 200
    with monkeypatch.context() as earlier:
        earlier.setattr(packing, "choose_document_limit", lambda _: limit)
        _, before = make_packs(documents, tmp_path / "old", 128)
    _, packs = make_packs(documents, tmp_path / "old", 128)
    _, new = make_packs(documents, tmp_path / "new", 128)
    every = np.arange(len(before))
    assert len(packs) == len(before) != len(new) == 202
    for one, other in zip(packs.read_samples(every), before.read_samples(every), strict=True):
        assert np.array_equal(one, other)


def make_packs(
    documents: list[int],
    tmp_path: Path,
    capacity: int,
    is_single: bool = False,
) -> tuple[np.ndarray, packing.Packs]:
    """Pack documents of these lengths; tokens are 1, 2, 3 … so that each is known."""
    ends = np.cumsum(documents).astype(np.int64)
    tokens = np.arange(1, ends[-1] + 1, dtype=np.uint16)
    token_store = TokenStore(
        tmp_path / "corpus-key", "fingerprint", 9999, {}, {"train": Split(tokens, ends)}
    )
    return tokens, packing.prepare_packs(token_store, capacity, is_single)["train"]


@pytest.mark.parametrize("documents", [[3, 5, 8, 2, 0, 1, 8], [20, 7, 16, 1], [1] * 30])
def test_every_token_once_and_labels_within_documents(tmp_path: Path, documents: list[int]):
    tokens, packs = make_packs(documents, tmp_path, 8)
    rows = packs.read_samples(np.arange(len(packs)))
    seen = rows.inputs[rows.inputs > 0]
    assert sorted(seen.tolist()) == tokens.tolist()
    labels, count = (mean * len(packs) for mean in packs.mean_counts())
    assert count == pytest.approx(len(tokens))
    assert labels == pytest.approx((rows.labels != IGNORED).sum() - documents.count(0))
    ends = set(np.cumsum(documents).tolist())  # tokens count from 1, so these end a document
    expected = np.where(np.isin(rows.inputs, [0, *ends]), IGNORED, rows.inputs + 1)
    assert np.array_equal(rows.labels, expected)
    steps = np.diff(rows.positions, axis=1)
    assert ((steps == 1) | (rows.positions[:, 1:] == 0)).all() and (rows.positions[:, 0] == 0).all()
    label_tokens, count = packs.token_counts(np.arange(len(packs)))
    assert (label_tokens, count) == (int((rows.labels != IGNORED).sum()), len(tokens))


def test_single_documents_have_a_row_each_in_the_order_of_the_store(tmp_path: Path) -> None:
    """A longer document has several. Documents and remainders of one token have no label."""
    tokens, packs = make_packs([3, 1, 8, 0, 20, 17], tmp_path, 8, is_single=True)
    pieces = [(0, 3), (4, 12), (12, 20), (20, 28), (28, 32), (32, 40), (40, 48)]
    rows = packs.read_samples(np.arange(len(packs)))
    assert rows.positions is None and packs.most_documents == 1
    assert rows.lengths.tolist() == [end - start for start, end in pieces]
    ends = {3, 12, 32}  # of documents; the last one continues in a remainder of one token
    for row, labels, (start, end) in zip(rows.inputs, rows.labels, pieces, strict=True):
        length = end - start
        assert row.tolist() == [*tokens[start:end].tolist(), *[0] * (8 - length)]
        last = IGNORED if end in ends else tokens[end]
        after = [*tokens[start + 1 : end].tolist(), last]
        assert labels.tolist() == [*after, *[IGNORED] * (8 - length)]
    counts = packs.token_counts(np.arange(len(packs)))
    assert counts == (int((rows.labels != IGNORED).sum()), int(rows.lengths.sum()))
    assert (tmp_path / "corpus-key.packs-8-single").is_dir()
    _, packed = make_packs([3, 1, 8, 0, 20, 17], tmp_path, 8)
    assert packed.most_documents > 1, "both kinds of index exist side by side"


def test_a_shorter_sequence_length_is_advised_for_much_padding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_packs([3, 20, 17], tmp_path, 64, is_single=True)
    assert "79.2 % of the tokens" in caplog.text and "--seq-length 32 " in caplog.text
    caplog.clear()
    make_packs([3, 20, 17], tmp_path, 32, is_single=True)
    make_packs([3], tmp_path, 64)
    assert "--seq-length" not in caplog.text


def test_a_document_that_fits_is_never_cut(tmp_path: Path) -> None:
    documents = [5, 8, 3, 7, 8, 1, 2, 6]
    _, packs = make_packs(documents, tmp_path, 8)
    rows = packs.read_samples(np.arange(len(packs)))
    begins = set((np.cumsum(documents) - documents + 1).tolist())
    assert set(rows.inputs[(rows.positions == 0) & (rows.inputs > 0)].tolist()) == begins
    assert len(packs) == sum(documents) // 8  # and here they fill every window


def test_the_index_is_built_once_and_reports_padding_and_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="pipeline")
    make_packs([20, 4, 4], tmp_path, 8)
    [index] = tmp_path.iterdir()
    content = (index / "manifest.json").read_bytes()
    assert index.name == "corpus-key.packs-8"
    assert "12.5 % padding, 33.3 % of the documents cut, at most 2 per pack" in caplog.text
    make_packs([20, 4, 4], tmp_path, 8)
    assert (index / "manifest.json").read_bytes() == content
    assert store.open_file(index / "train.packs.bin", "int64")[-1] == 5
