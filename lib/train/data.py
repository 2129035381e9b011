"""Prepare the data of a run: token stores, packed samples, and the batches of each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, units
from lib.evaluate.tasks import Task
from lib.tokens import build, mixture, packing, readable, store
from lib.tokens.batches import DataStream, SampleStream
from lib.tokens.build import Tokenization
from lib.tokens.chat import counts
from lib.tokens.chat.counts import ChatFacts
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.chat.write import ChatTokenization
from lib.tokens.columns import CHAT
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.mixture import ValidationSplit
from lib.tokens.prompts import Prompt, encode_prompts, read_prompts
from lib.tokens.raw_shards import RawShards
from lib.tokens.raw_stream import RawDocuments, RawStream
from lib.tokens.samples import Samples, Windows
from lib.tokens.store import Split, TokenStore
from lib.tokens.synthetic import SyntheticText
from lib.tokens.text_bytes import SplitText
from lib.tokens.text_writer import TextTokenization
from lib.train.batch_division import get_degrees
from lib.train.config import Config
from lib.train.inputs import Inputs, get_text_field
from lib.train.plan import Plan, get_world_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Data:
    """The training and validation samples of a run.

    train: samples of one epoch, or documents that are tokenised while training (--streaming).
    held_out: the validation splits. chat: facts about the chat datasets, None without any.
    prompts: those of --sample-prompts. tasks: those of --eval-suite.
    """

    train: Samples | RawDocuments
    held_out: list[ValidationSplit]
    chat: ChatFacts | None = None
    prompts: Sequence[Prompt] = ()
    tasks: Sequence[Task] = ()

    @property
    def samples_per_epoch(self) -> int | None:
        """Return the number of samples in an epoch, None with --streaming."""
        return None if isinstance(self.train, RawDocuments) else len(self.train)

    @property
    def most_documents(self) -> int:
        """Return the largest number of documents in a sample."""
        return 1 if isinstance(self.train, RawDocuments) else self.train.most_documents

    @property
    def stops(self) -> list[int]:
        """Return the tokens that end the answers of conversations, [] without any."""
        return list(self.chat.stops) if self.chat else []

    def stream(self, plan: Plan, device: torch.device) -> DataStream:
        """Return the stream from which this rank takes its share of each step."""
        if isinstance(self.train, RawDocuments):
            return RawStream(self.train, plan.config.seq_length, plan.division, device)
        return SampleStream(self.train, plan.config.seed, plan.division, device)

    def describe(self, plan: Plan) -> dict[str, str]:
        """Return the steps, epochs and tokens of the run and of each corpus, as table rows."""
        total_samples = plan.total_steps * plan.division.global_batch
        rows = plan.describe() | self.train.describe(total_samples)
        if isinstance(self.train, RawDocuments):
            return rows
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


def prepare_data(
    config: Config, inputs: Inputs, vocab_size: int, tasks: Sequence[Task] = ()
) -> Data:
    """Return the samples of all corpora; create the token stores and packs that are missing.

    Call this before the process group exists, because it may take hours and collectives would time
    out. Raises UsageError if a tokenizer has more tokens than `vocab_size`, the model's vocabulary,
    or if prompts cannot be used.
    """
    prompts = prepare_prompts(config, inputs)  # first, since the rest may take hours
    return replace(_prepare_samples(config, inputs, vocab_size), prompts=prompts, tasks=tasks)


def prepare_prompts(config: Config, inputs: Inputs) -> list[Prompt]:
    """Return the encoded prompts of a run, [] without --sample-prompts.

    config: with its --seq-length. Raises UsageError with all problems of the prompts.
    """
    if config.sample_prompts is None:
        return []
    return encode_prompts(
        read_prompts(config.sample_prompts),
        inputs.model_dir,
        inputs.template,
        config.seq_length,
        config.sample_tokens,
        config.chat_template_kwargs,
    )


def _prepare_samples(config: Config, inputs: Inputs, vocab_size: int) -> Data:
    """Return the samples of all corpora, without prompts."""
    if inputs.shards:
        return Data(_prepare_shards(config, inputs.shards, inputs.model_dir, vocab_size), [])
    if inputs.synthetic:
        return make_synthetic(config, inputs.synthetic, vocab_size)
    stores = []
    for corpus in inputs.corpora:
        path = build.prepare_store(
            make_tokenization(config, inputs, corpus.dataset),
            config.cache_dir,
            vocab_size,
            config.prepare_only,
            bool(inputs.identity),
        )
        tokens = store.open_store(path)
        build.require_vocabulary(tokens.vocab_size, vocab_size, inputs.model_dir)
        log.detail(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
        if chat := counts.read_facts(tokens):
            log.table(chat.table_rows(), log.detail)
            if log.rank() == 0:
                counts.warn_about_samples(
                    str(corpus.dataset.path), chat.counts["train"], path / counts.ERRORS
                )
        _report_missing_bytes(tokens)
        stores.append(tokens)
    if config.show_samples and log.rank() == 0:
        _print_samples(stores, config.show_samples, inputs.model_dir)
    return combine_stores(config, inputs, stores)


def _print_samples(stores: Sequence[TokenStore], count: int, tokenizer_dir: Path) -> None:
    """Print some samples of each store, in colour on a terminal."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    tokenizer = Encoder(tokenizer_dir, 1).tokenizer
    log.info(f"training samples ({readable.describe_marks(colour)}):")
    for tokens in stores:
        for text in readable.render_documents(tokens, count, tokenizer, colour):
            log.info(text)


