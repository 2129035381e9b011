# covers: lib/corpus/parts.py, lib/corpus/work_units.py, lib/corpus/shards.py
# covers: lib/corpus/row_options.py, lib/corpus/raw_file.py, lib/corpus/inputs.py
"""From documents to rows: fields, strings, filters, splits, order, batches."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from lib.corpus import inputs, parts, raw_file, shards, work_units
from lib.corpus.row_options import RowOptions
from lib.corpus.shards import Flusher


@pytest.fixture
def flusher():
    new_flusher = Flusher()
    yield new_flusher
    new_flusher.close()


NESTED = json.dumps(
    {
        "a": "x",
        "b": {"c": "y", "d": "no"},
        "e": [{"f": "z"}, {"f": ["w", 1]}],
        "g.h": "dotted",
        "a2": "no",
    }
)


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        (("a",), "x"),
        (("b.c", "a"), "x\ny"),
        (("b",), "y\nno"),
        (("e.f",), "z\nw"),
        (("g.h",), "dotted"),
        (("e", "missing.key"), "z\nw"),
    ],
)
def test_fields_keep_only_the_named_keys_in_document_order(read, fields, row):
    outcome = read({"a.json": NESTED, "b.txt": "plain text is not touched"}, fields=fields)
    assert outcome.rows == [row, "plain text is not touched"]
    assert outcome.dataset.tally.fields_seen == set(fields) - {"missing.key"}


def test_fields_that_keep_nothing_are_listed(read):
    outcome = read({"a.jsonl": '{"b": "x"}\n"bare"\n', "b.txt": "t"}, fields=("a",))
    assert outcome.rows == ["t"] and outcome.kinds == ["no string", "no string"]


def test_strings_rows_gives_one_row_per_string(read):
    outcome = read({"a.json": '{"a": "x", "b": ["", " ", "y\\nz"]}'}, strings="rows")
    assert outcome.rows == ["x", "y\nz"]
    assert outcome.dataset.tally.documents == 1


def test_min_chars_counts_characters_not_bytes(read):
    outcome = read({"a.jsonl": '"éé"\n"ééé"\n"abcd"\n', "b.txt": "éé"}, min_chars=3)
    assert outcome.rows == ["ééé", "abcd"] and outcome.dataset.tally.short == 2
    assert [(p["path"], p["kind"]) for p in outcome.problems] == [
        ("a.jsonl", "short"),
        ("b.txt", "short"),
    ]
    assert not outcome.dataset.tally.failed


def test_rows_come_in_the_order_of_path_bytes_and_position(read):
    names = ["b/a.txt", "a.txt", "a/z.txt", "B.txt", "é.txt", "z.txt"]
    outcome = read({name: name for name in names} | {"a/b.jsonl": '"1"\n"2"\n'}, keep_source=True)
    assert outcome.sources == sorted(
        [*names, "a/b.jsonl", "a/b.jsonl"], key=lambda name: name.encode()
    )
    assert outcome.rows[2:4] == ["1", "2"]


def test_the_validation_split_depends_on_the_text_alone(read, tmp_path):
    texts = [f"document {i}" for i in range(2000)]
    first = read(
        {"a.jsonl": "".join(json.dumps(t) + "\n" for t in texts)}, validation_percent=10
    ).splits
    (tmp_path / "out").rename(tmp_path / "first")
    second = read(
        {"0.txt": texts[0], "z/b.json": json.dumps([*texts[:1000], "new"])}, validation_percent=10
    ).splits
    assert 130 < len(first["validation"]) < 270
    assert set(first["validation"]) <= set(second["validation"])
    assert not set(second["validation"]) & set(second["train"])
    assert len(second["train"]) + len(second["validation"]) == 2000 + 1 + 1001


def test_a_large_json_lines_file_is_cut_without_losing_or_repeating_a_line(read, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 100)
    monkeypatch.setattr(raw_file, "_BUFFER", 64)
    lines = [json.dumps("x" * (i % 40) + str(i)) for i in range(200)]
    lines[150] = "bad"
    lines[40] = json.dumps("long" * 1000)
    data = "\ufeff" + "\n".join(lines)
    outcome = read({"a.jsonl": data, "b.txt": "after"})
    assert outcome.rows == [json.loads(line) for line in lines if line != "bad"] + ["after"]
    [problem] = outcome.problems
    assert problem["line"] == 151
    assert data.encode()[problem["offset"] :].startswith(b"bad\n")


def test_batches_are_bounded_by_bytes(tmp_path, monkeypatch, flusher):
    monkeypatch.setattr(parts, "BATCH_BYTES", 10_000)
    sizes = [100] * 300 + [50_000] + [1] * 400
    with (tmp_path / "part").open("wb") as file:
        part = parts.PartWriter(file, keep_source=False)
        for size in sizes:
            part.add(b"x" * size, "")
        part.flush()
    writer = shards.ShardWriter(tmp_path / "out", "train", parts.make_text_schema(False), flusher)
    writer.append(tmp_path / "part", part.rows, part.text_bytes)
    writer.finish()
    with pa.OSFile(str(tmp_path / "out/data-00000-of-00001.arrow")) as file:
        batches = list(pa.ipc.open_stream(file))
    assert [len(text) for batch in batches for text in batch["text"].to_pylist()] == sizes
    assert all(batch.num_rows == 1 or batch.nbytes <= 2 * 10_000 for batch in batches)


def test_rows_added_at_once_make_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_BYTES", 10_000)
    blocks = [[b"x" * (number * 37 % 900)] * (number % 13 + 1) for number in range(100)]
    written = []
    for name in ("one by one", "at once"):
        with (tmp_path / name).open("wb") as file:
            part = parts.PartWriter(file, keep_source=True)
            for block in blocks:
                if name == "at once":
                    part.extend(block, "a.txt")
                else:
                    for text in block:
                        part.add(text, "a.txt")
            part.finish()
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


def test_a_reused_part_contains_nothing_of_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)
    (tmp_path / "data").mkdir()
    for name, size in (("a.txt", 3900), ("b.txt", 2000)):
        (tmp_path / "data" / name).write_text(name[0] * size)
    files, _ = inputs.find_inputs(tmp_path / "data", False)
    fresh = work_units.cut_files(tmp_path / "data", files, tmp_path / "fresh", RowOptions())
    again = work_units.cut_files(tmp_path / "data", files, tmp_path / "again", RowOptions())
    for unit in fresh + again[:1]:
        work_units.process_unit(unit)
    work_units.release_part(again[0].part("train"))
    work_units.process_unit(again[1])
    assert again[1].part("train").read_bytes() == fresh[1].part("train").read_bytes()
    assert not list((tmp_path / "again/free").iterdir())


def test_shards_roll_at_their_size_and_a_lost_batch_is_noticed(tmp_path, monkeypatch, flusher):
    monkeypatch.setattr(shards, "SHARD_BYTES", 5_000)
    writer = shards.ShardWriter(tmp_path / "out", "train", parts.make_text_schema(True), flusher)
    for number in range(10):
        with (tmp_path / "part").open("wb") as file:
            part = parts.PartWriter(file, keep_source=True)
            part.add(b"%d" % number * 1500, "a.txt")
            part.flush()
        writer.append(tmp_path / "part", part.rows, part.text_bytes)
    entries = writer.finish()
    names = [entry["path"] for entry in entries if entry["path"].endswith(".arrow")]
    assert names == [f"data-{i:05d}-of-00005.arrow" for i in range(5)]
    assert writer.summary()["rows"] == 10
    # The same shard without its last batch opens, but is refused.
    shard = writer.shards[0]
    path = tmp_path / "out" / shard.name
    with pa.OSFile(str(path)) as file:
        first = next(iter(pa.ipc.open_stream(file)))
    schema = parts.make_text_schema(True)
    path.write_bytes(schema.serialize().to_pybytes() + first.serialize().to_pybytes())
    with pytest.raises(shards.ArtifactError, match="on disk differs"):
        shards._verify_shard(path, shard)
