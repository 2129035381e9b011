"""A control group that limits the memory of the processes in it, where this machine allows one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_ROOTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}


@contextmanager
def of_memory(size: int) -> Iterator[tuple[str, ...]]:
    """Yield the words before a command that let it and all its children have so many bytes.

    What is left of them is killed at the end. Skips the test where no memory control group may be
    written.
    """
    if not (group := _made(size)):
        pytest.skip("needs a memory control group that may be written")
    try:
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        group.rmdir()


def _made(size: int) -> Path | None:
    for root, limit in _ROOTS.items():
        group = Path(root) / f"test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(size))
                return group
            group.rmdir()
    return None
