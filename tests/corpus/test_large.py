# covers: lib/corpus/raw_file.py, lib/corpus/json_reader.py, lib/corpus/work_units.py
# covers: lib/corpus/yaml_reader.py, lib/corpus/table_reader.py, lib/corpus/inputs.py
# covers: lib/corpus/row_options.py
"""Documents too large for memory are read in pieces, or dropped and listed."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib

import pytest

from lib.corpus import inputs, json_reader, raw_file, table_reader, work_units, yaml_reader
from lib.corpus.row_options import RowOptions

LIMIT = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat everything beyond a kilobyte as large, and read it in pieces of a few bytes."""
    for module in (raw_file, json_reader, table_reader):
        monkeypatch.setattr(module, "LARGE_BYTES", LIMIT)
    monkeypatch.setattr(yaml_reader, "LARGE", LIMIT)
    monkeypatch.setattr(yaml_reader, "_GROUP", 100)
    monkeypatch.setattr(raw_file.RawFile.read, "__defaults__", (LIMIT,))
    monkeypatch.setattr(raw_file, "_CHUNK", 7)


def values(count: int) -> list:
    draw = random.Random(1)
    return [
        {"a": "é\u2028\U0001f600" * draw.randint(0, 9) + str(i), "n": [draw.random(), {}]}
        if i % 5
        else float(i * 1e7)
        for i in range(count)
    ]


@pytest.mark.parametrize("encoded", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_large_json_list_is_read_value_by_value(read, encoded, indent):
    data = json.dumps(values(300), indent=indent, ensure_ascii=False).encode(encoded)
    outcome = read({"a.json": data}, fields=("a",))
    assert outcome.rows == [value["a"] for value in values(300) if isinstance(value, dict)]
    assert outcome.kinds == ["no string"] * 60


@pytest.mark.parametrize("some", [50, 400, 1 << 17])
@pytest.mark.parametrize("indent", [None, 1])
def test_objects_parsed_at_once_equal_those_parsed_one_by_one(read, monkeypatch, some, indent):
    draw = random.Random(some)
    kinds = [
        lambda i: {"id": i, "t": f"é {i}", "in": [{"id": "x"}, {"id": "y, {"}]},
        lambda i: {"id": i, "n": []},
        lambda i: {"id": f'"}}, {{"id": {i}'},
        lambda i: [f"{i}", {"id": "z"}],
        lambda i: f'{{"id": {i}',
        lambda i: {"id": 1e999},
    ]
    records = [draw.choice(kinds)(i) for i in range(400)]
    data = json.dumps(records, indent=indent) + " "
    monkeypatch.setattr(json_reader, "_PARSED_AT_ONCE", 0)  # one by one
    one_by_one = read({"a.json": data})
    monkeypatch.setattr(json_reader, "_PARSED_AT_ONCE", some)
    at_once = read({"a.json": data})
    assert at_once.rows == one_by_one.rows and at_once.problems == one_by_one.problems
    assert len(at_once.rows) + len(at_once.problems) == 400
    cut = data[: len(data) // 2]
    assert read({"a.json": cut}).problems[-1]["kind"] == "syntax"


def test_a_large_list_is_never_completely_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_file, "_CHUNK", 10_000)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.json").write_text(json.dumps([{"a": "x" * 500}] * 24_000))
    files, _ = inputs.find_inputs(tmp_path / "data", False)
    [unit] = work_units.cut_files(
        tmp_path / "data", files, tmp_path / "parts", RowOptions(min_chars=1000)
    )
    work_units.process_unit(unit)  # imports what is needed
    tracemalloc.start()
    try:
        assert work_units.process_unit(unit).tally.short == 24_000
        assert tracemalloc.get_traced_memory()[1] < files[0].bytes / 4
    finally:
        tracemalloc.stop()


def test_a_large_list_cut_after_a_comma_is_reported(read):
    outcome = read({"a.json": "[" + '{"a": "x"},\n' * 500})
    assert outcome.rows == ["x"] * 500
    assert [(p["kind"], p["line"]) for p in outcome.problems] == [("syntax", 501)]


@pytest.mark.parametrize("between", ["\n", " ", "\n\n \n"])
def test_many_values_in_a_large_file_are_read(read, between):
    text = between.join(json.dumps(value, indent=1) for value in values(300))
    rows = read({"a.json": text}).rows
    assert rows == [value["a"] for value in values(300) if isinstance(value, dict)]


def test_offsets_and_lines_in_a_large_file_are_correct(read):
    lines = [json.dumps({"a": "é" * 50, "i": i}, ensure_ascii=False) for i in range(100)]
    lines[0] = "{\n" + lines[0][1:]
    lines[60] = '{"a": bad}'
    data = "\n".join(lines).encode()
    outcome = read({"a.json": data})
    assert len(outcome.rows) == 99
    [problem] = outcome.problems
    assert problem["line"] == 62 and data[problem["offset"] :].startswith(b'{"a": bad}')


def test_a_value_beyond_the_limit_is_dropped_and_listed(read):
    long = json.dumps({"a": "x" * 3 * LIMIT})
    outcome = read(
        {
            "a.jsonl": f'"before"\n{long}\n"after"\n',
            "b.json": f'["kept", {long}, "no"]',
            "c.csv": f"a,b\nx,{'y' * 3 * LIMIT}\nz,w\n",
            "d.yaml": "--- kept\n--- " + "x " * 3 * LIMIT + "\n--- after\n",
        }
    )
    assert outcome.rows == ["before", "after", "kept", "z\nw", "kept", "after"]
    assert [(p["path"], p["kind"], p["line"]) for p in outcome.problems] == [
        ("a.jsonl", "too large", 2),
        ("b.json", "too large", 1),
        ("c.csv", "too large", 2),
        ("d.yaml", "too large", 2),
    ]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        ("utf-8", "é\u2028\U0001f600\r\n" * 500),
        ("utf-8-sig", "é" * 5000),
        ("utf-16", "\U0001f600 x" * 2000),
        ("utf-8", "\ufeff" + "x" * 4999 + "\ufeff"),
    ],
)
def test_large_text_becomes_one_unchanged_row(read, pack, encoded, text):
    outcome = read(
        {"a.txt": pack(text.encode(encoded)), "b.txt": "b"},
        keep_source=True,
        validation_percent=1e-9,
        dedup="exact",
    )
    assert outcome.rows == [text.removeprefix("\ufeff"), "b"] and not outcome.problems
    assert outcome.sources == ["a.txt", "b.txt"]


