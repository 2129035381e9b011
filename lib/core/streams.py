"""Let standard output and standard error survive a reader that leaves early (`| head`).

A run that trains, builds or exports continues: further output is dropped, while logs, metrics and
the exit code stay the same. A command that only prints exits.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

EXIT_READER_LEFT = 141  # as for a process that SIGPIPE ends: 128 + 13


class _Outlet(io.FileIO):
    """Writes to a descriptor until its reader closes it, and drops the rest.

    only_shows: the process does nothing but print, so it exits instead.
    """

    def __init__(self, descriptor: int, only_shows: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._only_shows = only_shows

    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        """Write data, or drop it if nobody reads it or the disk is full.

        With `only_shows`, exit if nobody reads it, and raise other errors.
        """
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                if self._only_shows:
                    raise
                return len(data)
            if self._only_shows:
                os._exit(EXIT_READER_LEFT)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers(only_shows: bool = False) -> None:
    """Let standard output and standard error survive their readers.

    File names that are not UTF-8 are printed with backslashes, whatever the locale. only_shows: for
    a command that only prints.
    """
    sys.stdout = _wrap_stream(sys.stdout, 1, only_shows)
    sys.stderr = _wrap_stream(sys.stderr, 2, only_shows)


def _wrap_stream(stream: TextIO, descriptor: int, only_shows: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # a test's stream, or none
        return stream
    try:
        is_usual = stream.fileno() == descriptor
    except (OSError, ValueError):
        is_usual = False
    if not is_usual or isinstance(getattr(stream.buffer, "raw", None), _Outlet):
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(descriptor, only_shows)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
