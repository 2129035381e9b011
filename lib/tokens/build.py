"""Making a token store: once per dataset and tokenizer, before any process group exists."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import (
    commands,
    hashing,
    log,
    manifest,
    publish,
    reading,
    records,
    stamps,
    units,
    verified,
)
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress
from lib.tokens import store
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder, tokenizer_fingerprint

_POLL_S = 0.5
_PROGRESS = "progress.json"
_SAVE_PROGRESS_S = 20.0


def prepare(dataset: Dataset, tokenizer_dir: Path, cache_dir: Path, model_vocab: int,
            num_workers: int, progress: bool, verify: bool = False) -> Path:
    """Return the finished store of a dataset and a tokenizer, building it when needed.

    Every process of a launch may call it (see `once`). `model_vocab`: ids the model can embed.
    verify: hash a store that is there already also when it has not changed since it was hashed.
    Raises UsageError when the tokenizer can give larger ids or the dataset is replaced meanwhile,
    ArtifactError when a store is there and damaged.
    """
    identity = store.identity(dataset, tokenizer_dir)
    target = store.directory(cache_dir, dataset, identity)

    @cache  # for who waits and tries again
    def encoder() -> Encoder:
        made = Encoder(tokenizer_dir, num_workers)
        require_vocabulary(made.vocab_size, model_vocab, tokenizer_dir)
        return made

    def build() -> None:
        _build(dataset, encoder(), target, identity, num_workers, progress)
        verified.note(target, manifest.read(target, store.KIND, "the token store"), cache_dir)

    once(target, store.KIND, identity, build, lambda content: verified.require(
        target, content, "the token store", cache_dir, workers=num_workers, progress=progress,
        always=verify, run=commands.remade(target)))
    if verify:
        log.info(f"{target}: every byte is as it was written")
    dataset.require_same()  # or another rank, which looked later, waits for another store
    return target


def once(target: Path, kind: str, identity: dict[str, Any], build: Callable[[], None],
         verify: Callable[[dict[str, Any]], None] = lambda content: None) -> None:
    """Have an artifact built by one process of each machine while the others wait.

    They wait for the manifest to appear, without any collective that could time out. verify: done
    by that process with the manifest of one that was there, or that another machine has built.
    Raises ArtifactError when something damaged is there.
    """
    if target.is_dir() and any(target.iterdir()) and manifest.read_if_any(target) is None:
        raise ArtifactError(f"{target} is damaged (no readable manifest.json)",
                            run=commands.remade(target))
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    waited = False
    while not publish.is_done(target, kind, identity, overwrite=False,
                              run=commands.remade(target)):
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
        verify(manifest.read(target, kind, publish.in_words(kind)))


def require_vocabulary(vocab_size: int, model_vocab: int, tokenizer_dir: Path) -> None:
    """Raise UsageError when a tokenizer can give ids that the model cannot embed."""
    if vocab_size > model_vocab:
        raise UsageError(f"the tokenizer in {tokenizer_dir} is larger than the model's vocabulary",
                         expected=f"at most {model_vocab:,} token ids (vocab_size in config.json)",
                         found=f"{vocab_size:,} token ids",
                         hint="use the tokenizer that belongs to the model")


def _build(dataset: Dataset, encoder: Encoder, target: Path, identity: dict[str, Any],
           num_workers: int, progress: bool) -> None:
    text_bytes = dataset.total_bytes()
    with publish.Build(target, store.KIND, identity, overwrite=False, resumable=True) as build:
        try:
            counts, began = _fill(build, dataset, encoder, num_workers, progress)
        except (ArtifactError, UsageError):  # nothing that could go on from what is there
            build.resumable = False
            raise
    seconds = time.monotonic() - began
    for name, count in counts.items():
        log.info(f"  {name}: {units.counted(count['tokens'], 'token')} in "
                 f"{units.counted(count['documents'], 'document')}")
    log.info(f"  {units.size(text_bytes / seconds)}/s, {units.duration(seconds)}")


def _fill(build: publish.Build, dataset: Dataset, encoder: Encoder, num_workers: int,
          progress: bool) -> tuple[dict[str, dict[str, int]], float]:
    """Write and publish a store; return its counts by split, and when tokenising began."""
    dataset.check_content()
    text_bytes = dataset.total_bytes()
    # A store is rarely larger than its text: a token stands for 3 bytes or more, and takes 2 or 4.
    publish.require_space(build.dir, text_bytes, "the token store")
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    log.info(f"tokenising {dataset.path} with {encoder.directory} → {build.target} ({dtype})")
    encoder.tune(dataset.sample())
    require_same(encoder.directory, build.identity["inputs"]["tokenizer"])
    dataset.require_same()
    began = time.monotonic()
    counts, files = {}, []
    with Progress("tokenising", text_bytes, "B", progress) as bar:
        for name in dataset.splits:
            writer = _SplitWriter(build.dir, name, dtype, dataset)
            writer.run(encoder, bar)
            dataset.require_same()
            counts[name] = {"tokens": writer.tokens, "documents": writer.documents}
            files += writer.entries()
    for leftover in build.dir.glob(f"*.{_PROGRESS}"):
        leftover.unlink()
    dataset.require_same()
    build.publish(stage="04_train_fsdp.py", options={"num_workers": num_workers}, files=files,
                  summary=store.summarise(dtype, encoder, counts))
    return counts, began


def require_same(tokenizer_dir: Path, fingerprint: str) -> None:
    """Raise UsageError when a tokenizer is not the one any more that was fingerprinted."""
    if tokenizer_fingerprint(tokenizer_dir) != fingerprint:
        raise UsageError(f"the tokenizer in {tokenizer_dir} was replaced while it was read; "
                         "nothing was made of it", hint="once nothing writes to it:",
                         run=commands.as_typed())


class _SplitWriter:
    """Writes tokens and ends of one split; takes up what a killed run had made durable.

    The files depend on nothing but documents and tokenizer, so where a run was cut leaves no trace.
    """

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        self._progress = directory / f"{name}.{_PROGRESS}"
        self._name, self._dataset = name, dataset
        self._dtype = np.dtype(dtype).newbyteorder("<")
        # Of a dataset made elsewhere the fingerprint knows only both ends of each shard.
        self._text = "" if dataset.ours else stamps.fingerprint(dataset.stamps)
        earlier = _read_progress(self._progress)
        if earlier.get("text", "") != self._text:
            earlier = {}
        self.documents, self.tokens = earlier.get("documents", 0), earlier.get("tokens", 0)
        self._token_sink = _Sink(directory / f"{name}.tokens.bin",
                                 self.tokens * self._dtype.itemsize)
        self._ends_sink = _Sink(directory / f"{name}.ends.bin", self.documents * 8)

    def run(self, encoder: Encoder, bar: Progress) -> None:
        """Tokenise the documents that are not there yet."""
        if self.documents:
            log.info(f"  going on after {units.counted(self.documents, 'document')} of an "
                     "interrupted run")
        saved = time.monotonic()
        for texts in self._dataset.documents(self._name, self.documents):
            ids, lengths = encoder.encode(texts)
            self._token_sink.write(ids.astype(self._dtype))
            self._ends_sink.write((self.tokens + np.cumsum(lengths)).astype("<i8"))
            self.tokens, self.documents = self.tokens + len(ids), self.documents + len(texts)
            bar.advance(sum(map(len, texts)))
            if time.monotonic() - saved > _SAVE_PROGRESS_S:
                self._save_progress()
                saved = time.monotonic()
        self._save_progress()

    def entries(self) -> list[dict[str, Any]]:
        """Return the manifest entries of the two files."""
        return [self._token_sink.close(), self._ends_sink.close()]

    def _save_progress(self) -> None:
        self._token_sink.sync()
        self._ends_sink.sync()
        manifest.write_json(self._progress, {"documents": self.documents, "tokens": self.tokens,
                                             "text": self._text})


class _Sink:
    """Hashes a file while it writes it; the first `keep` bytes of an old one stay."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.bytes, self._hasher = path, keep, hashing.new()
        self._file = path.open("r+b" if keep else "w+b")
        self._file.truncate(keep)
        while chunk := self._file.read(1 << 22):
            self._hasher.update(chunk)

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        self._hasher.update(data)
        self.bytes += self._file.write(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> dict[str, Any]:
        """Close the file and return its manifest entry, after reading the file back.

        Raises ArtifactError when it holds anything else than was written.
        """
        self.sync()
        self._file.close()
        entry = {"path": self.path.name, "bytes": self.bytes,
                 "digest": hashing.digest(self._hasher)}
        if found := manifest.damage(self.path, entry, deep=True):
            raise ArtifactError(f"{self.path} does not read back as it was written", found=found,
                                hint="the disk may be failing (`dmesg` tells), or something else "
                                     "wrote there; it is made anew by:", run=commands.as_typed())
        return entry


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        noted = reading.patiently(lambda: records.read_json(path), path)
    except (OSError, ValueError):  # of one that is not there, or is torn
        return {}
    counts = [noted.get(key, 0) for key in ("documents", "tokens")] if isinstance(noted, dict) \
        else [None]
    return noted if all(type(count) is int and count >= 0 for count in counts) else {}
