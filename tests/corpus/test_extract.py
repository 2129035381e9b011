# covers: lib/corpus/readers.py, lib/corpus/extract/process.py, lib/corpus/extract/child.py
# covers: lib/corpus/extract/html.py, lib/corpus/extract/pdf.py, lib/corpus/extract/docx.py
# covers: lib/corpus/extract/epub.py, lib/corpus/extract/archive.py
# covers: lib/corpus/extract/extracted.py
# covers: lib/corpus/extract/table.py, lib/corpus/extraction.py, lib/corpus/kinds.py
"""The text of documents is extracted; a damaged or hostile document costs no other document."""

from __future__ import annotations

import gzip
import importlib.metadata
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.corpus import extraction, inputs, kinds
from lib.corpus.extract import archive, child, extracted
from lib.corpus.extract.docx import extract_docx
from lib.corpus.extract.epub import extract_epub
from lib.corpus.extract.extracted import Refusal
from lib.corpus.extract.html import decode_page, extract_html
from lib.corpus.extract.process import Extraction
from lib.corpus.row_options import RowOptions
from tests.conftest import ROOT
from tests.corpus.sample_documents import (
    make_docx,
    make_epub,
    make_notes,
    make_pdf,
    make_zip,
    paragraph,
)

ALL = ["html", "pdf", "docx", "epub"]
PAGE = "<!doctype html><html><body><p>One <b>two</b></p><p>three</p></body></html>"
BOOK = make_epub({"a.xhtml": "<body><p>a</p></body>"}, ["a.xhtml"])
LOCKED = "/Encrypt << /Filter /Standard /V 1 /R 2 /O ({0}) /U ({0}) /P -4 >> /ID [({0}) ({0})]"


def refusal_of(function, data: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        function(data, "")
    return caught.value


def test_each_kind_becomes_one_document(read):
    files = {
        "a.html": PAGE,
        "b.pdf": make_pdf(["Hello world\nsecond line", "page two"]),
        "c.docx": make_docx(paragraph("Word")),
        "d.epub": BOOK,
        "e.txt": "plain",
        "f.jsonl": f'{{"t": "{PAGE}"}}\n',
        "g.html.gz": gzip.compress(PAGE.encode()),
        "page": PAGE.upper(),
    }
    outcome = read(files, extract=ALL, keep_source=True)
    assert dict(zip(outcome.sources, outcome.rows, strict=True)) == {
        "a.html": "One two\n\nthree",
        "b.pdf": "Hello world\nsecond line\n\npage two",
        "c.docx": "Word",
        "d.epub": "a",
        "e.txt": "plain",
        "f.jsonl": PAGE,  # a field of JSON keeps its tags
        "g.html.gz": "One two\n\nthree",
        "page": "ONE TWO\n\nTHREE",
    }
    assert not outcome.problems
    assert outcome.dataset.summary()["extracted"] == {"docx": 1, "epub": 1, "html": 3, "pdf": 1}


def test_without_the_option_html_keeps_its_tags_and_the_others_are_skipped(read):
    outcome = read({"a.html": PAGE, "b.pdf": make_pdf(["x"]), "c.docx": make_docx("")})
    assert outcome.rows == [PAGE] and outcome.kinds == ["binary", "binary"]
    assert outcome.dataset.tally.not_extracted == {"html": 1, "pdf": 1, "docx": 1}
    assert "extracted" not in outcome.dataset.summary()


def test_damaged_documents_are_named_with_their_reason(read):
    pdf = make_pdf(["text"])
    outcome = read(
        {
            "cut.docx": make_docx(paragraph("x"))[:150],
            "cut.html.gz": gzip.compress(PAGE.encode())[:-12],
            "cut.pdf": pdf[:200],
            "cycle.pdf": pdf.replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"),
            "empty.html": "<html><body></body></html>",
            "locked.docx": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
            "locked.pdf": make_pdf(["x"], LOCKED.format("1" * 32)),
            "scan.pdf": make_pdf(["", ""]),
            "z.txt": "kept",
        },
        extract=ALL,
    )
    assert outcome.rows == ["kept"]
    assert {problem["path"]: problem["kind"] for problem in outcome.problems} == {
        "cut.docx": "damaged",
        "cut.html.gz": "cut",
        "cut.pdf": "damaged",
        "cycle.pdf": "damaged",
        "empty.html": "no text",
        "locked.docx": "encrypted",
        "locked.pdf": "encrypted",
        "scan.pdf": "no text",
    }
    assert outcome.dataset.tally.failed == {
        *("cut.docx", "cut.html.gz", "cut.pdf", "cycle.pdf", "locked.docx", "locked.pdf")
    }


# --- HTML -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "fallback", "expected", "replaced"),
    [
        ("<html>é".encode(), "", "é", 0),
        ("\ufeff<html>é".encode(), "", "é", 0),
        ("<html>é".encode("utf-16"), "", "é", 0),
        ("<meta charset=iso-8859-1>“é”".encode("cp1252"), "", "“é”", 0),
        ('<meta http-equiv=x content="text/html; charset=koi8-r">да'.encode("koi8-r"), "", "да", 0),
        ('<?xml version="1.0" encoding="shift_jis"?>日本'.encode("shift_jis"), "", "日本", 0),
        ("<meta charset='iso-2022-jp'>日本".encode("iso-2022-jp"), "", "日本", 0),
        ("<meta charset=iso-8859-1>日本".encode(), "", "日本", 0),  # UTF-8 all the same
        ("<html>é".encode("cp1252"), "cp1252", "é", 1),
        ("<html>é".encode("cp1252"), "", "\ufffd", 1),
        ("<meta charset=unheard-of>é".encode("cp1252"), "cp1252", "é", 1),
        ("<meta charset=utf-8>é".encode("cp1252"), "cp1252", "é", 1),
        ("<meta charset=utf-16>é".encode(), "", "é", 0),
        ("<meta charset=idna>é".encode("cp1252"), "", "\ufffd", 1),  # unknown to browsers
    ],
)
def test_the_encoding_of_a_page(data, fallback, expected, replaced):
    text, count = decode_page(data, fallback)
    assert text.rpartition(">")[2] == expected and count == replaced


