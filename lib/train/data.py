"""The data of a run: token stores and packs made where they are missing, and this rank's stream."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, units
from lib.tokens import build, mixture, packing, readable, store
from lib.tokens.batches import DataStream, SampleStream
from lib.tokens.chat import counts
from lib.tokens.chat.counts import ChatFacts
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.columns import CHAT
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.mixture import HeldOut
from lib.tokens.raw_shards import RawShards
from lib.tokens.raw_stream import RawDocuments, RawStream
from lib.tokens.samples import Samples, Windows
from lib.tokens.store import TokenStore
from lib.train.config import Config
from lib.train.inputs import Inputs, text_field
from lib.train.plan import Plan, degrees, launched_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what its validation loss is measured on.

    chat: what its chat datasets were prepared with, None where there are none.
    """

    train: Samples | RawDocuments
    held_out: list[HeldOut]
    chat: ChatFacts | None = None

    @property
    def samples(self) -> int | None:
        """Return the samples of an epoch, None where it has no known length."""
        return None if isinstance(self.train, RawDocuments) else len(self.train)

    @property
    def most_documents(self) -> int:
        """Return the most documents of a sample, where they are packed."""
        return 1 if isinstance(self.train, RawDocuments) else self.train.most_documents

    def stream(self, plan: Plan, device: torch.device) -> DataStream:
        """Return the steps of this rank; see Division for its part of each."""
        if isinstance(self.train, RawDocuments):
            return RawStream(self.train, plan.config.seq_length, plan.division, device)
        return SampleStream(self.train, plan.config.seed, plan.division, device)

    def describe(self, plan: Plan) -> dict[str, str]:
        """Return the derived numbers of a run, for a mixture those of each corpus too."""
        numbers = plan.total_steps * plan.division.global_batch
        rows = plan.describe() | self.train.describe(numbers)
        if isinstance(self.train, RawDocuments):
            return rows
        labels, tokens = self.train.mean_counts()
        if labels < tokens:
            kind = "trained" if self.chat else "with a label"
            rows["without padding"] = (
                f"about {numbers * tokens:,.0f} tokens, {numbers * labels:,.0f} of them {kind}"
            )
        return rows


def prepare_data(config: Config, inputs: Inputs, vocab_size: int) -> Data:
    """Return the samples of all corpora, making token stores and packs where they are missing.

    Must run before the process group exists: it may take hours, and no collective may time out.
    """
    if inputs.shards:
        return Data(_prepare_shards(config, inputs.shards, inputs.model_dir, vocab_size), [])
    stores = []
    for corpus in inputs.corpora:
        path = build.prepare_store(
            corpus.dataset,
            inputs.model_dir,
            config.cache_dir,
            vocab_size,
            config.num_workers,
            not config.no_progress,
            config.prepare_only,
            chat_policy(config, inputs.template, corpus.dataset),
        )
        tokens = store.open_store(path, config.token_reads)
        build.require_vocabulary(tokens.vocab_size, vocab_size, inputs.model_dir)
        log.info(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
        if chat := counts.read_facts(tokens):
            log.table(chat.table_rows())
            if log.rank() == 0:
                counts.warn_about_samples(
                    str(corpus.dataset.path), chat.counts["train"], path / counts.ERRORS
                )
        stores.append(tokens)
    if config.show_samples and log.rank() == 0:
        _print_samples(stores, config.show_samples, inputs.model_dir)
    return mix(config, inputs, stores)


def _print_samples(stores: Sequence[TokenStore], count: int, tokenizer_dir: Path) -> None:
    """Print some samples of each store, in colour on a terminal."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    tokenizer = Encoder(tokenizer_dir, 1).tokenizer
    log.info(f"training samples ({readable.describe_marks(colour)}):")
    for tokens in stores:
        for text in readable.render_documents(tokens, count, tokenizer, colour):
            log.info(text)


def chat_policy(config: Config, template: str, dataset: Dataset) -> ChatPolicy | None:
    """Return how the conversations of a dataset become samples; None for a dataset of text.

    template: its source.
    """
    if dataset.format != CHAT:
        return None
    return ChatPolicy(template, config.train_on, config.too_long, config.seq_length)


def mix(config: Config, inputs: Inputs, stores: list[TokenStore]) -> Data:
    """Return the samples of all corpora, making the index of packs first where it is needed."""
    splits = [_split(config, tokens) for tokens in stores]
    train = mixture.mix_samples(inputs.corpora, [split["train"] for split in splits])
    return Data(
        train,
        mixture.list_held_out(inputs.corpora, train, [split.get("validation") for split in splits]),
        counts.merge_facts([*filter(None, map(counts.read_facts, stores))]),
    )


def _split(config: Config, tokens: TokenStore) -> Mapping[str, Samples]:
    """Return the samples of one corpus by split."""
    if config.packing == "documents":
        return packing.prepare_packs(tokens, config.seq_length)
    return {
        name: Windows(split.tokens, config.seq_length, split.labels)
        for name, split in tokens.splits.items()
    }


def shards_of_rank(config: Config, found: RawShards) -> RawDocuments:
    """Return this rank's part of the shards, nothing of it read yet."""
    divided = degrees(config)
    return RawDocuments(
        found,
        text_field(config),
        config.seed,
        divided.dp_rank(log.rank()),
        divided.dp_size(launched_size()),
    )


def _prepare_shards(
    config: Config, found: RawShards, model_dir: Path, vocab_size: int
) -> RawDocuments:
    """Return this rank's part, with processes that are about to tokenise it.

    Raises UsageError when the tokenizer does not fit the model or no document has the text field,
    ArtifactError when no document can be read.
    """
    encoder = Encoder(model_dir, 1)
    build.require_vocabulary(encoder.vocab_size, vocab_size, model_dir)
    documents = shards_of_rank(config, found)
    sample = documents.sample()
    encoder.tune(sample)
    workers = max(1, config.num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    documents.start(workers, model_dir, sample)
    log.info(
        f"streaming: {workers} {units.plural(workers, 'worker process')} per rank tokenise "
        f"{found.name} while training. This is for trying things out: a dataset of stages 01 "
        "and 02 costs a step next to nothing, is shuffled as a whole and may have a "
        "validation split"
    )
    return documents
