# covers: lib/core/watchdog.py
"""The watchdog ends a process even if disks, pipes or the interpreter hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANGS = """
import ctypes, os, sys, threading, time
from pathlib import Path
from lib.core import launcher, log, watchdog

launcher._LAST_WORDS_S, watchdog._CHECK_EVERY_S, watchdog._FROZEN_S = 0.5, 0.05, 1.0
where, log_file, how = sys.argv[1:]
log.setup()
if log_file:
    threading.Thread(target=log.add_file, args=(Path(log_file),), daemon=True).start()
guard = watchdog.Watchdog(0.1 / 60, Path(where))
guard.enter("step")
if how == "frozen":
    ctypes.PyDLL(None).sleep(60)  # with Python's lock held
time.sleep(60)
"""


def hang_process(
    where: Path, log_file: Path | str = "", way: str = "", err: int = subprocess.PIPE
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HANGS, str(where), str(log_file), way],
        cwd=ROOT,
        stderr=err,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def test_the_process_ends_even_if_disks_and_pipes_hang(tmp_path: Path) -> None:
    """A FIFO without a reader simulates a hung disk, a full pipe a hung terminal."""
    silent = tmp_path / "silent"
    os.mkfifo(silent)
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    while True:
        try:
            os.write(writable, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(writable, True)
    hung = [
        hang_process(silent, log_file=silent),
        hang_process(silent, log_file=silent, err=writable),
        hang_process(tmp_path / "frozen", way="frozen"),
        hang_process(tmp_path / "frozen", way="frozen", err=writable),
    ]
    usual = hang_process(tmp_path / "logs" / "stacks.txt")
    read_only = hang_process(Path("/proc/no/stacks.txt"))
    try:
        errors = [process.communicate(timeout=20)[1] for process in (usual, read_only, *hung)]
    finally:
        for process in (usual, read_only, *hung):
            process.kill()
    assert [process.returncode for process in (usual, read_only, *hung)] == [1] * 6
    assert all("has not ended" in text for text in errors[:3])
    assert "_watch" in (tmp_path / "logs" / "stacks.txt").read_text()
    assert "cannot be written" in errors[1] and "most recent call first" in errors[1]
    assert "Timeout" in errors[4] and "most recent call first" in errors[4]
    os.close(readable)
    os.close(writable)
