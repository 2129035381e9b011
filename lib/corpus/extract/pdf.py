"""Extract the text layer of a PDF with pypdfium2."""

from __future__ import annotations

from lib.core import units
from lib.corpus.extract.extracted import (
    DAMAGED,
    ENCRYPTED,
    NO_TEXT,
    Extracted,
    Refusal,
    clean_text,
)

_NEEDS_PASSWORD = 4  # FPDF_ERR_PASSWORD
_UNKNOWN_SECURITY = 5  # FPDF_ERR_SECURITY
_HYPHEN = "\ufffe"  # stands for a hyphen at the end of a line, and for the line end


def extract_pdf(data: bytes, fallback: str) -> Extracted:
    """Return the text of all pages, in the order of the pages, separated by a blank line.

    fallback: unused, since a PDF maps its characters to Unicode itself. Raises Refusal if the file
    yields no text.
    """
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (_NEEDS_PASSWORD, _UNKNOWN_SECURITY):
            raise Refusal(ENCRYPTED, "the PDF file is encrypted") from None
        raise Refusal(DAMAGED, f"the PDF file is damaged: {error}") from None
    texts = []
    unreadable = []
    for number in range(len(document)):
        try:
            page = document[number]
            layer = page.get_textpage()
            texts.append(layer.get_text_range())
            layer.close()
            page.close()
        except pypdfium2.PdfiumError:
            unreadable.append(number + 1)
    pages = len(document)
    if pages == len(unreadable):
        raise Refusal(DAMAGED, "the PDF file is damaged: it has no page that can be read")
    text = clean_text("\n\n".join(filter(None, (clean_text(text) for text in texts))))
    text = text.replace(_HYPHEN, "")
    if not text:
        raise Refusal(
            NO_TEXT,
            f"the PDF file has {units.counted(pages, 'page')} without text; they may be scanned "
            "images",
        )
    lost = ""
    if unreadable:
        lost = (
            f"{units.counted(len(unreadable), 'page')} of {pages:,} cannot be read, the first is "
            f"page {unreadable[0]:,}"
        )
    return Extracted(text, 0, lost)
