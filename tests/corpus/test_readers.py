# covers: lib/corpus/row_options.py, lib/corpus/report.py, lib/corpus/json_reader.py
# covers: lib/corpus/work_units.py, lib/corpus/raw_file.py, lib/corpus/inputs.py
# covers: lib/corpus/tally.py
"""Read each format: its rows, and its lines of errors.jsonl."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.core.errors import StageError
from lib.corpus import inputs, json_reader, raw_file, work_units
from lib.corpus.report import list_warnings
from lib.corpus.row_options import RowOptions
from lib.corpus.tally import Tally


@pytest.fixture(params=["orjson", "json"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with orjson and as if it were not installed."""
    if request.param == "json":
        monkeypatch.setattr(
            json_reader, "_parse_fast", lambda data: json_reader._DECODER.decode(data.decode())
        )


# --- plain text -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.html", "README", "a.unheard-of"])
def test_a_text_file_of_any_suffix_is_one_unchanged_document(read, name):
    text = "  first\r\n\u2028 second\n\n"
    assert read({name: text}).rows == [text]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfh\xc3\xa9",
        "hé".encode("utf-16"),
        "\ufeffhé".encode("utf-16-le"),
        "\ufeffhé".encode("utf-16-be"),
        "hé".encode(),
    ],
)
def test_utf8_and_utf16_lose_their_byte_order_mark(read, data):
    outcome = read({"a.txt": data})
    assert outcome.rows == ["hé"] and not outcome.problems


def test_invalid_bytes_become_replacement_characters_and_are_counted(read):
    outcome = read(
        {
            "a.txt": b"a\xff\xfeb\xef\xbf\xbdc",
            "b.jsonl": b'{"a": "x\xffy"}\n',
            "c.json": b'["z\xff"]',
            "d.yaml": b"a: w\xff",
        }
    )
    assert outcome.rows == ["a\ufffd\ufffdb\ufffdc", "x\ufffdy", "z\ufffd", "w\ufffd"]
    assert outcome.dataset.tally.replaced == 5  # the one that was in the file does not count
    assert outcome.kinds == ["encoding"] * 4 and not outcome.dataset.tally.failed


def test_utf16_cut_in_the_middle_of_a_character(read):
    outcome = read({"a.txt": "hé".encode("utf-16") + b"x"})
    assert outcome.rows == ["hé\ufffd"] and outcome.dataset.tally.replaced == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_lone_surrogates_in_lines_of_utf16_are_counted(read, name):
    data = 'a,b\n"x\ud800"\n"\ufffd"\n'.encode("utf-16", "surrogatepass")
    outcome = read({name: data})
    assert outcome.rows == ["x\ufffd", "\ufffd"] and outcome.dataset.tally.replaced == 1
    assert outcome.kinds[-1] == "encoding"


def test_files_without_text_are_listed(read):
    outcome = read(
        {"a.txt": b" \n\t", "b.bin": b"a\0b", "c.txt": b"", "d.parquet": b"PAR1xx", "e.txt": "kept"}
    )
    assert outcome.rows == ["kept"]
    assert {p["path"]: p["kind"] for p in outcome.problems} == {
        "a.txt": "empty",
        "b.bin": "binary",
        "c.txt": "empty",
        "d.parquet": "syntax",
    }
    assert outcome.dataset.tally.failed == {"d.parquet"}
    assert set(outcome.problems[0]) == {"path", "offset", "line", "kind", "message", "action"}


