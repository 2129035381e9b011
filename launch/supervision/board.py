"""Keeps notes that the launchers of all nodes leave for each other, in a directory they share.

Each node writes one small file of its own, again and again, and reads the head's; the head reads
them all. A file that no longer changes is that of a node that is gone: no clock is compared.
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
_MOST_PAUSE_S = 5.0
_OF_PHASES: dict[str, dict[str, type]] = {
    "run": {"members": dict, "found": str},
    "ended": {"outcome": dict},
    "leave": {"code": int},
}


class NoteBoard:
    """Writes this node's note and reads those of others.

    directory: None when this is the only node, and there is nobody to tell anything. me: names
    this launcher, so that a node that returns is told from the one it was.
    """

    def __init__(self, directory: Path | None, node: int) -> None:
        self.directory = directory
        self.node = node
        self.me = uuid.uuid4().hex
        self._beat = 0
        self._clock = SilenceClock(_MOST_PAUSE_S)
        self._last: dict[int, dict[str, Any]] = {}

    def post(self, **facts: Any) -> None:
        """Replace this node's note; a file system that refuses it now may take the next one."""
        if self.directory is None:
            return
        self._beat += 1
        with suppress(OSError):
            path = self._write({"me": self.me, "beat": self._beat, **facts})
            path.replace(self.directory / _note(self.node))

    def require_writable(self) -> None:
        """Raise an error unless this node can leave notes: the others would wait for it in vain."""
        if self.directory is None:
            return
        try:
            with suppress(FileNotFoundError):  # an earlier launch takes the board down
                self._write({}).unlink()
        except OSError as error:
            known = from_os_error(error)
            raise (UsageError if known is None else type(known))(
                f"{self.directory}, where the launchers of all nodes leave notes for each other, "
                "cannot be written",
                found=os.strerror(error.errno or 0),
                hint="--save-dir DIR names another place, which all nodes have to share",
            ) from None

    def _write(self, note: dict[str, Any]) -> Path:
        """Write a note beside its place; return where it lies."""
        assert self.directory is not None  # or there is nobody to tell
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = (self.directory / _note(self.node)).with_suffix(".tmp")
        temporary.write_text(json.dumps(note))
        return temporary

    def look(self) -> None:
        """Note that a new look at the others begins: only time spent looking counts as silence."""
        self._clock.look()

    def read(self, node: int) -> dict[str, Any]:
        """Return a node's note, empty when there is none; keeps account of when it last changed."""
        note = self._read(node)
        self._clock.note(node, (note["me"], note["beat"]) if note else None)
        return note

    def _read(self, node: int) -> dict[str, Any]:
        if self.directory is None:
            return {}
        try:
            note = records.read_json(self.directory / _note(node))
            self._last[node] = note if _is_sound(note) else {}
        except FileNotFoundError:
            self._last[node] = {}
        except (OSError, ValueError):  # a network file system has its moments: as it was before
            pass
        return self._last.get(node, {})

    def is_silent(self, node: int) -> bool:
        """Tell whether a node's note has not changed for long."""
        return self._clock.silence(node) > SILENT_S

    def is_alive(self, node: int) -> bool:
        """Tell whether a node's note has been seen to change, and not long ago."""
        return self._clock.has_changed(node) and not self.is_silent(node)

    def take_down(self, everyone: bool = False) -> None:
        """Delete this node's note, or everyone's, and the board when it was the last one."""
        if self.directory is not None:
            with suppress(OSError):  # others may have theirs beside it
                for path in self.directory.glob("node_*" if everyone else _note(self.node)):
                    path.unlink()
                self.directory.rmdir()
                self.directory.parent.rmdir()


def _is_sound(note: Any) -> bool:
    """Return whether a note has the fields that launchers read, with values they can work with."""
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
    kinds |= _OF_PHASES.get(str(note.get("phase")), {})
    more = {"members": dict, "found": str, "code": int, "has_begun": bool, "is_over": bool}
    kinds |= {key: kind for key, kind in more.items() if key in note}
    return all(type(note.get(key)) is kind for key, kind in kinds.items())


def _note(node: int) -> str:
    return f"node_{node:05d}.json"
