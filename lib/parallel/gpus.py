"""Find why torch cannot use the GPUs of this machine, if it has any.

Stage 04 and launch/check.py use this, so that a run on a GPU node does not silently train on its
CPU because a driver is missing. On a machine without GPUs it only reads a few files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.parallel import nvidia
from lib.parallel.torch_builds import BLACKWELL, Torch, driver_problem, find_build

_VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_ONLY = "-1"  # what users set for the CPU; schedulers set an empty value
_HIDING = ("", "NoDevFiles")  # values that hide all GPUs; Slurm sets the second one
# Parts of torch's errors when CUDA does not start, and what to do.
_REMEDIES = {
    "Error 802": "the fabric manager of these GPUs does not run: systemctl start "
    "nvidia-fabricmanager",
    "Error 803": "the driver was updated but not loaded: restart the machine",
    "Error 804": "libraries of another CUDA are found first: remove cuda-compat from "
    "LD_LIBRARY_PATH",
}


class Reason(NamedTuple):
    """Why torch cannot use GPUs, and what to do."""

    problem: str
    hint: str


class Unusable(NamedTuple):
    """GPUs that torch cannot use. found: their names, and the versions of driver and torch."""

    found: str
    reasons: list[Reason]

    @property
    def problem(self) -> str:
        return "torch cannot use the GPUs of this machine: " + "; and ".join(
            reason.problem for reason in self.reasons
        )

    @property
    def hint(self) -> str:
        return "; ".join(dict.fromkeys(reason.hint for reason in self.reasons))


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
    """Return the GPUs of this machine that torch cannot use, with the reasons, or None.

    Returns None as well if the machine has no GPU or the CPU was asked for.
    """
    if is_cpu_wanted():
        return None
    if torch.cuda.is_available():
        reasons = list(_find_missing_code())
        return Unusable(torch.cuda.get_device_name(_device()), reasons) if reasons else None
    names = nvidia.list_names()
    files = nvidia.list_device_files()
    if not (gpus := names or files or nvidia.list_kernel_gpus()):
        return None
    driver = nvidia.find_driver()
    found = (
        f"{units.counted(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(map(str, gpus)))}), "
        f"driver {driver or 'not known'}, torch {torch.__version__}"
    )
    reasons = [*_find_version_problems(driver), *_find_hiding_causes(bool(names), files)]
    return Unusable(found, reasons or [_find_torch_error()])


def _find_version_problems(driver: str) -> Iterator[Reason]:
    """Yield the reason if torch's build does not work with the driver, or has no CUDA."""
    installed = Torch(torch.__version__.partition("+")[0], torch.version.cuda or "")
    with suppress(UsageError):  # the table lacks this release or CUDA
        default = Torch(installed.version, installed.release.default)
        build = (
            default
            if driver and not driver_problem(default, driver)
            else find_build(installed, driver)
        )
        install = (
            f"install torch {build}, which runs with it (docs/how-to/airgap.md)" if build else ""
        )
        if driver and (problem := driver_problem(installed, driver)):
            yield Reason(problem, " or ".join(filter(None, ("update the driver", install))))
        elif not installed.cuda:
            yield Reason(
                f"torch {torch.__version__} is built without CUDA",
                install if driver else f"install torch {default} (docs/how-to/airgap.md)",
            )


def _find_hiding_causes(is_listed: bool, files: list[Path]) -> Iterator[Reason]:
    """Yield the causes that hide all GPUs from this process. is_listed: nvidia-smi lists GPUs."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None and visible.strip() in _HIDING:
        yield Reason(
            f"{_VISIBLE} is {f'{visible!r}' if visible.strip() else 'empty'}, which hides them",
            f"unset {_VISIBLE}, or ask the scheduler for GPUs (sbatch --gres=gpu:8, say)",
        )
    if not files and not is_listed:
        yield Reason(
            "this container or job was given none of them",
            "docker run --gpus all; sbatch --gres=gpu:8; on Kubernetes a limit of nvidia.com/gpu",
        )
    elif files and not any(map(_can_open, files)):
        yield Reason(
            f"this user may not open {files[0]}",
            "ask for permission, or ask the scheduler for a GPU",
        )


def _can_open(file: Path) -> bool:
    """Return whether this process may open a device file; a control group can forbid it."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
    except PermissionError:
        return False
    except OSError:
        pass  # the cause is not a missing permission
    return True


def _find_torch_error() -> Reason:
    try:
        torch.cuda.init()
        message = "torch counts no GPU"
    except Exception as error:  # any kind of error: its message is the reason
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return Reason(
            f"{message}, with {_VISIBLE}={visible}",
            f"name GPUs of this machine in {_VISIBLE}, or unset it",
        )
    return Reason(
        message,
        next(
            (remedy for part, remedy in _REMEDIES.items() if part in message),
            "see nvidia-smi and `dmesg | grep NVRM`",
        ),
    )


def _find_missing_code() -> Iterator[Reason]:
    """Yield the reason if torch's build contains no code for the GPU of this rank."""
    known = [
        arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))
    ]  # AMD's have other names, such as gfx942
    major, minor = torch.cuda.get_device_capability(_device())
    if known and not any(_can_run(arch, major, minor) for arch in known):
        yield Reason(
            f"torch {torch.__version__} holds no code for its compute capability "
            f"{major}.{minor}, only for {', '.join(known)}",
            "a newer GPU needs a newer torch, or a build for a newer CUDA: Blackwell with "
            f"a driver older than 580 torch 2.11.0+{BLACKWELL}"
            if major >= 10
            else "an older GPU needs a build of torch for an older CUDA (+cu126)",
        )


def _can_run(arch: str, major: int, minor: int) -> bool:
    """Return whether a GPU runs code: 8.6 and 8.9 run `sm_86`, 9.0 and later `compute_90`."""
    kind, _, number = arch.partition("_")
    code_major, code_minor = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):  # runs on this capability only
        return (code_major, code_minor) == (major, minor)
    return (
        (code_major, code_minor) <= (major, minor)
        if kind == "compute"
        else code_major == major and code_minor <= minor
    )


def _device() -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def report_unused(device: str) -> None:
    """Log that ranks use only some GPUs of this machine, with the command that uses all of them.

    device: the value of --device. GPUs that CUDA_VISIBLE_DEVICES hides do not count.
    """
    if device == "cpu":
        return
    gpus = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < ranks < gpus:
        command = commands.on_ranks(gpus)
        log.info(
            f"uses {ranks} of the {units.counted(gpus, 'GPU')} of this machine"
            + (
                f"; all of them: {command}"
                if command
                else f"; --nproc-per-node {gpus} uses all of them"
            )
        )


def warn_without_offload(device: str) -> None:
    """Warn that --cpu-offload changes nothing on the CPU. device: the value of --device."""
    if log.rank() == 0 and (device == "cpu" or not torch.cuda.is_available()):
        log.warn("--cpu-offload changes nothing here: this run trains on the CPU")
