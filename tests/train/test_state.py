# covers: lib/train/state.py, lib/checkpoints/contents.py
"""The state of a run is saved in a checkpoint's record and restored from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lib.checkpoints import contents
from lib.core.errors import ArtifactError
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.optim.optimizers import MomentOptions
from lib.tokens.batches import BEGINNING, Cursor, Position, Step
from lib.train.state import TrainState
from tests.train.test_plan import make_plan


def state_of(group: dist.ProcessGroup) -> TrainState:
    """Return the state of a run before its first step, with optimizer states."""
    model = nn.Linear(2, 2)
    optimizer = registry.build_optimizer("adamw", model, 1e-3, MomentOptions(weight_decay=0.0))
    registry.named_states(model, optimizer)
    return TrainState(
        model,
        optimizer,
        StepGuard("fp16", 30.0, torch.device("cpu")),
        make_plan(samples=100, max_steps=10),
        SimpleNamespace(ranks=1, control=group),
    )


def test_a_record_restores_the_state(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state = state_of(group)
    for tokens in (7, 9):
        state.advance(Step([], 1, tokens, Position(8, Cursor(1, 2, None, 3))))
    state.rollbacks = 2
    state.guard.scale = 512.0
    state.model_files = {"config.json": "sha256:0"}
    registry.set_step_count(state.optimizer, 1)
    nan = float("nan")
    for figures, losses in (
        ({"step": 2, "train/loss": 1.5, "eval/loss": nan}, (1.5, None)),
        ({"step": 1, "train/loss": 1.5}, (None, None)),
    ):
        state.figures = figures
        record = state.state_dict()
        assert (record["loss"], record["eval_loss"]) == losses
    (tmp_path / "train_state.json").write_text(json.dumps(record))
    read = contents.read_record(tmp_path / "train_state.json")
    contents.require_complete(read, tmp_path)
    other = state_of(group)
    other.load_state_dict(read)
    assert (other.step, other.tokens, other.position) == (2, 16, state.position)
    assert other.guard.state() == state.guard.state() and other.rollbacks == 2
    assert registry.count_steps(other.optimizer) == 1
    other.model_files = state.model_files
    assert other.state_dict() == record


def test_cursors_of_another_number_of_readers_are_ignored(group: dist.ProcessGroup) -> None:
    state = state_of(group)
    cursor = {"epoch": 0, "piece": 1, "place": None, "token": 5}
    state.load_state_dict({**state.state_dict(), "samples": 4, "cursors": [cursor, cursor]})
    assert state.position == BEGINNING


def test_an_incomplete_record_is_an_error_that_names_the_missing_keys(
    group: dist.ProcessGroup,
) -> None:
    record = state_of(group).state_dict()
    for key in ("samples", "optimizer_steps"):
        del record[key]
    with pytest.raises(ArtifactError, match="lacks state") as caught:
        contents.require_complete(record, Path("step_00000001"))
    assert caught.value.found.endswith("optimizer_steps, samples")
    record = state_of(group).state_dict()
    assert record["loss_scale"].keys() == contents._LOSS_SCALE
    del record["loss_scale"]["usual_norm"]
    with pytest.raises(ArtifactError) as caught:
        contents.require_complete(record, Path("step_00000001"))
    assert caught.value.found.endswith("usual_norm")
