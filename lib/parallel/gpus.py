"""Find why torch cannot use the GPUs of this machine, if it has any.

Stage 04 and launch/check.py use this, so that a run on a GPU node does not silently train on its
CPU because a driver is missing. On a machine without GPUs it only reads a few files.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from lib.core import commands, log, nvidia, units
from lib.core.errors import UsageError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_ONLY = "-1"  # what users set for the CPU; schedulers set an empty value
_HINT = (
    "docs/how-to/troubleshooting.md lists the usual causes, such as a driver that is too old for "
    "this torch, or a container that was given no GPU"
)


class Unusable(NamedTuple):
    """GPUs that torch cannot use. found: their names, and the versions of driver and torch."""

    problem: str
    found: str
    hint: str


def hide_gpus(device: str) -> None:
    """Hide the GPUs from this process and its child processes if `device` is `cpu`.

    Call this before anything asks torch about a GPU.
    """
    if device == "cpu":
        os.environ[_VISIBLE] = CPU_ONLY


def is_cpu_wanted() -> bool:
    """Return whether the user asked for the CPU."""
    return os.environ.get(_VISIBLE, "").strip() == CPU_ONLY


def require_usable_gpus(is_plan: bool) -> None:
    """Raise UsageError if torch cannot use the GPUs of this machine; a dry run only warns.

    Every rank of a machine comes to the same result.
    """
    if (gpus := find_unusable()) is None:
        return
    error = UsageError(
        gpus.problem,
        found=gpus.found,
        hint=f"{gpus.hint}; on the CPU instead:",
        run=commands.as_typed("--device", "cpu"),
    )
    if not is_plan:
        raise error
    log.warn("training would end here: " + error.render().removeprefix("error: "))


def find_unusable() -> Unusable | None:
    """Return the GPUs of this machine that torch cannot use, with torch's reason, or None.

    Returns None as well if the machine has no GPU or the CPU was asked for.
    """
    if is_cpu_wanted() or torch.cuda.is_available():
        return None
    gpus = nvidia.list_names() or nvidia.list_device_files() or nvidia.list_kernel_gpus()
    if not gpus:
        return None
    found = (
        f"{units.counted(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(map(str, gpus)))}), "
        f"driver {nvidia.find_driver() or 'not known'}, torch {torch.__version__}"
    )
    return Unusable(f"torch cannot use the GPUs of this machine: {_find_reason()}", found, _HINT)


def _find_reason() -> str:
    """Return why torch finds no GPU: its own words, and what its environment says."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
        reason = "torch counts no GPU"
    except Exception as error:  # any kind of error: its message is the reason
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    visible = os.environ.get(_VISIBLE)
    return reason if visible is None else f"{reason}, with {_VISIBLE}={visible!r}"


def report_unused(device: str) -> None:
    """Log that ranks use only some GPUs of this machine, with the option that uses all of them.

    device: the value of --device. GPUs that CUDA_VISIBLE_DEVICES hides do not count.
    """
    if device == "cpu":
        return
    gpus = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < ranks < gpus:
        log.info(
            f"uses {ranks} of the {units.counted(gpus, 'GPU')} of this machine; with "
            f"--nproc-per-node {gpus}, torchrun and the launchers use all of them"
        )


def warn_without_offload(device: str, option: str) -> None:
    """Warn that an option that offloads changes nothing on the CPU.

    device: the value of --device. option: --cpu-offload or --activation-offload.
    """
    if log.rank() == 0 and (device == "cpu" or not torch.cuda.is_available()):
        log.warn(f"{option} changes nothing here: this run trains on the CPU")
