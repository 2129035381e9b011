"""Make small PDF, DOCX and EPUB files, without the libraries that read them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
_WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def make_pdf(pages: Sequence[str], trailer: str = "") -> bytes:
    """Return a PDF with these pages; an empty page has no text. trailer: more entries of it."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, page in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * index} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        lines = " ".join(f"({line}) Tj T*" for line in page.split("\n"))
        stream = f"BT /F1 12 Tf 72 720 Td 14 TL {lines} ET".encode("latin-1") if page else b""
        objects.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(stream), stream))
    data = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    return data + (
        b"xref\n0 %d\n0000000000 65535 f \n%b" % (count, table)
        + b"trailer << /Size %d /Root 1 0 R %b >>\n" % (count, trailer.encode())
        + b"startxref\n%d\n%%%%EOF\n" % len(data)
    )


def make_zip(members: dict[str, str | bytes], packed: bool = True) -> bytes:
    """Return a zip archive with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else 0) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=8 if packed else 0)
    return file.getvalue()


def paragraph(text: str, properties: str = "") -> str:
    """Return a paragraph of WordprocessingML."""
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def make_docx(body: str, more: dict[str, str | bytes] | None = None) -> bytes:
    """Return a DOCX with this body. more: further members."""
    return make_zip(
        {
            "[Content_Types].xml": "<Types/>",
            "word/document.xml": f"<w:document {_WORD}><w:body>{body}</w:body></w:document>",
            **(more or {}),
        }
    )


def make_notes(*notes: str) -> str:
    """Return the part with the footnotes, whose IDs count from 1."""
    texts = "".join(
        f'<w:footnote w:id="{number}">{paragraph(note)}</w:footnote>'
        for number, note in enumerate(notes, 1)
    )
    return f"<w:footnotes {_WORD}>{texts}</w:footnotes>"


def make_epub(
    chapters: dict[str, str | bytes],
    spine: Sequence[str],
    more: dict[str, str | bytes] | None = None,
) -> bytes:
    """Return an EPUB. chapters: content by name, below OEBPS. spine: names in reading order."""
    items = "".join(
        f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"'
        f"{' properties=' + chr(34) + 'nav' + chr(34) if name.startswith('nav') else ''}/>"
        for name in chapters
    )
    references = "".join(f'<itemref idref="{name}"/>' for name in spine)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf">'
        f"<manifest>{items}</manifest><spine>{references}</spine></package>"
    )
    return make_zip(
        {
            "META-INF/container.xml": CONTAINER,
            "OEBPS/book.opf": package,
            **{f"OEBPS/{name}": content for name, content in chapters.items()},
            **(more or {}),
        }
    )
