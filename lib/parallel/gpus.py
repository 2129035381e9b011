"""Tells why torch cannot use the GPUs of this machine, where it has some.

Stage 04 and launch/check.py ask it, so that nobody trains on the CPU of a GPU node for want of
a driver. A machine without GPUs costs it a look at a few files.
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
from lib.parallel.torch_builds import BLACKWELL, Torch, build_for, driver_problem

_VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE_MEANT = "-1"  # what a person types for the CPU; schedulers leave it empty
_HIDING = ("", "NoDevFiles")  # the latter is Slurm's
# What torch says when CUDA does not start, and what to do then.
_REMEDIES = {
    "Error 802": "the fabric manager of these GPUs does not run: systemctl start "
    "nvidia-fabricmanager",
    "Error 803": "the driver was updated and not loaded since: restart the machine",
    "Error 804": "libraries of another CUDA come first: leave cuda-compat out of LD_LIBRARY_PATH",
}


class Reason(NamedTuple):
    """Says in a sentence why torch cannot use GPUs, and what to do."""

    problem: str
    hint: str


class Unusable(NamedTuple):
    """GPUs that torch cannot use. found: what there is. reasons: at least one."""

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

    Must come before anything asks torch about a GPU.
    """
    if device == "cpu":
        os.environ[_VISIBLE] = NONE_MEANT


def is_cpu_meant() -> bool:
    """Tell whether a person has said that no GPU is to be used."""
    return os.environ.get(_VISIBLE, "").strip() == NONE_MEANT


def require(is_plan: bool) -> None:
    """Raise UsageError where there are GPUs that torch cannot use; only say so of a plan.

    Every rank of a machine finds the same.
    """
    if (found := unusable()) is None:
        return
    error = UsageError(
        found.problem,
        found=found.found,
        hint=f"{found.hint}; on the CPU instead:",
        run=commands.as_typed("--device", "cpu"),
    )
    if not is_plan:
        raise error
    log.warn("training would end here: " + error.render().removeprefix("error: "))


def unusable() -> Unusable | None:
    """Return what keeps torch from the GPUs of this machine; None where nothing does.

    Nothing does either where there are none, or the CPU is meant.
    """
    if is_cpu_meant():
        return None
    if torch.cuda.is_available():
        reasons = list(_without_code())
        return Unusable(torch.cuda.get_device_name(_device()), reasons) if reasons else None
    names = nvidia.names()
    files = nvidia.device_files()
    if not (there := names or files or nvidia.known_to_kernel()):
        return None
    driver = nvidia.driver()
    found = (
        f"{units.counted(len(there), 'GPU')} ({', '.join(dict.fromkeys(map(str, there)))}), "
        f"driver {driver or 'not known'}, torch {torch.__version__}"
    )
    reasons = [*_of_versions(driver), *_hidden(bool(names), files)]
    return Unusable(found, reasons or [_said_by_torch()])


def _of_versions(driver: str) -> Iterator[Reason]:
    """Yield the cause where torch's build does not fit the driver, or has no CUDA."""
    here = Torch(torch.__version__.partition("+")[0], torch.version.cuda or "")
    with suppress(UsageError):  # of a release or a CUDA that the table does not know
        usual = Torch(here.version, here.release.default)
        build = usual if driver and not driver_problem(usual, driver) else build_for(here, driver)
        install = (
            f"install torch {build}, which runs with it (docs/how-to/airgap.md)" if build else ""
        )
        if driver and (problem := driver_problem(here, driver)):
            yield Reason(problem, " or ".join(filter(None, ("update the driver", install))))
        elif not here.cuda:
            yield Reason(
                f"torch {torch.__version__} is built without CUDA",
                install if driver else f"install torch {usual} (docs/how-to/airgap.md)",
            )


def _hidden(is_listed: bool, files: list[Path]) -> Iterator[Reason]:
    """Yield what hides all GPUs from this process. is_listed: nvidia-smi sees some."""
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
    elif files and not any(map(_opens, files)):
        yield Reason(
            f"this user may not open {files[0]}",
            "ask for the right to, or for a GPU of the scheduler",
        )


def _opens(file: Path) -> bool:
    """Return whether this process may use a device: a control group may forbid it."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
    except PermissionError:
        return False
    except OSError:
        pass  # which is no matter of rights
    return True


def _said_by_torch() -> Reason:
    try:
        torch.cuda.init()
        said = "torch counts no GPU"
    except Exception as error:  # of whatever kind: it says why
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return Reason(
            f"{said}, with {_VISIBLE}={visible}",
            f"name GPUs that are here in {_VISIBLE}, or unset it",
        )
    return Reason(
        said,
        next(
            (remedy for sign, remedy in _REMEDIES.items() if sign in said),
            "nvidia-smi, and `dmesg | grep NVRM`, tell more",
        ),
    )


def _without_code() -> Iterator[Reason]:
    """Yield the cause where torch's build holds no code for the GPU of this rank."""
    known = [
        arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))
    ]  # AMD's are gfx942 and the like
    major, minor = torch.cuda.get_device_capability(_device())
    if known and not any(_runs(arch, major, minor) for arch in known):
        yield Reason(
            f"torch {torch.__version__} holds no code for its compute capability "
            f"{major}.{minor}, only for {', '.join(known)}",
            "a newer GPU needs a newer torch, or a build for a newer CUDA: Blackwell with "
            f"a driver older than 580 torch 2.11.0+{BLACKWELL}"
            if major >= 10
            else "an older GPU needs a build of torch for an older CUDA (+cu126)",
        )


def _runs(arch: str, major: int, minor: int) -> bool:
    """Tell whether code runs on a GPU: `sm_86` on 8.6 and 8.9, `compute_90` on all from 9.0 on."""
    kind, _, number = arch.partition("_")
    of_major, of_minor = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):  # for that one alone
        return (of_major, of_minor) == (major, minor)
    return (
        (of_major, of_minor) <= (major, minor)
        if kind == "compute"
        else of_major == major and of_minor <= minor
    )


def _device() -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def report_unused(device: str) -> None:
    """Log which GPUs of this machine no rank uses, with the command that uses all of them.

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
    """Warn that --cpu-offload changes nothing in a run on the CPU. device: as for the run."""
    if device == "cpu" or not torch.cuda.is_available():
        log.warn("--cpu-offload changes nothing here: this run trains on the CPU")
