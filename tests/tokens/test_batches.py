# covers: lib/tokens/order.py, lib/tokens/batches.py, lib/tokens/samples.py, lib/tokens/packing.py
# covers: lib/tokens/store.py, lib/tokens/mixture.py
"""Windows and batches: any number of ranks reads the same samples in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lib.tokens import batches, order, packing
from lib.tokens.batches import MicroBatch, Position, SampleStream, Step, read_evaluation_batches
from lib.tokens.mixture import Mixture
from lib.tokens.order import Division
from lib.tokens.samples import IGNORED, Windows
from lib.tokens.store import Split, TokenStore

CPU = torch.device("cpu")
T = 4


def windows(samples: int, tail: int = 0) -> Windows:
    """Return windows over tokens 0, 1, 2, … of so many samples and tokens left over."""
    return Windows(np.arange(samples * T + 1 + tail, dtype=np.uint16), T)


def divisions(global_batch: int) -> list[tuple[int, int, int]]:
    """Return every (micro-batch, accumulation, ranks) that makes up a global batch."""
    return [
        (micro, rest // ranks, ranks)
        for micro in range(1, global_batch + 1)
        if global_batch % micro == 0
        for rest in [global_batch // micro]
        for ranks in range(1, rest + 1)
        if rest % ranks == 0
    ]


def steps(
    samples: Windows, seed: int, division: Division, count: int, first: int = 0
) -> Iterator[Step]:
    """Return steps from sample number `first` on."""
    return SampleStream(samples, seed, division, CPU).steps(Position(first), count)


def starts(batch: MicroBatch) -> list[int]:
    """Return which sample each row is."""
    return (batch.input_ids[:, 0] // T).tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_incomplete_windows_are_dropped(tokens: int, samples: int) -> None:
    assert len(Windows(np.arange(tokens, dtype=np.uint16), T)) == samples


def test_windows_cover_every_token_as_input_once_and_label_it_with_the_next() -> None:
    w = windows(7, tail=3)
    taken = w.read_windows(np.arange(len(w)))
    assert taken.shape == (7, T + 1) and taken.dtype == np.int64
    assert np.array_equal(taken[:, :-1].ravel(), np.arange(7 * T))
    assert np.array_equal(taken[:, 1:], taken[:, :-1] + 1)


def test_large_ids_stay_positive() -> None:
    w = Windows(np.array([65_535, 65_534, 3, 4, 65_535], dtype=np.uint16), T)
    assert w.read_windows(np.array([0])).tolist() == [[65_535, 65_534, 3, 4, 65_535]]


def test_labels_are_the_tokens_after_the_inputs() -> None:
    [[batch]] = [step.batches for step in steps(windows(5), 0, Division(2, 1, 0, 1), 1)]
    assert batch.input_ids.shape == batch.labels.shape == (2, T)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.input_ids + 1)


def test_ranks_and_micro_batches_only_divide_the_samples_of_a_step() -> None:
    w = windows(19)
    # 9 × 12 = 108 numbers: across five epochs, never at their ends.
    count = 9
    size = 12
    expected = [sorted(order.sample_numbers(step * size, size, 19, 3)) for step in range(count)]
    assert len(divisions(size)) > 15
    for micro, accumulation, ranks in divisions(size):
        shares = [
            steps(w, 3, Division(micro, accumulation, rank, ranks), count) for rank in range(ranks)
        ]
        for step, of_ranks in enumerate(zip(*shares, strict=True)):
            assert all(len(rank.batches) == accumulation for rank in of_ranks)
            seen = [s for rank in of_ranks for batch in rank.batches for s in starts(batch)]
            assert sorted(seen) == expected[step]


def test_a_resumed_stream_continues_at_its_position() -> None:
    division = Division(2, 2, 1, 2)
    expected = list(steps(windows(11), 0, division, 6))
    assert [step.after for step in expected] == [Position(8 * k) for k in range(1, 7)]
    for k in (1, 4, 5):
        rest = steps(windows(11), 0, division, 6 - k, expected[k - 1].after.samples)
        assert [[starts(b) for b in step.batches] for step in rest] == [
            [starts(b) for b in step.batches] for step in expected[k:]
        ]


def test_a_stream_can_start_at_any_sample() -> None:
    """After a change of the global batch, no step of the new size begins at the position."""
    seen = [
        s
        for step in steps(windows(24), 3, Division(2, 1, 0, 1), 3, 5)
        for batch in step.batches
        for s in starts(batch)
    ]
    assert seen == order.sample_numbers(5, 6, 24, 3).tolist()


def test_the_order_does_not_depend_on_the_chunk_size(monkeypatch) -> None:
    expected = [starts(step.batches[0]) for step in steps(windows(7), 1, Division(3, 1, 0, 1), 20)]
    monkeypatch.setattr(batches, "_ORDERED_AT_ONCE", 9)
    assert expected == [
        starts(step.batches[0]) for step in steps(windows(7), 1, Division(3, 1, 0, 1), 20)
    ]


def test_an_epoch_reads_every_sample_once() -> None:
    seen = Counter(
        s
        for step in steps(windows(24), 0, Division(2, 3, 0, 1), 4)
        for batch in step.batches
        for s in starts(batch)
    )
    assert seen == Counter(range(24))


def test_steps_left_early_end_their_thread() -> None:
    import threading

    stream = steps(windows(11), 0, Division(1, 1, 0, 1), 100)
    next(stream)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_a_stream_of_no_steps_is_empty() -> None:
    assert list(steps(windows(3), 0, Division(1, 1, 0, 1), 0, 5)) == []


@pytest.mark.parametrize("samples", [1, 5, 12, 13, 23, 24, 25, 40])
@pytest.mark.parametrize("rounds", [1, 2, 100])
def test_evaluation_does_not_depend_on_the_number_of_ranks(samples: int, rounds: int) -> None:
    w = windows(samples, tail=2)
    size = 12
    expected = list(range(1, min(rounds * size, samples) * T + 1))
    for micro, accumulation, ranks in divisions(size):
        shares = [
            list(read_evaluation_batches(w, rounds, Division(micro, accumulation, rank, ranks)))
            for rank in range(ranks)
        ]
        assert len({len(share) for share in shares}) == 1  # forwards are collective
        labels = torch.cat([b.labels.ravel() for share in shares for b in share])
        assert sorted(labels[labels != IGNORED].tolist()) == expected
        assert all(b.input_ids.shape == (micro, T) for share in shares for b in share)
        assert all((b.input_ids >= 0).all() for share in shares for b in share)


def test_an_empty_split_gives_no_evaluation_batches() -> None:
    assert list(read_evaluation_batches(windows(0), 3, Division(1, 1, 0, 1))) == []


def packed(lengths: list[int], tmp_path: Path, name: str, seq_length: int) -> packing.Packs:
    """Return packs of documents of these lengths, as a run makes them."""
    ends = np.cumsum(lengths).astype(np.int64)
    tokens = np.arange(ends[-1], dtype=np.uint32)
    store = TokenStore(tmp_path / name, name, 9, {}, {"train": Split(tokens, ends)})
    return packing.prepare_packs(store, seq_length)["train"]


def test_no_document_exceeds_the_longest_of_its_batch(tmp_path: Path) -> None:
    """In training and evaluation, for one corpus or a mixture; padding is a document too."""
    rng = np.random.default_rng(0)
    length = 1024
    short = packed([*rng.integers(1, 200, 300)], tmp_path, "short", length)
    long = packed([*rng.integers(1, 1500, 60)], tmp_path, "long", length)
    padded = packed([600] * 9, tmp_path, "padded", length)
    mixed = Mixture(["short", "long", "padded"], [short, long, padded], [1, 1, 1])
    counts_by_length = Counter()
    for samples in (short, long, padded, mixed):
        division = Division(2, 3, 0, 1)
        taken = [
            batch
            for step in SampleStream(samples, 0, division, CPU).steps(Position(), 9)
            for batch in step.batches
        ]
        for batch in (*taken, *read_evaluation_batches(samples, 3, division)):
            ends = batch.boundaries
            assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == 2 * length
            lengths = ends.diff()
            assert lengths.min() > 0 and lengths.max() <= batch.longest
            assert lengths.max() > batch.longest // 2 or batch.longest == length // 8
            assert torch.equal(
                batch.position_ids.flatten(), torch.cat([torch.arange(n) for n in lengths])
            )
            assert len(lengths) <= 2 * samples.most_documents
            assert batch.count_pairs() == sum(n**2 for n in lengths.tolist())
            counts_by_length[batch.longest] += 1
    assert set(counts_by_length) == {128, 256, 512, 1024}


@pytest.mark.parametrize(
    ("row", "longest", "bound"),
    [
        (8192, 1, 1024),
        (8192, 1024, 1024),
        (8192, 1025, 2048),
        (8192, 4097, 8192),
        (8192, 8192, 8192),
        (300, 1, 150),
        (300, 151, 300),
        (100, 3, 100),
        (1001, 126, 251),
        (1023, 128, 128),
    ],
)
def test_the_kernel_gets_one_of_few_lengths(row: int, longest: int, bound: int) -> None:
    """A half, a quarter or an eighth of a row, rounded up, and no less than 128 tokens."""
    rest = row - longest
    ends = np.array([0, longest, *range(longest + 1, longest + 1 + rest)], np.int32)
    assert batches.bound_document_length(ends, row) == bound


def test_each_row_begins_a_document() -> None:
    positions = np.array([[3, 4, 0, 1], [2, 3, 4, 5]])
    assert batches.find_boundaries(positions).tolist() == [0, 2, 4, 8]


def test_windows_have_no_boundaries() -> None:
    [[batch]] = [step.batches for step in steps(windows(5), 0, Division(2, 1, 0, 1), 1)]
    assert batch.count_pairs() == 2 * batch.input_ids.shape[1] ** 2
    assert (
        batch.boundaries
        is batch.longest
        is batch.to(SimpleNamespace(device=CPU, context=None)).longest
        is None
    )