def test_invalid_bytes_in_large_text_are_replaced(read):
    data = ("é" * 2000).encode() + b"a\xff\xe9b\xc3" + "\ufffd".encode()
    outcome = read(
        {
            "a.txt": data,
            "b.txt": b" " * 5000,
            "c.txt.gz": gzip.compress(bytes(random.Random(0).choices(b"ab c", k=20_000)))[:-20],
        }
    )
    assert outcome.rows == ["é" * 2000 + "a\ufffd\ufffdb\ufffd\ufffd"]
    assert outcome.kinds == ["encoding", "empty", "cut"]
    assert outcome.dataset.tally.replaced == 3


def test_the_same_text_large_and_small_is_a_duplicate(read, monkeypatch):
    text = "x" * LIMIT + "y"
    outcome = read(
        {"a.txt": text, "b.json": json.dumps(text[:-1]), "c.txt": text[:-1], "d.txt": text},
        dedup="exact",
    )
    assert outcome.rows == [text, text[:-1]] and outcome.dataset.duplicates == 2
    assert [(p["path"], p["kind"]) for p in outcome.problems] == [
        ("c.txt", "duplicate"),
        ("d.txt", "duplicate"),
    ]


def test_large_yaml_is_read_document_by_document(read):
    data = "\n".join(f"---\nt: {'é' * (i % 50)} {i}" for i in range(200)) + "\n"
    outcome = read({"a.yaml": data + "---\nbad: [\n"})
    assert outcome.rows == [
        f"{'é' * (i % 50)} {i}" if i % 50 else f"{i}" for i in range(200) if i % 50
    ]
    bad = outcome.problems[-1]
    assert bad["kind"] == "syntax" and bad["line"] > 400
    assert outcome.kinds[:-1] == ["no string"] * 4


def test_large_utf16_lines_are_read(read):
    lines = "".join(f'"{"ਊ" * 40} {i}"\n' for i in range(100))
    assert read({"a.jsonl": lines.encode("utf-16")}).rows == [f"{'ਊ' * 40} {i}" for i in range(100)]


@pytest.mark.parametrize("filler", ["", "x" * 2 * LIMIT])
def test_a_fallback_encoding_decodes_other_bytes(read, filler):
    outcome = read(
        {"a.txt": (filler + "café à").encode("cp1252"), "b.txt": filler + "café"},
        fallback_encoding="cp1252",
    )
    assert outcome.rows == [filler + "café à", filler + "café"]
    assert outcome.kinds == ["encoding"] and "cp1252" in outcome.problems[0]["message"]


@pytest.mark.parametrize("codec", ["gb18030", "shift_jis"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_fallback_encoding_of_several_bytes_decodes_a_whole_text(read, codec, pack):
    text = "第二 日本 文字。\n" * (LIMIT // 10)
    outcome = read(
        {"a.txt": pack(text.encode(codec)), "b.txt": pack(text.encode())}, fallback_encoding=codec
    )
    assert outcome.rows == [text, text]
    (problem,) = outcome.problems
    assert problem["kind"] == "encoding" and problem["path"] == "a.txt"
    assert problem["message"].endswith("(1 times)")


@pytest.mark.parametrize("separator", [", ", "\n"])
def test_an_error_in_a_large_json_file_is_an_error_of_syntax(read, separator):
    good = f'{{"a": "{"x" * 50}"}}'
    data = separator.join([*[good] * 5, '{"a": bad}', *[good] * 100])
    outcome = read({"a.json": f"[{data}]" if separator == ", " else f"{data}\n"})
    (problem,) = outcome.problems
    assert problem["kind"] == "syntax" and "Expecting value" in problem["message"]
    assert problem["offset"] == 5 * (len(good) + len(separator)) + (separator == ", ")
    assert len(outcome.rows) == (5 if separator == ", " else 105)


@pytest.mark.parametrize("count", [5, 200])
@pytest.mark.parametrize("codec", ["cp1252", "gb18030"])
def test_a_cut_character_does_not_change_the_encoding(read, count, codec):
    texts = [f"第二 日本 {i}" for i in range(count)]
    data = json.dumps(texts, ensure_ascii=False).encode()
    packed = zlib.compressobj(0, wbits=31)  # without compression, so the cut is where it seems
    cut = data[: data.rindex("日".encode()) + 2]
    outcome = read(
        {"a.json.gz": packed.compress(cut) + packed.flush(zlib.Z_SYNC_FLUSH)},
        fallback_encoding=codec,
    )
    assert outcome.rows == texts[:-1]
    assert "cut" in outcome.kinds
