"""Render pages of one HTML file without scripts and requests. All text is escaped."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import markupsafe
from markupsafe import Markup

from lib.core import units
from lib.core.errors import make_visible

_LIB = Path(__file__).resolve().parents[1]  # the names of templates are paths from here
_LONGEST = 400  # bytes of a text as HTML, unless a template allows more
_TORN = re.compile(r"&[^;]*$")  # a character reference that was cut
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def escape(text: object, most: int = _LONGEST) -> Markup:
    """Return a text as HTML of at most `most` bytes, with all control characters visible.

    A longer text is cut, and a note follows. Markup is returned as it is.
    """
    if isinstance(text, Markup):
        return text
    plain = make_visible(text)
    data = markupsafe.escape(plain).encode()
    if len(data) <= most:
        return Markup(data.decode())
    shown = Markup(_TORN.sub("", data[:most].decode(errors="ignore")))
    rest = len(plain.encode()) - len(shown.unescape().encode())
    return Markup(f"{shown} … ({rest:,} more bytes)")


def render_template(template: str, **values: object) -> str:
    """Return a template with its values. template: its path in lib/, `report/report.html.j2`."""
    return ENVIRONMENT.get_template(template).render(values)


def is_page(text: str) -> bool:
    """Return whether a text is a page that `render_template` has made."""
    return f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">' in text


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_LIB),
    autoescape=True,
    finalize=escape,  # so a text needs no filter to be escaped and cut
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals["policy"] = Markup(_POLICY)
ENVIRONMENT.filters.update(cut=escape, number="{:,}".format, size=units.size)
