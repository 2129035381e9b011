# covers: lib/checkpoints/checkpointer.py, lib/checkpoints/commit.py
"""Test full and failing disks, and directories that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lib.checkpoints import commit
from tests.fault_points import Fault
from tests.faults import (
    STEPS,
    Server,
    Undisturbed,
    find_start_step,
    find_valid_steps,
    read_events,
    run_options,
)
from tests.training import list_saved_steps

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a disk of N KiB; needs root."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        (path := tmp_path / "disk").mkdir()
        result = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", path],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            pytest.skip(f"needs to mount a tmpfs: {result.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


def size_of_one(server: Server, tmp_path: Path) -> int:
    """Return the size of a checkpoint in KiB."""
    outputs = tmp_path / "measured" / "outputs"
    server.run(*run_options(outputs, "--ckpt-freq", 2, steps=2))
    [one] = commit.list_checkpoints(outputs / "run" / "checkpoints")
    return sum(p.stat().st_blocks * 512 for p in one.path.rglob("*") if p.is_file()) // KIB


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(("--ckpt-keep", 0), marks=pytest.mark.slow),
        pytest.param(("--ckpt-keep", 50), marks=pytest.mark.long),
    ],
)
def test_a_small_disk_loses_no_checkpoint_that_must_be_kept(
    server: Server,
    disk: Callable[[int], Path],
    tmp_path: Path,
    undisturbed: Callable[..., Undisturbed],
    keep: tuple[object, ...],
):
    """The disk has room for three and a half checkpoints; the next save is skipped with a warning.

    Then the run ends. If it keeps fewer checkpoints, it continues, and each deletion is an event.
    """
    outputs = disk(int(3.5 * size_of_one(server, tmp_path)) + 256) / "outputs"
    server.run(
        *run_options(outputs, *keep),
        expect=-9,
        faults={0: Fault(str(outputs), 2, kinds=("write",), match="step_00000004.tmp-")},
    )
    [leftover] = [p.name for p in (outputs / "run" / "checkpoints").iterdir() if ".tmp-" in p.name]
    result = server.run(*run_options(outputs, *keep), expect=4)
    assert result.output.count("NOT SAVED") == 2 and "--ckpt-keep" in result.output
    assert find_valid_steps(outputs) == [6, 4, 2]
    assert [(e["event"], e["step"]) for e in read_events(outputs)] == [
        ("start", 0),
        ("save", 2),
        ("clean", 0),
        ("resume", 2),
        ("save", 4),
        ("save", 6),
        ("disk_full", 8),
        ("disk_full", 10),
        ("disk_full", 12),
    ]
    assert [e["paths"] for e in read_events(outputs) if e["event"] == "clean"] == [[leftover]]
    server.run(*run_options(outputs, "--ckpt-keep", 2))
    assert find_start_step(outputs) == 6 and find_valid_steps(outputs) == [12, 10]
    assert [step for e in read_events(outputs) if e["event"] == "prune" for step in e["steps"]] == [
        2,
        4,
        6,
        8,
    ]
    undisturbed().require_same(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["on", pytest.param("off", marks=pytest.mark.long)])
def test_a_full_disk_skips_saves_and_then_ends_the_run(
    server: Server,
    disk: Callable[[int], Path],
    tmp_path: Path,
    asynchronous: str,
    undisturbed: Callable[..., Undisturbed],
):
    size = size_of_one(server, tmp_path)
    outputs = disk(4 * size + 512) / "outputs"
    options = run_options(outputs, "--ckpt-async", asynchronous)
    server.run(
        *options,
        expect=-9,
        faults={0: Fault(str(outputs), 1, kinds=("mkdir",), match="step_00000004")},
    )
    ballast = outputs.parent / "ballast"
    free = os.statvfs(outputs).f_bavail * os.statvfs(outputs).f_bsize
    ballast.write_bytes(bytes(free - size * KIB // 2))
    result = server.run(*options, expect=4)
    assert result.output.count("NOT SAVED") >= 2 and "Traceback" not in result.output
    assert [e["step"] for e in read_events(outputs) if e["event"] == "disk_full"] == [4, 6, 8]
    assert json.loads((outputs / "run" / "state.json").read_text())["status"] == "disk_full"
    assert find_valid_steps(outputs) == [2]
    ballast.unlink()
    server.run(*options)
    assert find_start_step(outputs) == 2
    undisturbed().require_same(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["on", "off"])
def test_if_one_rank_has_no_room_all_skip_the_save(
    server: Server, tmp_path: Path, asynchronous: str, undisturbed: Callable[..., Undisturbed]
):
    """The other ranks skip the save too, no rank hangs, and later saves are complete."""
    outputs = tmp_path / "outputs"
    fault = Fault(str(outputs), 3, "ENOSPC", times=30, kinds=("write",), match="step_00000006")
    result = server.run(
        *run_options(outputs, "--ckpt-keep", 0, "--ckpt-async", asynchronous),
        ranks=2,
        faults={1: fault},
    )
    assert result.wait() == [0, 0] and "NOT SAVED" in result.output
    assert list_saved_steps(tmp_path, "run") == [2, 4, 8, 10, 12]
    undisturbed(ranks=2).require_same(outputs)


@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [
        ("write", "on"),
        ("fsync", "off"),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (("write", "off"), ("fsync", "on"), ("rename", "on"), ("rename", "off"))
        ),
    ],
)
def test_a_disk_error_ends_the_run(
    server: Server,
    tmp_path: Path,
    asynchronous: str,
    kind: str,
    undisturbed: Callable[..., Undisturbed],
):
    """It ends with an error and without a partial checkpoint; the same command continues."""
    outputs = tmp_path / "outputs"
    options = run_options(outputs, "--ckpt-async", asynchronous)
    fault = Fault(str(outputs), 2, "EIO", kinds=(kind,), match="step_00000006")
    result = server.run(*options, expect=None, faults={0: fault})
    assert result.wait() != [0] and "Input/output error" in result.output
    assert [p.name for p in sorted((outputs / "run" / "checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000004",
    ]
    server.run(*options)
    assert find_start_step(outputs) == 4
    undisturbed().require_same(outputs)


def test_a_read_only_disk_is_reported(
    server: Server, disk: Callable[[int], Path], undisturbed: Callable[..., Undisturbed]
):
    """If it is read-only from the start, the launch is refused, otherwise the save fails."""
    outputs = disk(64 * KIB) / "outputs"
    fault = Fault(str(outputs), 1, "EROFS", times=10**6, match="step_00000006")
    result = server.run(*run_options(outputs), expect=2, faults={0: fault})
    assert "Read-only file system" in result.output and "Traceback" not in result.output
    assert find_valid_steps(outputs) == [4, 2]
    subprocess.run(["mount", "-o", "remount,ro", outputs.parent], check=True)
    result = server.run(*run_options(outputs), expect=2)
    assert "cannot be written" in result.output and "Traceback" not in result.output
    subprocess.run(["mount", "-o", "remount,rw", outputs.parent], check=True)
    server.run(*run_options(outputs))
    assert find_start_step(outputs) == 4
    undisturbed().require_same(outputs)
    assert max(find_valid_steps(outputs)) == STEPS


@pytest.mark.slow
def test_figures_and_logs_may_fail_at_any_time(
    server: Server, tmp_path: Path, undisturbed: Callable[..., Undisturbed]
):
    """The disk is full for some steps: there is one warning, and no checkpoint is lost."""
    outputs = tmp_path / "outputs"
    result = server.run(
        *run_options(outputs, "--ckpt-freq", 6),
        faults={
            0: Fault(
                str(outputs),
                1,
                "ENOSPC",
                times=40,
                kinds=("write", "mkdir"),
                match="metrics.jsonl|events.jsonl|run/state.json|/logs|/tb",
            )
        },
    )
    for name in (
        "metrics.jsonl",
        "events.jsonl",
        "state.json",
        "rank_00000.log",
        "TensorBoard's file",
    ):
        [printed] = [
            line for line in result.output.splitlines() if f"{name} cannot be written" in line
        ]
        assert "No space left" in printed and f"{name} can be written again" in result.output
    undisturbed().require_same(outputs)
    assert [e["event"] for e in read_events(outputs)] == ["start", "save", "save", "complete"]
    log = (outputs / "run" / "logs" / "rank_00000.log").read_text()
    assert all(f"'global_step': {step}," in log for step in range(1, STEPS + 1))
    board = EventAccumulator(str(outputs / "run" / "tb"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("train/loss")] == list(range(1, STEPS + 1))
    result = server.run(
        *run_options(tmp_path / "never", "--profile", "3:3"),
        faults={
            0: Fault(
                str(tmp_path / "never"),
                1,
                "EROFS",
                times=10**6,
                kinds=("write", "mkdir"),
                match="metrics.jsonl|events.jsonl|run/state.json|/logs|/tb|/profile",
            )
        },
    )
    assert "Read-only file system" in result.output
    assert find_valid_steps(tmp_path / "never")[0] == STEPS
