"""Limit the memory of processes with a control group, if this machine allows one."""

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
def limit_memory(size: int) -> Iterator[tuple[str, ...]]:
    """Yield a command prefix that limits the memory of a command and its children to `size` bytes.

    At the end, kills the processes that still run. Skips the test if this process may not create
    a memory control group.
    """
    if not (group := _make_group(size)):
        pytest.skip("needs a memory control group that may be written")
    try:
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        group.rmdir()


def _make_group(size: int) -> Path | None:
    for root, limit in _ROOTS.items():
        group = Path(root) / f"test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(size))
                return group
            group.rmdir()
    return None
