"""TensorBoard's event file, written without its own thread, whose errors come at a later call."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from lib.core.appended import AppendedFile


class Board:
    """Appends to an event file of its own. Raises ImportError without the package."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._session = \
            event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        # Files are read in the order of their names, as TensorBoard's own writer gives them.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._file = AppendedFile(directory / name, is_text=False)
        self._records = RecordWriter(self._file)
        self._next: list[Any] = [
            self._event(wall_time=time.time(), file_version="brain.Event:2")]

    def begin(self, step: int) -> None:
        """Go on after a step: what this and earlier files say of later ones is void."""
        self._next.append(self._event(
            wall_time=time.time(), step=step + 1,
            session_log=self._session(status=self._session.START)))

    def write(self, figures: dict[str, Any]) -> None:
        """Append the numbers of a row; OSError when they have to wait for the next one."""
        numbers = [self._summary.Value(tag=key, simple_value=value)
                   for key, value in figures.items()
                   if isinstance(value, (int, float)) and key != "step"]
        row = self._event(wall_time=time.time(), step=figures["step"],
                          summary=self._summary(value=numbers))
        events, self._next = [*self._next, row], []
        lost: OSError | None = None
        for event in events:
            try:
                self._records.write(event.SerializeToString())
            except OSError as error:  # the record waits in the file
                lost = error
        if lost is not None:
            raise lost

    def close(self) -> None:
        """Write what waits; OSError when it is lost."""
        self._file.close()
