"""The processes of a command, and the memory they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it, as far as they are still there."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def resident(pid: int) -> int:
    """Return the bytes of memory of a process, shared pages included; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
