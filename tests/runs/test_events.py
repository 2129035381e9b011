# covers: lib/runs/events.py
"""Names of events as files contain them."""

from __future__ import annotations

import json

from lib.runs.events import PROBLEMS, Event


def test_a_name_read_from_a_file_is_the_event() -> None:
    line = json.dumps({"event": Event.LOCAL_SAVE_FAILED})
    assert json.loads(line) == {"event": "local_save_failed"}
    assert json.loads(line)["event"] in PROBLEMS
    assert Event("local_save_failed") is Event.LOCAL_SAVE_FAILED
