"""Extract the main text of an HTML page with resiliparse."""

from __future__ import annotations

import codecs
import re
from typing import Any

from lib.corpus import encoding, kinds
from lib.corpus.extract.extracted import NO_TEXT, Extracted, Refusal, clean_text

_HEAD = 4096  # bytes in which a page may declare its encoding; browsers look at 1024
_DECLARED = re.compile(
    rb"""<(?:meta\s[^>]*?charset|\?xml\s[^>]*?encoding)\s*=\s*["']?\s*([\w.:+-]+)""", re.IGNORECASE
)
_FIGURE = re.compile(r"<(/?)(?:figure|figcaption)\b", re.IGNORECASE)
# Browsers read these encodings as Windows-1252, which contains all of their letters.
_AS_CP1252 = {"iso8859-1", "ascii", "latin_1"}
# Text in these encodings consists of ASCII bytes, so it looks like UTF-8.
_SEVEN_BIT = ("iso2022", "hz", "utf-7")


def extract_html(data: bytes, fallback: str) -> Extracted:
    """Return the main text of a page, or all its text if it has no main part.

    fallback: encoding of a page that declares none and is not UTF-8, "" to replace invalid bytes.
    Raises Refusal if the page yields no text.
    """
    page, replaced = decode_page(data, fallback)
    for is_main in (True, False):
        text = convert_page(page, is_main)
        if text:
            return Extracted(text, replaced)
    raise Refusal(NO_TEXT, "the HTML page contains no text, only tags")


def convert_page(page: str, is_main: bool = False) -> str:
    """Return the text of a page. is_main: leave out navigation, advertisements and the like."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    # For resiliparse, a NUL ends the text, a lone surrogate is an error, and no text of a figure
    # counts.
    tree = HTMLTree.parse(_FIGURE.sub(r"<\1div", clean_text(page)))
    if is_main and tree.body:
        _deepen(tree)
    return clean_text(
        extract_plain_text(
            tree,
            preserve_formatting=True,
            main_content=is_main,
            list_bullets=True,
            alt_texts=False,
            links=False,
            form_fields=False,
            noscript=False,
            hidden_elements=True,  # names such as `hidden-xs`, which hide text on small screens
        )
    )


def _deepen(tree: Any) -> None:
    """Put three elements around the content of a page.

    The heuristics of resiliparse take a list for navigation if fewer than three elements are
    between it and the body.
    """
    outer, middle, inner = (tree.create_element("div") for _ in range(3))
    while tree.body.first_child is not None:
        inner.append_child(tree.body.first_child)
    middle.append_child(inner)
    outer.append_child(middle)
    tree.body.append_child(outer)


def decode_page(data: bytes, fallback: str) -> tuple[str, int]:
    """Return the text of a page and the number of replacements in it.

    The encoding is the first of these: that of a byte order mark, UTF-8 if all bytes are valid, the
    declared encoding, the fallback. UTF-8 precedes the declared encoding because many pages in
    UTF-8 declare another one, and text in another encoding is hardly ever valid UTF-8 by chance.
    """
    declared = _find_declared(data[:_HEAD])
    if kinds.is_utf16(data) or not declared:
        return encoding.decode_text(data, fallback)
    if not declared.startswith(_SEVEN_BIT):
        try:
            return data.removeprefix(kinds.UTF8_BOM).decode(), 0
        except UnicodeDecodeError:
            pass
    if declared.startswith(("utf-8", "utf-16", "utf-32")):  # the bytes contradict it
        return encoding.decode_text(data, fallback)
    text = data.decode(declared, "replace")
    return text, text.count(encoding.REPLACEMENT)


def _find_declared(head: bytes) -> str:
    """Return the name of the declared encoding as Python spells it, "" if there is none."""
    if not (match := _DECLARED.search(head)):
        return ""
    try:
        name = encoding.parse_encoding_name(match[1].decode("ascii"))
    except Exception:  # argparse's error: unknown to Python, or no encoding of text
        return ""
    return "cp1252" if codecs.lookup(name).name in _AS_CP1252 else name
