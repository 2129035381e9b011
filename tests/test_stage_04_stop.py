# covers: 04_train_fsdp.py, lib/parallel/stop_request.py, lib/core/watchdog.py
# covers: lib/parallel/flight_recorder.py
"""A run stops after a complete step for each reason, and a run that hangs is ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import kill_all, run_stage, stage_command, start_stage
from tests.training import SMALL_RUN, list_saved_steps, metrics

ENDLESS = (
    *SMALL_RUN,
    "-e",
    "run",
    "-b",
    2,
    "--max-steps",
    50_000,
    "--ckpt-freq",
    50_000,
    "--eval-freq",
    0,
)


def start_endless_run(
    project: Path, *options: object, ranks: int | None = None
) -> subprocess.Popen:
    """Launch a run that does not end by itself and wait for its third step."""
    process = subprocess.Popen(
        stage_command("04_train_fsdp.py", *ENDLESS, *options, ranks=ranks),
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (project / "outputs/run/metrics.jsonl").exists() or len(metrics(project, "run")) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def stop_run(project: Path, reason: str) -> str:
    """Start a run, give it a reason to stop, and return what it printed."""
    options = ("--max-minutes", 0.05) if reason == "--max-minutes" else ()
    launch = start_stage(
        "04_train_fsdp.py", *ENDLESS, *options, cwd=project, output=project / "printed"
    )
    rows = project / "outputs/run/metrics.jsonl"
    # A slow machine may reach the time limit after any step.
    while reason != "--max-minutes" and not (rows.exists() and len(metrics(project, "run")) >= 3):
        assert not launch.poll(0.05), (project / "printed").read_text()
    if reason == "SIGUSR1":
        launch.signal(signal.SIGUSR1)
    elif reason == "the stop file":
        (project / "outputs" / "run" / "stop").touch()
    output = (launch.wait(), (project / "printed").read_text())
    assert output[0] == [75], output[1]
    return output[1]


@pytest.mark.parametrize(
    "reason",
    [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGUSR1", "--max-minutes", "the stop file"],
)
def test_each_reason_to_stop_saves_and_exits_with_75(project: Path, reason: str) -> None:
    if reason == "SIGTERM":  # as without a launcher
        process = start_endless_run(project)
        process.terminate()
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 75, output
    else:
        output = stop_run(project, reason)
    assert f"stopped by {reason}" in output and "run the same command again" in output
    state = json.loads((project / "outputs" / "run" / "state.json").read_text())
    assert state["status"] == "preempted" and list_saved_steps(project, "run") == [state["step"]]
    assert not (project / "outputs" / "run" / "stop").exists()


def signal_while_loading(rank: int) -> None:
    """Send SIGTERM while the weights are read, which may take minutes."""
    from lib.train import model

    load = model.load_first_weights

    def load_after_signal(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        load(*arguments)

    model.load_first_weights = load_after_signal


def test_a_signal_while_the_weights_load_ends_the_run_after_step_1(project: Path) -> None:
    done = run_stage(
        "04_train_fsdp.py",
        *ENDLESS,
        cwd=project,
        expect=75,
        before=f"{__name__}:signal_while_loading",
    )
    assert "stopped by SIGTERM after step 1, which is saved" in done.stdout + done.stderr
    state = json.loads((project / "outputs" / "run" / "state.json").read_text())
    assert state["status"] == "preempted" and list_saved_steps(project, "run") == [1]


@pytest.mark.slow  # torchrun gives the stopped rank half a minute to end
def test_if_a_rank_hangs_the_others_end_with_their_stacks(project: Path) -> None:
    process = start_endless_run(project, "--watchdog-minutes", 0.1, ranks=2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    of_rank = {_environment(pid).get("RANK"): int(pid) for pid in children}
    os.kill(of_rank["1"], signal.SIGSTOP)
    try:
        output = process.communicate(timeout=90)[0]
    finally:
        kill_all(process, project)
    assert process.returncode == 1
    assert "watchdog: the step has not ended for 0.1 minutes" in output
    stacks = (project / "outputs" / "run" / "logs" / "rank_00000.stacks.txt").read_text()
    assert "in train" in stacks and "Thread" in stacks
    seen = run_stage("launch/monitor.py", "run", "--once", cwd=project).stdout
    hang = next(line for line in seen.splitlines() if "waited for" in line)
    assert re.search(
        r"rank 0 hung in gloo:\w+, number \d+ of group \w+, and waited for rank 1$", hang.strip()
    )


def _environment(pid: str) -> dict[str, str]:
    content = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)