# --- JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ('{"a": "x", "b": [{"c": "y"}, 1, null, true, 1.5], "d": {"e": "z"}}', ["x\ny\nz"]),
        ('["x", {"a": "y", "b": "z"}]', ["x", "y\nz"]),
        ('{\n "a": "x"\n}\n{\n "a": "y"\n}\n', ["x", "y"]),
        ('{"a": "x"} {"a": "y"}["z", "w"]', ["x", "y", "z\nw"]),
        ('{"a": "x"}\n{"a": "y"}\n', ["x", "y"]),
        ('["x", "y"]\n["z"]\n', ["x\ny", "z"]),
        ('{"a": "x"}\n{\n"a": "y"\n}', ["x", "y"]),
        ('"just a string"', ["just a string"]),
        ('{"a": "x", "b": "y", "a": "z"}', ["z\ny"]),  # of equal keys the last counts
        ('{"a": NaN, "b": [Infinity, "x"]}', ["x"]),
        ('{"n": ' + "9" * 5000 + ', "b": "x"}', ["x"]),
        ('\ufeff{"a": "x"}', ["x"]),
        (r'{"a": "\ud83d\ude00"}', ["\U0001f600"]),
        (r'{"a": "line\nbreak\u2028"}', ["line\nbreak\u2028"]),
    ],
)
def test_json_documents_become_rows(read, decoder, data, rows):
    outcome = read({"a.json": data})
    assert outcome.rows == rows and not outcome.problems


def test_json_in_utf16_is_read(read):
    assert read({"a.json": '{"a": "é"}'.encode("utf-16")}).rows == ["é"]


def test_a_lone_surrogate_is_replaced_and_counted(read, decoder):
    outcome = read({"a.json": r'{"a": "x\ud800y"}', "b.jsonl": r'{"a": "\udc00"}' + "\n"})
    assert outcome.rows == ["x\ufffdy", "\ufffd"]
    assert outcome.dataset.tally.replaced == 2


def test_a_truncated_list_keeps_its_complete_elements(read, decoder):
    outcome = read({"a.json": '[{"a": "é"},\n {"a": "y"},\n {"a": "cut'})
    assert outcome.rows == ["é", "y"]
    [problem] = outcome.problems
    assert (problem["kind"], problem["line"], problem["offset"]) == ("syntax", 3, 28)
    assert "rest" in problem["action"]


def test_a_document_cut_in_the_middle_is_dropped(read, decoder):
    outcome = read({"a.json": '{\n "a": "x",\n "b": [\n  "y"\n', "b.txt": "kept"})
    assert outcome.rows == ["kept"] and outcome.kinds == ["syntax"]


def test_only_a_bad_line_in_a_json_file_is_lost(read, decoder):
    outcome = read({"a.json": '{"a": "x"}\n{"a": bad}\n{"a": "y"}\n'})
    assert outcome.rows == ["x", "y"]
    assert [(p["kind"], p["line"], p["offset"]) for p in outcome.problems] == [("syntax", 2, 11)]


def test_a_large_json_file_is_read_value_by_value(read, monkeypatch):
    monkeypatch.setattr(raw_file.RawFile.read, "__defaults__", (10,))
    outcome = read({"a.json": '[{"a": "x"}, {}, "y", ]', "b.json": '{"a": "z"}'})
    assert outcome.rows == ["x", "y", "z"]
    assert [(p["kind"], p["offset"]) for p in outcome.problems] == [("no string", 13)]


def test_documents_without_strings_are_listed(read, decoder):
    outcome = read(
        {"a.json": '[{"a": 1}, {"a": "x"}, [], {"a": " "}]', "b.json": "[]", "c.json": "17"}
    )
    assert outcome.rows == ["x"]
    assert [(p["path"], p["kind"]) for p in outcome.problems] == [("a.json", "no string")] * 3 + [
        ("b.json", "empty"),
        ("c.json", "no string"),
    ]
    assert not outcome.dataset.tally.failed


# --- JSON Lines -----------------------------------------------------------------------------


def test_json_lines_split_at_newline_bytes_only(read, decoder):
    data = '{"a": "x\u2028y\u0085"}\r\n\n  \n{"b": ["z", 1]}\n["v", "w"]\n"last"'
    assert read({"a.jsonl": data}).rows == ["x\u2028y\u0085", "z", "v\nw", "last"]


