"""Build a token store once per dataset and tokenizer, before any process group exists."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, publish, units, verified
from lib.core.artifacts import tokenizer_fingerprint
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress
from lib.core.retry import poll
from lib.tokens import store, text_bytes
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.split_writer import PROGRESS, StoreContents, TextWriter, write_sources

_POLL_S = 0.5


def prepare_store(
    dataset: Dataset,
    tokenizer_dir: Path,
    cache_dir: Path,
    model_vocab: int,
    num_workers: int,
    progress: bool,
    verify: bool = False,
    chat: ChatPolicy | None = None,
    has_begun: bool = False,
) -> Path:
    """Return the path of the token store for a dataset and a tokenizer; build it if needed.

    Every process of a launch may call this function (see `build_once`). model_vocab: the number of
    ids the model can embed. verify: hash an existing store even if it has not changed since the
    last time. chat: the options for conversations, for a chat dataset. has_begun: see
    `store.find_store`. Raises UsageError if the tokenizer contains larger ids, the dataset was
    replaced meanwhile, or no conversation can be trained on. Raises ArtifactError if the existing
    store is damaged.
    """

    @cache  # `build_once` may call `build` several times
    def load_encoder() -> Encoder:
        encoder = Encoder(tokenizer_dir, num_workers)
        require_vocabulary(encoder.vocab_size, model_vocab, tokenizer_dir)
        return encoder

    target, identity = store.find_store(
        cache_dir,
        dataset,
        load_encoder,
        tokenizer_dir,
        chat.identity() if chat else None,
        has_begun,
    )

    def build() -> None:
        _build_store(dataset, load_encoder(), target, identity, num_workers, progress, chat)
        verified.record_intact(
            target, manifest.read_manifest(target, store.KIND, "the token store"), cache_dir
        )

    build_once(
        target,
        store.KIND,
        identity,
        build,
        lambda content: verified.require_intact(
            target,
            content,
            "the token store",
            cache_dir,
            workers=num_workers,
            progress=progress,
            always=verify,
            run=commands.delete_and_rerun(target),
        ),
    )
    if verify:
        log.info(f"{target}: all checksums match")
    dataset.require_same()  # otherwise ranks that looked later would wait for another store
    return target


def build_once(
    target: Path,
    kind: str,
    identity: dict[str, Any],
    build: Callable[[], None],
    verify: Callable[[dict[str, Any]], None] = lambda content: None,
) -> None:
    """Build an artifact in one process of each machine while the others wait.

    The others wait for the manifest to appear, without a collective that could time out. verify:
    called by that one process with the manifest of an artifact that existed, or that another
    machine has built. Raises ArtifactError if the existing artifact is damaged.
    """
    if target.is_dir() and any(target.iterdir()) and manifest.read_if_any(target) is None:
        raise ArtifactError(
            f"{target} is damaged (no readable manifest.json)",
            run=commands.delete_and_rerun(target),
        )
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    was_built = False
    is_announced = False

    def is_complete() -> bool:
        """Return whether the artifact is complete, after building it if no other process does."""
        nonlocal was_built, is_announced
        builder = ""
        if publish.is_done(
            target, kind, identity, overwrite=False, run=commands.delete_and_rerun(target)
        ):
            return True
        if is_builder:
            try:
                build()
                was_built = True
                return True
            except publish.AlreadyBuilding as error:  # by another machine or launch
                builder = f" ({error.found})" if error.found else ""
        if not is_announced:
            log.info(f"waiting for {target} to be built by another process{builder}")
            is_announced = True
        return False

    poll(is_complete, _POLL_S)
    if is_builder and not was_built:
        verify(manifest.read_manifest(target, kind, publish.kind_name(kind)))


def require_vocabulary(vocab_size: int, model_vocab: int, tokenizer_dir: Path) -> None:
    """Raise UsageError if a tokenizer contains ids that the model cannot embed."""
    if vocab_size > model_vocab:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} is larger than the model's vocabulary",
            expected=f"at most {model_vocab:,} token ids (vocab_size in config.json)",
            found=f"{vocab_size:,} token ids",
            hint="use the tokenizer that belongs to the model",
        )


def _build_store(
    dataset: Dataset,
    encoder: Encoder,
    target: Path,
    identity: dict[str, Any],
    num_workers: int,
    progress: bool,
    chat: ChatPolicy | None,
) -> None:
    text_bytes = dataset.total_bytes()
    if encoder.eos is None and not chat:
        log.warn(
            "the tokenizer has no EOS token, so nothing separates documents and the model does "
            "not learn where a text ends"
        )
    with publish.Build(target, store.KIND, identity, overwrite=False, resumable=True) as build:
        try:
            counts, began = _fill_store(build, dataset, encoder, num_workers, progress, chat)
        except (ArtifactError, UsageError):  # a later run cannot continue after this error
            build.resumable = False
            raise
    seconds = time.monotonic() - began
    for name, count in counts.items():
        log.detail(
            f"  {name}: {units.counted(count['tokens'], 'token')} in "
            f"{units.counted(count['documents'], 'sample' if chat else 'document')}"
        )
    log.detail(f"  {units.size(text_bytes / seconds)}/s, {units.duration(seconds)}")


def _fill_store(
    build: publish.Build,
    dataset: Dataset,
    encoder: Encoder,
    num_workers: int,
    progress: bool,
    chat: ChatPolicy | None,
) -> tuple[dict[str, dict[str, int]], float]:
    """Write and publish a store; return its counts by split, and the time when tokenising began."""
    dataset.check_content()
    text_bytes = dataset.total_bytes()
    # A store is rarely larger than its text: a token takes 2 or 4 bytes and covers 3 or more.
    publish.require_space(build.dir, text_bytes, "the token store")
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    log.detail(f"tokenising {dataset.path} with {encoder.directory} → {build.target} ({dtype})")
    if not chat:  # the worker processes for conversations tune their own encoders
        encoder.tune(dataset.sample())
    require_same_tokenizer(encoder.directory, build.identity["inputs"]["tokenizer"])
    dataset.require_same()
    began = time.monotonic()
    with Progress("tokenising", text_bytes, "B", progress) as bar:
        from lib.tokens.chat import write  # takes time to import

        contents = (
            write.write_splits(build.dir, dataset, encoder, dtype, chat, num_workers, bar)
            if chat
            else _write_texts(build.dir, dataset, encoder, dtype, bar)
        )
    for leftover in (*build.dir.glob(f"*.{PROGRESS}"), *contents.leftovers):
        leftover.unlink()
    dataset.require_same()
    build.publish(
        stage="04_train_fsdp.py",
        options={"num_workers": num_workers},
        files=contents.files,
        summary=store.summarise_store(dtype, encoder, contents.counts, contents.facts),
    )
    return contents.counts, began


def _write_texts(
    directory: Path, dataset: Dataset, encoder: Encoder, dtype: str, bar: Progress
) -> StoreContents:
    """Write the splits of a text dataset."""
    contents = StoreContents({}, [], {}, [])
    for name in dataset.splits:
        is_held_out = name == "validation"
        vocabulary = text_bytes.measure_vocabulary(encoder.tokenizer) if is_held_out else None
        writer = TextWriter(directory, name, dtype, dataset, vocabulary)
        writer.run(encoder, bar)
        dataset.require_same()
        contents.counts[name] = writer.manifest_counts()
        contents.files.extend(writer.close())
        if is_held_out:
            names, entry = write_sources(directory, name, dataset)
            contents.facts[text_bytes.FACT] = {"sources": names}
            contents.files.extend([entry] if entry else [])
    return contents


def require_same_tokenizer(tokenizer_dir: Path, fingerprint: str) -> None:
    """Raise UsageError if a tokenizer has changed since its fingerprint was taken."""
    if tokenizer_fingerprint(tokenizer_dir) != fingerprint:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} was replaced while it was read; "
            "no token store was published",
            hint="when no other process writes to it any more:",
            run=commands.as_typed(),
        )
