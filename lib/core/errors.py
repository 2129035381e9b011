"""Errors that a person caused or can fix, and their exit codes.

StageError          1   a disk, network or service fails
├── UsageError      2   bad usage or bad input
├── ArtifactError   3   an artifact is missing, unfinished or corrupt
├── DiskFullError   4   no room to write
└── Preempted      75   stopped by a signal after saving; the same command continues the run

Any other exception that leaves a stage is a bug: the traceback is printed, and the code is 1.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard, TypeVar

Result = TypeVar("Result")

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_ARTIFACT = 3
EXIT_DISK_FULL = 4
EXIT_PREEMPTED = 75
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_FAILED_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.EUCLEAN,
    errno.ENODEV,
    errno.ENXIO,
    errno.EHOSTDOWN,
}
_MISSING_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}

# A remedy for `name_full_disk` if the directory is the one for temporary files.
MOVE_TEMPORARY = "put TMPDIR=DIR before the command, such as TMPDIR=/scratch"
# An alias that a person typed → our option. Errors repeat the alias.
TYPED_AS: dict[str, str] = {}
# Names in a stranger's artifact may contain control sequences of a terminal.
_CONTROLS = {
    number: f"\\x{number:02x}"
    for number in (*range(32), *range(127, 160))
    if chr(number) not in "\n\t"
}
# Characters that change the text direction, break a line or are invisible.
_MORE_CONTROLS = {
    number: f"\\u{number:04x}"
    for number in (
        0xAD,
        0x61C,
        0x200B,
        0xFEFF,
        *range(0x200E, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    )
}


def escape_controls(text: str) -> str:
    """Return a string with its control characters escaped, except newlines and tabs."""
    return text.translate(_CONTROLS)


def make_visible(text: object) -> str:
    """Return a text whose control characters are escaped, except newlines and tabs.

    This includes characters that change the direction of the text, and halves of surrogate pairs.
    """
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return escape_controls(text).translate(_MORE_CONTROLS)


def one_line(text: object) -> str:
    """Return a text that is safe within one line of a terminal."""
    text = make_visible(text)
    return text.replace("\n", "\\n").replace("\t", "\\t")


class StageError(Exception):
    """An error message: the problem, what was expected and found, and what to do.

    problem: one sentence. expected, found, hint, run: further lines below it. run: commands that
    fix the problem if typed as they stand, one per line, in this order (lib/core/commands.py makes
    them). hint: advice in words.
    """

    code = EXIT_BUG

    def __init__(
        self, problem: str, *, expected: str = "", found: str = "", hint: str = "", run: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.expected = expected
        self.found = found
        self.hint = hint
        self.run = run
        self.several: list[StageError] = []  # the problems that this error lists

    def render(self) -> str:
        """Return the printed message, with one `label: text` line for each part."""
        lines = [f"error: {self.problem}"]
        for label in ("expected", "found", "hint", "run"):
            if text := getattr(self, label):
                first, *rest = text.splitlines()
                lines.append(f"  {label + ':':<9} {first}")
                lines += [f"  {'':<9} {line}" for line in rest]
        if not self.several:
            words = {word.strip(":,;.'") for word in self.problem.replace("/", " ").split()}
            lines += [
                f"  {'typed:':<9} {name}, which is {option} here"
                for name, option in TYPED_AS.items()
                if option in words and f" {name}, which is " not in self.problem
            ]
        return escape_controls("\n".join(lines))


class UsageError(StageError):
    """The command line or the input is bad."""

    code = EXIT_USAGE


class ArtifactError(StageError):
    """An artifact is missing, unfinished or corrupt."""

    code = EXIT_ARTIFACT


class DiskFullError(StageError):
    """The disk is full."""

    code = EXIT_DISK_FULL


class Preempted(StageError):
    """A signal asked the run to stop, and it stopped after saving."""

    code = EXIT_PREEMPTED


class Problems:
    """Collects problems of the input, to report all of them at once.

    >>> problems = Problems()
    >>> problems.add("--lr must be above 0, got -1")
    >>> problems.raise_if_any()      # UsageError listing every problem
    """

    def __init__(self) -> None:
        self._errors: list[StageError] = []

    def add(self, problem: str | StageError, **parts: str) -> None:
        """Add an error, or a sentence, which becomes a UsageError with `parts` (hint, run, …)."""
        error = problem if isinstance(problem, StageError) else UsageError(problem, **parts)
        self._errors += error.several or [error]

    def collect(self, check: Callable[[], Result]) -> Result | None:
        """Return the result of a check, or add the StageError that it raises and return None."""
        try:
            return check()
        except StageError as error:
            self.add(error)
            return None

    def raise_if_any(self, hint: str = "") -> None:
        """Raise one error that lists all problems and has the class of the first.

        hint: advice for all problems together; a single problem keeps its own.
        """
        if self._errors:
            error = combine_errors(self._errors)
            error.hint = error.hint or hint
            raise error


def combine_errors(errors: list[StageError]) -> StageError:
    """Return one error that lists all of `errors`, which must not be empty."""
    if len(errors) == 1:
        return errors[0]
    rendered = [error.render().removeprefix("error: ") for error in errors]
    listing = "\n".join(f"{i}. {text}" for i, text in enumerate(rendered, 1))
    error = type(errors[0])(f"{len(errors)} problems:\n{listing}")
    error.several = errors
    return error


def from_os_error(error: OSError) -> StageError | None:
    """Return the StageError for an OSError that the machine or user caused, else None."""
    where = f": {error.filename}" if error.filename else ""
    if error.errno in _DISK_FULL_ERRNOS:
        where = f": {error.filename2}" if error.filename2 else where  # the target of a copy
        return _make_full_error(where, error)
    if is_of_disk(error):
        return StageError(
            f"a disk or file system failed{where} ({error.strerror})",
            expected="a working one (`dmesg` may say more)",
            hint="the same command continues from the finished part",
        )
    if error.errno in {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.EEXIST,
        errno.ELOOP,
    }:
        return UsageError(f"{error.strerror}{where}")
    return None


@contextmanager
def name_full_disk(directory: Path, remedy: str) -> Iterator[None]:
    """Raise DiskFullError with a directory's name if a write in the `with` block fills the disk.

    The error of a failed write does not name its file. remedy: what to do to use another disk.
    """
    try:
        yield
    except OSError as error:
        if error.filename or error.errno not in _DISK_FULL_ERRNOS:
            raise
        hint = f"to use another disk, {remedy}"
        raise _make_full_error(f" in {directory}", error, hint) from error


def _make_full_error(where: str, error: OSError, hint: str = "") -> DiskFullError:
    """Return the error for a full disk. where: ends the words "no room to write"."""
    return DiskFullError(
        f"no room to write{where} ({error.strerror})",
        expected="free space there (`df -h`), then run the same command again",
        hint=hint,
    )


def is_missing(error: OSError) -> bool:
    """Return whether a read error means that a file does not exist.

    Other errors (of a disk, a network file system, permissions) say nothing about the file.
    """
    return error.errno in _MISSING_ERRNOS


def is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error means that a disk or mount failed, not that a file is damaged."""
    return isinstance(error, OSError) and error.errno in _DISK_FAILED_ERRNOS
