# covers: lib/corpus/dedup.py
"""A set of digests knows which are new, and the number of each known one, also after a resume."""

from __future__ import annotations

import numpy as np

from lib.corpus import dedup
from lib.corpus.dedup import DigestSet


def test_a_digest_is_new_once_and_keeps_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(dedup, "_FIRST_SLOTS", 4)  # so that the table grows many times
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 1 << 63, (500, 2), np.uint64)
    keys[7] = 0  # a slot of zeros is free, so zeros need a substitute
    keys[8] = (5, 0)
    order = draw.integers(0, 500, 3000)
    digests = keys[order].view(np.uint8)
    numbers: dict[int, int] = {}
    table = DigestSet(tmp_path / "digests")
    for start in range(0, 3000, 700):
        rows = slice(start, start + 700)
        is_new = table.add(digests[rows])
        for key, new in zip(order[rows].tolist(), is_new.tolist(), strict=True):
            assert new == (key not in numbers)
            numbers.setdefault(key, len(numbers))
        assert table.find_numbers(digests[rows]).tolist() == [numbers[k] for k in order[rows]]
    table.file.close()

    resumed = DigestSet(tmp_path / "digests")
    assert not resumed.add(digests).any()
    assert resumed.find_numbers(digests).tolist() == [numbers[k] for k in order]
    resumed.file.close()
