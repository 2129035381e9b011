# covers: 04_train_fsdp.py, lib/optim/adamw.py, lib/optim/adamw8bit.py, lib/optim/muon.py
"""Train with moments in 8 bits and bf16, and with Muon: losses, checkpoints, resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.training import SMALL_RUN, assert_refused, losses, metrics, read_log, train_model

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


def test_moments_in_bf16_train_like_float32_and_resume_exactly(project: Path) -> None:
    """They train like float32, on any number of ranks, and no run changes to them unasked."""
    for name, precision in (("large", "fp32"), ("small", "bf16")):
        train_model(project, name, *ARGUMENTS, "--optimizer-states", precision, ranks=2)
    expected = losses(project, "small")
    assert expected[STEPS] < expected[1] - 0.5
    assert expected != losses(project, "large")
    assert expected == pytest.approx(losses(project, "large"), rel=2e-3)
    words = (*ARGUMENTS, "--optimizer-states", "bf16")
    for ranks, batch, tolerance in ((2, 2, 0.0), (0, 2, 1e-3), (4, 1, 1e-3)):
        copy_after_four_steps(project, f"on_{ranks}")
        train_model(project, f"on_{ranks}", *words, "-b", batch, ranks=ranks)
        assert losses(project, f"on_{ranks}") == pytest.approx(expected, rel=tolerance)
    for name, other in (
        ("small", ()),
        ("small", ("--optimizer", "adamw8bit")),
        ("large", ("--optimizer-states", "bf16")),
        ("large", ("--optimizer", "muon")),
    ):
        error = run_stage(
            "04_train_fsdp.py", "-e", name, *ARGUMENTS, *other, cwd=project, expect=2
        ).stderr
        assert "--optimizer" in error and "--resume-with-changes" not in error
    assert_refused(
        project, "-e", "new", *words, "--beta2", 0.999, code=2, says="a --beta2 of at most 0.99"
    )


def test_muon_trains_and_resumes_on_any_number_of_ranks(project: Path) -> None:
    """Its momentum is sharded, and its checkpoint is no one else's."""
    words = (*ARGUMENTS, "--from-scratch", "--optimizer", "muon", "--compile", "off")
    printed = train_model(project, "small", *words, ranks=2)
    assert "suits models" not in printed
    expected = losses(project, "small")
    assert expected[STEPS] < expected[1] - 0.5
    log = read_log(project, "small")
    assert "Muon for 14 tensors" in log and "AdamW for 1 tensor" in log
    for ranks, batch in ((0, 2), (4, 1)):
        copy_after_four_steps(project, f"on_{ranks}")
        train_model(project, f"on_{ranks}", *words, "-b", batch, ranks=ranks)
        assert losses(project, f"on_{ranks}") == pytest.approx(expected, rel=1e-5)
    copy_after_four_steps(project, "other")
    others = (*ARGUMENTS, "--from-scratch", "--optimizer")
    assert_refused(project, "-e", "other", *others, "adamw", code=2, says="--optimizer: muon")
    tuning = (*ARGUMENTS, "--optimizer", "muon", "--max-steps", 1)
    for name, more, is_warned in (
        ("planned", ("--dry-run",), True),
        ("tuned", (), True),
        ("adapted", ("--lora-rank", 4), False),
    ):
        printed = train_model(project, name, *tuning, *more)
        assert ("Muon suits models that were trained with it" in printed) == is_warned