def test_text_has_one_kind_of_line_end_and_no_nul_or_surrogate():
    assert extracted.clean_text(" a\r\nb\rc\0d\ud800e\n") == "a\nb\ncde"


@pytest.mark.parametrize("tag", ["body", "article", "main", "section", "details", "blockquote"])
def test_lists_of_simple_pages_are_kept_and_navigation_is_not(tag):
    items = "<ul><li>500 g of flour</li><li>salt</li></ul>"
    page = (
        f"<body><nav><ul><li>home</li></ul></nav><p>One</p><{tag}><h2>Two</h2>{items}</{tag}>"
        "<figure><figcaption>A caption</figcaption></figure><p class='hidden-xs'>wide</p></body>"
    )
    text = extract_html(page.encode(), "").text
    assert "• 500 g of flour\n  • salt" in text and "home" not in text
    assert "A caption" in text and "wide" in text


# --- DOCX -----------------------------------------------------------------------------------


def test_docx_paragraphs_lists_tables_and_notes():
    item = "<w:pPr><w:tabs><w:tab/></w:tabs><w:numPr/></w:pPr>"
    cell = "<w:tc>{}</w:tc>"
    body = (
        paragraph("Title")
        + "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r>"
        + '<w:r><w:footnoteReference w:id="1"/></w:r></w:p>'
        + paragraph("")
        + paragraph("first", item)
        + paragraph("second", item)
        + "<w:tbl><w:tr>"
        + cell.format(paragraph("1") + paragraph("2"))
        + cell.format(paragraph("3"))
        + "</w:tr><w:tr>"
        + cell.format(paragraph("4"))
        + cell.format(paragraph("5"))
        + "</w:tr></w:tbl>"
    )
    data = make_docx(body, {"word/footnotes.xml": make_notes("a note")})
    assert extract_docx(data, "").text == (
        "Title\n\na b\nc[1]\n\nfirst\n\nsecond\n\n1 2 \t\t3\n4 \t\t5\n\n  1. a note"
    )


