"""The processes of a command, and the memory that they use."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
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


def measure_peak(command: Sequence[str], cwd: Path) -> int:
    """Run a command and return the largest sum of resident memory of its processes, in bytes."""
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL)
    seen = [0]

    def watch() -> None:
        while process.poll() is None:
            seen.append(sum(map(resident_bytes, list_descendants(process.pid))))
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    assert process.wait() == 0
    return max(seen)
