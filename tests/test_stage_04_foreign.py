# covers: 04_train_fsdp.py, lib/checkpoints/foreign_run.py, lib/checkpoints/foreign_weights.py
"""Take over the weights of runs of other trainers, and resume the new run by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lib.checkpoints import commit, contents
from lib.export.tensor_reader import FullTensorReader
from lib.tokens import order, store
from lib.tokens.samples import Windows
from tests.conftest import run_stage, start_stage
from tests.training import SEQ_LENGTH, list_saved_steps, losses, prepare_project, train_model

BATCH = 6
RUN = (
    *("-d", "corpus", "-s", SEQ_LENGTH, "--global-batch-size", BATCH, "--compile", "off"),
    *("--precision", "fp32", "--log-freq", 1, "--eval-freq", 0, "--num-workers", 1),
)
KEEP = ("--lr", 0, "--max-steps", 1)  # changes no weight


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with runs of other trainers in old/."""
    root = prepare_project(tmp_path_factory.mktemp("foreign"))
    run_stage("tests/foreign_trainer.py", "model", "old", cwd=root, ranks=2)
    return root


def begin_from_foreign(root: Path, name: str, *options: object, **settings: Any) -> str:
    return train_model(root, name, *RUN, *options, **settings)


def assert_same_bits(root: Path, experiment: str, step: int, expected: Path) -> None:
    """Assert that a checkpoint contains the weights in a file."""
    checkpoint = root / f"outputs/{experiment}/checkpoints/step_{step:08d}/dcp"
    reader = FullTensorReader(checkpoint, reads_ahead=False)
    weights = load_file(expected)
    names = [name for name in reader.described if name.startswith(contents.MODEL)]
    assert len(names) == len(weights) - 1, "the embedding is tied"
    for name in names:
        (tensor,) = reader.read([name])
        assert torch.equal(tensor, weights[name.removeprefix(contents.MODEL)]), name
    reader.close()


def plain_loss(root: Path, expected: Path) -> float:
    """Return the loss of transformers' model on the samples of the first step."""
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model.load_state_dict(load_file(expected))
    (tokens,) = (root / ".cache/tokens").glob("corpus-*")
    samples = Windows(store.open_store(tokens).splits["train"].tokens, SEQ_LENGTH)
    numbers = order.sample_numbers(0, BATCH, len(samples), seed=0)
    inputs, labels = (torch.from_numpy(part.copy()) for part in samples.read_samples(numbers)[:2])
    logits = model(inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().long()).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("offline", 2),
        pytest.param("offline", 3, marks=pytest.mark.long),
        pytest.param("trainer", 3, marks=pytest.mark.long),
        ("wrapped", 0),
    ],
)
def test_weights_of_two_ranks_are_taken_over_to_the_bit(
    project: Path, kind: str, ranks: int
) -> None:
    name = f"{kind}-{ranks}"
    printed = begin_from_foreign(
        project, name, "-m", "model", *KEEP, "--resume-from-foreign", f"old/{kind}", ranks=ranks
    )
    assert f"parameters read from old/{kind}" in printed
    expected = project / f"old/{kind}.safetensors"
    assert_same_bits(project, name, 1, expected)
    assert losses(project, name)[1] == pytest.approx(plain_loss(project, expected), rel=1e-6)


@pytest.mark.slow
def test_a_run_that_has_begun_resumes_by_itself(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    option = ("--resume-from-foreign", "old/offline")
    shape = tmp_path / "shape"  # a directory without weights is enough
    shutil.copytree(tmp_path / "model", shape)
    (shape / "model.safetensors").unlink()
    assert "missing" in begin_from_foreign(
        tmp_path, "run", "-m", "shape", "--max-steps", 2, expect=3
    )
    printed = begin_from_foreign(tmp_path, "run", "-m", "shape", "--max-steps", 2, *option)
    assert "read from old/offline/checkpoint (step 1,200 of epoch 1)" in printed
    assert "learning-rate schedule (lr_scheduler.pt)" in printed
    assert "--lr 3e-05 (a model with weights)" in printed
    events = (tmp_path / "outputs/run/events.jsonl").read_text().splitlines()
    assert json.loads(events[0])["weights"] == "old/offline/checkpoint"

    assert "already done" in begin_from_foreign(
        tmp_path, "run", "-m", "shape", "--max-steps", 2, *option
    )
    for more, typed in ((3, option), (4, ())):  # the option may be left out
        printed = begin_from_foreign(tmp_path, "run", "-m", "shape", "--max-steps", more, *typed)
        assert f"step {more - 1:,} of {more}" in printed and "read from" not in printed

    # Other weights in the same directory are another run, or none.
    (tmp_path / "old/offline/checkpoint/__0_0.distcp").open("ab").write(b"x")
    printed = begin_from_foreign(
        tmp_path, "run", "-m", "shape", "--max-steps", 5, *option, expect=2
    )
    assert "foreign weights" in printed and "which need no --resume-from-foreign" in printed
    shutil.rmtree(tmp_path / "old")
    begin_from_foreign(tmp_path, "run", "-m", "shape", "--max-steps", 5, *option)
    assert list_saved_steps(tmp_path, "run") == [3, 4, 5]
    printed = begin_from_foreign(
        tmp_path, "another", "-m", "shape", "--max-steps", 2, *option, expect=3
    )
    assert "there is no directory old" in printed


@pytest.mark.slow
def test_a_killed_run_gives_the_same_losses(project: Path) -> None:
    """Before its first save, it reads the weights of the other trainer again."""
    steps = ("--max-steps", 50, "--resume-from-foreign", "old/offline", "-m", "model")
    begin_from_foreign(project, "undisturbed", *steps, ranks=2)
    for name, every in (("before a save", 1000), ("after a save", 10)):
        options = (*steps, "--ckpt-freq", every)
        launch = start_stage("04_train_fsdp.py", *RUN, "-e", name, *options, cwd=project, ranks=2)
        run = project / "outputs" / name
        rows = run / "metrics.jsonl"
        while not (commit.list_checkpoints(run / "checkpoints") if every == 10 else rows.exists()):
            assert not launch.poll(0.02)
        launch.kill()
        assert bool(commit.list_checkpoints(run / "checkpoints")) == (every == 10)
        begin_from_foreign(project, name, *options, ranks=2)
        assert losses(project, name) == losses(project, "undisturbed")


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named_before_training(project: Path) -> None:
    wider = project / "wider"
    shutil.copytree(project / "model", wider)
    (wider / "model.safetensors").unlink()
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 96, "num_hidden_layers": 3})
    )
    option = ("--resume-from-foreign", "old/offline")
    for dry in ((), ("--dry-run",)):
        printed = begin_from_foreign(project, "wide", "-m", "wider", *KEEP, *option, *dry, expect=2)
        assert "gate_proj.weight: expected shape (96, 32), found (64, 32)" in printed
        assert "missing: model.layers.2.mlp.up_proj.weight" in printed
    assert not (project / "outputs/wide").exists()


def test_contradictory_options_are_refused_at_once(tmp_path: Path) -> None:
    printed = begin_from_foreign(
        tmp_path,
        "all",
        *("-m", "model", "--resume-from-foreign", "old/offline", "--from-scratch"),
        *("--lora-rank", 4, "--resume", "outputs/x/checkpoints/step_00000002"),
        expect=2,
    )
    for line in (
        "3 problems",
        "--from-scratch initialises the weights",
        "does not work with LoRA",
        "both name the weights to start from",
    ):
        assert line in printed
