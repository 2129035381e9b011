"""Pools of threads that work on the GPU of the process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor


def pool(count: int = 1, name: str = "") -> ThreadPoolExecutor:
    """Return threads whose current GPU is that of the thread that makes them.

    torch keeps the current GPU per thread, and a new thread has number 0: what every rank of a node
    does there would meet on that one, on a stream that nothing else waits for.
    """
    torch = sys.modules.get("torch")  # a stage that has not imported it has no GPU either
    if torch is None or not torch.cuda.is_initialized():
        return ThreadPoolExecutor(count, thread_name_prefix=name)
    return ThreadPoolExecutor(count, name, torch.cuda.set_device, (torch.cuda.current_device(),))
