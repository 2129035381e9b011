"""`--resume-with-changes`: a run that goes on with other data or batches, and says so."""

from __future__ import annotations

import json
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
    assert "the 4 samples of a step that the run was begun with cannot be divided" in done.stderr
    assert "a multiple of 3 = 3 per process (--batch-size) × 1 ranks" in done.stderr


def test_another_batch_goes_on_with_the_next_sample(run: Path) -> None:
    done = run_stage("04_train_fsdp.py", *COMMON, 8, "--global-batch-size", 2, cwd=run, expect=2)
    assert "--global-batch-size: 4 there, 2 now" in done.stderr
    assert "--resume-with-changes" in done.stderr
    changed = (*COMMON, 8, "-b", 2, "--resume-with-changes")
    done = run_stage("04_train_fsdp.py", *changed, cwd=run)
    assert "--resume-with-changes: --global-batch-size: 4 there, 2 now" in done.stdout
    assert cursor(run) == 4 * 4 + 4 * 2
    events = (run / "outputs/run/events.jsonl").read_text()
    assert '"changes": ["--global-batch-size: 4 there, 2 now"]' in events
    whole = losses(run, "run")
    shutil.rmtree(run / "outputs/run/checkpoints/step_00000008")
    run_stage("04_train_fsdp.py", *changed, "--ckpt-freq", 2, cwd=run)
    assert losses(run, "run") == whole
    shutil.rmtree(run / "outputs/run/checkpoints/step_00000008")
    run_stage("04_train_fsdp.py", *COMMON, 8, "-b", 2, cwd=run)  # no change any more
    assert losses(run, "run") == whole


def test_another_order_begins_with_its_first_sample(run: Path) -> None:
    run_stage(
        "04_train_fsdp.py", *COMMON, 8, "-b", 4, "--seed", 1, "--resume-with-changes", cwd=run
    )
    assert cursor(run) == 4 * 4


def test_it_needs_an_end(run: Path) -> None:
    done = run_stage(
        "04_train_fsdp.py", *COMMON[:-1], "-b", 2, "--resume-with-changes", cwd=run, expect=2
    )
    assert "--resume-with-changes needs --max-steps" in done.stderr
