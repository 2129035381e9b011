# covers: lib/corpus/table_format.py, lib/corpus/table_reader.py
"""Read tables with the separator, quotes, line ends and encoding that they use."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import random
from pathlib import Path

import pyarrow as pa
import pytest

from lib.corpus.report import format_summary, list_warnings
from lib.corpus.row_options import RowOptions


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            'id;title;text\n1;Rivers;"Water runs; it meets the sea."\n2;Hills;"Stay, mostly."\n',
            ["Rivers\nWater runs; it meets the sea.", "Hills\nStay, mostly."],
        ),
        ('\ufeff"name";"text"\r\n"Österreich";"Ein; Text"\r\n', ["Österreich\nEin; Text"]),
        ("id|text\n1|Water runs, down\n2|Stones\n", ["Water runs, down", "Stones"]),
        ("id\ttext\n1\tWater runs, down\n2\tStones; stay\n", ["Water runs, down", "Stones; stay"]),
        ("sep=;\nid,x;text\n1;one\n", ["one"]),
        ("sep=\ntext;x\n" + "one, two; three\n" * 12, ["one, two; three"] * 12),
        ('"sep=\t"\r\nid\ttext\r\n1\tone\r\n', ["one"]),
        # decimal commas
        ("id;price;text\n1;3,50;one\n2;-1.234,75;two\n", ["one", "two"]),
        ("id;price, EUR;text\n1;3,50;one\n2;4,75;two\n", ["one", "two"]),
        ("id;text\n1;a, b\n2;c, d\n3;e\n", ["a, b", "c, d", "e"]),
        # the usual separator fits
        ("id,text\n1,a;b\n2,c;d\n", ["a;b", "c;d"]),
        ("id,a;b\n1,c;d\n", ["c;d"]),
        ("a,b,c\nx,y\nz,w\n", ["x\ny", "z\nw"]),
        ("q,choices (a|b|c)\n" + "what 1x?,yes|no|maybe\n" * 12, ["what 1x?\nyes|no|maybe"] * 12),
        # one column
        ("text\none; two; three\nfour\n", ["one; two; three", "four"]),
        ("text\none, two\nthree, four, five\n", ["one, two", "three, four, five"]),
        ("Name (first|last)\nAda\nBen\n", ["Ada", "Ben"]),
        ("text\n" + '"foo, bar",\n' * 12, ["foo, bar"] * 12),
        ('text\n"quoted, text"\n"He", she said\n', ["quoted, text", '"He", she said']),
        ("text\none\ntwo\n", ["one", "two"]),
        # quotes
        ('id, text\n1, "one, two"\n2, "three"\n', ["one, two", "three"]),
        ("id,text\n1,'one, two'\n2,'it''s'\n", ["one, two", "it's"]),
        ("id,text\n1,'one'\n2,'two'\n", ["one", "two"]),
        ("id,text\n1,'it\\'s, so'\n2,'two'\n", ["it's, so", "two"]),
        ("'id';'text'\n'1';'one; two'\n", ["one; two"]),
        ("id,text\n1,'tis so\n2,rock 'n' roll\n", ["'tis so", "rock 'n' roll"]),
        # backslashes
        (
            'id,text\n1,"She said \\"go, now\\" and left"\n2,"C:\\new\\\\"\n',
            ['She said "go, now" and left', "C:\\new\\"],
        ),
        ('"text"\n"C:\\\\dir"\n"5\\" disc"\n', ["C:\\dir", '5" disc']),
        ('id,text\n1,"one\\"\n2,"C:\\dir\\"\n', ["one\\", "C:\\dir\\"]),
        (
            "id,text\n" + '1,"Let $f\\,dx$, so"\n' * 12 + "2,See $g\\,dx$\n",
            ["Let $f\\,dx$, so"] * 12 + ["See $g,dx$"],
        ),
        ('id,text\n1,"a \\"b\\"\nc"\n2,\\N\n3,three\n', ['a "b"\nc', "three"]),
        # line ends
        ("id,text\r1,one\r2,two\r", ["one", "two"]),
        ('id;text\r1;"one\ntwo"\r2;three', ["one\ntwo", "three"]),
        ("id,text\r1,one\n2,two\r\n", ["one", "two"]),
        ("id,text\r\r\n1,one\r\r\n", ["one"]),
        ("\n\nid,text\n1,one\n", ["one"]),
    ],
)
def test_a_table_is_read_in_its_format(read, table, rows):
    outcome = read({"a.csv": table})
    assert outcome.rows == rows
    assert set(outcome.kinds) == ({"no string"} if "\\N" in table else set())


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ('id\ttext\n1\tHe said "hi" to\n2\t"quoted\ttext"\n', ['He said "hi" to', "quoted\ttext"]),
        ('id\ttext\n1\t"one" he said\n2\ttwo\n', ['"one" he said', "two"]),
        ('id\ttext\n1\t"one\n2\ttwo\n3\tthree"\n', ['"one', "two", 'three"']),
        ('id\ttext\n1\t"one\n2\ttwo\n3\t5" disc\n', ['"one', "two", '5" disc']),
        ('id\ttext\n1\t"one\nmore"\n2\ttwo\n', ["one\nmore", "two"]),
        ('text\n"one\ntwo\n', ['"one', "two"]),
        ("id,text\n1,one\n2,two\n", ["one", "two"]),
        ("id\ttext\n1\tone\\\nmore\n2\t\\N\n3\ta\\\tb\\\\c\n", ["one\nmore", "a\tb\\c"]),
        ("id\ttext\n1\t\\alpha \\\\ \\beta\n", ["\\alpha \\\\ \\beta"]),
        ("id\ttext\r1\tone\r2\ttwo", ["one", "two"]),
        (
            "name (last, first)\tborn (month day, year)\n" + "Smith, John\tMay 5, 2020\n" * 12,
            ["Smith, John\nMay 5, 2020"] * 12,
        ),
        ("city\n" + "Paris, France\n" * 12, ["Paris, France"] * 12),
    ],
)
def test_quotes_and_backslashes_of_tsv_may_be_text(read, table, rows):
    outcome = read({"a.tsv": table})
    assert outcome.rows == rows
    assert set(outcome.kinds) == ({"no string"} if "\\N" in table else set())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("id;text\n1;a;b\n2;c;d\n3;e\n", ['";"', "33 %", "sep=;"]),
        ("a report\n" + "1,2,one\n" * 10, ["one column", "10", '","', "delete"]),
        ("# a comment\nid,text\n1,one\n", ["one column", "delete", "sep="]),
        ('"id;""text"""\n"1;""one"""\n', ["single cell", "2 cells", '";"']),
        ("id,text\n" + "1,one, two\n" * 10, ["2 columns", "10", '","', "in quotes"]),
        ("id::text\n1::one\n2::two\n", ['":"', "sep=:"]),
    ],
)
def test_a_table_whose_separator_is_unclear_fails(read, table, words):
    outcome = read({"a.csv": table, "b.csv": "text\nkept\n"})
    assert outcome.rows == ["kept"]
    [problem] = outcome.problems
    assert problem["kind"] == "mismatch" and outcome.dataset.tally.failed == {"a.csv"}
    assert all(word in problem["message"] for word in words)


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_the_printed_line_makes_an_unclear_table_readable(read, end):
    table = f"id;text{end}1;a;b{end}2;c;d{end}3;e{end}"
    message = read({"a.csv": table}).problems[0]["message"]
    assert "`sed -i '1i sep=;' FILE`" in message
    assert read({"a.csv": f"sep=;\n{table}"}).rows == ["a\nb", "c\nd", "e"]


