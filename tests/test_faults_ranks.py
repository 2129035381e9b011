# covers: lib/checkpoints/checkpointer.py, lib/parallel/meeting.py
"""Test killed and stopped ranks, and other numbers of ranks: same state, same samples, no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lib.checkpoints import commit
from lib.checkpoints.storage import StrictReader
from tests.conftest import ROOT, kill_all, stage_command
from tests.fault_points import Fault, read_operations
from tests.faults import (
    COMMON_OPTIONS,
    PLAIN_MODEL,
    STEPS,
    Server,
    Undisturbed,
    find_start_step,
    find_valid_steps,
    pin_to_core,
    read_events,
    run_options,
)
from tests.training import losses, metrics

LONG = 40  # steps


@pytest.mark.slow
def test_two_ranks_resume_to_the_same_bits(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed]
):
    outputs = tmp_path / "outputs"
    server.run(
        *run_options(outputs, steps=30),
        ranks=2,
        expect=None,
        faults={0: Fault(str(outputs), 1, kinds=("rename",), match="step_00000012")},
    )
    server.run(*run_options(outputs, steps=30), ranks=2)
    assert find_start_step(outputs) == 10  # 20 more steps
    undisturbed(ranks=2, steps=30).require_same(outputs)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, unsharded."""
    reader = StrictReader(checkpoint / commit.TENSORS)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.slow
def test_the_number_of_ranks_changes_no_sample_and_no_state(server: Server, tmp_path: Path):
    """2 → 1 → 3 → 2 ranks: each step has the same samples, and resuming changes no bit."""

    def options(experiment: str, steps: int) -> tuple[object, ...]:
        return (
            *COMMON_OPTIONS,
            *PLAIN_MODEL,
            "-e",
            experiment,
            "--save-dir",
            tmp_path / "outputs",
            "--global-batch-size",
            6,
            "--ckpt-freq",
            100,
            "--ckpt-keep",
            0,
            "--max-steps",
            steps,
        )

    server.run(*options("one", 12))
    for ranks, steps in ((2, 3), (1, 6), (3, 9), (2, 12)):
        server.run(*options("run", steps), ranks=ranks)
    assert losses(tmp_path, "run") == pytest.approx(losses(tmp_path, "one"), rel=1e-4)
    assert [row["train/tokens_seen"] for row in metrics(tmp_path, "run")] == [
        row["train/tokens_seen"] for row in metrics(tmp_path, "one")
    ]
    assert [e["step"] for e in read_events(tmp_path / "outputs") if e["event"] == "resume"] == [
        3,
        6,
        9,
    ]
    step = tmp_path / "outputs" / "run" / "checkpoints" / "step_00000003"
    expected = tensors(step)
    for number, ranks in enumerate((2, 1, 3, 2)):
        copy = tmp_path / f"copy_{number}"
        server.run(
            server.root / "model",
            step,
            copy,
            ranks=ranks,
            call="tests.checkpoint_harness:load_and_save",
        )
        (step,) = copy.iterdir()
        state = tensors(step)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(2, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.long) for n in (1, 20, 60, 100)),
    ],
)
def test_a_rank_killed_during_a_save_ends_the_other(
    server: Server, tmp_path: Path, rank: int, number: int, undisturbed: Callable[..., Undisturbed]
):
    """The other rank ends by itself, without a checkpoint of half the shards."""
    outputs = tmp_path / "outputs"
    result = server.run(
        *run_options(outputs),
        ranks=2,
        expect=None,
        faults={
            rank: Fault(str(outputs), number, "torn", kinds=("write",), match="step_00000006.tmp-")
        },
    )
    codes = result.wait()
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] > 0
    assert find_valid_steps(outputs)[0] == 4
    server.run(*run_options(outputs), ranks=2)
    assert find_start_step(outputs) == 4
    undisturbed(ranks=2).require_same(outputs)


@pytest.mark.slow
def test_a_rank_may_be_stopped_for_a_while(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed]
):
    outputs = tmp_path / "outputs"
    report = tmp_path / "report"
    launch = server.start(
        *run_options(outputs),
        ranks=2,
        faults={
            1: Fault(
                str(outputs), 1, "pause", seconds=0.5, match="step_00000006", report=str(report)
            )
        },
    )
    launch.until(lambda: bool(read_operations(report)))
    launch.signal(signal.SIGSTOP, rank=1)
    time.sleep(1.5)
    assert not launch.poll()
    launch.signal(signal.SIGCONT, rank=1)
    assert launch.wait() == [0, 0]
    undisturbed(ranks=2).require_same(outputs)


@pytest.mark.slow
def test_saves_that_overlap_wait_for_each_other(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed]
):
    """Each step is saved, and a save is slower than many steps, but only one runs at a time."""
    outputs = tmp_path / "outputs"
    report = tmp_path / "report"
    server.run(
        *run_options(outputs, "--ckpt-freq", 1, "--ckpt-keep", 0),
        ranks=2,
        faults={
            rank: Fault(
                str(outputs),
                1,
                "pause",
                times=10**6,
                seconds=0.02,
                kinds=("fsync",),
                match="/checkpoints/step_",
                report=f"{report}{rank}",
            )
            for rank in range(2)
        },
    )
    assert find_valid_steps(outputs) == list(range(STEPS, 0, -1))
    undisturbed(ranks=2).require_same(outputs)
    for rank in range(2):
        synced = [
            int(path.split("step_")[1][:8])
            for _, path in read_operations(report.with_name(f"report{rank}"))
        ]
        assert synced == sorted(synced) and len(set(synced)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.long)])
def test_torchrun_restarts_killed_ranks(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed], kills: int
):
    """After kill -9 of a rank, plain torchrun restarts all ranks, and they continue."""
    outputs = tmp_path / "outputs"
    options = run_options(
        outputs, "--overwrite", steps=LONG
    )  # the restarts do not repeat --overwrite
    command = stage_command("04_train_fsdp.py", *options, ranks=2)
    command.insert(command.index(str(ROOT / "04_train_fsdp.py")), "--max-restarts=2")
    process = subprocess.Popen(
        command,
        cwd=server.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=pin_to_core(),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    deadline = time.monotonic() + 240
    try:
        for number in range(kills):
            while (
                len([e for e in read_events(outputs) if e["event"] in ("start", "resume")])
                <= number
                or max(find_valid_steps(outputs), default=0) < 2
            ):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(rank_of(process, number % 2), signal.SIGKILL)
        assert process.wait(timeout=120) == 0
    finally:
        kill_all(process, server.root)
    assert [path.name for path in outputs.iterdir() if path.is_dir()] == [
        "run"
    ]  # no checkpoint is in quarantine
    undisturbed(ranks=2, steps=LONG).require_same(outputs)


def rank_of(process: subprocess.Popen, rank: int) -> int:
    """Return the process ID of a rank that torchrun has started."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"no rank {rank}")
