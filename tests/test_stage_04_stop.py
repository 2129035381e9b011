# covers: 04_train_fsdp.py, lib/parallel/stop_request.py, lib/core/watchdog.py
# covers: lib/parallel/flight_recorder.py
"""A run stops after a complete step for each reason, and a run that hangs is ended."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import time
import traceback
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
    assert f"stopped by {reason}" in output and "the same command" in output
    state = json.loads((project / "outputs" / "run" / "state.json").read_text())
    assert state["status"] == "preempted" and list_saved_steps(project, "run") == [state["step"]]
    assert not (project / "outputs" / "run" / "stop").exists()


def signal_while_loading(rank: int) -> None:
    """Send SIGTERM while the weights are read, which may take minutes."""
    from lib.train import model

    def load_after_signal(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    model.load_first_weights = load_after_signal


def test_a_signal_while_the_weights_load_ends_the_process_at_once(project: Path) -> None:
    began = time.monotonic()
    run_stage(
        "04_train_fsdp.py",
        *ENDLESS,
        cwd=project,
        expect=-signal.SIGTERM,
        before=f"{__name__}:signal_while_loading",
    )
    assert time.monotonic() - began < 50
    assert not list_saved_steps(project, "run")


def signal_in_evaluation(rank: int) -> None:
    """Send SIGTERM to rank 1 (or the only one) at the second forward pass without gradients.

    It acts once in a project. All further passes are counted in passes.txt.
    """
    import torch
    from transformers import LlamaForCausalLM

    compute = LlamaForCausalLM.forward
    phase = Path("phase.txt").read_text()
    is_signalled = Path("passes.txt").exists()

    def forward(self: object, *arguments: object, **options: object) -> object:
        names = {frame.name for frame in traceback.extract_stack()}
        if phase in names and not torch.is_grad_enabled() and not is_signalled:
            with Path("passes.txt").open("a") as file:
                file.write(f"{rank}\n")
            calls = Path("passes.txt").read_text().splitlines().count(str(rank))
            if calls == 2 and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, *arguments, **options)

    LlamaForCausalLM.forward = forward


EVALUATED = (
    *SMALL_RUN,
    *("-e", "run", "-b", 2, "--eval-freq", 2, "--eval-batches", 10, "--max-steps", 4),
    *("--eval-suite", "small:8"),
    *("--sample-prompts", "prompts.txt", "-s", 128),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "ranks", "ckpt_freq", "asynchronous"),
    [
        ("measure_loss", 1, 2, "off"),
        ("score_requests", 2, 2, "on"),
        pytest.param("score_requests", 2, 50, "on", marks=pytest.mark.long),
        pytest.param("measure_loss", 3, 50, "off", marks=pytest.mark.long),
        pytest.param("make_samples", 2, 2, "off", marks=pytest.mark.long),
        pytest.param("make_samples", 1, 50, "on", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_an_evaluation_which_the_next_launch_repeats(
    project: Path, phase: str, ranks: int, ckpt_freq: int, asynchronous: str
) -> None:
    (project / "prompts.txt").write_text("kalo mi\n")
    (project / "phase.txt").write_text(phase)
    options = ("--ckpt-freq", ckpt_freq, "--ckpt-async", asynchronous)
    launch = functools.partial(
        run_stage,
        *("04_train_fsdp.py", *EVALUATED, *options),
        cwd=project,
        ranks=ranks,
        before=f"{__name__}:signal_in_evaluation",
    )
    launch(expect=1)  # as torchrun reports any failure
    root = project / "outputs" / "run"
    assert json.loads((root / "state.json").read_text())["status"] == "preempted"
    assert list_saved_steps(project, "run") == [2]
    assert (project / "passes.txt").read_text().split().count("0") <= 3
    assert [row["step"] for row in metrics(project, "run")] == [1, 2]

    launch(expect=0)
    rows = metrics(project, "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    evaluated = [row["step"] for row in rows if "eval/copying/accuracy" in row]
    assert evaluated == [2, 4] == [row["step"] for row in rows if "eval/loss" in row]
    samples = [json.loads(line) for line in (root / "samples.jsonl").open()]
    assert [row["step"] for row in samples] == [2, 2, 4, 4]
    for step in list_saved_steps(project, "run"):
        commit = json.loads((root / f"checkpoints/step_{step:08d}/COMMIT.json").read_text())
        assert commit["eval_loss"] == rows[step - 1]["eval/loss"] and "unevaluated" not in commit
    twin = EVALUATED[EVALUATED.index("-e") + 2 :]
    run_stage(
        "04_train_fsdp.py", *SMALL_RUN, "-e", "twin", *twin, *options, cwd=project, ranks=ranks
    )
    for row, other in zip(rows, metrics(project, "twin"), strict=True):
        assert all(row[key] == other[key] for key in other if key.startswith(("train/", "eval/")))


@pytest.mark.slow
def test_the_last_evaluation_is_repeated_after_a_kill(project: Path) -> None:
    """A run whose last step is saved is complete only after its evaluation."""
    (project / "prompts.txt").write_text("kalo mi\n")
    options = (*EVALUATED, "--max-steps", 2)
    run_stage(
        "04_train_fsdp.py",
        *options,
        cwd=project,
        expect=-signal.SIGKILL,
        before=f"{__name__}:die_in_evaluation",
    )
    assert list_saved_steps(project, "run") == [2]
    done = run_stage("04_train_fsdp.py", *options, cwd=project)
    assert "validation loss" in done.stdout and "done: 2 steps" in done.stdout
    assert [row["step"] for row in metrics(project, "run") if "eval/loss" in row] == [2]
    assert "already done" in run_stage("04_train_fsdp.py", *options, cwd=project).stdout


def die_in_evaluation(rank: int) -> None:
    """Kill the process in its first evaluation."""
    from lib.train.output.rows import Evaluation

    Evaluation.measure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


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
    assert "has not ended for 0.1" in output
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
