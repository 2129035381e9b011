#!/usr/bin/env python3
"""Have a run save and end; the command that started it goes on from there.

  python launch/stop.py outputs/exp
  python launch/stop.py outputs/exp --slurm    and name the jobs of Slurm that would start it again

It leaves the file outputs/exp/stop, which the run obeys after the step at hand, wherever it runs. A
run that is not running is told so, and no file is left for its next start. Where a launcher on this
machine prepares it, or is about to start it again, the launcher is asked to end; a process that
prepares it without one is named. Exit codes: 0, also when there was nothing to stop; 2 when there
is no such run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.runs import at_work, run_files
from launch.runs.run_files import RunFiles
from lib.core import log, options, paths, stage
from lib.core.errors import UsageError


def main(argv: list[str]) -> None:
    """Ask a run to stop, or say why there is nothing to stop."""
    parser = options.Parser(__doc__)
    run_files.add_option(parser)
    parser.add_argument(
        "--slurm", action="store_true", help="also look for jobs of that name in Slurm's queue"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say how the run stands and stop nothing"
    )
    opts = parser.parse(argv)
    experiment = paths.existing_experiment(opts.experiment)
    run_files.require(experiment)
    root = experiment.root
    run = RunFiles(root.resolve())
    run.update()
    if run.status().is_held:  # only then does anybody look for the file
        if not opts.dry_run:
            run.experiment.stop_file.touch()
        log.info(
            f"{root} is running{_step(run)}: it finishes its step, saves a checkpoint and "
            "ends with exit code 75"
        )
        log.info("the command that started it goes on from there")
    else:
        stop_before_it_runs(run, root, opts.dry_run)
    for job, state in jobs(root.name) if opts.slurm else []:
        if state != "RUNNING" or not run.status().is_held:
            log.info(f"job {job} of that name is {state.lower()} in Slurm; scancel {job} ends it")


def stop_before_it_runs(run: RunFiles, root: Path, dry_run: bool) -> None:
    """End the launcher of a run that still prepares; otherwise name it, or report none."""
    if not dry_run:
        run.experiment.stop_file.unlink(missing_ok=True)
    process, is_launcher = at_work.process_on(root.resolve())
    how = f"{root} is not running ({run.status().words})"
    if is_launcher:
        if not dry_run:
            os.kill(process, signal.SIGTERM)
        log.info(
            f"{how}: its launcher, process {process}, which prepares it or was about to start "
            "it again, is asked to end"
        )
    elif process:
        log.info(
            f"{how}: process {process} prepares it, and nothing is lost where that is ended: "
            f"kill {process}"
        )
    else:
        log.info(f"nothing to stop: {how}{_step(run)}")


def jobs(name: str) -> list[tuple[str, str]]:
    """Return number and state of this user's jobs of a name; UsageError without Slurm."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--name", name, "--format", "%i %T"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        raise UsageError(
            "squeue is not installed: this machine cannot ask Slurm",
            expected="a login node of the cluster",
        ) from None
    if done.returncode:
        raise UsageError(f"squeue failed: {done.stderr.strip()}")
    return [(job, state) for job, state in (line.split() for line in done.stdout.splitlines())]


def _step(run: RunFiles) -> str:
    step = run.state.get("step")
    total = run.state.get("total_steps")
    if run.rows:
        step = max(run.rows[-1]["step"], step or 0)
    return f", at step {step:,} of {total:,}" if step is not None and total else ""


if __name__ == "__main__":
    stage.run(main)