def test_docx_leaves_out_deleted_moved_and_hidden_text():
    body = (
        "<w:p><w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
        "<w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom>"
        "<w:ins><w:r><w:t>new</w:t></w:r></w:ins>"
        "<w:r><w:rPr><w:vanish/></w:rPr><w:t>hidden</w:t></w:r>"
        '<w:r><w:rPr><w:vanish w:val="0"/></w:rPr><w:t> shown</w:t></w:r>'
        "<w:r><w:instrText>PAGE</w:instrText></w:r>"
        "<w:r><mc:AlternateContent xmlns:mc='m'><mc:Choice><w:t> box</w:t></mc:Choice>"
        "<mc:Fallback><w:t>twice</w:t></mc:Fallback></mc:AlternateContent></w:r></w:p>"
    )
    assert extract_docx(make_docx(body), "").text == "new shown box"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (  # formatting that changed while changes were tracked
            "<w:p><w:r><w:rPr><w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange></w:rPr>"
            "<w:t>shown</w:t></w:r></w:p>",
            "shown",
        ),
        (  # a text box with a hidden run inside a run
            "<w:p><w:r><w:t>one </w:t><w:pict><w:txbxContent><w:p><w:r><w:rPr><w:vanish/></w:rPr>"
            "<w:t>hidden</w:t></w:r><w:r><w:t>box</w:t></w:r></w:p></w:txbxContent></w:pict>"
            "<w:t>after</w:t></w:r></w:p>",
            "one after box",
        ),
        ("<w:p><w:fldSimple><w:r><w:t>field</w:t></w:r></w:fldSimple></w:p>", "field"),
        ("<w:p><w:dir><w:r><w:t>right to left</w:t></w:r></w:dir></w:p>", "right to left"),
        ("<w:p><m:oMath xmlns:m='m'><m:r><m:t>x=1</m:t></m:r></m:oMath></w:p>", "x=1"),
        (
            f"<w:sdt><w:sdtPr/><w:sdtContent>{paragraph('control')}</w:sdtContent></w:sdt>",
            "control",
        ),
        (
            f"<w:tbl><w:tr><w:tc>{paragraph('a')}<w:tbl><w:tr><w:tc>{paragraph('b')}</w:tc>"
            f"</w:tr></w:tbl>{paragraph('c')}</w:tc></w:tr></w:tbl>",
            "a b c",
        ),
        ("<w:p><w:r><w:footnoteReference/><w:sym/><w:t>odd</w:t></w:r></w:p>", "odd"),
    ],
)
def test_docx_keeps_all_visible_text(body, words):
    assert extract_docx(make_docx(body), "").text.split() == words.split()


def test_docx_notes_may_contain_tables_and_parts_may_have_other_names():
    table = f"<w:tbl><w:tr><w:tc>{paragraph('cell')}</w:tc></w:tr></w:tbl>"
    body = '<w:p><w:r><w:t>body</w:t><w:footnoteReference w:id="1"/></w:r></w:p>'
    notes = make_notes("note").replace("</w:p>", f"</w:p>{table}{paragraph('end')}")
    data = make_docx(body, {"word/footnotes.xml": notes})
    assert extract_docx(data, "").text.split() == ["body[1]", "1.", "note", "cell", "end"]
    package = "<Relationships><Relationship Type='x/officeDocument' Target='/word/a2.xml'/>"
    names = {"_rels/.rels": f"{package}</Relationships>", "word/a2.xml": archive_member(body)}
    assert extract_docx(make_docx(paragraph("old"), names), "").text == "body"


def archive_member(body: str) -> bytes:
    with zipfile.ZipFile(zipfile.io.BytesIO(make_docx(body))) as file:
        return file.read("word/document.xml")


# --- EPUB -----------------------------------------------------------------------------------


def test_epub_in_the_order_of_its_spine():
    data = make_epub(
        {
            "nav.xhtml": "<body>contents</body>",
            "b%20c.xhtml": "<html><head><title>t</title></head><body><h1>B</h1>"
            "<p>x&nbsp;y <br/>\n z</p><script/><pre>  p\n q</pre></body></html>",
            "a.xhtml": "<body><ul>\n <li>one</li>\n <li>two</li></ul></body>",
        },
        ["nav.xhtml", "b%20c.xhtml", "a.xhtml", "missing"],
        {"OEBPS/b c.xhtml": "<body><h1>B</h1><p>x&nbsp;y <br/>\n z</p><pre>  p\n q</pre></body>"},
    )
    assert extract_epub(data, "").text == "B\n\nx\xa0y\nz\n\n  p\n q\n\n• one\n  • two"


@pytest.mark.parametrize(
    ("chapter", "words"),
    [
        ("<p>a<![ x ]>b<![if !x]>c<![endif]>d<![CDATA[e < f]]></p>", "abcde < f"),
        ("<script/><title/><p>after</p><a id='x>y'/><div/><p>end</p>", "after end"),
        ("<figure><img/><figcaption>caption</figcaption></figure>", "caption"),
        ("<svg><text>drawn</text></svg>", "drawn"),
    ],
)
def test_epub_chapters_in_the_forms_of_xhtml(chapter, words):
    data = make_epub({"a.xhtml": f"<html><body>{chapter}</body></html>"}, ["a.xhtml"])
    assert extract_epub(data, "").text.split() == words.split()


