"""Let only one process at a time write the copies of a run, on a disk or in a bucket.

The holder keeps changing a record that all machines see, as in lib/core/lease.py. A bucket has
neither locks nor links, so two processes that start at the same moment may both begin. The one
whose record was replaced notices that at its next change, and copies no more.

The holder is a child process of the training, and after a failed copy another one takes its turn.
So the record names the training too: a place is abandoned when both processes have ended.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from typing import Any

from lib.checkpoints.copies import CopyPlace
from lib.core import lease, liveness, log, records
from lib.core.errors import StageError, UsageError
from lib.core.retry import poll

RECORD = "LEASE.json"
BEAT_S = 20.0
PATIENCE_S = 70.0  # without a change, until a record of another machine counts as abandoned
_POLL_S = 2.0


class PlaceLease:
    """Holds the right to write a place of copies.

    It ends with `release`, or with this process and the training that it copies for.
    """

    def __init__(self, place: CopyPlace, trainer: dict[str, Any] | None = None) -> None:
        """Take the place. Raises UsageError if another process holds it.

        trainer: the `liveness.process_record` of the process that this one copies for; None if it
        copies for itself.
        """
        self._place = place
        self._trainer = trainer or liveness.process_record(os.getpid())
        self._record = lease.make_record() | {"trainer": self._trainer}
        self._beats = 0
        self._holder = ""  # the process that has taken over
        if earlier := self._read():
            self._require_abandoned(earlier)
        self._write()
        self._is_own()
        self.require_held()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease of copies", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Raise UsageError if another process has taken over the place."""
        if self._holder:
            raise self._make_error(self._holder)

    def release(self) -> None:
        """Let others take the place."""
        self._ended.set()
        self._thread.join()
        with suppress(StageError, OSError):  # then the record looks abandoned
            if self._is_own():
                self._record["released"] = True
                self._write()

    def _require_abandoned(self, earlier: dict[str, Any]) -> None:
        """Raise UsageError if the process of a record is alive; wait if that must be seen."""
        alive = liveness.is_alive(earlier)
        trainer = earlier.get("trainer", earlier)  # records of earlier versions name none
        if alive is False and trainer != self._trainer:
            alive = liveness.is_alive(trainer)
        if earlier.get("released") or alive is False:
            return
        holder = _describe_holder(earlier)
        if alive:
            raise self._make_error(holder)
        log.info(
            f"{self._place.where} was written by {holder}: waiting {PATIENCE_S:.0f} s for a sign "
            "of life"
        )
        now = earlier

        def has_changed() -> bool:
            nonlocal now
            now = self._read()
            return now != earlier

        if poll(has_changed, _POLL_S, PATIENCE_S) and now and not now.get("released"):
            raise self._make_error(_describe_holder(now))

    def _make_error(self, holder: str) -> UsageError:
        return UsageError(
            f"another launch writes the copies in {self._place.where} now",
            found=holder,
            hint="wait for it, stop it, or use another --experiment-name",
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(StageError, OSError):  # a copy fails as well, and says so
                if not self._is_own():
                    return
                self._beats += 1
                self._write()

    def _is_own(self) -> bool:
        """Return whether the record is still this process's, and note another holder."""
        record = self._read()
        if record.get("id", self._record["id"]) == self._record["id"]:
            return True
        self._holder = _describe_holder(record)
        return False

    def _read(self) -> dict[str, Any]:
        """Return the record; empty if there is none, or if it is damaged."""
        try:
            record = records.parse_json(b"".join(self._place.read(RECORD)))
        except (FileNotFoundError, ValueError):
            return {}
        is_valid = isinstance(record, dict) and isinstance(record.get("trainer", {}), dict)
        return record if is_valid else {}

    def _write(self) -> None:
        content = self._record | {"beats": self._beats}
        self._place.write_file(RECORD, json.dumps(content).encode())


def _describe_holder(record: dict[str, Any]) -> str:
    """Return a text about the training that holds a place, as a person would look for it."""
    return lease.describe_holder(record | record.get("trainer", {}))
