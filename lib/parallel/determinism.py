"""Make a run on a GPU give the same bits each time (`--deterministic on`)."""

from __future__ import annotations

import os

import torch
import torch._inductor.config

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS sums in any order


def require_determinism() -> None:
    """Allow torch only algorithms that give the same bits each time.

    Call this before the first computation on a GPU. From then on, torch raises RuntimeError for an
    operation without such an algorithm. A CPU gives the same bits anyway.
    """
    os.environ.setdefault(*_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Otherwise the compiler picks kernels by timing, and another run may pick others.
    torch._inductor.config.deterministic = True
    # Filling memory that is written before it is read would only take time.
    torch.utils.deterministic.fill_uninitialized_memory = False
