"""Identify files without reading them, to notice whether one was replaced or written to.

A run first checks files and later reads them. If a file has the same identity before the check and
after the last read, its content was the same too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lib.core import commands, hashing
from lib.core.errors import UsageError


class FileIdentity(NamedTuple):
    """Identifies the content of a file without reading it.

    A replacement has another inode, and a write changes the times. For a symbolic link, the values
    are those of its target. bytes: size of the file. ctime_ns: no program can
    set it, but it also changes if only permissions, the name or hard links change.
    """

    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @property
    def recorded(self) -> list[int]:
        """Return the values to record: all but the device, whose number changes with a mount."""
        return [self.inode, self.bytes, self.mtime_ns, self.ctime_ns]

    @property
    def content(self) -> tuple[int, ...]:
        """Return all values but ctime_ns, which may change although the content does not."""
        return self[:4]


Identities = dict[Path, FileIdentity | None]  # None: the file does not exist


def read_identities(paths: Iterable[Path]) -> Identities:
    """Return the identities of files."""
    return {path: _read_identity(path) for path in paths}


def fingerprint(identities: Identities) -> str:
    """Return a digest of the names, sizes and modification times, wherever the files lie."""
    return hashing.fingerprint(
        [[path.name, file.bytes, file.mtime_ns] for path, file in identities.items() if file]
    )


def require_same(before: Identities, subject: str, doing: str) -> None:
    """Raise UsageError if a file has changed.

    subject, doing: the error begins with "SUBJECT was replaced or changed while DOING".
    """
    changes = [text for path, file in before.items() if (text := _describe_change(path, file))]
    if changes:
        more = f" (and {len(changes) - 1} more)" if changes[1:] else ""
        raise UsageError(
            f"{subject} was replaced or changed while {doing}; no artifact was written from it",
            found=changes[0] + more,
            hint="once nothing writes to it:",
            run=commands.as_typed(),
        )


def _read_identity(path: Path) -> FileIdentity | None:
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileIdentity(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _describe_change(path: Path, before: FileIdentity | None) -> str:
    """Return a sentence about the change of a file; empty if it is the same."""
    now = _read_identity(path)
    if now is None:
        return f"{path} is gone" if before else ""
    if before is None:
        return f"{path} was not there"
    if now.content == before.content:
        return ""
    if now[:2] != before[:2]:
        return f"{path} is another file now"
    if now.bytes != before.bytes:
        return f"{path} has {now.bytes} bytes instead of {before.bytes}"
    return f"{path} was written to"
