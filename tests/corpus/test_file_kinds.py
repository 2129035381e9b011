# covers: lib/core/placeholders.py, lib/core/json_heads.py, lib/corpus/kinds.py
# covers: lib/corpus/readers.py, lib/core/reading.py
"""Recognise files by name and content: promises of suffixes, pointers, JSON Lines anywhere."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 73400320\n"
ANNEX = "/annex/objects/SHA256E-s73400320--4d7a.parquet\n"
DVC = f"outs:\n- md5: {'a3' * 16}\n  size: 14445097\n  hash: md5\n  path: data.jsonl\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head></html>\n"
LINES = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(10))
ROWS = [f"row {number}" for number in range(10)]


def workbook() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("xl/workbook.xml", "<workbook/>")
    return file.getvalue()


# --- pointers and error pages ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.txt", "README", "a.jsonl.gz", "a.zst"])
@pytest.mark.parametrize(
    ("pointer", "cure"),
    [
        (LFS, "git lfs pull"),
        (LFS.replace("\n", "\r\n"), "git lfs pull"),
        (ANNEX, "git annex get"),
        (DVC, "dvc pull"),
        ("# xet version 0\nfilesize = 7\nhash = 'ab'\n", "git-xet"),
    ],
)
def test_a_pointer_is_never_a_document(read, name, pointer, cure):
    outcome = read({name: pointer, "z.txt": "kept"})
    assert outcome.rows == ["kept"]
    [problem] = outcome.problems
    assert problem["kind"] == "pointer" and cure in problem["message"]
    assert outcome.dataset.tally.failed == {name}


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.github.com/spec/v1 is the first line of a pointer.\n",
        f"A pointer:\n\n{LFS}",
        LFS + "This is what git stores. " * 200,
        "annex/objects/ is a directory of git-annex\n",
        "outs:\n- model.pkl\nThese are the outputs.\n",
    ],
)
def test_texts_about_pointers_stay_texts(read, text):
    assert read({"a.txt": text}).rows == [text]


@pytest.mark.parametrize(
    "page",
    [
        PAGE,
        b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>',
        b'{"error":"Invalid credentials in Authorization header"}',
        b'{"message": "Not Found", "documentation_url": "https://docs", "status": "404"}',
        b"Entry not found",
        b"Access to dataset a/b is restricted. You must be authenticated to access it.",
        PAGE + b" " * 20_000,
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv", "jsonl.gz", "zst", "tsv"])
def test_an_error_page_in_place_of_data_fails(read, page, suffix):
    outcome = read({f"a.{suffix}": page, "z.txt": "kept"})
    assert outcome.rows == ["kept"]
    assert [problem["kind"] for problem in outcome.problems] == ["error page"]
    assert outcome.dataset.tally.failed == {f"a.{suffix}"}


def test_pages_and_errors_under_other_names_are_texts(read):
    files = {"a.html": PAGE.decode(), "b.txt": "Not found", "c.log": "404: Not Found\nGET /x\n"}
    assert read(files).rows == [*files.values()]


@pytest.mark.parametrize(
    "record",
    [
        {"text": "x", "error": "none"},
        {"message": "hello", "id": "y"},
        {"message": "hello"},
        {"message": "fix", "code": "def f(): pass"},
    ],
)
def test_a_record_is_no_error_message(read, record):
    assert read({"a.jsonl": json.dumps(record)}).rows == ["\n".join(record.values())]


# --- promises of suffixes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("a.parquet", b"plain text", "plain text"),
        ("a.parquet", LINES.encode(), "row 0"),
        ("a.parquet", bytes(100), "NUL"),
        ("a.arrow", b"\x07\x00\x81garbage" * 50, "binary data"),
        ("a.json", b"plain text", "plain text"),
        ("a.jsonl", b"a\nb\nc\n", "a b c"),
        ("a.jsonl", workbook(), "Excel"),
        ("a.csv", workbook(), "Excel"),
        ("a.csv", b"%PDF-1.7\n", "PDF"),
        ("a.yaml", bytes(range(256)) * 4, "binary data"),
        ("a.csv", "a,b\n1,two\n".encode("utf-32"), "iconv -f UTF-32"),
        ("a.txt.gz", b"plain text", "compressed data"),
        ("a.csv.zst", b"a,b\nx,y\n", "compressed data"),
        ("a.pdf", b"plain text", "PDF"),
        ("a.safetensors", b"plain text", "safetensors"),
    ],
)
def test_a_file_that_is_not_what_its_suffix_says_fails(read, name, data, word):
    outcome = read({name: data, "z.txt": "kept"})
    assert outcome.rows == ["kept"]
    [problem] = outcome.problems
    assert problem["kind"] == "mismatch" and word in problem["message"]
    assert outcome.dataset.tally.failed == {name}


def test_content_that_proves_its_format_is_read_under_another_suffix(read):
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["parquet"]}), table)
    outcome = read(
        {
            "a.csv": table.getvalue(),
            "b.jsonl": gzip.compress(b'{"text": "gzip"}\n'),
            "c.jsonl.gz": '{"text": "plain"}\n{"text": "lines"}\n',
            "d.jsonl.gz": lzma.compress(b'{"text": "xz"}\n'),
            "e.parquet.gz": gzip.compress(table.getvalue()),
        }
    )
    assert outcome.rows == ["parquet", "gzip", "plain", "lines", "xz", "parquet"]
    assert not outcome.problems


@pytest.mark.parametrize(
    ("name", "data", "command"),
    [
        ("a.zip", b"PK\x03\x04" + bytes(40), "unzip"),
        ("a", b"7z\xbc\xaf\x27\x1c" + bytes(40), "7z x"),
        ("a.tar.gz", gzip.compress(bytes(257) + b"ustar\x0000" + bytes(300)), "tar -xf"),
        ("a.xlsx", workbook(), "CSV"),
    ],
    ids=["zip", "7z", "tar", "xlsx"],
)
def test_archives_fail_with_a_command(read, name, data, command):
    outcome = read({name: data, "z.txt": "kept"})
    assert outcome.rows == ["kept"] and outcome.kinds == ["unsupported"]
    assert command in outcome.problems[0]["message"]


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("a.txt", "Grüße, a text.\n", "Grüße, a text.\n"),
        ("a.log", "河流 和 山\n" * 3, "河流 和 山\n" * 3),
        ("a.txt", "Река течёт.\n" * 4000, "Река течёт.\n" * 4000),
        ("a.txt", "🙂 うみは広い。\n" * 2001, "🙂 うみは広い。\n" * 2001),
        ("a.jsonl", '{"text": "x"}\n', "x"),
        ("a.json", '[{"text": "x"}]', "x"),
        ("a.csv", "id,text\n1,x\n", "x"),
        ("a.csv.gz", "id,text\n1,水\n", "水"),
    ],
)
def test_utf16_without_a_mark_is_read(read, name, text, row, codec):
    data = text.encode(codec)
    outcome = read({name: gzip.compress(data) if name.endswith("gz") else data})
    assert outcome.rows == [row] and not outcome.problems


@pytest.mark.parametrize(
    "data",
    [
        b"text with one \0 in it, and of even length ",
        "café au lait\0, un texte".encode("latin-1"),
        bytes(range(256)) * 64,
        b"".join(number.to_bytes(2, "little") for number in range(0, 16_000, 7)),
        b"\x05\0\x06\0" * 100,
        random.Random(0).randbytes(16_000),
        b"abc\0",
    ],
    ids=range(7),
)
def test_other_content_with_nul_is_binary(read, data):
    assert read({"a.txt": data, "b.txt": "kept"}).kinds == ["binary"]


# --- JSON and JSON Lines by content ---------------------------------------------------------


LONG = json.dumps({"text": "long " * 5000}) + "\n"  # longer than the head of a file


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.txt", "a.log", "a", "a.csv"])
@pytest.mark.parametrize(
    ("before", "after", "broken"),
    [
        ('ber 12 about a hill."}\n', "", 1),
        ("# a comment\n// another\n", "", 2),
        ("", '{"text": "cut', 1),
        ("\ufeff", "\n\n", 0),
        ("\n \n", "", 0),
    ],
)
def test_a_broken_line_costs_only_itself(read, name, before, after, broken):
    outcome = read({name: before + LINES + after})
    assert outcome.rows == ROWS
    assert outcome.kinds.count("syntax") == len(outcome.kinds) == broken


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_fragments_of_long_lines_are_dropped(read, name):
    outcome = read({name: "long " * 5000 + '"}\n' + LONG + LONG})
    assert outcome.rows == ["long " * 5000] * 2 and outcome.kinds == ["syntax"]


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ('[{"text": "x"}, {"text": "y"}]', ["x", "y"]),
        ('[\n{"text": "x"},\n{"text": "y"}\n]\n', ["x", "y"]),
        ('[{"text": "x"},\n {"text": "y"}]', ["x", "y"]),
        ('{"a": "x",\n "b": "y"}\n{"a": "z",\n "b": "w"}\n', ["x\ny", "z\nw"]),
        ('{"a": "x"}{"a": "y"}{"a": "z"}', ["x", "y", "z"]),
        ('{"a": "x"}\r{"a": "y"}\r', ["x", "y"]),
        ('{\n "a": bad\n}\n{\n "a": "y"\n}\n', ["y"]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_is_read_whatever_its_layout(read, name, data, rows):
    assert read({name: data}).rows == rows


def test_padding_costs_only_its_line(read):
    outcome = read({"a.jsonl": LINES + "\0" * 3000, "b.jsonl": "\0" * 99 + LINES, "c.json": "[]\0"})
    assert outcome.rows == [*ROWS, *ROWS[1:]]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a", "a.log"])
@pytest.mark.parametrize(
    "text",
    [
        f"Three records:\n{LINES[:44]}and\nsome\nmore\nprose.\n",
        f"# How to\n\n```json\n{LINES}```\n",
        '{"a": 1,\n "b": [2]}\nprint(1)\n',
        '{"a": 1}["a"]\n',
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "{}\n{}\n",
        "{hello}\n{world}\n",
        '[\n{"a": "x"},\n{"a": "y"}\n]\n',
    ],
)
def test_texts_with_some_json_stay_as_they_are(read, name, text):
    assert read({name: text}).rows == [text]


def test_utf16_and_long_lines_are_recognised_without_suffix(read):
    assert read({"a": LINES.encode("utf-16"), "b.txt": LONG * 2}).rows == [
        *ROWS,
        *["long " * 5000] * 2,
    ]


# --- compression ----------------------------------------------------------------------------


SKIPPED = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame that decoders skip


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def long_zstd(log: int) -> bytes:
    from backports.zstd import CompressionParameter, ZstdCompressor

    options = {
        CompressionParameter.window_log: log,
        CompressionParameter.enable_long_distance_matching: 1,
    }
    compressor = ZstdCompressor(options=options)
    return compressor.compress(LINES.encode()) + compressor.flush()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.zst", "a"])
def test_all_frames_of_zstd_are_read(read, name):
    half = zstd(LINES[: len(LINES) // 2].encode())
    other = zstd(LINES[len(LINES) // 2 :].encode())
    assert read({name: SKIPPED + half + SKIPPED + other}).rows == ROWS


@pytest.mark.parametrize("log", [28, 30, 31])
def test_zstd_with_a_long_window_is_read(read, log):
    outcome = read({"a.jsonl.zst": zstd(LINES.encode()) + long_zstd(log)})
    assert outcome.rows == ROWS * 2 and not outcome.problems


def test_without_the_package_a_long_window_fails_with_a_command(read, monkeypatch):
    packed = long_zstd(31)
    monkeypatch.setitem(__import__("sys").modules, "backports", None)
    outcome = read({"a.jsonl.zst": packed, "z.txt": "kept"})
    assert outcome.rows == ["kept"] and outcome.kinds == ["unsupported"]
    assert "zstd -dc --long=31" in outcome.problems[0]["message"]


def test_a_cut_long_window_keeps_complete_lines(read):
    packed = long_zstd(31)
    outcome = read({"a.jsonl.zst": packed[:-4] + b"\0\0\0\0", "z.txt": "kept"})
    assert outcome.kinds == ["cut"] and outcome.rows[-1] == "kept"


def test_lz4_and_lzma_are_read(read, tmp_path):
    path = tmp_path / "lines.lz4"
    with pa.CompressedOutputStream(str(path), "lz4") as file:
        file.write(LINES.encode())
    packed = lzma.compress(LINES.encode(), lzma.FORMAT_ALONE)
    assert read({"a.jsonl.lz4": path.read_bytes(), "b.jsonl.lzma": packed}).rows == ROWS * 2
