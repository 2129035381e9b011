"""Train on synthetic tokens: `-d synthetic[:TOKENS]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.core import commands
from lib.core.errors import Problems
from lib.tokens import packing
from lib.tokens.options import is_synthetic
from lib.tokens.samples import Windows
from lib.tokens.store import Split
from lib.tokens.synthetic import SyntheticText, find_synthetic
from lib.train.config import Config
from lib.train.data import Data, SampleData
from lib.train.source import Encoding, SampleSource


@dataclass(frozen=True)
class SyntheticSource(SampleSource):
    """Computes tokens where other sources read them, so there is no text and no file."""

    text: SyntheticText
    option = "-d synthetic"
    needs_tokenizer = False
    is_prepared = False
    needs_weights = False
    new_tokenizer = "without a tokenizer"

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return whether -d names synthetic tokens."""
        return any(map(is_synthetic, config.dataset_name))

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for each option that needs text or files."""
        if not problems.collect(lambda: find_synthetic(config.dataset_name)):
            return
        if config.sample_prompts is not None:
            problems.add("--sample-prompts needs a tokenizer, and -d synthetic uses none")
        if config.eval_suite:
            problems.add(
                "--eval-suite needs a tokenizer, and a run on synthetic tokens has none",
                run=commands.as_typed(drop=["--eval-suite"]),
            )

    @classmethod
    def open(cls, config: Config, earlier_inputs: Mapping[str, str]) -> SyntheticSource:
        """Return the source with the number of tokens that -d names."""
        text = find_synthetic(config.dataset_name)
        assert text is not None  # `is_requested` has returned True
        return cls(text)

    def __str__(self) -> str:
        return str(self.text)

    def identify(self, config: Config, tokenizer_dir: Path) -> dict[str, str]:
        """Return the number of tokens as an input; there is no tokenizer."""
        return {"dataset": self.text.fingerprint}

    def estimate_samples(self, config: Config, encoding: Encoding) -> tuple[Data, int]:
        """Return the samples themselves, which no preparation can change."""
        data = self.prepare_samples(config, encoding)
        return data, len(data.train)

    def prepare_samples(self, config: Config, encoding: Encoding) -> SampleData:
        """Return the samples; UsageError if there are too many documents to pack."""
        tokens = self.text.make_tokens(encoding.vocab_size, config.seed)
        if config.packing == "concat":
            return SampleData(Windows(tokens, config.seq_length))
        split = Split(tokens, self.text.cut_documents(config.seed))
        is_single = config.packing == "none"
        return SampleData(packing.pack_in_memory(split, config.seq_length, is_single))
