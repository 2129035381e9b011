"""Train on datasets of stage 02, of texts or of conversations, alone or as a mixture."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lib.core import artifacts, log, units
from lib.core.data_names import VALIDATION
from lib.core.errors import Problems, StageError
from lib.tokens import build, mixture, packing, readable, store
from lib.tokens.build import Tokenization
from lib.tokens.chat import counts, policy
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.chat.write import ChatTokenization
from lib.tokens.columns import CHAT, TEXT
from lib.tokens.encode import Encoder
from lib.tokens.mixture import Corpus
from lib.tokens.samples import Samples, Windows
from lib.tokens.store import TokenStore
from lib.tokens.text_bytes import SplitText, name_sources
from lib.tokens.text_writer import TextTokenization
from lib.train.config import Config
from lib.train.data import SampleData
from lib.train.previous_run import KeptTemplate
from lib.train.source import Encoding, SampleSource

_PRINTED_SAMPLES = 2  # of each dataset


@dataclass(frozen=True)
class CorporaSource(SampleSource):
    """Reads token stores of datasets; each of them consists of texts or of conversations."""

    corpora: Sequence[Corpus]
    new_tokenizer = "with a tokenizer trained on the dataset"

    @classmethod
    def is_requested(cls, config: Config) -> bool:
        """Return True: this is the usual source."""
        return True

    @classmethod
    def check_options(cls, config: Config, problems: Problems) -> None:
        """Add nothing: all options suit this source."""

    @classmethod
    def list_tokenizer_texts(cls, config: Config) -> tuple[Path, ...]:
        """Return the directories of all datasets."""
        return tuple(corpus.dataset.path for corpus in mixture.open_corpora(config.dataset_name))

    @classmethod
    def open(cls, config: Config, earlier_inputs: Mapping[str, str]) -> CorporaSource:
        """Return the datasets of -d; all problems of them are one error."""
        return cls(mixture.open_corpora(config.dataset_name))

    def __str__(self) -> str:
        return ", ".join(map(str, self.corpora))

    def identify(self, config: Config, tokenizer_dir: Path) -> dict[str, str]:
        """Return the tokenizer and the datasets, by name."""
        return {
            "tokenizer": artifacts.tokenizer_fingerprint(tokenizer_dir),
            "dataset": mixture.fingerprint_corpora(self.corpora),
        }

    def find_template(
        self, config: Config, model_dir: Path, kept_template: KeptTemplate | None
    ) -> str:
        """Return the source of the template that renders conversations, "" if there are none.

        --chat-template can replace the template that a resumed run was started with.
        """
        if not self._has_chats:
            return super().find_template(config, model_dir, kept_template)
        if kept_template is None:
            return policy.find_template(model_dir, config.chat_template)
        if config.chat_template:
            typed = policy.find_template(model_dir, config.chat_template)
            return kept_template.source if typed == kept_template.text else typed
        try:
            has_changed = policy.find_template(model_dir, None) != kept_template.source
        except StageError:  # the model has no template, or an unreadable one
            has_changed = True
        if has_changed:
            log.info(
                f"chat template: {kept_template.path}, with which the run was started; {model_dir} "
                "now contains another one or none"
            )
        return kept_template.source

    def fill_packing(self, config: Config) -> Config:
        """Return the options with whole documents for conversations, which must not be cut."""
        if self._has_chats:
            return config.with_values("a chat dataset", packing="documents")
        return super().fill_packing(config)

    @property
    def _has_chats(self) -> bool:
        return any(corpus.dataset.format == CHAT for corpus in self.corpora)

    @property
    def has_validation(self) -> bool:
        """Return whether a dataset has a validation split."""
        return any(VALIDATION in corpus.dataset.splits for corpus in self.corpora)

    def name_validation_texts(self) -> set[str]:
        """Return the names of the datasets, if they are several, and of the sources of texts."""
        held_out = [
            corpus.dataset for corpus in self.corpora if VALIDATION in corpus.dataset.splits
        ]
        names = set(mixture.name_corpora(self.corpora)) if len(held_out) > 1 else set()
        for dataset in held_out:
            if dataset.format == TEXT and dataset.has_sources(VALIDATION):
                names |= set(name_sources(partial(dataset.sources, VALIDATION))[0])
        return names

    def prepare_samples(self, config: Config, encoding: Encoding) -> SampleData:
        """Return the samples of all datasets; create missing token stores and packs."""
        stores = [self._prepare_store(config, encoding, corpus) for corpus in self.corpora]
        if config.prepare_only and log.rank() == 0:
            _print_samples(stores, encoding.tokenizer_dir)
        return self._combine_stores(config, stores)

    def _prepare_store(self, config: Config, encoding: Encoding, corpus: Corpus) -> TokenStore:
        """Return the token store of a dataset, built if it is missing."""
        path = build.prepare_store(
            _make_tokenization(config, encoding, corpus),
            config.cache_dir,
            encoding.vocab_size,
            config.prepare_only,
            encoding.is_resumed,
        )
        tokens = store.open_store(path)
        build.require_vocabulary(tokens.vocab_size, encoding.vocab_size, encoding.tokenizer_dir)
        log.detail(f"tokens: {path}, {len(tokens.splits['train'].tokens):,} for training")
        if chat := counts.read_facts(tokens):
            log.table(chat.table_rows(), log.detail)
            if log.rank() == 0:
                counts.warn_about_samples(
                    str(corpus.dataset.path), chat.counts["train"], path / counts.ERRORS
                )
        _report_missing_bytes(tokens)
        return tokens

    def _combine_stores(self, config: Config, stores: Sequence[TokenStore]) -> SampleData:
        """Return the samples from one token store per dataset; create missing packs."""
        splits = [_cut_samples(config, tokens) for tokens in stores]
        train = mixture.mix_samples(self.corpora, [split["train"] for split in splits])
        return SampleData(
            train,
            _describe_long_documents(config, stores) if log.rank() == 0 else "",
            held_out=mixture.list_validation_splits(
                self.corpora,
                train,
                [split.get(VALIDATION) for split in splits],
                [_get_validation_text(tokens) for tokens in stores],
            ),
            chat=counts.merge_facts([*filter(None, map(counts.read_facts, stores))]),
        )

    def estimate_samples(
        self, config: Config, encoding: Encoding
    ) -> tuple[SampleData | None, int | None]:
        """Return the data and the samples of an epoch; for missing stores or packs, an estimate."""
        tokenizations = [_make_tokenization(config, encoding, corpus) for corpus in self.corpora]
        targets = [
            tokenization.find_store(config.cache_dir, encoding.is_resumed)[0]
            for tokenization in tokenizations
        ]
        if missing := [str(target) for target in targets if not target.exists()]:
            tokens = sum(tokenization.estimate_tokens() for tokenization in tokenizations)
            return None, self._estimate_from_text(config, tokens, missing)
        stores = [store.open_store(target) for target in targets]
        is_single = config.packing == "none"
        if config.packing == "concat" or all(
            packing.find_packs_dir(tokens, config.seq_length, is_single).exists()
            for tokens in stores
        ):
            data = self._combine_stores(config, stores)
            return data, data.samples_per_epoch
        log.info(f"  long documents: {_describe_long_documents(config, stores)}")
        splits = [tokens.splits["train"] for tokens in stores]
        if is_single:
            lengths = np.concatenate([np.diff(split.ends[:], prepend=0) for split in splits])
            return None, int(np.ceil(lengths / config.seq_length).sum())
        log.info(
            "  the documents are not packed yet: the run or --prepare-only packs them; the number "
            "of samples is an estimate without padding"
        )
        return None, sum(len(split.tokens) for split in splits) // config.seq_length

    def _estimate_from_text(self, config: Config, tokens: int, missing: Sequence[str]) -> int:
        """Return about how many samples the tokens make, and say that they are an estimate.

        missing: the token stores.
        """
        log.info(
            f"  the tokens are not prepared yet ({', '.join(missing)}): the run or --prepare-only "
            f"prepares them; {units.count(tokens)} tokens are an estimate from a sample of the "
            "text, and the following numbers depend on it"
        )
        if config.packing == "concat":
            return tokens // config.seq_length
        samples = units.ceil_div(tokens, config.seq_length)  # the last one need not be full
        if config.packing == "documents":
            return samples
        return max(samples, sum(corpus.dataset.extent()[0] for corpus in self.corpora))


def _make_tokenization(config: Config, encoding: Encoding, corpus: Corpus) -> Tokenization:
    """Return how a dataset becomes tokens: as text, or as conversations."""
    shared = (
        corpus.dataset,
        encoding.tokenizer_dir,
        config.num_workers,
        not config.no_progress,
    )
    if corpus.dataset.format != CHAT:
        return TextTokenization(*shared)
    rules = ChatPolicy(
        encoding.template,
        config.train_on,
        config.too_long,
        config.seq_length,
        config.chat_template_kwargs,
    )
    return ChatTokenization(*shared, rules)


def _print_samples(stores: Sequence[TokenStore], tokenizer_dir: Path) -> None:
    """Print a few samples of each store, in colour on a terminal."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    tokenizer = Encoder(tokenizer_dir, 1).tokenizer
    log.info(f"training samples ({readable.describe_marks(colour)}):")
    for tokens in stores:
        for text in readable.render_documents(tokens, _PRINTED_SAMPLES, tokenizer, colour):
            log.info(text)


