"""Tokenise raw text while training, without stages 01 and 02: `--streaming`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import artifacts, commands, log, paths, units
from lib.core.errors import Problems
from lib.hub.dataset import HubDataset
from lib.tokens import build, raw_shards
from lib.tokens.dataset import find_dataset
from lib.tokens.encode import Encoder
from lib.tokens.raw_shards import RawShards
from lib.tokens.raw_stream import RawDocuments, RawStream
from lib.train.batch_division import get_degrees
from lib.train.config import Config
from lib.train.data import Data
from lib.train.plan import Plan, get_world_size
from lib.train.source import Encoding, SampleSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StreamedData(Data):
    """The documents that this rank reads. Their number is unknown, and none are held out."""

    documents: RawDocuments

    @property
    def samples_per_epoch(self) -> None:
        """Return None."""

    @property
    def most_documents(self) -> int:
        """Return 1, because samples are windows."""
        return 1

    def stream(self, plan: Plan, device: torch.device) -> RawStream:
        """Return the stream from which this rank takes its share of each step."""
        return RawStream(self.documents, plan.config.seq_length, plan.division, device)

    def describe(self, plan: Plan) -> dict[str, str]:
        """Return the steps and tokens of the run and its pieces of files, as table rows."""
        total_samples = plan.total_steps * plan.division.global_batch
        return plan.describe() | self.documents.describe(total_samples)


@dataclass(frozen=True)
class RawStreamSource(SampleSource):
    """Reads JSON Lines or Parquet from this machine or, with --online, from the Hub."""

    shards: RawShards
    option = "--streaming"
    is_prepared = False
    new_tokenizer = "with a token for each byte"

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return whether --streaming was typed."""
        return bool(config.streaming)

    @classmethod
    def reads_hub(cls, config: Config) -> bool:
        """Return whether --online was typed."""
        return config.online

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add a problem for each option that needs a number of samples or a token store."""
        if not config.step_limit:
            problems.add("--streaming needs --max-steps: the number of samples is unknown")
        if config.num_epochs and not config.steps_per_epoch:
            problems.add("--streaming ends at --max-steps, not after --num-epochs")
        if config.packing in ("documents", "none"):
            problems.add(
                f"--streaming does not work with --packing {config.packing}: it needs all "
                "documents",
                hint="stage 02 makes a dataset of them; or let samples be windows, in which "
                "documents see each other:",
                run=commands.as_typed("--packing", "concat"),
            )
        if len(config.dataset_name) > 1:
            problems.add(
                "--streaming uses one dataset, not a mixture", found=", ".join(config.dataset_name)
            )
        if config.prepare_only:
            problems.add("--prepare-only makes a token store, which --streaming does not use")
        if config.resume_with_changes:
            problems.add("--streaming has no --resume-with-changes: other data has other positions")

    @classmethod
    def open(cls, config: Config, earlier_inputs: Mapping[str, str]) -> RawStreamSource:
        """Return the shards of -d. A resumed run keeps the commit of its dataset on the Hub."""
        name = config.dataset_name[0]
        if not config.online:
            return cls(raw_shards.open_directory(find_dataset(name)))
        organisation, _, rest = name.partition("/")
        repository, _, glob = rest.partition("/")
        name = f"{organisation}/{repository}" if repository else organisation
        revision = earlier_inputs.get("commit", "main")
        root = paths.streaming_root(config.cache_dir, name)
        dataset = HubDataset(name, revision, glob or "*", root)
        return cls(raw_shards.open_repository(name, dataset.commit, dataset.sizes, root, dataset))

    def __str__(self) -> str:
        return str(self.shards)

    def identify(self, config: Config, tokenizer_dir: Path) -> dict[str, str]:
        """Return the inputs that must stay the same in a resume.

        The number of ranks is one, because each rank resumes in its own part of the shards.
        """
        shards = self.shards
        return {
            "tokenizer": artifacts.tokenizer_fingerprint(tokenizer_dir),
            "dataset": shards.fingerprint,
            "text field": config.streaming,
            "ranks": str(get_degrees(config).dp_size(get_world_size())),
            **({"commit": shards.commit} if shards.commit else {}),
        }

    def estimate_samples(self, config: Config, encoding: Encoding) -> tuple[Data, None]:
        """Return the documents that this rank would read; nothing is read."""
        return StreamedData(self._select_documents(config)), None

    def prepare_samples(self, config: Config, encoding: Encoding) -> StreamedData:
        """Return the documents of this rank, and start the processes that tokenise them.

        Raises UsageError if the tokenizer does not fit the model or no document has the text
        field, and ArtifactError if no document can be read.
        """
        encoder = Encoder(encoding.tokenizer_dir, 1)
        build.require_vocabulary(encoder.vocab_size, encoding.vocab_size, encoding.tokenizer_dir)
        documents = self._select_documents(config)
        sample = documents.sample()
        encoder.tune(sample)
        workers = max(1, config.num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        documents.start(workers, encoding.tokenizer_dir, sample)
        log.detail(
            f"streaming: {workers} {units.plural(workers, 'worker process')} per rank tokenise "
            f"{self.shards.name} while training. This is for quick trials: a dataset of stages 01 "
            "and 02 costs a step next to nothing, is shuffled as a whole and can have a validation "
            "split"
        )
        return StreamedData(documents)

    def _select_documents(self, config: Config) -> RawDocuments:
        """Return the documents that this rank reads; nothing is read yet."""
        degrees = get_degrees(config)
        return RawDocuments(
            self.shards,
            config.streaming,
            config.seed,
            degrees.dp_rank(log.rank()),
            degrees.dp_size(get_world_size()),
        )
