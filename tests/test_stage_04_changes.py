# covers: 04_train_fsdp.py, lib/train/previous_run.py
"""Resume a run with other options: with `--resume-with-changes`, or refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.training import SMALL_RUN, losses

COMMON = (
    *SMALL_RUN,
    "-e",
    "run",
    "--lr",
    "1e-2",
    "--ckpt-freq",
    4,
    "--eval-freq",
    0,
    "--max-steps",
)


def cursor(project: Path) -> int:
    return json.loads((project / "outputs/run/state.json").read_text())["sample_cursor"]


@pytest.fixture(scope="module")
def begun(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose run has done 4 steps of batch 4."""
    root = tmp_path_factory.mktemp("begun")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", *COMMON, 4, "-b", 4, cwd=root)
    return root


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_step_that_cannot_be_divided_is_refused(run: Path) -> None:
    done = run_stage("04_train_fsdp.py", *COMMON, 8, "-b", 3, cwd=run, expect=2)
    assert "cannot be divided" in done.stderr and "a multiple of 3" in done.stderr
    assert re.search(r"run: .* -b 2$", done.stderr, re.M) and "-b 3" not in done.stderr


def test_a_run_with_another_batch_continues_with_the_next_sample(run: Path) -> None:
    done = run_stage("04_train_fsdp.py", *COMMON, 8, "--global-batch-size", 2, cwd=run, expect=2)
    assert "--global-batch-size: 4 there, 2 now" in done.stderr
    assert "--resume-with-changes" in done.stderr
    changed = (*COMMON, 8, "-b", 2, "--resume-with-changes")
    done = run_stage("04_train_fsdp.py", *changed, cwd=run)
    assert "--resume-with-changes: --global-batch-size: 4 there, 2 now" in done.stdout
    assert cursor(run) == 4 * 4 + 4 * 2
    events = (run / "outputs/run/events.jsonl").read_text()
    assert '"changes": ["--global-batch-size: 4 there, 2 now"]' in events
    uninterrupted = losses(run, "run")
    shutil.rmtree(run / "outputs/run/checkpoints/step_00000008")
    run_stage("04_train_fsdp.py", *changed, "--ckpt-freq", 2, cwd=run)
    assert losses(run, "run") == uninterrupted
    shutil.rmtree(run / "outputs/run/checkpoints/step_00000008")
    run_stage("04_train_fsdp.py", *COMMON, 8, "-b", 2, cwd=run)  # no change any more
    assert losses(run, "run") == uninterrupted


def test_a_run_with_another_order_begins_at_its_first_sample(run: Path) -> None:
    run_stage(
        "04_train_fsdp.py", *COMMON, 8, "-b", 4, "--seed", 1, "--resume-with-changes", cwd=run
    )
    assert cursor(run) == 4 * 4


def test_a_refused_launch_leaves_the_record_of_the_run(run: Path) -> None:
    record = run / "outputs/run/config.yaml"
    before = record.read_bytes()
    (run / "file").touch()
    refused = (*COMMON, 8, "-b", 4, "--ckpt-local-dir", "file")
    done = run_stage("04_train_fsdp.py", *refused, cwd=run, expect=2)
    assert "--ckpt-local-dir" in done.stderr
    assert record.read_bytes() == before


def test_resume_with_changes_needs_max_steps(run: Path) -> None:
    done = run_stage(
        "04_train_fsdp.py", *COMMON[:-1], "-b", 2, "--resume-with-changes", cwd=run, expect=2
    )
    assert "--resume-with-changes needs --max-steps" in done.stderr
