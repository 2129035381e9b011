# covers: 04_train_fsdp.py, lib/models/float8.py
"""Train in 8-bit floats (emulated), resume bit for bit, and export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, losses, metrics, read_log, train_model

ARGUMENTS = (
    "-d",
    "corpus",
    "-m",
    "model",
    "-s",
    SEQ_LENGTH,
    "--lr",
    "1e-2",
    "--log-freq",
    1,
    "--ckpt-freq",
    2,
    "--max-steps",
    4,
    "-b",
    2,
    "--global-batch-size",
    8,
)
FP8 = (*ARGUMENTS, "--precision", "fp8")


def allow_float8_anywhere(_: int) -> None:
    """Allow a run in 8-bit floats on hardware without them."""
    from lib.parallel import precision

    precision.require_float8 = lambda *_: None


def read_shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def train_float8(root: Path, name: str, *options: object, ranks: int = 2, **settings: Any) -> str:
    before = "tests.test_stage_04_float8:allow_float8_anywhere"
    return train_model(root, name, *FP8, *options, ranks=ranks, before=before, **settings)


@pytest.mark.slow
def test_a_run_in_8_bits_trains_resumes_and_exports(project: Path) -> None:
    printed = train_float8(project, "whole")
    log = read_log(project, "whole")
    assert "fp8: 14 linear layers" in log and "scaled tensorwise" in log
    assert "float32 masters and reductions, fp8 compute" in log
    assert "Failed to load" not in printed
    run_stage(
        "04_train_fsdp.py", "-e", "wide", *ARGUMENTS, "--precision", "bf16", cwd=project, ranks=2
    )
    expected = losses(project, "whole")
    assert expected != losses(project, "wide")
    assert expected == pytest.approx(losses(project, "wide"), rel=0.01)

    runs = project / "outputs"
    shutil.copytree(runs / "whole", runs / "cut")
    shutil.rmtree(runs / "cut" / "checkpoints" / "step_00000004")
    assert "step 2 of 4" in train_float8(project, "cut", "--activation-checkpointing", "full")
    exact = ("train/loss", "train/grad_norm")
    assert [[row[key] for key in exact] for row in metrics(project, "cut")] == [
        [row[key] for key in exact] for row in metrics(project, "whole")
    ]

    done = run_stage(
        "04_train_fsdp.py", "-e", "whole", *ARGUMENTS, "--precision", "bf16", cwd=project, expect=2
    )
    assert "--precision: fp8 there, bf16 now" in done.stderr
    printed = train_float8(
        project, "whole", "--precision", "fp8-rowwise", "--max-steps", 6, expect=2, ranks=0
    )
    assert "--precision: fp8 there, fp8-rowwise now" in printed

    train_float8(
        project, "replicas", "--shard-size", 1, "--precision", "fp8-rowwise", "--max-steps", 2
    )
    assert losses(project, "replicas")[1] == pytest.approx(expected[1], rel=0.01)

    for name in ("whole", "wide"):
        run_stage("05_export_checkpoint.py", "-e", name, cwd=project)
    files = [
        next((runs / name / "export" / "step_00000004").glob("*.safetensors"))
        for name in ("whole", "wide")
    ]
    assert (
        read_shapes(files[0]) == read_shapes(files[1])
        and files[0].stat().st_size == files[1].stat().st_size
    )