@pytest.mark.parametrize(
    "kind",
    ["application/xhtml+xml; charset=utf-8", "application/xml", "image/svg+xml", "Text/HTML", ""],
)
def test_epub_chapters_of_each_media_type(kind):
    data = make_epub(
        {"a.xhtml": "<body>a</body>", "b": "<svg><text>b</text></svg>"}, ["a.xhtml", "b"]
    )
    assert extract_epub(change_last_type(data, kind), "").text.split() == ["a", "b"]


def change_last_type(data: bytes, kind: str) -> bytes:
    """Return an EPUB whose last item has another media type."""
    with zipfile.ZipFile(zipfile.io.BytesIO(data)) as file:
        members = {name: file.read(name).decode() for name in file.namelist()}
    before, _, after = members["OEBPS/book.opf"].rpartition("application/xhtml+xml")
    return make_zip({**members, "OEBPS/book.opf": f"{before}{kind}{after}"})


def test_epub_reports_each_chapter_that_it_leaves_out():
    chapters = {"a.xhtml": "<body>a</body>", "cover": "x"}
    found = extract_epub(
        change_last_type(make_epub(chapters, [*chapters, "gone"]), "image/png"), ""
    )
    assert found.text == "a" and "2 chapters of 3" in found.lost
    assert "image/png" in found.lost


@pytest.mark.parametrize("name", ["CAF\u00c9.xhtml", "cafe\u0301.xhtml", "caf%C3%A9.xhtml"])
def test_epub_names_that_differ_only_in_their_spelling(name):
    data = make_epub({"a": "<p>a</p>"}, ["a"], {f"OEBPS/{name}": "<p>b</p>"})
    with zipfile.ZipFile(zipfile.io.BytesIO(data)) as file:
        members = {member: file.read(member).decode() for member in file.namelist()}
    package = members["OEBPS/book.opf"].replace('href="a"', 'href="caf\u00e9.xhtml"')
    assert extract_epub(make_zip({**members, "OEBPS/book.opf": package}), "").text == "b"


def test_epub_with_encrypted_chapters_or_without_any():
    encryption = '<encryption><CipherReference URI="OEBPS/{}"/></encryption>'
    chapters = {"a.xhtml": "<body>a</body>"}
    for name, kind in (("a.xhtml", "encrypted"), ("font.otf", "")):
        data = make_epub(
            chapters, ["a.xhtml"], {"META-INF/encryption.xml": encryption.format(name)}
        )
        if kind:
            assert refusal_of(extract_epub, data).kind == kind
        else:
            assert extract_epub(data, "").text == "a"
    assert refusal_of(extract_epub, make_epub(chapters, [])).kind == "damaged"
    lost = make_epub(chapters | {"b.xhtml": b"X" * 50}, ["a.xhtml", "b.xhtml"])
    lost = lost.replace(b"OEBPS/b.xhtml", b"OEBPS/c.xhtml")  # a chapter that is missing
    assert "1 chapter of 2" in extract_epub(lost, "").lost


# --- hostile archives and XML ------------------------------------------------------------------


def test_archives_have_limits(monkeypatch):
    bomb = make_docx(paragraph(" " * 5_000_000))
    assert "250 times" in refusal_of(extract_docx, bomb).message
    monkeypatch.setattr(archive, "MOST_MEMBERS", 3)
    many = make_docx(paragraph("x"), {"a": "", "b": ""})
    assert refusal_of(extract_docx, many).kind == "too large"
    monkeypatch.setattr(archive, "MOST_MEMBERS", 9)
    monkeypatch.setattr(archive, "MOST_BYTES", 1000)
    large = make_docx(paragraph("ab" * 500))
    assert "1,000 bytes" in refusal_of(extract_docx, large).message


