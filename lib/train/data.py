"""Define the samples of a run, from which each rank takes its share of every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib.evaluate.tasks import Task
from lib.tokens.batches import DataStream, SampleStream
from lib.tokens.chat.counts import ChatFacts
from lib.tokens.mixture import ValidationSplit
from lib.tokens.prompts import Prompt, encode_prompts, read_prompts
from lib.tokens.samples import Samples
from lib.train.config import Config
from lib.train.plan import Plan

if TYPE_CHECKING:
    import torch

SAMPLE_TOKENS = 64  # tokens of each sample; each takes a forward pass over all prompts


@dataclass(frozen=True)
class Data(ABC):
    """The training and validation samples of a run.

    held_out: the validation splits. chat: facts about the chat datasets, None without any.
    prompts: those of --sample-prompts. tasks: those of --eval-suite.
    """

    held_out: list[ValidationSplit] = field(default_factory=list, kw_only=True)
    chat: ChatFacts | None = field(default=None, kw_only=True)
    prompts: Sequence[Prompt] = field(default=(), kw_only=True)
    tasks: Sequence[Task] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int | None:
        """Return the number of samples in an epoch, None if it is unknown."""

    @property
    @abstractmethod
    def most_documents(self) -> int:
        """Return the largest number of documents in a sample."""

    @property
    def stops(self) -> list[int]:
        """Return the tokens that end the answers of conversations, [] without any."""
        return list(self.chat.stops) if self.chat else []

    @abstractmethod
    def stream(self, plan: Plan, device: torch.device) -> DataStream:
        """Return the stream from which this rank takes its share of each step."""

    @abstractmethod
    def describe(self, plan: Plan) -> dict[str, str]:
        """Return the steps, epochs and tokens of the run and of each corpus, as table rows."""


@dataclass(frozen=True)
class SampleData(Data):
    """Samples that are numbered before the run starts.

    train: the samples of one epoch. long_documents: a phrase with the number of documents that are
    longer than a row; "" if it is unknown or if another rank prints it.
    """

    train: Samples
    long_documents: str = ""

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self.train)

    @property
    def most_documents(self) -> int:
        """Return the largest number of documents in a sample."""
        return self.train.most_documents

    def stream(self, plan: Plan, device: torch.device) -> DataStream:
        """Return the stream from which this rank takes its share of each step."""
        return SampleStream(self.train, plan.config.seed, plan.division, device)

    def describe(self, plan: Plan) -> dict[str, str]:
        """Return the steps, epochs and tokens of the run and of each corpus, as table rows."""
        total_samples = plan.total_steps * plan.division.global_batch
        rows = plan.describe() | self.train.describe(total_samples)
        if self.long_documents:
            rows["long documents"] = self.long_documents
        labels, tokens = self.train.mean_counts()
        if labels < tokens:
            kind = "trained" if self.chat else "with a label"
            padding = 1 - tokens / plan.config.seq_length
            rows["without padding"] = (
                f"about {total_samples * tokens:,.0f} tokens, "
                f"{total_samples * labels:,.0f} of them {kind}; "
                f"{100 * padding:.3g} % of each row is padding on average"
            )
        return rows


def prepare_prompts(config: Config, tokenizer_dir: Path, template: str) -> list[Prompt]:
    """Return the encoded prompts of a run, [] without --sample-prompts.

    config: with its --seq-length. template: source of the chat template, "" without chat datasets.
    Raises UsageError with all problems of the prompts.
    """
    if config.sample_prompts is None:
        return []
    return encode_prompts(
        read_prompts(config.sample_prompts),
        tokenizer_dir,
        template,
        config.seq_length,
        SAMPLE_TOKENS,
        config.chat_template_kwargs,
    )