def test_bad_lines_are_dropped_with_their_place(read, decoder):
    data = '\ufeff{"a": "x"}\n{"a": \n{"a": "y"}\n{}\n{"a": "z"} trailing\n'
    outcome = read({"a.ndjson": data})
    assert outcome.rows == ["x", "y"]
    assert [(p["line"], p["offset"], p["kind"]) for p in outcome.problems] == [
        (2, 14, "syntax"),
        (4, 32, "no string"),
        (5, 35, "syntax"),
    ]
    assert outcome.dataset.tally.failed == {"a.ndjson"}


def test_json_lines_in_utf16_are_read(read):
    data = '{"a": "ਊ"}\n{"a": "y"}\n'.encode("utf-16")  # U+0A0A holds two bytes like newlines
    assert read({"a.jsonl": data}).rows == ["ਊ", "y"]


def test_json_lines_are_recognised_under_any_name(read):
    data = '{"a": "x"}\n{"a": "y"}\n'
    assert read({"part-00000": data, "z.txt": data}).rows == ["x", "y", "x", "y"]


# --- YAML -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ("a: x\nb:\n - y\n - 1\n - 2.5\n - true\n - null\n - ~\nc: {d: z}", ["x\ny\nz"]),
        ("a: x\n---\na: y\n...\n---\n- z\n", ["x", "y", "z"]),
        ("a: 2001-12-14\nb: '2001-12-15'\nc: 2001-12-14t21:59:43.10-05:00", ["2001-12-15"]),
        ("a: 9999-99-99\nb: x", ["x"]),  # looks like a date, is none: still no string
        ("a: x\na: y", ["y"]),
        ("base: &b {k: x, l: y}\nd:\n  <<: *b\n  l: z", ["x\ny\nx\nz"]),
        ("a: &t x\nb: *t", ["x\nx"]),
        ("a: !Ref name\nb: !Sub [p, q]\nc: !!binary aGk=\nd: !x {k: v}", ["name\np\nq\nv"]),
        ("1: x\n2: y\n0x1: z", ["x\ny\nz"]),
        ("a: |\n  two\n  lines\nb: >\n  folded\n  text\n", ["two\nlines\n\nfolded text\n"]),
        ("!!omap [a: x, b: y]", ["x\ny"]),
        ("n: " + "9" * 5000 + "\nb: x\nc: =\nd: on", ["x\n="]),
        ("\ufeffa: é", ["é"]),
    ],
)
def test_yaml_documents_become_rows(read, data, rows):
    outcome = read({"a.yaml": data})
    assert outcome.rows == rows and not outcome.problems


def test_yaml_documents_before_a_syntax_error_are_kept(read):
    outcome = read({"a.yml": "a: x\n---\nb: [y\n---\nc: z\n", "b.yml": "a: *nowhere\n"})
    assert outcome.rows == ["x"]
    assert outcome.kinds == ["syntax", "syntax"]
    assert outcome.problems[0]["line"] == 4


def test_yaml_alias_bombs_and_cycles_are_dropped_and_the_rest_read(read):
    bomb = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
        f"{b}: &{b} [" + ", ".join(["*" + a] * 10) + "]\n"
        for a, b in zip("abcdef", "bcdefg", strict=True)
    )
    merges = "a: &a {k0: v}\n" + "".join(
        f"{b}: &{b} {{<<: [" + ", ".join(["*" + a] * 10) + "]}\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    outcome = read(
        {
            "a.yaml": bomb + "---\nx: after\n",
            "b.yaml": "&c [x, *c]\n---\ny\n",
            "c.yaml": merges,
            "d.yaml": "&m {k: x, <<: *m}",
        }
    )
    assert outcome.rows == ["after", "y"]
    assert outcome.kinds == ["aliases"] * 4


def test_complex_yaml_keys_lose_only_their_document(read):
    outcome = read({"a.yaml": "? [a, b]\n: x\n---\ny: z\n"})
    assert outcome.rows == ["z"] and outcome.kinds == ["syntax"]


# --- CSV and TSV ----------------------------------------------------------------------------


