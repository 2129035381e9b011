"""Exchange notes between the launchers of all nodes, in a directory that they share.

Each node keeps rewriting one small file and reads the head's file; the head reads them all. A node
whose file no longer changes counts as lost. Clocks are not compared.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import records
from lib.core.errors import UsageError, from_os_error
from lib.core.liveness import SilenceClock

HEAD = 0
SILENT_S = 90.0  # network file systems may show a change a minute late
_MAX_GAP_S = 5.0  # time between two passes that may count as silence
_PHASE_FIELDS: dict[str, dict[str, type]] = {
    "run": {"members": dict, "found": str},
    "ended": {"outcome": dict},
    "leave": {"code": int},
}


class NoteBoard:
    """Writes this node's note and reads those of others.

    directory: None if this is the only node. me: identifies this launcher, so that the others
    notice when a node comes back as a new process.
    """

    def __init__(self, directory: Path | None, node: int) -> None:
        self.directory = directory
        self.node = node
        self.me = uuid.uuid4().hex
        self._beat = 0
        self._clock = SilenceClock(_MAX_GAP_S)
        self._last: dict[int, dict[str, Any]] = {}

    def post(self, **facts: Any) -> None:
        """Replace this node's note. Errors are ignored, since the next note may succeed."""
        if self.directory is None:
            return
        self._beat += 1
        with suppress(OSError):
            path = self._write({"me": self.me, "beat": self._beat, **facts})
            path.replace(self.directory / _note_name(self.node))

    def require_writable(self) -> None:
        """Raise UsageError if this node cannot write notes, since the others would wait for it."""
        if self.directory is None:
            return
        try:
            with suppress(FileNotFoundError):  # an earlier launch may just delete the directory
                self._write({}).unlink()
        except OSError as error:
            stage_error = from_os_error(error)
            raise (UsageError if stage_error is None else type(stage_error))(
                f"the launchers of all nodes exchange notes in {self.directory}, which cannot be "
                "written",
                found=os.strerror(error.errno or 0),
                hint="choose another --save-dir, on a file system that all nodes share",
            ) from None

    def _write(self, note: dict[str, Any]) -> Path:
        """Write a note to a temporary file and return its path."""
        assert self.directory is not None  # the callers check this
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = (self.directory / _note_name(self.node)).with_suffix(".tmp")
        temporary.write_text(json.dumps(note))
        return temporary

    def look(self) -> None:
        """Begin a new look at all notes; call this before reading them, to measure silence."""
        self._clock.look()

    def read(self, node: int) -> dict[str, Any]:
        """Return a node's note, empty if there is none, and record whether it has changed."""
        note = self._read(node)
        self._clock.note(node, (note["me"], note["beat"]) if note else None)
        return note

    def _read(self, node: int) -> dict[str, Any]:
        if self.directory is None:
            return {}
        try:
            note = records.read_json(self.directory / _note_name(node))
            self._last[node] = note if _is_valid_note(note) else {}
        except FileNotFoundError:
            self._last[node] = {}
        except (OSError, ValueError):  # a network file system may fail briefly: keep the last note
            pass
        return self._last.get(node, {})

    def is_silent(self, node: int) -> bool:
        """Return whether a node's note has not changed for SILENT_S seconds."""
        return self._clock.silence(node) > SILENT_S

    def is_alive(self, node: int) -> bool:
        """Return whether a node has renewed its note within the last SILENT_S seconds."""
        return self._clock.has_changed(node) and not self.is_silent(node)

    def delete_notes(self, everyone: bool = False) -> None:
        """Delete this node's note, or everyone's, and the directory if it is empty then."""
        if self.directory is not None:
            with suppress(OSError):  # the directory may still contain notes of others
                for path in self.directory.glob("node_*" if everyone else _note_name(self.node)):
                    path.unlink()
                self.directory.rmdir()
                self.directory.parent.rmdir()


def _is_valid_note(note: Any) -> bool:
    """Return whether a note has the fields that launchers read, with values of the right types."""
    if not isinstance(note, dict):
        return False
    kinds: dict[str, type] = {
        "me": str,
        "beat": int,
        "phase": str,
        "round": int,
        "stop": str,
        "gave_up": bool,
    }
    kinds |= _PHASE_FIELDS.get(str(note.get("phase")), {})
    optional_kinds = {
        "members": dict,
        "found": str,
        "code": int,
        "has_begun": bool,
        "is_over": bool,
    }
    kinds |= {key: kind for key, kind in optional_kinds.items() if key in note}
    return all(type(note.get(key)) is kind for key, kind in kinds.items())


def _note_name(node: int) -> str:
    return f"node_{node:05d}.json"
