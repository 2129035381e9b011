# covers: 04_train_fsdp.py, lib/optim/muon.py
"""Muon trains alike with every option for memory, speed and precision, and in every layout."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig

from lib.optim import guard
from lib.optim.optimizers import Choice
from tests.training import (
    SMALL_RUN,
    VOCABULARY,
    assert_refused,
    losses,
    read_events,
    read_log,
    save_model,
    train_model,
)

RUN = (
    *SMALL_RUN,
    *("--from-scratch", "--optimizer", "muon", "--lr", "3e-3", "--max-steps", 4),
    *("--global-batch-size", 12, "--compile", "off"),
)
EXPERTS = MixtralConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)
# Options, the number of ranks, and of samples in a micro-batch.
WAYS: dict[str, tuple[tuple[object, ...], int, int]] = {
    "two ranks share samples": (
        ("--context-parallel", 2, "--activation-checkpointing", "full", "--deterministic", "on"),
        2,
        6,
    ),
    "three ranks share samples": (("--context-parallel", 3, "--deterministic", "on"), 3, 4),
    "two pairs share samples": (
        ("--context-parallel", 2, "--shard-size", 2, "--cpu-offload", "on"),
        4,
        3,
    ),
    "replicas": (("--shard-size", 1), 2, 6),
}


@pytest.fixture(scope="module")
def root(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with runs of one rank: `plain`, and `experts` of a mixture of experts."""
    root = tmp_path_factory.mktemp("muon")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    shutil.copytree(root / "model", root / "mixtral")
    save_model(root / "mixtral", EXPERTS)
    train_model(root, "plain", *RUN, "-b", 12, "--ckpt-freq", 2)
    return root


@pytest.mark.parametrize(
    "way",
    [
        "two ranks share samples",
        pytest.param("three ranks share samples", marks=pytest.mark.slow),
        pytest.param("two pairs share samples", marks=pytest.mark.slow),
        pytest.param("replicas", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_rank_with_whole_samples(root: Path, way: str) -> None:
    options, ranks, batch = WAYS[way]
    name = way.replace(" ", "_")
    train_model(root, name, *RUN, *options, "-b", batch, ranks=ranks)
    assert losses(root, name) == pytest.approx(losses(root, "plain"), rel=1e-5)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("tests.training:note_graphs", id="graphs", marks=pytest.mark.slow),
        pytest.param("", id="compiled", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_train_alike(root: Path, before: str) -> None:
    words = (*RUN[:-1], "on", "-b", 12)
    name = f"compiled_{len(before)}"
    train_model(root, name, *words, before=before)
    assert losses(root, name) == pytest.approx(losses(root, "plain"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_experts_train_alike_on_ranks_with_whole_and_with_divided_ones(
    root: Path, ranks: int
) -> None:
    """Two ranks have two whole experts each; three ranks have some rows of all four."""
    words = (*RUN, "-m", "mixtral", "-b", 2)
    if not (root / "outputs" / "experts").exists():
        train_model(root, "experts", *words)
    train_model(root, f"experts_{ranks}", *words, ranks=ranks)
    assert losses(root, f"experts_{ranks}") == pytest.approx(losses(root, "experts"), rel=1e-4)
    assert "Muon for 14 tensors" in read_log(root, f"experts_{ranks}")


def scale_loss_too_much(rank: int) -> None:
    """Let fp16 begin with a loss scale that makes gradients infinite. A fork calls this first."""
    create = guard.StepGuard.__init__

    def create_with_scale(self: guard.StepGuard, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        self.scale = 2.0**21

    guard.StepGuard.__init__ = create_with_scale  # type: ignore[method-assign]


def test_steps_of_fp16_that_overflow_are_skipped(root: Path) -> None:
    words = (*RUN, "--precision", "fp16", "-b", 2, "--lr", "1e-2", "--max-steps", 10)
    train_model(root, "fp16", *words, ranks=2, before=f"{__name__}:scale_loss_too_much")
    skipped = sum(event["steps"] for event in read_events(root, "skip_step", experiment="fp16"))
    assert 2 <= skipped <= 7
    values = losses(root, "fp16")
    assert values[10] < values[1] - 0.2


def test_adapters_are_trained_by_adamw(root: Path) -> None:
    words = (*SMALL_RUN, "--lora-rank", 4, "--max-steps", 2, "-b", 4, "--compile", "off")
    for name in ("adamw", "muon"):
        train_model(root, f"lora_{name}", *words, "--optimizer", name)
    assert losses(root, "lora_muon") == losses(root, "lora_adamw")
    assert "Muon for" not in read_log(root, "lora_muon")


def test_a_plan_counts_the_momentum_and_a_resume_keeps_the_coefficients(root: Path) -> None:
    words = (*RUN, "--dry-run", "--plan-gpus", 2, "-b", 2)
    printed = train_model(root, "x", *words, before="tests.training:plan_one_batch")
    model = AutoModelForCausalLM.from_pretrained(root / "model")
    size = sum(Choice("muon").state_bytes(name, p.shape) for name, p in model.named_parameters())
    [planned] = re.findall(r"([\d.]+) KiB optimizer states", printed)
    assert float(planned) == pytest.approx(size / 2 / 1024, rel=0.01)
    printed = train_model(root, "x", *RUN, "--dry-run", "-b", "auto")
    assert "--batch-size auto" in printed, printed
    assert_refused(
        root,
        *("-e", "plain", *RUN, "-b", 12, "--max-steps", 6),
        *("--muon-coefficients", "polar-express"),
        code=2,
        says="--muon-coefficients: not given there, polar-express now",
    )
