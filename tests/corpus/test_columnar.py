# covers: lib/corpus/work_units.py, lib/corpus/columnar_reader.py
"""Parquet and Arrow: rows, nested values, damage, and large files in spans."""

from __future__ import annotations

import bz2
import datetime
import gzip
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.corpus import columnar_reader, work_units

ROWS = [
    {
        "text": f"row {i} é\u2028",
        "n": i,
        "when": datetime.date(2001, 1, 1),
        "raw": b"bytes",
        "meta": {"title": f"title {i}", "tags": ["a", None, "b"], "score": 0.5},
        "none": None,
    }
    for i in range(1000)
]
TEXTS = [f"row {i} é\u2028\ntitle {i}\na\nb" for i in range(1000)]


def parquet(table: pa.Table, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def ipc(table: pa.Table, new=pa.ipc.new_file, **options) -> bytes:
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, **options)
    return sink.getvalue()


def encoded(data: list[dict]) -> dict[str, bytes]:
    table = pa.Table.from_pylist(data)
    return {
        "a.parquet": parquet(table, row_group_size=300),
        "b.arrow": ipc(table),
        "c.arrow": ipc(table, pa.ipc.new_stream, max_chunksize=70),
    }


@pytest.mark.parametrize("write", [parquet, ipc])
def test_the_last_column_of_a_name_counts(read, write):
    columns = {"n": [1, 2], "m": [0.5, 1], "a": ["x", "y"], "b": ["first", "one"]}
    table = pa.table(columns).append_column("b", pa.array(["last", "two"]))
    outcome = read({"a.data": write(table.append_column("c", pa.array(["end", None])))})
    assert outcome.rows == ["x\nlast\nend", "y\ntwo"] and not outcome.problems


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_damaged_offsets_in_arrow_end_the_file(read, name, nested):
    texts = [f"{10**power} é" for power in range(11)]
    column = pa.array([{"a": text} for text in texts] if nested else texts)
    data = ipc(
        pa.table({"t": column}),
        pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream,
        max_chunksize=4,
    )
    # The offsets of the second batch: its texts have 8, 9, 10 and 11 bytes.
    offsets = np.array([0, 8, 17, 27, 38], np.int32)
    assert data.count(offsets.tobytes()) == 1
    damaged = offsets.copy()
    damaged[2] = 5
    outcome = read({name: data.replace(offsets.tobytes(), damaged.tobytes())})
    assert outcome.rows == texts[:4] and outcome.kinds == ["syntax"]
    assert "Offset invariant" in outcome.problems[0]["message"]


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow", "c.arrow"])
def test_rows_are_documents_and_nested_strings_their_text(read, name):
    outcome = read({name: encoded(ROWS)[name]})
    assert outcome.rows == TEXTS and not outcome.problems


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow", "c.arrow"])
def test_formats_are_detected_by_content_and_decompressed(read, name):
    data = encoded(ROWS[:50])[name]
    outcome = read({"a.txt": data, f"b{name}.gz": gzip.compress(data), "c.bz2": bz2.compress(data)})
    assert outcome.rows == TEXTS[:50] * 3 and not outcome.problems


def test_fields_select_columns_and_nested_keys(read):
    files = encoded(ROWS[:2])
    assert read(files, fields=("meta.title", "n")).rows == ["title 0", "title 1"] * 3


def test_fields_without_strings_count_as_seen(read):
    outcome = read(encoded(ROWS[:2]), fields=("n", "none", "absent"))
    assert outcome.dataset.tally.fields_seen == {"n", "none"}
    assert [problem["kind"] for problem in outcome.problems] == ["no string"] * 6
    assert outcome.problems[1]["message"].startswith("document 2:")


def test_all_column_types_with_strings_are_read(read):
    arrays = {
        "dictionary": pa.array(["x", "y"]).dictionary_encode(),
        "large": pa.array(["l", None], pa.large_string()),
        "view": pa.array(["v", "w"], pa.string_view()),
        "list": pa.array([["p", "q"], []], pa.list_(pa.string())),
        "map": pa.array([[("key", "value")], None], pa.map_(pa.string(), pa.string())),
        "time": pa.array([10**18 + 1, 0], pa.timestamp("ns")),
    }
    table = pa.table(arrays)
    assert read({"a.arrow": ipc(table)}).rows == ["x\nl\nv\np\nq\nvalue", "y\nw"]


def test_invalid_utf8_in_columns_is_replaced(read):
    column = pa.array([b"ok", b"a\xffb", None], pa.binary()).view(pa.string())
    outcome = read({"a.arrow": ipc(pa.table({"t": column}))})
    assert outcome.rows == ["ok", "a\ufffdb"] and outcome.dataset.tally.replaced == 1
    assert outcome.kinds == ["no string", "encoding"]


def test_columnar_files_without_text_or_rows_are_listed(read):
    numbers = pa.table({"n": [1, 2, 3]})
    outcome = read({"a.parquet": parquet(numbers), "b.parquet": parquet(numbers[:0]), "c.txt": "t"})
    assert outcome.rows == ["t"]
    assert outcome.kinds == ["no string"] * 3 + ["empty"]


def test_only_a_damaged_row_group_is_lost(read):
    data = bytearray(encoded(ROWS)["a.parquet"])
    meta = pq.ParquetFile(io.BytesIO(data)).metadata
    start = (
        meta.row_group(1).column(0).dictionary_page_offset
        or meta.row_group(1).column(0).data_page_offset
    )
    data[start : start + 40] = b"\xff" * 40
    outcome = read({"a.parquet": bytes(data)})
    assert outcome.rows == TEXTS[:300] + TEXTS[600:]
    [problem] = outcome.problems
    assert problem["kind"] == "syntax" and "row group 1" in problem["message"]


def test_cut_files_keep_complete_rows(read):
    files = encoded(ROWS)
    outcome = read(
        {
            "a.parquet": files["a.parquet"][:-500],
            "b.arrow": files["b.arrow"][:-9],
            "c.arrow": files["c.arrow"][:-500],
            "d.txt": "kept",
        },
        keep_source=True,
    )
    streamed = [
        row
        for row, source in zip(outcome.rows, outcome.sources, strict=True)
        if source == "c.arrow"
    ]
    assert len(streamed) > 800 and streamed == TEXTS[: len(streamed)] and outcome.rows[-1] == "kept"
    assert outcome.dataset.tally.failed == {"a.parquet", "b.arrow", "c.arrow"}


def test_large_files_are_read_in_pieces_by_row_group(read, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 5_000)
    monkeypatch.setattr(columnar_reader, "_BATCH_ROWS", 7)
    table = pa.Table.from_pylist([*ROWS, {"n": 1}])
    files = {
        "a.parquet": parquet(table, row_group_size=100),
        "b.arrow": ipc(table, max_chunksize=90),
    }
    seen = []
    process = work_units.process_unit

    def note_and_process(unit):
        seen.append(unit)
        return process(unit)

    monkeypatch.setattr(work_units, "process_unit", note_and_process)
    outcome = read(files)
    assert outcome.rows == TEXTS * 2 and len(seen) > 8
    assert sum(unit.bytes for unit in seen) == sum(map(len, files.values()))
    assert [p["message"][:14] for p in outcome.problems] == ["document 1001:"] * 2
