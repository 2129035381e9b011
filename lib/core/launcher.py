"""What started this process: the torchrun above it, and the marks of the launch it belongs to."""

from __future__ import annotations

import functools
import os

from lib.core import lease

MARK = "LAUNCH_MARK"  # variable that launchers set, the same for all that they start


def is_torchrun() -> bool:
    """Tell whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def process() -> int:
    """Return the process that had started this one when this was first asked."""
    return os.getppid()


def is_gone() -> bool:
    """Tell whether the torchrun that started this process has ended; False without one."""
    return is_torchrun() and os.getppid() != process()


def marks() -> list[str]:
    """Return what no other launch has; nothing for a process that a person started."""
    given = [os.environ[MARK]] if os.environ.get(MARK) else []
    return given + ([lease.identity(process())] if is_torchrun() else [])


def job_marks() -> list[str]:
    """Return the mark of a job of Slurm, in which a person may start several launches by hand."""
    job = os.environ.get("SLURM_JOB_ID")
    return [f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')} {job}"] if job else []


def is_requeued() -> bool:
    """Tell whether Slurm has started the job again, and with it what it started before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
