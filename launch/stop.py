#!/usr/bin/env python3
"""Make a run save a checkpoint and end; the command that started it resumes from there.

  python launch/stop.py outputs/exp
  python launch/stop.py outputs/exp --slurm    also list Slurm jobs with the name of the run

This creates the file outputs/exp/stop, which the run obeys after its current step, on any machine.
On Kubernetes the operator would start it again: use `launch/kubernetes.py stop` there.
If no process runs, the command reports that and creates no file, since the file would stop the next
launch. If a launcher on this machine prepares the run or is about to restart it, the launcher
receives SIGTERM. If a process prepares the run without a launcher, the command names it. Exit
codes: 0, also if there was nothing to stop; 2 if there is no such run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.core import log, options, paths, stage
from lib.core.errors import UsageError
from lib.runs import processes
from lib.runs.run_files import RunFiles, require_run

SQUEUE_TIMEOUT_S = 60.0


def main(argv: list[str]) -> None:
    """Ask a run to stop, or report why there is nothing to stop."""
    parser = options.Parser(__doc__)
    parser.add_argument(
        "experiment",
        metavar="NAME|DIR",
        help="name of the run, for outputs/NAME, or its directory",
    )
    parser.add_argument(
        "--slurm", action="store_true", help="also list the jobs of this name in Slurm's queue"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="report the status of the run and stop nothing"
    )
    opts = parser.parse(argv)
    experiment = paths.existing_experiment(opts.experiment)
    require_run(experiment)
    root = experiment.root
    run = RunFiles(root.resolve())
    run.update()
    if run.status().is_held:  # otherwise no process looks for the file
        if not opts.dry_run:
            run.experiment.stop_file.touch()
        log.info(
            f"{root} is running{_describe_step(run)}: it finishes its step, saves a checkpoint "
            "and ends with exit code 75"
        )
        log.info("the command that started it resumes from there")
    else:
        stop_before_it_runs(run, root, opts.dry_run)
    for job, state in list_jobs(root.name) if opts.slurm else []:
        if state != "RUNNING" or not run.status().is_held:
            log.info(f"Slurm job {job} of this name is {state.lower()}; scancel {job} ends it")


def stop_before_it_runs(run: RunFiles, root: Path, dry_run: bool) -> None:
    """Ask the launcher of a run to end before training runs, or report that there is none."""
    if not dry_run:
        run.experiment.stop_file.unlink(missing_ok=True)
    process = processes.find_process(root.resolve())
    status = f"{root} is not running ({run.status().text})"
    if process is None:
        log.info(f"nothing to stop: {status}{_describe_step(run)}")
    elif process.is_launcher:
        if not dry_run:
            os.kill(process.pid, signal.SIGTERM)
        log.info(
            f"{status}: its launcher, process {process.pid}, which prepares it or is about to "
            "restart it, is asked to end"
        )
    else:
        log.info(
            f"{status}: process {process.pid} prepares it; ending that process loses nothing: "
            f"kill {process.pid}"
        )


def list_jobs(name: str) -> list[tuple[str, str]]:
    """Return the ID and state of each Slurm job that this user has under a name.

    Raises UsageError if squeue is not installed, fails or does not answer.
    """
    try:
        process = subprocess.run(
            ["squeue", "--me", "--noheader", "--name", name, "--format", "%i %T"],
            capture_output=True,
            text=True,
            timeout=SQUEUE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"squeue has not answered within {SQUEUE_TIMEOUT_S:.0f} s",
            hint="`scontrol ping` shows whether the controller is up",
        ) from None
    except FileNotFoundError:
        raise UsageError(
            "squeue is not installed: this machine cannot query Slurm",
            expected="a login node of the cluster",
        ) from None
    if process.returncode:
        raise UsageError(f"squeue failed: {process.stderr.strip()}")
    return [(job, state) for job, state in (line.split() for line in process.stdout.splitlines())]


def _describe_step(run: RunFiles) -> str:
    """Return a text with the current step; empty if it is unknown."""
    step = run.state.get("step")
    total = run.state.get("total_steps")
    if run.rows:
        step = max(run.rows[-1]["step"], step or 0)
    return f", at step {step:,} of {total:,}" if step is not None and total else ""


if __name__ == "__main__":
    stage.run_main(main)