def test_csv_rows_are_documents(read):
    data = 'id,title,body\n1,one,"line\nbreak, ""quoted"""\n2.5,,two\n\n-3e4,three,x,surplus\n'
    assert read({"a.csv": data}).rows == ['one\nline\nbreak, "quoted"', "two", "three\nx\nsurplus"]


def test_the_last_column_of_a_name_counts(read):
    assert read({"a.csv": "a,a\nx,y\n"}).rows == ["y"]


def test_fields_select_columns_of_tsv(read):
    assert read({"a.tsv": "a\tb\nx\ty,z\n"}, fields=("b",)).rows == ["y,z"]


def test_csv_columns_without_a_name_are_all_read(read):
    data = ",title,,\nindex,one,a,b\n,two,,c,surplus\n"
    assert read({"a.csv": data}).rows == ["index\na\nb\none", "c\nsurplus\ntwo"]
    assert read({"a.csv": ",title\nindex,one,surplus\n"}).rows[-1] == "index\nsurplus\none"


def test_a_csv_row_with_an_open_quote_is_dropped(read):
    outcome = read({"a.csv": 'a,b\nx,y\nz,"open\n'})
    assert outcome.rows == ["x\ny"]
    assert [(p["kind"], p["line"]) for p in outcome.problems] == [("syntax", 3)]


@pytest.mark.parametrize("quoted_later", [False, True])
def test_an_unclosed_quote_loses_one_row(read, quoted_later):
    """The number of cells shows that the other lines are rows."""
    rows = [f"{n},text {n},more {n}" for n in range(1000)]
    rows[5] = '5,"text 5,more 5'
    if quoted_later:
        rows[700] = '700,"text 700","more, 700"'
    outcome = read({"a.csv": "n,a,b\n" + "\n".join(rows) + "\n"})
    assert outcome.rows == [
        f"text {n}\nmore{',' if quoted_later and n == 700 else ''} {n}"
        for n in range(1000)
        if n != 5
    ]
    [problem] = outcome.problems
    assert (problem["kind"], problem["line"], problem["offset"]) == ("syntax", 7, 86)
    last = 702 if quoted_later else 1001
    assert f"{last - 7} more lines" in problem["message"]
    assert f"line {last:,}" in problem["message"]
    assert outcome.dataset.tally.lines_lost == 0


def test_lines_lost_to_an_unclosed_quote_are_reported(read):
    """The lines may be one long text that is cut, so they are not read as rows."""
    text = "\n".join(f"line {n} of a text, and some more of it" for n in range(998))
    outcome = read({"a.csv": f'a,b,c\nx,y,z\n1,2,"{text}\n', "b.csv": '"a\n1\n2\n'})
    assert outcome.rows == ["x\ny\nz"]
    first, second = outcome.problems
    assert "998 lines" in first["message"]
    assert "3 lines" in second["message"]
    [warning] = list_warnings(
        outcome.dataset.tally, RowOptions(), outcome.dataset.rows, 0, Path("out")
    )
    assert "1,001 lines" in warning


def test_a_row_that_looks_like_many_is_reported(read):
    """Two stray quotes, the second before a comma, make all lines between one valid row."""
    rows = [f"{n},text {n}" for n in range(100)]
    rows[5] = '5,"text 5'
    rows[60] = '60",text 60'
    outcome = read(
        {
            "a.csv": "n,a\n" + "\n".join(rows) + "\n",
            "b.csv": 'n,a\n1,"' + "\n".join(f"a line, of prose, {n}" for n in range(30)) + '"\n',
        }
    )
    assert len(outcome.rows) == 100 - 55 + 1
    assert [(p["path"], p["kind"], p["line"]) for p in outcome.problems] == [("a.csv", "quote", 7)]
    assert "lines 7 to 62" in outcome.problems[0]["message"]
    doubts = list_warnings(
        outcome.dataset.tally, RowOptions(), outcome.dataset.rows, 0, Path("out")
    )
    assert "1 row of CSV" in doubts[0]


