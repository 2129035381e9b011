"""Windows and batches: any number of readers reads the same samples in the same step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from lib.tokens import order
from lib.tokens.loader import IGNORED, Division, Loader, MicroBatch, evaluation_batches
from lib.tokens.samples import Windows

CPU = torch.device("cpu")
T = 4


def windows(samples: int, tail: int = 0) -> Windows:
    """Return windows over tokens 0, 1, 2, … of so many samples and tokens left over."""
    return Windows(np.arange(samples * T + 1 + tail, dtype=np.uint16), T)


def divisions(global_batch: int) -> list[tuple[int, int, int]]:
    """Return every (micro-batch, accumulation, ranks) that makes up a global batch."""
    return [(micro, rest // ranks, ranks) for micro in range(1, global_batch + 1)
            if global_batch % micro == 0 for rest in [global_batch // micro]
            for ranks in range(1, rest + 1) if rest % ranks == 0]


def starts(batch: MicroBatch) -> list[int]:
    """Return which sample each row is."""
    return (batch.input_ids[:, 0] // T).tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_windows_that_are_whole(tokens: int, samples: int) -> None:
    assert len(Windows(np.arange(tokens, dtype=np.uint16), T)) == samples


def test_windows_cover_every_token_as_input_once_and_label_it_with_the_next() -> None:
    w = windows(7, tail=3)
    taken = w.take(np.arange(len(w)))
    assert taken.shape == (7, T + 1) and taken.dtype == np.int64
    assert np.array_equal(taken[:, :-1].ravel(), np.arange(7 * T))
    assert np.array_equal(taken[:, 1:], taken[:, :-1] + 1)


def test_large_ids_stay_positive() -> None:
    w = Windows(np.array([65_535, 65_534, 3, 4, 65_535], dtype=np.uint16), T)
    assert w.take(np.array([0])).tolist() == [[65_535, 65_534, 3, 4, 65_535]]


def test_a_batch_is_inputs_and_the_tokens_after_them() -> None:
    [[batch]] = [step.micro_batches for step in Loader(windows(5), 0, Division(2, 1, 0, 1), 0, 1,
                                                       CPU)]
    assert batch.input_ids.shape == batch.labels.shape == (2, T)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.input_ids + 1)


def test_ranks_and_micro_batches_only_divide_the_samples_of_a_step() -> None:
    w, steps, size = windows(19), 9, 12  # 108 numbers: across five epochs, never at their ends
    expected = [sorted(order.sample_numbers(step * size, size, 19, 3)) for step in range(steps)]
    assert len(divisions(size)) > 15
    for micro, accumulation, ranks in divisions(size):
        loaders = [Loader(w, 3, Division(micro, accumulation, rank, ranks), 0, steps, CPU)
                   for rank in range(ranks)]
        for step, of_ranks in enumerate(zip(*loaders, strict=True)):
            assert all(len(rank.micro_batches) == accumulation for rank in of_ranks)
            seen = [s for rank in of_ranks for batch in rank.micro_batches for s in starts(batch)]
            assert sorted(seen) == expected[step]


@pytest.mark.parametrize("k", [0, 1, 4, 5])
def test_a_resume_goes_on_where_the_run_stood(k: int) -> None:
    division = Division(2, 2, 1, 2)
    whole = [[starts(b) for b in step.micro_batches]
             for step in Loader(windows(11), 0, division, 0, 6, CPU)]
    rest = [[starts(b) for b in step.micro_batches]
            for step in Loader(windows(11), 0, division, k, 6, CPU)]
    assert rest == whole[k:]


def test_an_epoch_reads_every_sample_once() -> None:
    seen = Counter(s for step in Loader(windows(24), 0, Division(2, 3, 0, 1), 0, 4, CPU)
                   for batch in step.micro_batches for s in starts(batch))
    assert seen == Counter(range(24))


def test_a_loader_left_early_ends_its_thread() -> None:
    import threading
    batches = iter(Loader(windows(11), 0, Division(1, 1, 0, 1), 0, 100, CPU))
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_no_step_is_left() -> None:
    assert list(Loader(windows(3), 0, Division(1, 1, 0, 1), 5, 5, CPU)) == []


@pytest.mark.parametrize("samples", [1, 5, 12, 13, 23, 24, 25, 40])
@pytest.mark.parametrize("batches", [1, 2, 100])
def test_an_evaluation_is_that_of_any_number_of_readers(samples: int, batches: int) -> None:
    w, size = windows(samples, tail=2), 12
    expected = list(range(1, min(batches * size, samples) * T + 1))
    for micro, accumulation, ranks in divisions(size):
        shares = [list(evaluation_batches(w, batches, Division(micro, accumulation, rank, ranks)))
                  for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1  # forwards are collective
        labels = torch.cat([b.labels.ravel() for share in shares for b in share])
        assert sorted(labels[labels != IGNORED].tolist()) == expected
        assert all(b.input_ids.shape == (micro, T) for share in shares for b in share)
        assert all((b.input_ids >= 0).all() for share in shares for b in share)


def test_nothing_to_evaluate() -> None:
    assert list(evaluation_batches(windows(0), 3, Division(1, 1, 0, 1))) == []


def test_an_offset_moves_all_samples() -> None:
    plain = Loader(windows(24), 3, Division(2, 1, 0, 1), 5, 8, CPU)
    moved = Loader(windows(24), 3, Division(2, 1, 0, 1), 2, 5, CPU, offset=6)
    for expected, got in zip(plain, moved, strict=True):
        for one, other in zip(expected.micro_batches, got.micro_batches, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
