# covers: 04_train_fsdp.py, lib/optim/adamw8bit.py
"""Train with 8-bit moments: losses, bytes of the checkpoints, resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.training import SMALL_RUN, losses, metrics, train_model

STEPS = 12
ARGUMENTS = (
    *SMALL_RUN,
    "--lr",
    "1e-2",
    "--ckpt-freq",
    4,
    "--max-steps",
    STEPS,
    "-b",
    2,
    "--global-batch-size",
    8,
)


def train_with_optimizer(root: Path, name: str, kind: str, ranks: int = 2) -> str:
    return train_model(root, name, *ARGUMENTS, "--optimizer", kind, ranks=ranks)


def copy_after_four_steps(root: Path, name: str) -> None:
    """Copy the run as it was after four steps."""
    shutil.copytree(root / "outputs" / "small", root / "outputs" / name)
    for step in (8, 12):
        shutil.rmtree(root / "outputs" / name / "checkpoints" / f"step_{step:08d}")


@pytest.mark.slow
def test_8_bit_moments_train_like_float32_moments(project: Path) -> None:
    for name, kind in (("large", "adamw"), ("small", "adamw8bit")):
        train_with_optimizer(project, name, kind)
    expected = losses(project, "small")
    assert expected[STEPS] < expected[1] - 0.5
    assert expected == pytest.approx(losses(project, "large"), rel=0.02)
    sizes = {
        name: sum(
            path.stat().st_size
            for path in (project / "outputs" / name / "checkpoints" / "step_00000012" / "dcp").glob(
                "*optimizer*"
            )
        )
        for name in ("large", "small")
    }
    assert sizes["small"] < 0.8 * sizes["large"]  # rows of 32 numbers; most is the file format's

    copy_after_four_steps(project, "again")
    assert "step 4 of 12" in train_with_optimizer(project, "again", "adamw8bit")
    exact = ("train/loss", "train/grad_norm")
    assert [[row[key] for key in exact] for row in metrics(project, "again")] == [
        [row[key] for key in exact] for row in metrics(project, "small")
    ]

    copy_after_four_steps(project, "alone")  # on another number of ranks
    train_with_optimizer(project, "alone", "adamw8bit", ranks=0)
    assert losses(project, "alone") == pytest.approx(expected, rel=1e-3)

    done = run_stage(
        "04_train_fsdp.py", "-e", "small", *ARGUMENTS, "--max-steps", 20, cwd=project, expect=2
    )
    assert "--optimizer: adamw8bit there" in done.stderr
