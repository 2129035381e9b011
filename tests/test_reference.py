# covers: docs/reference/*.md, lib/runs/events.py, lib/runs/figures.py
"""Check docs/reference/ against the code, and the code against the tables behind it."""

from __future__ import annotations

import ast
import json
import re

import pytest

from lib.runs.events import DESCRIPTIONS, Event
from lib.runs.figures import METRICS, STATE, Status, documented_name
from tests import reference
from tests.reference import ROOT

FIGURE = re.compile(r"(train|perf|memory|eval|experts|time)/[a-z_]*[a-z]")


@pytest.mark.parametrize("page", reference.GENERATORS)
def test_a_generated_page_is_current(page: str) -> None:
    text = (reference.PAGES / page).read_text(encoding="utf-8")
    assert text == reference.GENERATORS[page](), "run `make reference`"


def test_some_module_writes_each_event() -> None:
    assert set(reference.event_writers()) == set(DESCRIPTIONS) == set(Event)


def test_events_have_no_undocumented_fields() -> None:
    calls = [
        (path.name, event, fields)
        for path in [*sorted((ROOT / "lib").rglob("*.py")), *reference.STAGES]
        for event, fields in reference.event_calls(path)
    ]
    assert len(calls) >= len(Event)
    assert not [call for call in calls if call[2] - set(DESCRIPTIONS[call[1]].fields)]


def test_every_figure_that_the_code_names_is_documented() -> None:
    named = {
        node.value
        for path in sorted((ROOT / "lib").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and FIGURE.fullmatch(node.value)
    }
    assert "train/loss" in named and not named - set(METRICS)


def test_every_status_is_documented_and_written_as_its_value() -> None:
    assert {*re.findall(r"`(\w+)`", STATE["status"].meaning)} == {*Status}
    assert f"{Status.DISK_FULL} {Status.DISK_FULL!s}" == "disk_full disk_full"
    assert json.dumps(Status.RUNNING) == '"running"'


def test_keys_with_a_number_or_a_name_are_documented_once() -> None:
    assert documented_name("experts/layer_07/starved") in METRICS
    assert documented_name("eval/loss/corpus-a") in METRICS
    assert documented_name("train/loss") == "train/loss"
