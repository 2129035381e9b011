# covers: lib/curate/row_tally.py
"""Counts of rows are bounded, and do not depend on how the input is divided."""

from __future__ import annotations

import json
import random

from lib.curate import row_tally
from lib.curate.row_tally import OTHERS, SAMPLES, RowTally, find_bin_start, make_key

NAMES = [f"{name}/a.jsonl" for name in "abcdef"] + ["b.txt", "a/\ud800\n/c"]


def tally_rows(rows: list[tuple[str, int, int, bool]]) -> RowTally:
    """Return the tally of rows: path, position, size, and whether a rule drops it."""
    tally = RowTally()
    for path, position, size, is_dropped in rows:
        tally.add_rows(path, [size])
        tally.add_languages({"en" if size % 2 else None: 1})
        if is_dropped:
            tally.drop_rows("rule", path, [size])
            tally.add_languages({"en" if size % 2 else None: 1}, is_dropped=True)
            tally.add_sample("rule", make_key(path, position), path, position, 0.25, "x" * size)
    return tally


def test_tallies_of_parts_add_up_after_json(monkeypatch):
    monkeypatch.setattr(row_tally, "_MOST_SOURCES", 4)
    draw = random.Random(0)
    rows = []
    for number in range(400):
        path = NAMES[number // 50]
        rows.append((path, number, int(10 ** (draw.random() * 4)), draw.random() < 0.3))
    tally = tally_rows(rows)
    joined = RowTally()
    for start in range(0, 400, 70):
        part = json.loads(json.dumps(tally_rows(rows[start : start + 70]).to_json()))
        joined.add(RowTally.from_json(part))
    assert joined == tally == RowTally.from_json(json.loads(json.dumps(tally.to_json())))

    assert tally.rows == 400 and tally.bytes == sum(size for _, _, size, _ in rows)
    for number, count in tally.lengths.items():
        low = find_bin_start(number)
        high = find_bin_start(number + 1)
        assert count == sum(round(low) <= max(size, 1) < round(high) for _, _, size, _ in rows)
    sources = {source["name"]: source for source in tally.list_sources()}
    assert [*sources] == ["a", "b", "c", "d", OTHERS] and sources[OTHERS]["rows"] == 150
    assert sum(source["dropped"].get("rule", 0) for source in sources.values()) == sum(
        is_dropped for *_, is_dropped in rows
    )
    keys = sorted((make_key(path, position), position) for path, position, _, x in rows if x)
    assert [(sample.key, sample.position) for sample in tally.samples["rule"]] == keys[:SAMPLES]


def test_samples_show_control_characters_and_are_cut():
    tally = RowTally()
    tally.add_sample("rule", 1, "a\n\ud800", 1, None, "\0\u202e" + "y" * 300)
    (sample,) = tally.samples["rule"]
    assert sample.path == "a\\n\\xed\\xa0\\x80" or "\\" in sample.path
    assert sample.text.startswith("\\x00\\u202eyyy") and sample.text.endswith("y …")
    assert not any(ord(char) < 32 for char in sample.path + sample.text)
