# covers: lib/corpus/place.py
"""Files are assigned to splits in equal numbers and with even sizes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from lib.corpus.place import assign_to_splits


def loads(sizes: list[int], splits: int) -> tuple[list[int], list[int]]:
    """Return counts and byte sums per split."""
    counts = Counter()
    sums = Counter()
    for size, split in zip(sizes, assign_to_splits(sizes, splits), strict=True):
        counts[split] += 1
        sums[split] += size
    return [counts[i] for i in range(splits)], [sums[i] for i in range(splits)]


@pytest.mark.parametrize(
    ("sizes", "splits", "largest"),
    [
        ([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 3, 19),
        ([5, 5, 5, 5, 100], 2, 105),
        ([100] + [1] * 9, 5, 101),
        ([1] * 7, 3, 3),
        ([3, 3, 2, 2, 2], 2, 6),
    ],
)
def test_the_largest_split_is_as_small_as_possible(sizes, splits, largest):
    counts, sums = loads(sizes, splits)
    assert max(counts) - min(counts) <= 1
    assert max(sums) == largest


def test_small_inputs_are_split_nearly_optimally():
    draw = random.Random(0)
    for _ in range(30):
        sizes = [draw.randint(1, 50) for _ in range(8)]
        best = min(
            max(sum(part), sum(sizes) - sum(part)) for part in itertools.combinations(sizes, 4)
        )
        assert max(loads(sizes, 2)[1]) <= best * 1.05


@pytest.mark.parametrize("splits", [1, 7, 20, 128])
def test_skewed_sizes_are_balanced(splits):
    draw = random.Random(splits)
    sizes = [int(draw.lognormvariate(8, 2)) + 1 for _ in range(5000)]
    counts, sums = loads(sizes, splits)
    assert max(counts) - min(counts) <= 1 and sum(counts) == 5000
    rest = sorted(sums)[:-1] or sums
    assert max(sums) <= max(max(sizes) * 1.05, sum(sizes) / splits * 1.001)
    assert max(rest) < 1.1 * min(rest) or max(rest) <= max(sizes)


def test_the_assignment_is_deterministic():
    sizes = [random.Random(1).randint(1, 9) for _ in range(500)]
    assert assign_to_splits(sizes, 20) == assign_to_splits(sizes, 20)
