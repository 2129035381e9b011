"""The state of a run: everything that a checkpoint saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lib.checkpoints import contents
from lib.checkpoints.contents import EvaluationFacts, TrainRecord
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel.layout import ParallelLayout, gather
from lib.runs import figures
from lib.tokens.batches import BEGINNING, Cursor, Position, Step
from lib.train.plan import Plan


@dataclass
class TrainState:
    """Model, optimizer, and position of a run in its steps and its data.

    model_files: digests of the files in the run's model/, on rank 0. base: digests of the files
    with frozen weights, on rank 0. step: optimizer steps done. tokens: tokens in these steps,
    without padding. rollbacks: see resume.roll_back. resumed_from, resumed_path: manifest digest
    and path of the checkpoint that --resume named in this or an earlier launch. figures: the last
    row. unevaluated: the row of this step while its evaluation or samples are due, else {}.
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
    unevaluated: dict[str, Any] = field(default_factory=dict)

    def advance(self, step: Step) -> None:
        """Count a completed step and its tokens."""
        self.step = self.step + 1
        self.tokens = self.tokens + step.tokens
        self.position = step.after

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters, persistent buffers and optimizer states by name, sharded as they are.

        Missing optimizer states, before the first step, are created as zeros.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) for p in trained), "gathered parameters"
        return contents.name_tensors(self.model, registry.named_states(self.model, self.optimizer))

    def evaluation_facts(self) -> EvaluationFacts:
        """Return the figures of this step's evaluation that a checkpoint contains."""
        logged = self._finite_figures()
        facts: EvaluationFacts = {"eval_loss": logged.get("eval/loss")}
        key = self.plan.config.best_by
        if key != figures.DEFAULT_SCORE:
            facts["score"] = {"key": key, "value": logged.get(key)}
        return facts

    def _finite_figures(self) -> dict[str, Any]:
        """Return the finite figures of this step's row, {} without a row."""
        logged = self.figures if self.figures.get("step") == self.step else {}
        return {key: value for key, value in logged.items() if math.isfinite(value)}

    def state_dict(self) -> TrainRecord:
        """Return all other state as a checkpoint's record. All ranks must call this."""
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
            "loss": self._finite_figures().get("train/loss"),
            **self.evaluation_facts(),
            "bad_steps": self.guard.in_a_row,
            "rollbacks": self.rollbacks,
            "loss_scale": self.guard.state(),
            "model_files": self.model_files,
            "optimizer_steps": registry.count_steps(self.optimizer),
        }
        if self.unevaluated:
            record["unevaluated"] = self._finite_figures()
        if self.base:
            record["base"] = self.base
        if self.position.cursor:
            cursors = gather(self.position.cursor._asdict(), self.layout.control)
            # Ranks that read the same data have the same cursor.
            record["cursors"] = cursors[:: len(cursors) // self.plan.division.dp_size]
        return record

    def load_state_dict(self, record: TrainRecord) -> None:
        """Restore the state besides model and optimizer from a checkpoint's record."""
        self.step = record["step"]
        self.unevaluated = {}
        self.tokens = record["tokens"]
        self.position = Position(record["samples"])
        if cursors := record.get("cursors"):
            division = self.plan.division
            # Cursors of another number of readers are useless: --resume-with-changes reads the
            # data from its beginning.
            self.position = (
                Position(record["samples"], Cursor(**cursors[division.dp_rank]))
                if len(cursors) == division.dp_size
                else BEGINNING
            )
        self.rollbacks = record["rollbacks"]
        self.guard.restore(record["loss_scale"])
        registry.set_step_count(self.optimizer, record["optimizer_steps"])
