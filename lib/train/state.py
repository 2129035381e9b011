"""The state of a run: all that a checkpoint saves, and what its record is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lib.checkpoints import contents
from lib.checkpoints.contents import TrainRecord
from lib.export import probe
from lib.models.sharded import is_frozen
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel.layout import ParallelLayout, gather
from lib.tokens.batches import BEGINNING, Cursor, Position, Step
from lib.train.plan import Plan


@dataclass
class TrainState:
    """What a run has learned, and where it stands.

    model_files, base: digests of the files in the run's model/, and of those with frozen weights,
    on rank 0. step: optimizer steps done. tokens: seen in them, without padding.
    rollbacks: see resume.roll_back. resumed_from, resumed_path: digest and place of the checkpoint
    that a person named with --resume, here or in an earlier launch. figures: of the last step that
    was logged.
    """

    model: PreTrainedModel
    optimizer: Optimizer
    guard: StepGuard
    plan: Plan
    layout: ParallelLayout
    model_files: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    position: Position = BEGINNING
    rollbacks: int = 0
    resumed_from: str | None = None
    resumed_path: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def advance(self, step: Step) -> None:
        """Count a step that was done, and its tokens."""
        self.step = self.step + 1
        self.tokens = self.tokens + step.tokens
        self.position = step.after

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters, persistent buffers and states of the optimizer, sharded as they are.

        States are made (zeros) where no step was taken yet.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) for p in trained), "gathered parameters"
        return contents.name_tensors(self.model, registry.named_states(self.model, self.optimizer))

    def state_dict(self) -> TrainRecord:
        """Return all other state; all ranks must call this."""
        logged = self.figures if self.figures.get("step") == self.step else {}
        logged = {key: value for key, value in logged.items() if math.isfinite(value)}
        record: TrainRecord = {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.position.samples,
            "seed": self.plan.config.seed,
            "total_steps": self.plan.total_steps,
            "samples_per_epoch": self.plan.samples,
            "resumed_from": self.resumed_from,
            "resumed_path": self.resumed_path,
            "world_size": self.layout.ranks,
            "loss": logged.get("train/loss"),
            "eval_loss": logged.get("eval/loss"),
            "bad_steps": self.guard.in_a_row,
            "rollbacks": self.rollbacks,
            "loss_scale": self.guard.state(),
            "model_files": self.model_files,
            "optimizer_steps": registry.count_steps(self.optimizer),
        }
        if self.base:
            record["base"] = self.base
        if self.position.cursor:
            each = gather(self.position.cursor._asdict(), self.layout.control)
            # The ranks that read the same data stand at the same cursor.
            record["cursors"] = each[:: len(each) // self.plan.division.dp_size]
        if is_frozen(self.model) and (logits := probe.measure(self.model, self.layout)):
            record["probe"] = {"precision": self.plan.config.precision, "logits": logits}
        return record

    def load_state_dict(self, record: TrainRecord) -> None:
        """Take up all other state, of a record that is complete."""
        self.step = record["step"]
        self.tokens = record["tokens"]
        self.position = Position(record["samples"])
        if cursors := record.get("cursors"):
            division = self.plan.division
            # Read by other ranks than now, they are of no use: --resume-with-changes begins anew.
            self.position = (
                Position(record["samples"], Cursor(**cursors[division.dp_rank]))
                if len(cursors) == division.dp_size
                else BEGINNING
            )
        self.rollbacks = record["rollbacks"]
        self.guard.restore(record["loss_scale"])
        registry.set_step_count(self.optimizer, record["optimizer_steps"])
