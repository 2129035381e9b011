"""What every worker process does first, whatever it works on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def prepare() -> None:
    """Set a worker up: the parent answers Ctrl-C, and no worker outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