def test_a_command_is_printed_only_if_it_works(read):
    table = "id;text\n1;a;b\n2;c;d\n3;e\n"
    files = {"a.csv.gz": gzip.compress(table.encode()), "b.csv": table.encode("utf-16")}
    messages = [problem["message"] for problem in read(files).problems]
    assert len(messages) == 2
    assert all("sep=;" in message and "sed" not in message for message in messages)


@pytest.mark.parametrize("codec", ["utf-8", "utf-16"])
def test_a_row_with_nul_is_dropped(read, codec):
    table = 'id,text\n1,"one\nb\0c"\n2,two\n\0\0\0'
    outcome = read({"a.csv": table.encode(codec)})
    assert outcome.rows == ["two"]
    assert [(p["kind"], p["line"]) for p in outcome.problems] == [("syntax", 2), ("syntax", 5)]
    assert all("NUL" in problem["message"] for problem in outcome.problems)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('1,"one" two', "written twice"),
        ('1,"one', "not closed"),
        ("1,one\rtwo", "CR"),
        ("1," + "x" * 70_000_000, "64,000,000"),
    ],
    ids=["text", "open", "cr", "large"],
)
def test_errors_are_in_words_of_the_project(read, row, words):
    outcome = read({"a.csv": f"id,text\n0,zero\n{row}\n"})
    [problem] = outcome.problems
    assert words in problem["message"] and outcome.rows == ["zero"]
    assert "expected after" not in problem["message"] and "universal" not in problem["message"]


