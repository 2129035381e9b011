"""Find which dtypes the hardware computes in, and which ones torch only emulates."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lib.core import commands, log
from lib.core.errors import Problems
from lib.models import float8
from lib.models.tensors import COMPUTE_DTYPES
from lib.tokens.batches import Pass

_WIDTH = 256  # rows and columns of the timed matrix products
_TRIES = 3  # per timed product
_FLOAT8_CAPABILITY = (8, 9)  # the oldest compute capability with 8-bit floats
_FLOAT8_GPUS = "NVIDIA Ada (L4, L40S, RTX 4090), Hopper (H100, H200), Blackwell or newer"


def default_precision() -> str:
    """Return bf16 if the hardware computes in it, else fp32."""
    return "fp32" if is_emulated("bf16") else "bf16"


def is_emulated(precision: str) -> bool:
    """Return whether the hardware lacks a dtype, so that torch converts to float32 and back.

    On a CPU this asks torch and not /proc/cpuinfo: virtual machines hide instructions, and the
    environment can forbid oneDNN to use them.
    """
    if precision == "fp32":
        return False
    if torch.cuda.is_available():
        return precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():
        return True
    if precision == "fp16":
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    # oneDNN supports bf16 from AVX-512 on, but without AVX512_BF16 at a fifth of the float32 speed.
    known = torch.cpu.get_capabilities()
    is_slow = known.get("avx512_f", False) and not known.get("avx512_bf16", False)
    return is_slow or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def require_float8(is_plan: bool, compile: bool | None, size: Pass | None) -> None:
    """Raise one UsageError that lists all unmet requirements of --precision fp8.

    is_plan: the run is planned for other machines, so this one is not checked. compile: the value
    of --compile. size: of a forward and backward pass, None if --batch-size is still open.
    """
    problems = Problems()
    problems.collect(float8.require_package)
    if is_plan:
        pass
    elif not torch.cuda.is_available():
        problems.add(
            "--precision fp8 needs a GPU",
            expected=_FLOAT8_GPUS,
            hint="--dry-run --plan-gpus N plans for other machines than this one",
        )
    elif torch.cuda.get_device_capability() < _FLOAT8_CAPABILITY:
        problems.add(
            "--precision fp8 needs a GPU that computes in 8-bit floats",
            found=torch.cuda.get_device_name(),
            expected=_FLOAT8_GPUS,
            run=commands.as_typed("--precision", "bf16"),
        )
    elif compile is False:
        problems.add(
            "--precision fp8 without --compile is slower than bf16: each cast would be "
            "several passes over memory",
            run=commands.as_typed("--compile", "on"),
        )
    if size and size.tokens_per_device % float8.MULTIPLE:
        shared = f" ÷ {size.context} (--context-parallel)" if size.context > 1 else ""
        problems.add(
            f"--precision fp8 needs micro-batches of a multiple of {float8.MULTIPLE} tokens",
            found=f"{size.tokens_per_device:,} = {size.batch} per process (--batch-size) × "
            f"{size.length:,} (--seq-length){shared}",
        )
    problems.raise_if_any()


def warn_if_emulated(precision: str) -> None:
    """Warn on rank 0 if the hardware only emulates a dtype, on a CPU with the slowdown."""
    if log.rank() == 0 and is_emulated(precision):
        device = "GPU" if torch.cuda.is_available() else "processor"
        cost = (
            ""
            if torch.cuda.is_available()
            else f": a matrix product takes about {_measure_slowdown(precision):.0f} times as long "
            "as in fp32"
        )
        log.warn(
            f"this {device} only emulates {precision}{cost}; --precision {default_precision()} is "
            "the default here"
        )


def _measure_slowdown(precision: str) -> float:
    """Return how many times longer a matrix product takes on one CPU core than in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would not survive the fork of the memory trace
    try:
        return _time_product(COMPUTE_DTYPES[precision]) / _time_product(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _time_product(dtype: torch.dtype) -> float:
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    return min(_time_call(lambda: matrix @ matrix) for _ in range(_TRIES))


def _time_call(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
