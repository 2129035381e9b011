"""Build a page of one HTML file without scripts and requests. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from lib.core import run_records

MOST_ROWS = 80  # of a table
_LONGEST = 400  # bytes of a text, unless a caller allows more
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Html(str):
    """A text that is HTML already; all other texts are escaped."""


def escape(text: object, most: int = _LONGEST) -> Html:
    """Return a text as HTML, cut after `most` bytes, with all control characters visible."""
    if isinstance(text, Html):
        return text
    data = run_records.make_visible(str(text)).encode()
    rest = f" … ({len(data) - most:,} more bytes)" if len(data) > most else ""
    return Html(html.escape(data[:most].decode(errors="ignore") + rest))


def tag(name: str, *parts: object, **attributes: str) -> Html:
    """Return an element; `class_` stands for the attribute `class`."""
    words = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{words}>" + "\n".join(map(escape, parts)) + f"</{name}>")


def table(caption: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> Html:
    """Return a table with column headings; the first cell of each row is its heading."""
    lines = [tag("tr", *(tag("th", name, scope="col") for name in head))]
    for first, *others in rows[:MOST_ROWS]:
        cells = (tag("td", cell) for cell in others)
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    more = f"; {len(rows) - MOST_ROWS:,} more rows are left out" if len(rows) > MOST_ROWS else ""
    return tag("div", tag("table", tag("caption", caption + more), *lines), class_="scroll")


def page(title: str, parts: Sequence[object]) -> Html:
    """Return a whole page."""
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return Html(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{tag('main', *parts)}\n</body>\n</html>\n"
    )