def test_archives_that_are_damaged_encrypted_or_lie():
    good = make_docx(paragraph("x" * 100))
    assert refusal_of(extract_docx, good[:-30]).kind == "damaged"
    position = good.index(b"word/document.xml") + 30
    assert refusal_of(extract_docx, good[:position] + b"\xff" * 9 + good[position + 9 :]).kind
    locked = bytearray(good)
    for start in (good.index(b"PK\x03\x04") + 6, good.index(b"PK\x01\x02") + 8):
        locked[start] |= 1
    second = good.rindex(b"PK\x01\x02") + 8
    locked[second] |= 1
    assert refusal_of(extract_docx, bytes(locked)).kind == "encrypted"
    assert refusal_of(extract_docx, make_zip({"xl/workbook.xml": ""})).kind == "damaged"
    with zipfile.ZipFile(zipfile.io.BytesIO(good)) as file:
        size = file.getinfo("word/document.xml").file_size
    small = good.replace(size.to_bytes(4, "little"), (9).to_bytes(4, "little"))
    assert refusal_of(extract_docx, small).kind == "damaged"  # unpacks to more than it says


@pytest.mark.parametrize(
    "declaration",
    ['<!ENTITY a SYSTEM "file:///etc/passwd">', '<!ENTITY % a SYSTEM "file:///etc/passwd"> %a;'],
)
def test_no_external_entity_is_read(declaration):
    member = archive_member(paragraph("&a;")).decode()
    data = make_zip({"word/document.xml": f"<!DOCTYPE d [{declaration}]>{member}"})
    assert refusal_of(extract_docx, data).kind == "damaged"


def test_entities_do_not_expand_without_limit():
    names = "abcdefghij"
    declarations = '<!ENTITY a "lol">' + "".join(
        f'<!ENTITY {name} "{10 * f"&{before};"}">' for before, name in itertools.pairwise(names)
    )
    member = archive_member(paragraph("&j;")).decode()
    data = make_zip({"word/document.xml": f"<!DOCTYPE d [{declarations}]>{member}"})
    assert refusal_of(extract_docx, data).kind == "damaged"


def test_deep_and_malformed_xml_is_refused(extractor):
    deep = "<w:a>" * 10_000 + "</w:a>" * 10_000
    with pytest.raises(Refusal) as caught:
        extractor.extract("docx", make_docx(deep), "", 20)
    assert caught.value.kind == "damaged"
    assert "not well-formed" in refusal_of(extract_docx, make_docx("<w:p>")).message


# --- the child process ------------------------------------------------------------------------


@pytest.fixture
def extractor():
    """Return the parent's side of a child process, which is closed at the end."""
    one = Extraction()
    yield one
    one.close()


