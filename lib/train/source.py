"""Define where a run gets its samples. To add a source, write a subclass; name
it in lib/train/sources/table.py.

The class methods need only options, and act before any file is opened. `open` finds the data; what
it returns identifies, estimates and prepares them. No other code asks which source a run has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from lib.core import declared
from lib.core.errors import Problems
from lib.train.config import DEFAULTS, Config
from lib.train.data import Data
from lib.train.mode import Mode
from lib.train.previous_run import KeptTemplate

_CHAT_OPTIONS = ("chat_template", "chat_template_kwargs", "train_on", "too_long")


@dataclass(frozen=True)
class Encoding:
    """How the text of a run becomes tokens.

    tokenizer_dir: the model's directory. vocab_size: number of tokens that the model knows.
    template: source of the chat template, "" without chat datasets. is_resumed: an earlier launch
    has trained, perhaps with token stores of an earlier version.
    """

    tokenizer_dir: Path
    vocab_size: int
    template: str
    is_resumed: bool


class SampleSource(Mode):
    """A source of samples.

    option: the option that asks for it, "" for prepared datasets. needs_tokenizer: it has text.
    is_prepared: its text can be tokenised ahead of time.
    needs_weights: a model without weights is an error, unless options ask for random weights.
    new_tokenizer: what a model from scratch gets without --tokenizer.
    """

    option: ClassVar[str] = ""
    needs_tokenizer: ClassVar[bool] = True
    is_prepared: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True
    new_tokenizer: ClassVar[str]

    @classmethod
    def reads_hub(cls, config: Config) -> bool:
        """Return whether the run downloads data while it trains."""
        return False

    @classmethod
    def list_tokenizer_texts(cls, config: Config) -> tuple[Path, ...]:
        """Return the datasets on which the tokenizer of a model from scratch is trained."""
        return ()

    @classmethod
    @abstractmethod
    def open(cls, config: Config, earlier_inputs: Mapping[str, str]) -> SampleSource:
        """Return the source of a run. Raises UsageError or ArtifactError if it cannot be used.

        earlier_inputs: the inputs of the run that is resumed, by name; {} for a new run.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Return the names of the data, with their weights or sizes."""

    @abstractmethod
    def identify(self, config: Config, tokenizer_dir: Path) -> dict[str, str]:
        """Return the inputs, apart from the model, that must stay the same in a resume, by name."""

    def find_template(
        self, config: Config, model_dir: Path, kept_template: KeptTemplate | None
    ) -> str:
        """Return the source of the template that renders conversations, "" if there are none.

        kept_template: the template that a resumed run was started with, if any. Raises UsageError
        if there is no template, or if options need conversations and there are none.
        """
        problems = Problems()
        for name in _CHAT_OPTIONS:
            if getattr(config, name) != getattr(DEFAULTS, name):
                problems.add(
                    f"{declared.flag(name)} belongs to chat datasets, and there is none",
                    found=", ".join(config.dataset_name),
                    expected="-d with a dataset that stage 02 has made with --format chat",
                )
        problems.raise_if_any()
        return ""

    def fill_packing(self, config: Config) -> Config:
        """Return the options with the --packing that suits the data."""
        return replace(config, packing="concat")

    @property
    def has_validation(self) -> bool:
        """Return whether some of the data is kept apart for validation."""
        return False

    def name_validation_texts(self) -> set[str]:
        """Return the names under which the losses of parts of the validation split are logged."""
        return set()

    @abstractmethod
    def estimate_samples(
        self, config: Config, encoding: Encoding
    ) -> tuple[Data | None, int | None]:
        """Return the data and the samples of an epoch for a dry run, which writes nothing.

        For unprepared data, these are None and an estimate.
        """

    @abstractmethod
    def prepare_samples(self, config: Config, encoding: Encoding) -> Data:
        """Return the samples, without prompts and tasks; create all files that are missing.

        Raises UsageError if the tokenizer has more tokens than the model.
        """