def test_options_that_drop_nearly_everything_are_reported():
    tally = Tally(documents=2, short=9, problems=Counter({"no string": 23}))
    tally.other_fields["body"] = 23
    options = RowOptions(fields=["text"], min_chars=5, validation_percent=1)
    warnings = list_warnings(tally, options, {"train": 2, "validation": 0}, 0, Path("out"))
    keywords = ["no document", "2 of 25 documents", "9 of 11 rows", "validation split"]
    assert len(warnings) == 4
    for keyword, warning in zip(keywords, warnings, strict=True):
        assert keyword in warning
    assert all("body (23)" in warning for warning in warnings[:2])


# --- compressed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
    ],
)
def test_compressed_files_are_read_by_their_content(read, suffix, compress):
    lines = b"".join(b'{"a": "row %d"}\n' % i for i in range(20_000))
    outcome = read(
        {
            "a.jsonl" + suffix: compress(lines) + compress(b'"more"\n'),
            "b.txt" + suffix: compress(b"text"),
            "c" + suffix: compress(b"a\0b"),
        }
    )
    assert outcome.rows == [f"row {i}" for i in range(20_000)] + ["more", "text"]
    assert outcome.kinds == ["binary"]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_truncated_archive_keeps_complete_documents(read, suffix, compress):
    lines = b"".join(
        json.dumps({"a": f"{i * 7919 % 10007} text {i}"}).encode() + b"\n" for i in range(5000)
    )
    yaml = b"".join(b"---\na: text %d\n" % (i * 7919 % 10007) for i in range(5000))
    cut = {
        name + suffix: compress(data)[:-2000]
        for name, data in [
            ("a.jsonl", lines),
            ("b.txt", b"text " + lines.replace(b"\n", b" ")),
            ("c.json", lines),
            ("d.yaml", yaml),
        ]
    }
    outcome = read(cut, keep_source=True)
    values = [json.loads(line)["a"] for line in lines.splitlines()]
    by_source = {
        name: [
            row
            for row, source in zip(outcome.rows, outcome.sources, strict=True)
            if source == name + suffix
        ]
        for name in ("a.jsonl", "b.txt", "c.json")
    }
    assert 100 < len(by_source["a.jsonl"]) < 5000
    assert by_source["a.jsonl"] == values[: len(by_source["a.jsonl"])] == by_source["c.json"]
    assert by_source["b.txt"] == []
    yaml_rows = [
        row
        for row, source in zip(outcome.rows, outcome.sources, strict=True)
        if source == "d.yaml" + suffix
    ]
    assert yaml_rows == [f"text {i * 7919 % 10007}" for i in range(len(yaml_rows))] != []
    assert outcome.dataset.tally.failed == set(cut)


# --- disks that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"]
)
def test_a_failing_disk_loses_no_document(read, name, failing_reads, tmp_path):
    """After a short failure the rows are the same. If it lasts, the build names the file."""
    rows = [f"text {number} " * 60 for number in range(400)]
    lines = "".join(json.dumps({"a": row}) + "\n" for row in rows).encode()
    arrow = io.BytesIO()
    columns = pa.table({"a": rows})
    if name.endswith("parquet"):
        pq.write_table(columns, arrow, row_group_size=100)
    elif name.endswith("arrow"):
        with pa.ipc.new_file(arrow, columns.schema) as file:
            file.write_table(columns, 100)
    data = {
        "txt": "\n".join(rows).encode(),
        "jsonl": lines,
        "gz": gzip.compress(lines),
        "zst": pa.compress(lines, "zstd", asbytes=True),
    }.get(name[2:].split(".")[-1])
    data = data or arrow.getvalue()
    failing_reads(2)
    outcome = read({name: data})
    assert outcome.rows == (["\n".join(rows)] if name == "a.txt" else rows)
    assert not outcome.problems
    failing_reads(1000)
    with pytest.raises(StageError, match=f"{name} cannot .*does not mean"):
        work_units.process_unit(
            work_units.cut_files(
                tmp_path / "data",
                *inputs.find_inputs(tmp_path / "data", False)[:1],
                tmp_path / "out",
                RowOptions(),
            )[0]
        )