def replace_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let the child of a test run other code for DOCX files: it reads modules from `sys.path`."""
    (tmp_path / "stub_child.py").write_text(
        "import ctypes, sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "from lib.corpus.extract import child, table\n"
        f"def extract(data, fallback):\n    {code}\n"
        "child.load_extractor = lambda kind: extract\n"
        "child._set_up()\nchild.serve_requests(Connection(int(sys.argv[1])))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "__name__", "stub_child")


def test_a_page_that_makes_the_library_hang_is_reported_and_the_next_one_is_read(extractor):
    hostile = b"<div>" * 200_000  # takes minutes
    with pytest.raises(Refusal, match="processor time") as caught:
        extractor.extract("html", hostile, "", 1)
    assert caught.value.kind == "timeout"
    assert extractor.extract("html", PAGE.encode(), "", 1).text == "One two\n\nthree"
    nested = b"<html><body>" + b"<b>" * 10_000 + b"deep"
    assert extractor.extract("html", nested, "", 20).text == "deep"


@pytest.mark.parametrize(
    ("code", "kind", "cause"),
    [
        ("ctypes.string_at(0)", "crash", "signal 11"),
        ("sys.exit(3)", "crash", "exit code 3"),
        ("time.sleep(60)", "timeout", "0.1 s in all"),
        ("bytearray(3 << 30)", "too large", "2 GiB"),
        ("return (b'x' * 64_000_001).decode(), 0, ''", "too large", "64,000,001 bytes"),
        ("raise KeyError('x')", "damaged", "KeyError: 'x'"),
    ],
)
def test_the_death_of_the_child_is_explained(
    extractor, monkeypatch, tmp_path, code: str, kind: str, cause: str
):
    replace_child(monkeypatch, tmp_path, code)
    with pytest.raises(Refusal) as caught:
        extractor.extract("docx", b"", "", 0.02 if "sleep" in code else 20)
    assert caught.value.kind == kind and cause in caught.value.message


def test_the_memory_of_the_process_that_starts_a_child_is_not_taken_for_its_own(tmp_path: Path):
    """Linux counts it in the child's peak."""
    script = """
import sys
from pathlib import Path
ballast = b"x" * (1200 << 20)
import pytest
from tests.corpus import test_extract
with pytest.MonkeyPatch.context() as patch:
    cases = [("sys.exit(3)", "crash", "code 3"), ("1 / 0", "damaged", "ZeroDivisionError")]
    for number, (code, kind, cause) in enumerate(cases):
        one = test_extract.Extraction()
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        test_extract.replace_child(patch, folder, code)
        with pytest.raises(test_extract.Refusal) as caught:
            one.extract("docx", b"", "", 20)
        assert (caught.value.kind, cause in caught.value.message) == (kind, True), caught.value
        one.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the child imports from there as well
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True)


# --- kinds, packages and the survey ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a", b"%PDF-1.7\n", "pdf"),
        ("a.pdf", b"junk\n%PDF-1.7", "pdf"),
        ("a.txt", b"the magic of a PDF is %PDF-", ""),
        ("a", b"\n <!-- a > b --><!DOCTYPE HTML PUBLIC>", "html"),
        ("a", b'<?xml version="1.0"?>\n<html xmlns="x">', "html"),
        ("a", "\ufeff<HTML>".encode("utf-16"), "html"),
        ("a", b"\xef\xbb\xbf<html>", "html"),
        ("a", b"<htmlx>", ""),
        ("a.html", b"<div>part of a page", "html"),
        ("a.htm.gz", b"<p>", "html"),
        ("a.html", b"no tag: 1 < 2", ""),
        ("a.md", b"<div>a page in Markdown", ""),
        ("a.zip", make_docx(""), "docx"),
        ("a", BOOK, "epub"),
        ("a", make_zip({"mimetype": "application/epub+zip"}, packed=False), "epub"),
        ("a.docx", make_zip({"x": ""}), "docx"),
        ("a.xlsx", make_zip({"xl/workbook.xml": ""}), ""),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ""),
    ],
)
def test_kinds_are_recognised_by_content(name, head, kind):
    assert kinds.sniff_document(name, head) == kind
    if kind in kinds.BINARY_DOCUMENTS:
        assert kinds.sniff_kind(name, head) == kind


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def find(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find)
    with pytest.raises(UsageError, match=r"--extract docx .*mammoth"):
        extraction.require_extraction(RowOptions(extract=["docx"]))
    with pytest.raises(UsageError, match=r"--extract html .*resiliparse") as caught:
        extraction.require_extraction(RowOptions(extract=["html"]))
    assert "pip install resiliparse==" in caught.value.run
    with pytest.raises(UsageError, match="pypdfium2"):
        extraction.require_extraction(RowOptions(extract=ALL))


def test_the_identity_contains_the_versions():
    assert extraction.identify_extraction(RowOptions()) == {}
    versions = extraction.identify_extraction(RowOptions(extract=["html", "docx"]))["extract"]
    assert versions["html"].startswith("2, resiliparse ")
    assert versions["docx"].startswith("2, mammoth ")


def test_the_order_of_the_kinds_does_not_affect_the_options():
    build = importlib.import_module("02_build_hf_dataset")
    expected = build.parse(["--extract", "html,pdf"])
    assert expected.extract == ["html", "pdf"]
    assert build.parse(["--extract", "pdf", "--extract", "html,pdf"]) == expected


def test_documents_are_counted_before_they_are_read(tmp_path, monkeypatch):
    for name in ("a.html", "b.HTM.gz", "c.pdf", "d.pdf", "e.docx", "f.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "page").write_text(PAGE)
    files, _ = inputs.find_inputs(tmp_path, False)
    counts = extraction.count_documents(tmp_path, files)
    assert counts == {"html": 3, "pdf": 2, "docx": 1}
    text = extraction.describe_skipped(counts, [])
    assert "2 PDF and 1 DOCX" in text and "3 HTML files" in text
    assert "--extract html,pdf,docx --overwrite" in text
    assert "HTML" not in extraction.describe_skipped(counts, ["html"])
    assert "1 DOCX file" in extraction.describe_skipped({"docx": 1}, [])
    assert not extraction.describe_skipped(counts, ALL)
    monkeypatch.setattr(extraction, "find_version", lambda package: "")
    assert "pip install resiliparse" in extraction.describe_skipped({"html": 1}, [])
    monkeypatch.setattr(extraction, "_MOST_OPENED", 1)
    assert extraction.count_documents(tmp_path, files) == counts
