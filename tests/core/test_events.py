"""The names of events: the documented ones, and those that readers look for."""

from __future__ import annotations

import json
import re

from lib.core.events import PROBLEMS, Event
from tests.conftest import ROOT


def test_the_documentation_lists_every_event_and_no_other() -> None:
    page = (ROOT / "docs/reference/artifacts.md").read_text(encoding="utf-8")
    table = (
        page.partition("events.jsonl (stage 04)")[2].partition("| event |")[2].partition("\n\n")[0]
    )
    names = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert names == {event.value for event in Event}


def test_a_name_read_from_a_file_is_the_event() -> None:
    line = json.dumps({"event": Event.LOCAL_SAVE_FAILED})
    assert json.loads(line)["event"] in PROBLEMS
