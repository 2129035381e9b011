"""The dtype a run computes in: what the hardware has, and what torch only emulates there."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lib.core import commands, log
from lib.core.errors import Problems
from lib.models import float8
from lib.models.tensors import COMPUTE_DTYPES
from lib.train.config import AUTO, Config

_WIDTH = 256  # of the products that are timed
_TRIES = 3  # of each product
_FLOAT8_FROM = (8, 9)  # compute capability
_FLOAT8_GPUS = "NVIDIA Ada (L4, L40S, RTX 4090), Hopper (H100, H200), Blackwell or newer"


def default() -> str:
    """Return bf16 where the hardware computes in it, else fp32."""
    return "fp32" if is_emulated("bf16") else "bf16"


def is_emulated(precision: str) -> bool:
    """Tell whether the hardware lacks a dtype, so that torch converts to float32 and back.

    On a CPU torch is asked, not /proc/cpuinfo: virtual machines hide instructions, and the
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
    # oneDNN takes bf16 from AVX-512 on, but before AVX512_BF16 at a fifth of the speed of float32.
    without = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return without or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def require_float8(config: Config) -> None:
    """Raise one UsageError that tells all that --precision fp8 lacks here.

    With --plan-gpus nothing is asked of this machine.
    """
    problems = Problems()
    problems.collect(float8.require_package)
    if config.plan_gpus:
        pass
    elif not torch.cuda.is_available():
        problems.add(
            "--precision fp8 needs a GPU",
            expected=_FLOAT8_GPUS,
            hint="--dry-run --plan-gpus N plans for other machines than this one",
        )
    elif torch.cuda.get_device_capability() < _FLOAT8_FROM:
        problems.add(
            "--precision fp8 needs a GPU that computes in 8-bit floats",
            found=torch.cuda.get_device_name(),
            expected=_FLOAT8_GPUS,
            run=commands.as_typed("--precision", "bf16"),
        )
    elif config.compile is False:
        problems.add(
            "--precision fp8 without --compile is slower than bf16: each cast would be "
            "several passes over memory",
            run=commands.as_typed("--compile", "on"),
        )
    batch = config.batch_size
    length = config.seq_length
    if batch not in (None, AUTO) and batch * length % float8.MULTIPLE:
        problems.add(
            f"--precision fp8 takes tokens in multiples of {float8.MULTIPLE}",
            found=f"{batch * length:,} in a pass = {batch} per process (--batch-size) × "
            f"{length:,} (--seq-length)",
        )
    problems.raise_if_any()


def warn_if_emulated(precision: str) -> None:
    """Tell a person who asks for an emulated dtype what it costs here."""
    if log.rank() == 0 and is_emulated(precision):
        device = "GPU" if torch.cuda.is_available() else "processor"
        cost = (
            ""
            if torch.cuda.is_available()
            else f": a matrix product takes about {_slowdown(precision):.0f} times as long "
            "as in fp32"
        )
        log.warn(
            f"this {device} only emulates {precision}{cost}; --precision {default()} is the "
            "default here"
        )


def _slowdown(precision: str) -> float:
    """Return how many times longer a product takes on one core of the CPU than in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would not survive the fork of the memory trace
    try:
        return _seconds(COMPUTE_DTYPES[precision]) / _seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    return min(_timed(lambda: matrix @ matrix) for _ in range(_TRIES))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
