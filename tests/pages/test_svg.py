# covers: lib/pages/svg.py, lib/pages/series.py, lib/pages/page.py, lib/pages/style.css
# covers: lib/pages/page.html.j2, lib/pages/parts.html.j2, lib/pages/chart.svg.j2
"""Charts and pages without a run: hostile numbers and texts, gaps, and a strict check of HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import jinja2
import numpy as np
import pytest

from lib.pages import page, svg
from lib.pages.svg import COLUMNS, Line

VOID = {"meta", "path", "line", "circle"}
PAGE = """{% extends "pages/page.html.j2" %}
{% from "pages/parts.html.j2" import legend, sample, table %}
{% block main %}<h1>{{ title }}</h1>
"""
HOSTILE = "</svg><script>alert(1)</script>\u202e\x1b[31m\ud800&\"'"


class StrictParser(HTMLParser):
    """Asserts that all elements are closed in order, and collects ids, links and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[int] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert len(values) == len(attrs), f"an attribute twice: {attrs}"
        assert not {"src", "srcset", "data", "action", "onload", "onclick"} & {*values}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []
        self.headings += [int(tag[1])] if re.fullmatch(r"h\d", tag) else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "head" not in self.open:
            self.text += data


def check_page(text: str) -> StrictParser:
    """Assert that a page is well-formed, asks for nothing and can be read; return what it says."""
    parser = StrictParser()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    assert all(link[0] == "#" and link[1:] in parser.ids for link in parser.links)
    assert not re.search(r"\ssrc=|href=\"http|<script|@import|url\(", text.lower())
    assert "content=\"default-src 'none'; style-src 'unsafe-inline';" in text
    assert '<html lang="en">' in text
    assert parser.headings[0] == 1 and parser.headings.count(1) == 1
    steps = zip(parser.headings, parser.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps), "a level of headings is skipped"
    assert text.count("<svg role=") == text.count("<desc id=") == text.count('-d" class="chart"')
    assert text.count("<th>") == 0, "each heading of a table has a scope"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    return parser


def make_curve(values: dict[int, float], **more: object) -> Line:
    """Return a curve with values in some columns; NaN is a gap."""
    low = np.full(COLUMNS, np.inf)
    gaps = np.zeros(COLUMNS, dtype=bool)
    for column, value in values.items():
        low[column] = value if np.isfinite(value) else np.inf
        gaps[column] = not np.isfinite(value)
    return Line("curve", low, np.where(np.isfinite(low), low, -np.inf), gaps, **more)


def render_page(main: str, **values: object) -> str:
    """Return a page. main: the template of what follows its title."""
    template = page.ENVIRONMENT.from_string(PAGE + main + "{% endblock %}")
    return template.render({"title": "title", **values})


def draw_chart(*curves: Line, form: str = "", end: float = 1000.0) -> str:
    """Return a page with one chart, which passes the check."""
    chart = svg.draw_chart("key", "Title", "unit", form, curves, end, [("tokens", str)])
    check_page(render_page("{{ legend(curves) }}{{ chart }}", chart=chart, curves=curves))
    assert not re.search(r"nan|inf\b", chart)
    return chart


def test_a_gap_interrupts_a_line_and_a_single_point_is_a_dot() -> None:
    chart = draw_chart(make_curve({0: 1.0, 1: 2.0, 5: float("nan"), 7: 3.0, 9: float("inf")}))
    (path,) = re.findall(r'<path d="(M[^"]*)"/>', chart)
    first, second = path[1:].split("M")
    assert first.count("L") == 1 and second.count("L") == 0 and second.endswith("h0")


def test_a_spike_stays_visible_in_a_band() -> None:
    curve = make_curve(dict.fromkeys(range(COLUMNS), 1.0))
    high = curve.high + 0.1
    high[17] = 50.0
    chart = draw_chart(curve._replace(high=high))
    assert "band" in chart
    heights = [float(y) for y in re.findall(r",([\d.]+)", chart.split("band")[1])]
    assert min(heights) < 60 < 200 < sorted(heights)[1]


@pytest.mark.parametrize("form", ["", "zero", "log", "wide", "wide log"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {3: 0.0},
        {3: -5.0, 4: -5.0},
        {0: 1e-300, 419: 1e29},
        {0: 3.0, 1: 3.0000000000000004},
        {0: 5e-324},
        {0: float("nan")},
    ],
)
def test_any_numbers_give_a_chart(values: dict[int, float], form: str) -> None:
    draw_chart(make_curve(values), form=form)
    draw_chart(make_curve(values, form="marked"), make_curve({2: 1.0}, style=7), form=form, end=1.0)


def test_an_area_lies_between_its_edges() -> None:
    upper = make_curve({0: 2.0, 1: 2.0}, form="area")
    chart = draw_chart(
        upper._replace(low=np.where(np.isfinite(upper.low), 1.0, np.inf)), form="zero"
    )
    (path,) = re.findall(r'<path class="sum" d="(M[^"]*)"/>', chart)
    assert len({point.split(",")[1] for point in path[1:-2].split("L")}) == 2


def test_hostile_text_is_shown_and_does_nothing() -> None:
    main = """{{ table(text, [text, "b"], [[text, text]]) }}{{ sample(text, 400) }}
        <p id="{{ text }}">{{ text ~ "" }}</p>"""
    parsed = check_page(render_page(main, title=HOSTILE, text=HOSTILE))
    assert parsed.text.count("<script>alert(1)</script>\\u202e\\x1b[31m\\ud800&\"'") == 7


def test_a_page_lacks_no_value() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render_page("{{ titel }}")


def test_long_texts_and_tables_are_cut_and_say_so() -> None:
    assert page.escape("ä" * 10, 9) == "ääää … (12 more bytes)"
    assert page.escape('"a' * 3, 13) == "&#34;a&#34;a … (2 more bytes)"
    assert page.escape("&" * 9, 44) == "&amp;" * 8 + " … (1 more bytes)"
    text = render_page('{{ table("all", ["n"], rows) }}', rows=[[n] for n in range(100)])
    assert text.count("<tr>") == 81 and "first 80 of 100 lines" in text
    text = render_page('{{ table("all", ["n"], rows) }}', rows=[[n] for n in range(80)])
    assert text.count("<tr>") == 81 and "<caption>all</caption>" in text
