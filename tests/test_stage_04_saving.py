# covers: 04_train_fsdp.py, lib/checkpoints/checkpointer.py, lib/checkpoints/host_copies.py
"""Save checkpoints in the background, delete old ones, and survive a full disk."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import run_stage, stage_command
from tests.training import SMALL_RUN, list_saved_steps, losses, metrics, read_events

COMMON = (*SMALL_RUN, "--lr", "1e-2", "-b", 2, "--eval-batches", 1)


@pytest.mark.slow
def test_saves_in_the_background_equal_immediate_saves(project: Path) -> None:
    """Both runs save every step, are cut back to step 5, and resume on two ranks."""
    for name, asynchronous in (("behind", "on"), ("at-once", "off")):
        options = (
            *COMMON,
            "--max-steps",
            8,
            "--ckpt-freq",
            1,
            "--ckpt-keep",
            0,
            "--ckpt-async",
            asynchronous,
        )
        done = run_stage("04_train_fsdp.py", "-e", name, *options, cwd=project, ranks=2)
        lines = [line for line in done.stdout.splitlines() if "step 3: sav" in line]
        assert len(lines) == 1 and "step_00000003 in " in lines[0]
        assert ("in the background; training" in lines[0]) == (asynchronous == "on")
        assert list_saved_steps(project, name) == list(range(1, 9))
        for step in (6, 7, 8):
            shutil.rmtree(project / "outputs" / name / "checkpoints" / f"step_{step:08d}")
        run_stage("04_train_fsdp.py", "-e", name, *options, cwd=project, ranks=2)
    assert losses(project, "behind") == losses(project, "at-once")
    digests = [
        {
            entry["path"]: entry["digest"]
            for entry in json.loads(
                (project / f"outputs/{name}/checkpoints/step_00000005/manifest.json").read_text()
            )["files"]
            if entry["path"].endswith(".distcp")
        }
        for name in ("behind", "at-once")
    ]
    assert digests[0] and digests[0] == digests[1]


def test_retention_keeps_the_documented_checkpoints(project: Path) -> None:
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "run",
        *COMMON,
        "--max-steps",
        9,
        "--ckpt-freq",
        1,
        "--eval-freq",
        2,
        "--ckpt-keep",
        2,
        cwd=project,
    )
    measured = {
        row["step"]: row["eval/loss"] for row in metrics(project, "run") if "eval/loss" in row
    }
    best = min(measured, key=measured.__getitem__)
    assert list_saved_steps(project, "run") == sorted({8, 9, best})


@pytest.mark.parametrize(
    ("steps", "ends_at", "failures"),
    [
        pytest.param(20, 9, 3, id="three in a row", marks=pytest.mark.slow),
        pytest.param(4, 4, 2, id="the last", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_skips_saves_and_then_ends_the_run(
    project: Path, steps: int, ends_at: int, failures: int
) -> None:
    """A limit of the file size stands for a full disk: writing fails within the tensors."""
    run_stage("04_train_fsdp.py", "-e", "x", *COMMON, "--prepare-only", cwd=project)
    command = stage_command(
        "04_train_fsdp.py",
        "-e",
        "full",
        *COMMON,
        "--max-steps",
        steps,
        "--ckpt-freq",
        3,
        "--ckpt-async",
        "off",
    )
    done = subprocess.run(
        ["bash", "-c", 'trap "" XFSZ; ulimit -f 60; exec "$@"', "-", *command],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4, done.stderr[-2000:]
    assert "no room to write" in done.stderr and "Traceback" not in done.stderr
    assert "NOT SAVED" in done.stdout
    assert [e["event"] for e in read_events(project, experiment="full")].count(
        "disk_full"
    ) == failures
    assert max(losses(project, "full")) == ends_at
    assert not list((project / "outputs" / "full" / "checkpoints").iterdir())
    state = json.loads((project / "outputs" / "full" / "state.json").read_text())
    assert state["status"] == "disk_full"
