"""Measure a few steps with `--bench`, and write no files."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lib.train.config import Config
from lib.train.output.kinds import NAME, BenchKind
from lib.train.output.output import Output

if TYPE_CHECKING:  # these import torch, which no check of options waits for
    from lib.checkpoints.checkpointer import Checkpointer
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


class BenchOutput(Output):
    """Prints a table and a line of JSON, and leaves nothing else behind."""

    kind = BenchKind

    @property
    def title(self) -> str:
        """Return the name of all benches."""
        return NAME

    def require_usable_directory(
        self, config: Config, inputs: Inputs, identity: dict[str, Any]
    ) -> None:
        """Do nothing: a bench has no directory."""

    def make_journal(self, rank: int, is_restart: bool) -> Journal:
        """Return a journal that writes nothing."""
        from lib.runs.journal import Journal

        return Journal(self.experiment, rank, False, is_restart)

    def claim(
        self,
        plan: Plan,
        inputs: Inputs,
        chat: ChatFacts | None,
        journal: Journal,
        launch: Launch,
        layout: ParallelLayout,
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def make_checkpointer(
        self, plan: Plan, layout: ParallelLayout, journal: Journal
    ) -> Checkpointer:
        """Return a checkpointer that saves nothing, and finds nothing."""
        from lib.train.output.bench_report import NoCheckpoints

        return NoCheckpoints()

    def make_report(
        self,
        inputs: Inputs,
        journal: Journal,
        state: TrainState,
        stream: DataStream,
        meters: Meters,
        estimate: MemoryEstimate,
    ) -> Report:
        """Return the report that prints the result."""
        from lib.train.output.bench_report import BenchReport

        return BenchReport(self.experiment, journal, state, stream, meters, estimate, inputs)

    def select_evaluated(self, data: Data) -> Data:
        """Return the data without validation splits and tasks."""
        return replace(data, held_out=[], tasks=[])

    def describe_cost(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> dict[str, str]:
        """Return rows of a table: the time of all steps, and that nothing is saved."""
        from lib.train import estimates

        return estimates.describe_cost(plan, cost, hardware) | {"checkpoints": "none"}

    def suggest_options(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
        """Return a warning if the bench takes many minutes."""
        from lib.train import estimates

        return estimates.suggest_shorter_bench(plan, cost, hardware)

    def suggest_next(self, config: Config) -> None:
        """Do nothing: there is nothing to export."""
