"""Build a page of one HTML file without scripts and requests. All text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from lib.core import run_records

MOST_ROWS = 80  # rows of a table, unless a caller allows more
_LONGEST = 400  # bytes of a text as HTML, unless a caller allows more
_TORN = re.compile(r"&[^;]*$")  # a character reference that was cut
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Html(str):
    """A text that is HTML already; all other texts are escaped."""


def escape(text: object, most: int = _LONGEST) -> Html:
    """Return a text as HTML of at most `most` bytes, with all control characters visible.

    A longer text is cut, and a note follows.
    """
    if isinstance(text, Html):
        return text
    plain = run_records.make_visible(str(text))
    data = html.escape(plain).encode()
    if len(data) <= most:
        return Html(data.decode())
    shown = _TORN.sub("", data[:most].decode(errors="ignore"))
    rest = len(plain.encode()) - len(html.unescape(shown).encode())
    return Html(f"{shown} … ({rest:,} more bytes)")


def tag(name: str, *parts: object, **attributes: str) -> Html:
    """Return an element; `class_` stands for the attribute `class`."""
    words = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{words}>" + "\n".join(map(escape, parts)) + f"</{name}>")


def table(
    caption: str,
    head: Sequence[object],
    rows: Sequence[Sequence[object]],
    most: int = MOST_ROWS,
) -> Html:
    """Return a table of at most `most` rows. The first cell of each row is its heading."""
    lines = [tag("tr", *(tag("th", name, scope="col") for name in head))]
    for first, *others in rows[:most]:
        cells = (tag("td", cell) for cell in others)
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    more = (
        f"; the table shows the first {most:,} of {len(rows):,} lines" if len(rows) > most else ""
    )
    return tag("div", tag("table", tag("caption", caption + more), *lines), class_="scroll")


def is_page(text: str) -> bool:
    """Return whether a text is a page that `page` has made."""
    return f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">' in text


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