def make_tokenization(config: Config, inputs: Inputs, dataset: Dataset) -> Tokenization:
    """Return how a dataset becomes tokens: as text, or as conversations."""
    shared = (dataset, inputs.model_dir, config.num_workers, not config.no_progress)
    if dataset.format != CHAT:
        return TextTokenization(*shared)
    policy = ChatPolicy(
        inputs.template,
        config.train_on,
        config.too_long,
        config.seq_length,
        config.chat_template_kwargs,
    )
    return ChatTokenization(*shared, policy)


def combine_stores(config: Config, inputs: Inputs, stores: list[TokenStore]) -> Data:
    """Return the data of a run from one token store per corpus; create missing packs."""
    splits = [_cut_samples(config, tokens) for tokens in stores]
    train = mixture.mix_samples(inputs.corpora, [split["train"] for split in splits])
    return Data(
        train,
        mixture.list_validation_splits(
            inputs.corpora,
            train,
            [split.get("validation") for split in splits],
            [_get_validation_text(tokens) for tokens in stores],
        ),
        counts.merge_facts([*filter(None, map(counts.read_facts, stores))]),
    )


def _get_validation_text(tokens: TokenStore) -> SplitText | None:
    """Return the bytes and sources of the validation split, None if the store lacks them."""
    split = tokens.splits.get("validation")
    return split.text if split else None


def _report_missing_bytes(tokens: TokenStore) -> None:
    """Say that a store of an older version lacks the bytes of its validation split."""
    split = tokens.splits.get("validation")
    if split and split.text is None and split.labels is None and log.rank() == 0:
        log.info(
            f"  no bits per byte on the validation split: {tokens.path} was built before this "
            "figure existed (if you delete that directory, the next launch builds it again)"
        )


def _cut_samples(config: Config, tokens: TokenStore) -> Mapping[str, Samples]:
    """Return the samples of a corpus by split: documents, or windows of --seq-length."""
    if config.packing == "concat":
        return {
            name: Windows(split.tokens, config.seq_length, split.labels)
            for name, split in tokens.splits.items()
        }
    return packing.prepare_packs(tokens, config.seq_length, config.packing == "none")


def make_synthetic(config: Config, text: SyntheticText, vocab_size: int) -> Data:
    """Return the samples of a run on synthetic tokens, which need no preparation.

    vocab_size: tokens are below it. Raises UsageError if there are too many documents to pack.
    """
    tokens = text.make_tokens(vocab_size, config.seed)
    if config.packing == "concat":
        return Data(Windows(tokens, config.seq_length), [])
    split = Split(tokens, text.cut_documents(config.seed))
    return Data(packing.pack_in_memory(split, config.seq_length, config.packing == "none"), [])


def select_shards(config: Config, shards: RawShards) -> RawDocuments:
    """Return the documents that this rank reads with --streaming; nothing is read yet."""
    degrees = get_degrees(config)
    return RawDocuments(
        shards,
        get_text_field(config),
        config.seed,
        degrees.dp_rank(log.rank()),
        degrees.dp_size(get_world_size()),
    )


def _prepare_shards(
    config: Config, shards: RawShards, model_dir: Path, vocab_size: int
) -> RawDocuments:
    """Return the documents of this rank, and start the processes that tokenise them.

    Raises UsageError if the tokenizer does not fit the model or no document has the text field, and
    ArtifactError if no document can be read.
    """
    encoder = Encoder(model_dir, 1)
    build.require_vocabulary(encoder.vocab_size, vocab_size, model_dir)
    documents = select_shards(config, shards)
    sample = documents.sample()
    encoder.tune(sample)
    workers = max(1, config.num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    documents.start(workers, model_dir, sample)
    log.detail(
        f"streaming: {workers} {units.plural(workers, 'worker process')} per rank tokenise "
        f"{shards.name} while training. This is for quick trials: a dataset of stages 01 and 02 "
        "costs a step next to nothing, is shuffled as a whole and can have a validation split"
    )
    return documents
