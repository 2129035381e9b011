"""Write a run: a directory with checkpoints, metrics, logs and pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import log
from lib.core.errors import UsageError
from lib.train.config import Config
from lib.train.output.kinds import RunKind
from lib.train.output.output import Output

if TYPE_CHECKING:  # these import torch, which no check of options waits for
    from lib.checkpoints.checkpointer import Checkpointer
    from lib.checkpoints.place import CheckpointPlace
    from lib.checkpoints.run_directory import RunDirectory
    from lib.parallel.layout import ParallelLayout
    from lib.planning.memory import MemoryEstimate
    from lib.runs.journal import Journal
    from lib.tokens.batches import DataStream
    from lib.tokens.chat.counts import ChatFacts
    from lib.train.data import Data
    from lib.train.estimates import Hardware, ModelCost
    from lib.train.inputs import Inputs
    from lib.train.launches import Launch
    from lib.train.output.meters import Meters
    from lib.train.output.report import Report
    from lib.train.plan import Plan
    from lib.train.state import TrainState


class RunOutput(Output):
    """Writes the directory of an experiment, from which the same command resumes."""

    kind = RunKind

    @property
    def title(self) -> str:
        """Return the directory of the experiment."""
        return f"experiment {self.experiment.root}"

    def require_usable_directory(
        self, config: Config, inputs: Inputs, identity: dict[str, Any]
    ) -> None:
        """Raise UsageError or ArtifactError if the run can neither start nor resume there."""
        from lib.train import previous_run

        previous_run.require_usable_directory(config, self.experiment, inputs.earlier_run, identity)
        _require_writable(self.experiment.root)

    def make_journal(self, rank: int, is_restart: bool) -> Journal:
        """Return the writer of config.yaml, state.json and events.jsonl."""
        from lib.runs.journal import Journal

        return Journal(self.experiment, rank, is_restart=is_restart)

    @contextmanager
    def claim(
        self,
        plan: Plan,
        inputs: Inputs,
        chat: ChatFacts | None,
        journal: Journal,
        launch: Launch,
        layout: ParallelLayout,
    ) -> Iterator[None]:
        """Hold the directory of the run, and write the log of this rank to it."""
        from lib.train.experiment import claim_experiment

        experiment = self.experiment
        with claim_experiment(experiment, plan, inputs, chat, journal, launch, layout):
            log.add_file(experiment.rank_log(layout.rank))
            yield

    def make_checkpointer(
        self, plan: Plan, layout: ParallelLayout, journal: Journal
    ) -> Checkpointer:
        """Return the checkpointer, with all places that the options name."""
        import torch

        from lib.checkpoints import tier
        from lib.checkpoints.checkpointer import Checkpointer
        from lib.checkpoints.copied_directory import CopiedDirectory
        from lib.checkpoints.place import SavedRun
        from lib.checkpoints.run_directory import RunDirectory
        from lib.planning import capacity
        from lib.runs.run_records import read_config
        from lib.train.copying import make_copier

        config = plan.config
        experiment = self.experiment
        run = SavedRun(
            config.experiment_name,
            read_config(experiment)["run"],
            plan.identity(),
            layout,
            journal.add_event,
        )
        tiers: list[CheckpointPlace] = []
        if place := config.ckpt_local_dir:
            tiers.append(tier.open_tier(run, place, config.ckpt_freq))
        retention = (config.ckpt_freq, config.ckpt_keep)
        directory: RunDirectory
        if config.ckpt_copy_to:  # last: the copier holds a lease, which a refused run would keep
            copier = make_copier(config, experiment, run, journal)
            directory = CopiedDirectory(run, experiment.checkpoints, *retention, copier)
        else:
            directory = RunDirectory(run, experiment.checkpoints, *retention)
        cpu = torch.device("cpu")
        free_memory = partial(capacity.count_free, cpu) if config.ckpt_async else None
        return Checkpointer(run, [directory, *tiers], plan.total_steps, free_memory)

    def make_report(
        self,
        inputs: Inputs,
        journal: Journal,
        state: TrainState,
        stream: DataStream,
        meters: Meters,
        estimate: MemoryEstimate,
    ) -> Report:
        """Return the writer of rows, console lines, samples and pages."""
        from lib.train.output.report import Report

        return Report(self.experiment, journal, state, stream, meters, estimate)

    def select_evaluated(self, data: Data) -> Data:
        """Return all data."""
        return data

    def describe_cost(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> dict[str, str]:
        """Return rows of a table: the time of all steps, and the checkpoints written and kept."""
        from lib.train import estimates

        return estimates.describe_cost(plan, cost, hardware)

    def suggest_options(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
        """Return None: the warnings for all launches are enough."""
        return None

    def suggest_next(self, config: Config) -> None:
        """Log the command that exports the model."""
        from lib.train.plan import next_command

        log.info(next_command(config, self.experiment))


def _require_writable(directory: Path) -> None:
    """Raise UsageError if a directory can be neither written to nor created."""
    existing = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"{directory} cannot be written",
            found=f"{existing} is {'read-only' if existing.is_dir() else 'a file'}",
            hint="--save-dir DIR uses another one",
        )
