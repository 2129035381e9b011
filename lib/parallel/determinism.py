"""The same bits from the same run on a GPU: `--deterministic on`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch._inductor.config
import torch.nn.functional as F

from lib.models.tensors import COMPUTE_DTYPES

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS sums in any order
_SHAPE = (1, 16, 4096, 128)  # of the attention that is timed: [B, H, T, D]
_TRIES = 5


def require() -> None:
    """Let torch use only what gives the same bits each time, and raise where there is no such way.

    Must come before anything is computed on a GPU. A processor gives the same bits anyway.
    """
    os.environ.setdefault(*_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Or what is compiled would be what was faster in a race, which another may win in another run.
    torch._inductor.config.deterministic = True
    # Memory that is written before it is read need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False


def measure_cost(device: torch.device, precision: str) -> str:
    """Return in words what determinism costs on a device, by timing attention; after `require`."""
    if device.type != "cuda":
        return "as a processor does anyway"
    query = torch.ones(_SHAPE, device=device, dtype=COMPUTE_DTYPES[precision], requires_grad=True)

    def attend() -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    slow = _seconds(attend)
    torch.use_deterministic_algorithms(False)
    try:
        fast = _seconds(attend)
    finally:
        torch.use_deterministic_algorithms(True)
    return f"attention takes {slow / fast:.2f} times as long for it, timed at {_SHAPE[2]:,} tokens"


def _seconds(work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
