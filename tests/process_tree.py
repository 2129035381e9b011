"""The processes of a command, and the memory that they use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def list_descendants(pid: int) -> Iterator[int]:
    """Yield the ID of a process and those of all its descendants that still run."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from list_descendants(int(child))


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process with its shared pages, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