def test_an_open_quote_does_not_hide_the_separator(read):
    outcome = read({"a.csv": 'id;text\n1;"open\n' + "2;two\n" * 20})
    assert outcome.rows == ["two"] * 20 and outcome.kinds == ["syntax"]


def test_rows_with_too_many_cells_cause_a_warning(read):
    outcome = read({"a.csv": "id,text\n1,one\n2,two, three\n3,four,,\n"})
    assert outcome.rows == ["one", "two\n three", "four"]
    rows = outcome.dataset.rows
    [warning] = list_warnings(outcome.dataset.tally, RowOptions(), rows, 0, Path("out"))
    assert "1 row of CSV" in warning and "quotes" in warning


def test_without_a_header_a_table_fails(read):
    outcome = read({"a.csv": 'id,"text" x\n1,one\n', "b.csv": "text\nkept\n"})
    assert outcome.rows == ["kept"]
    [problem] = outcome.problems
    assert "header" in problem["message"] and problem["action"] == "file skipped"


@pytest.mark.parametrize(
    ("suffix", "compress", "codec", "end"),
    [
        (".csv", bytes, "utf-8-sig", "\n"),
        (".CSV", bytes, "utf-16-be", "\r"),
        (".csv.gz", gzip.compress, "utf-16", "\r\n"),
        (".csv.xz", lzma.compress, "utf-8", "\r"),
        (".csv.zst", pa.Codec("zstd").compress, "utf-16-le", "\n"),
    ],
)
def test_the_head_may_end_within_a_quoted_cell(read, suffix, compress, codec, end):
    text = 'A long; text; "quoted", by | one.\n' * 2000
    quoted = text.replace('"', '""')
    table = f'id;text{end}1;"{quoted}"{end}2;two{end}3;"{quoted}"'
    data = bytes(compress(table.encode(codec)))
    outcome = read({f"a{suffix}": data}, fields=("text",))
    assert outcome.rows == [text, "two", text] and not outcome.problems


def test_backslashes_after_the_head_are_found(read):
    plain = "".join(f"{number},row,x\n" for number in range(3000))
    table = f'id,text,label\n{plain}1,"She said \\"go, now\\"\nand left",a\n2,"C:\\dir\\",b\n'
    rows = read({"a.csv": table}, fields=("text",)).rows
    assert rows[-2:] == ['She said "go, now"\nand left', "C:\\dir\\"] and len(rows) == 3002


def test_an_unusual_format_is_counted_in_the_summary(read):
    table = "id;text\n1;one\n2;two\n"
    outcome = read(
        {"a.csv": table, "b.csv": table, "c.tsv": "id,text\n1,one\n", "d.csv": "text\nx"}
    )
    lines = format_summary(outcome.dataset, RowOptions(), Path("out"), 4, 100)
    assert lines["tables"] == '2 CSV files with ";" as separator; 1 TSV file with "," as separator'


def test_conversations_are_read_from_an_unusual_table(read):
    chats = read({"a.csv": "prompt;completion\nhow many?;42, so\n"}, format="chat").chats
    assert [turn["content"] for turn in chats[0][0].messages] == ["how many?", "42, so"]


@pytest.mark.parametrize("seed", range(12))
def test_tables_of_csv_writers_are_read_back(read, seed):
    """Cells contain other separators, quotes, line ends, and decimal commas."""
    random_ = random.Random(seed)
    separator = random_.choice(";\t|,")
    end = random_.choice(["\n", "\r\n"])
    words = ["water", "runs, down", 'a "quoted" word', "it's", "x; y", "a|b", "two\nlines", "3,5"]
    names = ["id", "title", "text"]
    rows = [
        [f"n{number}", *(" ".join(random_.choices(words, k=5)) for _ in names[1:])]
        for number in range(random_.choice([2, 8, 200]))
    ]
    file = io.StringIO(newline="")
    writer = csv.writer(
        file,
        delimiter=separator,
        lineterminator=end,
        quoting=random_.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    )
    writer.writerows([names, *rows])
    codec = random_.choice(["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
    outcome = read({f"a.{random_.choice(['csv', 'tsv'])}": file.getvalue().encode(codec)})
    assert outcome.rows == ["\n".join(row) for row in rows] and not outcome.problems
