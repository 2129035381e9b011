# covers: lib/curate/near/key_groups.py, lib/curate/disk_array.py
"""Documents that share a key are found on disk, with any number of buckets."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lib.curate.disk_array import DiskArray
from lib.curate.near import key_groups

DOCUMENTS = 5000
FIRST_NEW = 1000


@pytest.mark.parametrize("limit", [0, 300, 5000])
@pytest.mark.parametrize("columns", [1, 2])
def test_groups_are_those_of_a_dictionary(tmp_path: Path, limit: int, columns: int):
    draw = np.random.default_rng(limit + columns)
    keys = draw.integers(0, 2 * DOCUMENTS, (DOCUMENTS, columns)).astype(np.uint64)
    keys[:, 0] *= np.uint64(0x9E3779B97F4A7C15)
    keys[::50] = keys[0]  # a large group
    keys[7] = 0
    keys[8] = 0  # documents without a key share none
    keys[:, 1:] %= np.uint64(2)
    omitted = (draw.random(DOCUMENTS) < 0.1).astype(np.uint8)
    keys.tofile(tmp_path / "keys")
    omitted.tofile(tmp_path / "omitted")
    count = key_groups.write_groups(
        DiskArray(tmp_path / "keys", np.uint64, width=columns if columns > 1 else 0),
        DiskArray(tmp_path / "omitted", np.uint8),
        FIRST_NEW,
        tmp_path / "out",
        limit,
    )
    expected = defaultdict(list)
    for number, key in enumerate(map(tuple, keys.tolist())):
        if key[0] and not omitted[number]:
            expected[key].append(number)
    pairs = np.fromfile(tmp_path / "out", np.uint64).reshape(-1, 2).tolist()
    assert len(pairs) == count and pairs == sorted(pairs)
    groups_by_document = defaultdict(list)
    for document, group in pairs:
        groups_by_document[group].append(document)
    assert sorted(groups_by_document.values()) == sorted(
        group for group in expected.values() if len(group) > 1 and group[-1] >= FIRST_NEW
    )
    starts = sorted(groups_by_document)  # each group has room for its members
    assert all(a + len(groups_by_document[a]) <= b for a, b in pairwise(starts))
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "omitted", "out"}


def test_bands_are_sorted_side_by_side(tmp_path: Path):
    draw = np.random.default_rng(0)
    bands = range(4)
    for band in bands:
        keys = draw.integers(1, 1 << 15, 1 << 16, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys.tofile(tmp_path / f"keys.{band}")

    def write_band(band: int, limit: int) -> bytes:
        out = tmp_path / f"{'few' if limit else 'one'}.{band}"
        keys = DiskArray(tmp_path / f"keys.{band}", np.uint64)
        key_groups.write_groups(keys, None, 0, out, limit)
        return out.read_bytes()

    with ThreadPoolExecutor(len(bands)) as threads:
        written = list(threads.map(write_band, bands, [1 << 12] * len(bands)))
    assert all(written) and written == [write_band(band, 0) for band in bands]


def test_an_array_on_disk_keeps_its_values_when_it_leaves_memory(tmp_path: Path):
    array = DiskArray(tmp_path / "a", np.int64, (1000, 2))
    assert not array.values.any()
    array.values[999] = 3, 4
    array.release()
    assert array.values[999].tolist() == [3, 4]
    again = DiskArray(tmp_path / "a", np.int64, width=2, is_fixed=True)
    assert len(again) == 1000 and again.values.sum() == 7
    assert [first for first, _ in again.blocks()] == [0]
    assert len(DiskArray(tmp_path / "empty", np.int64, (0,))) == 0
