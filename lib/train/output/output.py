"""Define how a launch of stage 04 writes what it leaves behind.

An output belongs to one launch. No other code asks which output a launch has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from lib.core.paths import Experiment
from lib.train.config import Config
from lib.train.output.kinds import OutputKind

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


class Output(ABC):
    """Makes the parts of a launch that write. kind: what its options say about it."""

    kind: ClassVar[type[OutputKind]]

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @property
    def keeps_files(self) -> bool:
        """Return whether the launch writes to the directory of an experiment."""
        return self.kind.keeps_files

    @property
    def reads_weights(self) -> bool:
        """Return whether a model without weights is an error."""
        return self.kind.reads_weights

    @property
    @abstractmethod
    def title(self) -> str:
        """Return the name of the launch for the head of the log."""

    @abstractmethod
    def require_usable_directory(
        self, config: Config, inputs: Inputs, identity: dict[str, Any]
    ) -> None:
        """Raise UsageError or ArtifactError if the launch cannot write where it has to.

        identity: that of the run, see Config.identity.
        """

    @abstractmethod
    def make_journal(self, rank: int, is_restart: bool) -> Journal:
        """Return the writer of the files in which the launch records itself."""

    @abstractmethod
    def claim(
        self,
        plan: Plan,
        inputs: Inputs,
        chat: ChatFacts | None,
        journal: Journal,
        launch: Launch,
        layout: ParallelLayout,
    ) -> AbstractContextManager[None]:
        """Return a context in which no other launch writes the same files; see claim_experiment."""

    @abstractmethod
    def make_checkpointer(
        self, plan: Plan, layout: ParallelLayout, journal: Journal
    ) -> Checkpointer:
        """Return the object that saves and finds checkpoints. All ranks must call this."""

    @abstractmethod
    def make_report(
        self,
        inputs: Inputs,
        journal: Journal,
        state: TrainState,
        stream: DataStream,
        meters: Meters,
        estimate: MemoryEstimate,
    ) -> Report:
        """Return the object that reports the steps."""

    @abstractmethod
    def select_evaluated(self, data: Data) -> Data:
        """Return the data with only those validation splits and tasks that are evaluated."""

    @abstractmethod
    def describe_cost(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> dict[str, str]:
        """Return rows of a table: the time of all steps, and the checkpoints."""

    @abstractmethod
    def suggest_options(self, plan: Plan, cost: ModelCost, hardware: Hardware) -> str | None:
        """Return a warning that names better options for this output, or None."""

    @abstractmethod
    def suggest_next(self, config: Config) -> None:
        """Log what to do after the last step."""
