# covers: lib/train/settle.py, lib/train/trained.py
"""Learning rates that nobody typed: by the model, and by what an earlier launch recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from lib.checkpoints.commit import Checkpoint
from lib.core.errors import UsageError
from lib.train import checks
from lib.train.settle import Facts, Known, apply_rules, settle_from_files
from tests.planning.test_memory import ASKED, on_meta
from tests.planning.test_memory_check import inputs

SMALL = on_meta()
LARGE = on_meta(LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=12))
OPEN = replace(ASKED, lr=None, min_lr=None)


def chose(lr: float) -> dict[str, Any]:
    """Return the record of an earlier launch for which nobody typed a learning rate."""
    return {"settled": {"lr": lr}, "identity": {"options": {"lr": lr}}}


@pytest.mark.parametrize(
    ("model", "scratch", "earlier", "expected"),
    [
        (SMALL, True, {}, 2e-3),
        (LARGE, True, {}, 3e-4),
        (SMALL, False, {}, 3e-5),
        (SMALL, True, chose(3e-4), 3e-4),
        (LARGE, True, chose(3e-4), 3e-4),
        (SMALL, True, chose(2e-3), 2e-3),
        (SMALL, True, {"identity": {"options": {"lr": 1e-3}}}, 2e-3),  # it was typed
        (SMALL, False, {"identity": {"options": {"lr": 1e-3}}}, 3e-5),
    ],
)
def test_the_default_learning_rate(
    model: Any, scratch: bool, earlier: dict[str, Any], expected: float
) -> None:
    facts = Facts(replace(inputs(earlier), scratch=scratch))
    from_files = apply_rules(OPEN, facts, Known.FILES)
    is_known = not scratch or "settled" in earlier
    assert from_files.lr == (expected if is_known else None)
    facts.model = model
    settled = apply_rules(from_files, facts, Known.MODEL)
    assert (settled.lr, settled.min_lr) == (expected, expected / 10)


def test_the_default_of_a_small_model_depends_on_the_optimizer() -> None:
    for model, earlier, expected in (
        (SMALL, {}, 4e-3),
        (LARGE, {}, 3e-4),
        (SMALL, chose(2e-3), 2e-3),
    ):
        facts = Facts(replace(inputs(earlier), scratch=True), model)
        settled = apply_rules(replace(OPEN, optimizer="muon"), facts, Known.MODEL)
        assert (settled.lr, settled.min_lr) == (expected, expected / 10)


def test_the_run_of_a_named_checkpoint_tells_what_it_has_chosen(tmp_path: Path) -> None:
    begun = replace(inputs(), named_checkpoint=Checkpoint(tmp_path / "checkpoints" / "step_3", 3))
    assert begun.settled == {}  # a checkpoint that was copied without its run
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(chose(2e-3)))
    assert begun.settled == {"lr": 2e-3}


def test_the_smallest_learning_rate_is_compared_with_the_chosen_one() -> None:
    facts = Facts(replace(inputs(), scratch=True), LARGE)
    typed = replace(OPEN, min_lr=1e-3)
    settle_from_files(typed, facts.inputs)  # a small model starts higher
    settle_from_files(replace(OPEN, optimizer="muon", min_lr=3e-3), facts.inputs)
    with pytest.raises(UsageError, match=r"above --lr 0\.0003"):
        checks.require_falling(apply_rules(typed, facts, Known.MODEL))