def _describe_long_documents(config: Config, stores: Sequence[TokenStore]) -> str:
    """Return how many training documents are longer than a row, with their share.

    Windows (--packing concat) also cut other documents.
    """
    splits = [tokens.splits["train"] for tokens in stores]
    documents = sum(len(split.ends) for split in splits)
    longer = sum(store.count_longer(split, config.seq_length) for split in splits)
    share = 100 * longer / max(1, documents)
    return (
        f"{longer:,} of {units.counted(documents, 'document')} ({share:.3g} %) "
        f"{'is' if longer == 1 else 'are'} longer than a row of {config.seq_length:,} tokens"
        + (", so each is cut into several" if longer and config.packing != "concat" else "")
    )


def _get_validation_text(tokens: TokenStore) -> SplitText | None:
    """Return the bytes and sources of the validation split, None if the store lacks them."""
    split = tokens.splits.get(VALIDATION)
    return split.text if split else None


def _report_missing_bytes(tokens: TokenStore) -> None:
    """Say that a store of an older version lacks the bytes of its validation split."""
    split = tokens.splits.get(VALIDATION)
    if split and split.text is None and split.labels is None and log.rank() == 0:
        log.info(
            f"  no bits per byte on the validation split: {tokens.path} was built before this "
            "figure existed (if you delete that directory, the next launch builds it again)"
        )


def _cut_samples(config: Config, tokens: TokenStore) -> Mapping[str, Samples]:
    """Return the samples of a dataset by split: documents, or windows of --seq-length."""
    if config.packing == "concat":
        return {
            name: Windows(split.tokens, config.seq_length, split.labels)
            for name, split in tokens.splits.items()
        }
    return packing.prepare_packs(tokens, config.seq_length, config.packing == "none")
