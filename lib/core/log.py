"""Rank-aware logging: rank 0 speaks on the console, every rank writes its own file."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from lib.core.appended import AppendedFile
from lib.core.errors import visible

_logger = logging.getLogger("pipeline")


class _Console(logging.StreamHandler):
    """Prints plain lines; warnings carry their level, other ranks than 0 their number.

    shows_times: print the time of day and the rank, rank 0 included, before each line of a text.
    """

    shows_times = False

    def format(self, record: logging.LogRecord) -> str:
        text = visible(record.getMessage())
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if (rank() or self.shows_times) and not text.startswith("[rank="):
            text = _before_lines(f"[rank={rank()}] ", text)
        return _before_lines(time.strftime("%H:%M:%S "), text) if self.shows_times else text

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, above a progress bar if there is one."""
        if (tqdm := sys.modules.get("tqdm")) is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be printed: nobody could be told."""


def _before_lines(prefix: str, text: str) -> str:
    return prefix + text.replace("\n", f"\n{prefix}")


class _RankFile(logging.Handler):
    """Appends each line to a file; that the file fails is told once, on the console."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendedFile(path)
        self._may_fail = Tolerated(str(path))

    def emit(self, record: logging.LogRecord) -> None:
        with self._may_fail:
            text = visible(self.format(record))
            self._file.write(f"{text}\n".encode(errors="backslashreplace"))


class Tolerated:
    """Lets writing fail without ending the run: of failures in a row the first one is told.

    >>> with may_fail:          # Tolerated("metrics.jsonl")
    ...     file.write(line)

    what: is written, or whatever `done` says, as a sentence names it. errors: that may be.
    """

    def __init__(self, what: str, *errors: type[Exception], done: str = "written") -> None:
        self._what = what
        self._errors = errors or (OSError,)
        self._done = done
        self.is_failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, self._errors):
            return False
        if (error is not None) != self.is_failing:
            self.is_failing = error is not None
            if error is None:
                info(f"{self._what} can be {self._done} again")
            else:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                warn(
                    f"{self._what} cannot be {self._done}: {why}; the run goes on, and this is "
                    "told once"
                )
        return True


def rank() -> int:
    """Return this process's rank under torchrun, 0 without it."""
    return int(os.environ.get("RANK", "0"))


def setup(stream: TextIO | None = None) -> None:
    """Send log lines to the console: all of rank 0's, warnings of the others.

    stream: another than the standard output, of a command that prints a document there.
    """
    console = _Console(stream or sys.stdout)
    console.setLevel(logging.INFO if rank() == 0 else logging.WARNING)
    _logger.handlers = [console]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def show_times(are_shown: bool) -> None:
    """Let lines on the console begin with the time of day and the rank, or no longer."""
    for handler in _logger.handlers:
        if isinstance(handler, _Console):
            handler.shows_times = are_shown


def setup_unless_heard() -> None:
    """Send log lines to the console where the program that called a function hears none."""
    if not _logger.hasHandlers():
        setup()


def add_file(path: Path) -> None:
    """Also append every line of this rank, with its time, to a file; it may fail at any time."""
    handler = _RankFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _logger.addHandler(handler)


def info(text: str) -> None:
    """Tell the reader of the log something expected."""
    _logger.info(text)


def to_console(text: str) -> None:
    """Tell the reader of the console alone; rank 0 only."""
    if rank() == 0:
        _pass_on(text, logging.INFO, to_files=False)


def to_file(text: str) -> None:
    """Note something expected in this rank's file alone."""
    _pass_on(text, logging.INFO, to_files=True)


def warn(text: str) -> None:
    """Tell the reader of the log something that wants attention."""
    _logger.warning(text)


def error(text: str) -> None:
    """Note in this rank's file what ends the run (the console gets it from the stage's exit)."""
    _pass_on(text, logging.ERROR, to_files=True)


def _pass_on(text: str, level: int, to_files: bool) -> None:
    for handler in _logger.handlers:
        if isinstance(handler, _RankFile) == to_files:
            handler.handle(_logger.makeRecord(_logger.name, level, "", 0, text, (), None))


def table(rows: Mapping[str, object]) -> None:
    """Print a plan or a summary: one aligned `name  value` line per row."""
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        info(f"  {name:<{width}}  {value}")
