"""Which file lies under a name, told without reading it: has it been replaced or written to since?

What is decided by the content of files is decided at one moment, and they are read at others. Their
stamps, taken before the first and compared after the last, tell whether that was the same content.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lib.core import commands, hashing
from lib.core.errors import UsageError


class Stamp(NamedTuple):
    """Changes with a file's content: replaced, it is another inode; written to, it is later.

    It is that of the file which a link leads to. bytes: its size.
    """

    device: int
    inode: int
    bytes: int
    mtime_ns: int


Stamps = dict[Path, Stamp | None]  # None: there is no such file


def take(paths: Iterable[Path]) -> Stamps:
    """Return the stamps of some files."""
    return {path: _stamp(path) for path in paths}


def fingerprint(stamps: Stamps) -> str:
    """Identify the content of files by their names, sizes and times, wherever the files lie."""
    return hashing.fingerprint(
        [[path.name, stamp.bytes, stamp.mtime_ns] for path, stamp in stamps.items() if stamp]
    )


def require_same(before: Stamps, what: str, doing: str) -> None:
    """Raise UsageError when a file is not what it was.

    what: the files together, in words. doing: what was done with them meanwhile.
    """
    if found := list(filter(None, (_change(path, stamp) for path, stamp in before.items()))):
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        raise UsageError(
            f"{what} was replaced or changed while {doing}; nothing was made of it",
            found=found[0] + more,
            hint="once nothing writes to it:",
            run=commands.as_typed(),
        )


def _stamp(path: Path) -> Stamp | None:
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _change(path: Path, before: Stamp | None) -> str:
    """Return what became of a file in a sentence, empty when it is the same."""
    now = _stamp(path)
    if now == before:
        return ""
    if now is None:
        return f"{path} is gone"
    if before is None:
        return f"{path} was not there"
    if now[:2] != before[:2]:
        return f"{path} is another file now"
    if now.bytes != before.bytes:
        return f"{path} holds {now.bytes} bytes instead of {before.bytes}"
    return f"{path} was written to"
