# covers: lib/tokens/order.py
"""The order of samples: a bijection, different in each epoch, the same for any ranges."""

from __future__ import annotations

import numpy as np
import pytest

from lib.tokens import order

EVERY_KIND = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    64,
    65,
    97,
    100,
    255,
    256,
    257,
    1000,
    1024,
    4095,
    4096,
    4097,
    65_537,
    1_000_000,
]


@pytest.mark.parametrize("n", EVERY_KIND)
def test_every_epoch_contains_every_sample_once(n: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**40, 7)):
        seen = order.permute_positions(np.arange(n), n, seed, epoch)
        assert seen.dtype == np.int64
        assert np.array_equal(np.sort(seen), np.arange(n))


def test_every_small_dataset_is_permuted() -> None:
    for n in range(1, 130):
        assert sorted(order.permute_positions(np.arange(n), n, 3, 5)) == list(range(n))


@pytest.mark.parametrize("n", [20, 1000, 65_536])
def test_epochs_and_seeds_have_different_orders(n: int) -> None:
    orders = {
        order.permute_positions(np.arange(n), n, seed, epoch).tobytes()
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
    assert np.arange(n).tobytes() not in orders


def test_the_order_looks_random() -> None:
    """In some epochs, neither positions nor neighbours are correlated."""
    n = 10_000
    for epoch in range(5):
        seen = order.permute_positions(np.arange(n), n, 0, epoch)
        assert abs(np.corrcoef(np.arange(n), seen)[0, 1]) < 0.05
        assert abs(np.corrcoef(seen[:-1], seen[1:])[0, 1]) < 0.05
        assert (np.diff(seen) == 1).mean() < 0.01
        halves = (seen[: n // 2] < n // 2).mean()
        assert 0.45 < halves < 0.55


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must continue in its order, with any version of this project or of numpy."""
    assert order.sample_numbers(0, 12, 10, seed=0).tolist() == [1, 9, 6, 4, 7, 0, 8, 3, 5, 2, 7, 1]
    assert order.sample_numbers(0, 5, 1_000_003, seed=17).tolist() == [
        879429,
        910483,
        711540,
        687317,
        163312,
    ]


@pytest.mark.parametrize("n", [1, 7, 100])
def test_the_stream_can_be_read_in_any_ranges(n: int) -> None:
    expected = order.sample_numbers(0, 350, n, seed=4)
    for size in (1, 3, 8, 50, 349):
        parts = [
            order.sample_numbers(first, min(size, 350 - first), n, seed=4)
            for first in range(0, 350, size)
        ]
        assert np.array_equal(np.concatenate(parts), expected)


def test_a_range_across_the_end_of_an_epoch() -> None:
    n = 10
    crossing = order.sample_numbers(8, 25, n, seed=1)
    epochs = [order.permute_positions(np.arange(n), n, 1, epoch) for epoch in range(4)]
    assert np.array_equal(crossing, np.concatenate(epochs)[8:33])


def test_an_epoch_of_billions_needs_no_memory() -> None:
    n = 3_000_000_000
    seen = order.sample_numbers(n - 500, 1000, n, seed=0)
    assert seen.min() >= 0 and seen.max() < n and len(set(seen.tolist())) > 990
