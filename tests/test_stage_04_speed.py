# covers: 04_train_fsdp.py, lib/parallel/parallelize.py, lib/parallel/compiling.py
"""Options for speed and memory, which must not change the losses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, losses, metrics, read_log

COMMON = (
    "-d",
    "corpus",
    "-m",
    "model",
    "--precision",
    "fp32",
    "--lr",
    "1e-2",
    "--log-freq",
    1,
    "--ckpt-freq",
    4,
    "--eval-freq",
    2,
    "--eval-batches",
    2,
    "--max-steps",
    4,
)
WINDOWS = (*COMMON, "-s", SEQ_LENGTH, "-b", 2)
DOCUMENTS = (*COMMON, "-s", 100, "-b", 2, "--packing", "documents")


@pytest.fixture(scope="module")
def plain(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the experiments `windows` (2 ranks, batch 8) and `documents` (1)."""
    root = tmp_path_factory.mktemp("plain")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage(
        "04_train_fsdp.py", "-e", "windows", *WINDOWS, "--grad-accum-steps", 2, cwd=root, ranks=2
    )
    run_stage("04_train_fsdp.py", "-e", "documents", *DOCUMENTS, cwd=root)
    return root


def figures(root: Path, experiment: str) -> list[float]:
    """Return the losses and gradient norms of a run."""
    return [
        row[key]
        for row in metrics(root, experiment)
        for key in ("train/loss", "train/grad_norm", "eval/loss")
        if key in row
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--activation-checkpointing", "full"), marks=pytest.mark.long),
        pytest.param(("--activation-checkpointing", "selective"), marks=pytest.mark.slow),
        ("--shard-size", 1),
        pytest.param(
            ("--compile", "on", "--activation-checkpointing", "selective"), marks=pytest.mark.long
        ),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_speed_options_do_not_change_the_losses_of_windows(
    plain: Path, options: tuple[object, ...]
) -> None:
    name = "x".join(map(str, options)).strip("-")
    run_stage(
        "04_train_fsdp.py",
        "-e",
        name,
        *WINDOWS,
        "--grad-accum-steps",
        2,
        *options,
        cwd=plain,
        ranks=2,
    )
    assert figures(plain, name) == pytest.approx(figures(plain, "windows"), rel=1e-4)
    if options[0] == "--activation-checkpointing":
        assert figures(plain, name) == figures(plain, "windows")
    log = read_log(plain, name)
    assert "computed in chunks" in log
    assert "attention: sdpa, by torch's" in log
    if "--shard-size" in options:
        assert "over 1 rank, 2 replicas" in log


@pytest.mark.parametrize(
    ("options", "before"),
    [
        pytest.param((), "", id="varlen"),
        pytest.param(
            ("--compile", "on"), "tests.training:note_graphs", id="graphs", marks=pytest.mark.slow
        ),
        pytest.param(("--compile", "on"), "", id="compiled", marks=pytest.mark.long),
    ],
)
def test_speed_options_do_not_change_the_losses_of_documents(
    plain: Path, request: pytest.FixtureRequest, options: tuple[object, ...], before: str
) -> None:
    """Compiling C++ takes a minute; in `graphs`, torch runs the captured graphs instead."""
    name = request.node.callspec.id
    options = ("--attention", "varlen", *options)
    run_stage("04_train_fsdp.py", "-e", name, *DOCUMENTS, *options, cwd=plain, before=before)
    assert figures(plain, name) == pytest.approx(figures(plain, "documents"), rel=1e-4)


def test_speed_options_may_change_when_a_run_resumes(plain: Path) -> None:
    shutil.copytree(plain / "outputs" / "windows", plain / "outputs" / "turned")
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "turned",
        *WINDOWS[:-4],
        "--max-steps",
        6,
        *WINDOWS[-4:],
        "--grad-accum-steps",
        4,
        "--activation-checkpointing",
        "full",
        cwd=plain,
    )
    assert set(losses(plain, "turned")) == {1, 2, 3, 4, 5, 6}
    later = run_stage(
        "04_train_fsdp.py",
        "-e",
        "turned",
        *WINDOWS[:-4],
        "--max-steps",
        8,
        *WINDOWS[-4:],
        "--grad-accum-steps",
        8,
        "--dry-run",
        cwd=plain,
    )
    assert "--activation-checkpointing full (earlier launch)" in later.stdout


def test_speed_options_that_cannot_work_are_refused(plain: Path) -> None:
    for options, says in (
        (("--attention", "flex"), "cannot train on a CPU"),
        (("--shard-size", 3), "does not divide the 1 rank"),
        (("--attention", "flash_attention_2"), "flash_attn needs a GPU"),
        (("--precision", "fp8"), "--precision fp8 needs a GPU"),
    ):
        done = run_stage("04_train_fsdp.py", "-e", "no", *WINDOWS, *options, cwd=plain, expect=2)
        assert says in done.stderr and "Traceback" not in done.stderr
