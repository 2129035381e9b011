"""Making a token store: once per dataset and tokenizer, before any process group exists."""

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
from lib.tokens import store
from lib.tokens.chat.policy import ChatPolicy
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.split_writer import PROGRESS, TextWriter, Written

_POLL_S = 0.5


def prepare(
    dataset: Dataset,
    tokenizer_dir: Path,
    cache_dir: Path,
    model_vocab: int,
    num_workers: int,
    progress: bool,
    verify: bool = False,
    chat: ChatPolicy | None = None,
) -> Path:
    """Return the finished store of a dataset and a tokenizer, building it when needed.

    Every process of a launch may call it (see `once`). `model_vocab`: ids the model can embed.
    verify: hash a store that is there already also when it has not changed since it was hashed.
    chat: how the conversations of a chat dataset become samples. Raises UsageError when the
    tokenizer can give larger ids, the dataset is replaced meanwhile, or no conversation can be
    trained on; ArtifactError when a store is there and damaged.
    """
    identity = store.identity(dataset, tokenizer_dir, chat)
    target = store.directory(cache_dir, dataset, identity)

    @cache  # for who waits and tries again
    def encoder() -> Encoder:
        made = Encoder(tokenizer_dir, num_workers)
        require_vocabulary(made.vocab_size, model_vocab, tokenizer_dir)
        return made

    def build() -> None:
        _build(dataset, encoder(), target, identity, num_workers, progress, chat)
        verified.record_intact(
            target, manifest.read(target, store.KIND, "the token store"), cache_dir
        )

    once(
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
        log.info(f"{target}: every byte is as it was written")
    dataset.require_same()  # or another rank, which looked later, waits for another store
    return target


def once(
    target: Path,
    kind: str,
    identity: dict[str, Any],
    build: Callable[[], None],
    verify: Callable[[dict[str, Any]], None] = lambda content: None,
) -> None:
    """Have an artifact built by one process of each machine while the others wait.

    They wait for the manifest to appear, without any collective that could time out. verify: done
    by that process with the manifest of one that was there, or that another machine has built.
    Raises ArtifactError when something damaged is there.
    """
    if target.is_dir() and any(target.iterdir()) and manifest.read_if_any(target) is None:
        raise ArtifactError(
            f"{target} is damaged (no readable manifest.json)",
            run=commands.delete_and_rerun(target),
        )
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    waited = False
    while not publish.is_done(
        target, kind, identity, overwrite=False, run=commands.delete_and_rerun(target)
    ):
        if is_builder:
            try:
                build()
                return
            except publish.AlreadyBuilding:
                pass  # another machine or launch that shares this directory is at it
        if not waited:
            log.info(f"waiting for {target} to be built by another process")
            waited = True
        time.sleep(_POLL_S)
    if is_builder:
        verify(manifest.read(target, kind, publish.kind_name(kind)))


def require_vocabulary(vocab_size: int, model_vocab: int, tokenizer_dir: Path) -> None:
    """Raise UsageError when a tokenizer can give ids that the model cannot embed."""
    if vocab_size > model_vocab:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} is larger than the model's vocabulary",
            expected=f"at most {model_vocab:,} token ids (vocab_size in config.json)",
            found=f"{vocab_size:,} token ids",
            hint="use the tokenizer that belongs to the model",
        )


def _build(
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
            "the tokenizer has no EOS token: documents follow each other with nothing in between, "
            "and the model does not learn where a text ends"
        )
    with publish.Build(target, store.KIND, identity, overwrite=False, resumable=True) as build:
        try:
            counts, began = _fill(build, dataset, encoder, num_workers, progress, chat)
        except (ArtifactError, UsageError):  # nothing that could go on from what is there
            build.resumable = False
            raise
    seconds = time.monotonic() - began
    for name, count in counts.items():
        log.info(
            f"  {name}: {units.counted(count['tokens'], 'token')} in "
            f"{units.counted(count['documents'], 'sample' if chat else 'document')}"
        )
    log.info(f"  {units.size(text_bytes / seconds)}/s, {units.duration(seconds)}")


def _fill(
    build: publish.Build,
    dataset: Dataset,
    encoder: Encoder,
    num_workers: int,
    progress: bool,
    chat: ChatPolicy | None,
) -> tuple[dict[str, dict[str, int]], float]:
    """Write and publish a store; return its counts by split, and when tokenising began."""
    dataset.check_content()
    text_bytes = dataset.total_bytes()
    # A store is rarely larger than its text: a token stands for 3 bytes or more, and takes 2 or 4.
    publish.require_space(build.dir, text_bytes, "the token store")
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    log.info(f"tokenising {dataset.path} with {encoder.directory} → {build.target} ({dtype})")
    if not chat:  # whose processes do so themselves
        encoder.tune(dataset.sample())
    require_same(encoder.directory, build.identity["inputs"]["tokenizer"])
    dataset.require_same()
    began = time.monotonic()
    with Progress("tokenising", text_bytes, "B", progress) as bar:
        from lib.tokens.chat import preparation  # which takes time to import

        written = (
            preparation.write(build.dir, dataset, encoder, dtype, chat, num_workers, bar)
            if chat
            else _write_texts(build.dir, dataset, encoder, dtype, bar)
        )
    for leftover in (*build.dir.glob(f"*.{PROGRESS}"), *build.dir.glob(f"*.{store.ERRORS}")):
        leftover.unlink()
    dataset.require_same()
    build.publish(
        stage="04_train_fsdp.py",
        options={"num_workers": num_workers},
        files=written.files,
        summary=store.summarise(dtype, encoder, written.counts, written.chat),
    )
    return written.counts, began


def _write_texts(
    directory: Path, dataset: Dataset, encoder: Encoder, dtype: str, bar: Progress
) -> Written:
    """Write the splits of a dataset of text."""
    written = Written({}, [])
    for name in dataset.splits:
        writer = TextWriter(directory, name, dtype, dataset)
        writer.run(encoder, bar)
        dataset.require_same()
        written.counts[name] = writer.counts()
        written.files.extend(writer.close())
    return written


def require_same(tokenizer_dir: Path, fingerprint: str) -> None:
    """Raise UsageError when a tokenizer is not the one any more that was fingerprinted."""
    if tokenizer_fingerprint(tokenizer_dir) != fingerprint:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} was replaced while it was read; "
            "nothing was made of it",
            hint="once nothing writes to it:",
            run=commands.as_typed(),
        )
