"""Rank-aware logging: rank 0 logs to the console, every rank writes its own file."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lib.core.append_only import AppendOnlyFile
from lib.core.errors import escape_controls

_logger = logging.getLogger("pipeline")


class _Console(logging.StreamHandler):
    """Prints plain lines. Warnings begin with their level, lines of other ranks with the rank.

    shows_times: each line begins with the time of day and the rank, also on rank 0.
    shows_details: whether the lines of `detail` are printed.
    """

    shows_times = False
    shows_details = True

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print a line."""
        return self.shows_details or not getattr(record, "is_detail", False)

    def format(self, record: logging.LogRecord) -> str:
        text = escape_controls(record.getMessage())
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
        """Drop a line that cannot be printed."""


def _before_lines(prefix: str, text: str) -> str:
    return prefix + text.replace("\n", f"\n{prefix}")


class _RankFile(logging.Handler):
    """Appends each line to a file. If the file fails, the console shows one warning."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendOnlyFile(path)
        self._may_fail = WarnOnce(str(path))

    def emit(self, record: logging.LogRecord) -> None:
        with self._may_fail:
            text = escape_controls(self.format(record))
            self._file.write(f"{text}\n".encode(errors="backslashreplace"))


class WarnOnce:
    """Suppresses errors of its `with` block, and warns about the first of several in a row.

    >>> with may_fail:          # WarnOnce("metrics.jsonl")
    ...     file.write(line)

    subject, done: the warning says "SUBJECT cannot be DONE". errors: the classes to suppress
    (default: OSError).
    """

    def __init__(self, subject: str, *errors: type[Exception], done: str = "written") -> None:
        self._subject = subject
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
                info(f"{self._subject} can be {self._done} again")
            else:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                warn(
                    f"{self._subject} cannot be {self._done}: {why}; the run continues, and this "
                    "is logged once"
                )
        return True


def rank() -> int:
    """Return this process's rank under torchrun, or 0 without it."""
    return int(os.environ.get("RANK", "0"))


def setup(stream: TextIO | None = None) -> None:
    """Send log lines to the console: all lines of rank 0, warnings of the others.

    stream: replaces standard output, for a command that prints a document there.
    """
    console = _Console(stream or sys.stdout)
    console.setLevel(logging.INFO if rank() == 0 else logging.WARNING)
    _logger.handlers = [console]
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


@contextmanager
def muted() -> Iterator[None]:
    """Log nothing but errors, in a check whose lines the launch logs again."""
    level = _logger.level
    _logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.setLevel(level)


def show_times(are_shown: bool) -> None:
    """Begin lines on the console with the time of day and the rank, or stop doing so."""
    for handler in _logger.handlers:
        if isinstance(handler, _Console):
            handler.shows_times = are_shown


def keep_details(are_kept: bool) -> None:
    """Keep the lines of `detail` off the console: `add_file` writes them and all earlier lines.

    are_kept: False for a command without a rank log, which prints them.
    """
    if not are_kept:
        return
    for handler in _logger.handlers:
        if isinstance(handler, _Console):
            handler.shows_details = False
    _logger.addHandler(logging.handlers.MemoryHandler(0))  # keeps all lines: it has no target


def ensure_setup() -> None:
    """Send log lines to the console if the calling program has no handler for them."""
    if not _logger.hasHandlers():
        setup()


def add_file(path: Path) -> None:
    """Also append every line of this rank, with its time, to a file, whose errors are tolerated."""
    handler = _RankFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for buffer in [*_logger.handlers]:
        if isinstance(buffer, logging.handlers.MemoryHandler):
            _logger.removeHandler(buffer)
            buffer.setTarget(handler)
            buffer.flush()
    _logger.addHandler(handler)


def info(text: str) -> None:
    """Log something expected."""
    _logger.info(text)


def detail(text: str) -> None:
    """Log something expected that few people need: only to the rank log of a training run.

    Commands without a rank log, such as a dry run, print it: see `keep_details`.
    """
    _logger.info(text, extra={"is_detail": True})


def to_console(text: str) -> None:
    """Print to the console only, on rank 0 only."""
    if rank() == 0:
        _log_to(text, logging.INFO, to_files=False)


def to_file(text: str) -> None:
    """Log something expected to this rank's file only."""
    _log_to(text, logging.INFO, to_files=True)


def warn(text: str) -> None:
    """Log something that needs attention."""
    _logger.warning(text)


def error(text: str) -> None:
    """Log the error that ends the run to this rank's file; the stage prints it on exit."""
    _log_to(text, logging.ERROR, to_files=True)


def _log_to(text: str, level: int, to_files: bool) -> None:
    for handler in _logger.handlers:
        if isinstance(handler, _RankFile) == to_files:
            handler.handle(_logger.makeRecord(_logger.name, level, "", 0, text, (), None))


def table(rows: Mapping[str, object], write: Callable[[str], None] = info) -> None:
    """Log a plan or a summary with `write`: one aligned `name  value` line per row."""
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        write(f"  {name:<{width}}  {value}")
