"""Turn the XHTML of a book's chapter into text, with its paragraphs."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "div", "dl", "dt"),
    *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header"),
    *("hr", "main", "nav", "ol", "p", "pre", "section", "table", "ul"),
}
_LINES = {"br", "li", "tr"}
_CELLS = {"td", "th"}
_HIDDEN = {"head", "script", "style", "template"}
_SPACE = re.compile(r"[ \t\n\r\f]+")
_TRAILING_SPACE = re.compile(r"[ \t]+\n")
_BLANK_LINES = re.compile(r"\n{3,}")


def strip_tags(page: str) -> str:
    """Return the text of a page without its head.

    Blocks are separated by blank lines, list items and rows by line ends, and cells by tabs. The
    pages of a book have no navigation or advertisements, so all text is kept.
    """
    reader = _ChapterReader()
    reader.feed(page)
    reader.close()
    return reader.join()


class _ChapterReader(HTMLParser):
    """Collects the text between tags. Damaged markup is read as browsers do."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden = ""  # name of the open element whose content is left out
        self._preformatted = 0

    def parse_html_declaration(self, i: int) -> int:
        """Read a declaration such as `<!DOCTYPE html>` at an index, and return where it ends.

        The parser of Python raises AssertionError for `<![` without a keyword after it.
        """
        try:
            return super().parse_html_declaration(i)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Receive the start of an element."""
        if tag == "body":
            self._hidden = ""  # a head that is not closed
        if self._hidden:
            return
        if tag in _HIDDEN:
            self._hidden = tag
        elif tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag in _LINES:
            self._parts.append("\n")
        if tag == "pre":
            self._preformatted += 1

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Receive an element without content, such as `<br/>` or `<script/>`."""
        if tag not in _HIDDEN:
            self.handle_starttag(tag, attrs)
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Receive the end of an element."""
        if self._hidden:
            if tag == self._hidden:
                self._hidden = ""
            return
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag in _CELLS:
            self._parts.append("\t")
        if tag == "pre" and self._preformatted:
            self._preformatted -= 1

    def handle_data(self, data: str) -> None:
        """Receive characters."""
        if self._hidden:
            return
        if not self._preformatted:
            data = _SPACE.sub(" ", data)
            if not self._parts or self._parts[-1].endswith("\n"):
                data = data.lstrip(" ")
        if data:
            self._parts.append(data)

    def join(self) -> str:
        """Return the text; blank lines at the ends of blocks are joined to one."""
        text = _TRAILING_SPACE.sub("\n", "".join(self._parts))
        return _BLANK_LINES.sub("\n\n", text).strip()
