"""Making a token store: once per dataset and tokenizer, before any process group exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lib.core import hashing, log, manifest, publish, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress
from lib.tokens import source as sources
from lib.tokens import store
from lib.tokens.encode import Encoder
from lib.tokens.source import Source

_POLL_S = 0.5
_BYTES_PER_TEXT_BYTE = 1.0  # a store is rarely larger than its text: ≥ 3 bytes a token, 2–4 stored


def prepare(source: Source, tokenizer_dir: Path, cache_dir: Path, model_vocab: int,
            num_workers: int, progress: bool) -> Path:
    """Return the finished store of a dataset and a tokenizer, building it when needed.

    Every process of a launch may call it: one of each machine builds, the others wait for the
    manifest to appear, without any collective that could time out. `model_vocab`: ids the model
    can embed. Raises UsageError when the tokenizer can give larger ones, ArtifactError when a store
    is there and damaged.
    """
    identity = store.identity(source, tokenizer_dir)
    target = store.directory(cache_dir, source, identity)
    if target.is_dir() and any(target.iterdir()) and manifest.read_if_any(target) is None:
        raise ArtifactError(f"token store {target} is damaged (no readable manifest.json)",
                            run=f"rm -r {target}, then the same command again")
    builder = os.environ.get("LOCAL_RANK", "0") == "0"
    waited = False
    while not publish.is_done(target, store.KIND, identity, overwrite=False):
        if builder:
            try:
                _build(source, tokenizer_dir, target, identity, model_vocab, num_workers, progress)
                break
            except publish.AlreadyBuilding:
                pass  # another machine or launch that shares this directory is at it
        if not waited:
            log.info(f"waiting for {target} to be built by another process")
            waited = True
        time.sleep(_POLL_S)
    return target


def require_vocabulary(vocab_size: int, model_vocab: int, tokenizer_dir: Path) -> None:
    """Raise UsageError when a tokenizer can give ids that the model cannot embed."""
    if vocab_size > model_vocab:
        raise UsageError(f"the tokenizer in {tokenizer_dir} is larger than the model's vocabulary",
                         expected=f"at most {model_vocab:,} token ids (vocab_size in config.json)",
                         found=f"{vocab_size:,} token ids",
                         run="use the tokenizer that belongs to the model")


def _build(source: Source, tokenizer_dir: Path, target: Path, identity: dict[str, Any],
           model_vocab: int, num_workers: int, progress: bool) -> None:
    encoder = Encoder(tokenizer_dir, num_workers)
    require_vocabulary(encoder.vocab_size, model_vocab, tokenizer_dir)
    sources.check_content(source)
    text_bytes = sum(f.stat().st_size for d in source.splits.values() for f in d.glob("*.arrow"))
    publish.require_space(target.parent, int(text_bytes * _BYTES_PER_TEXT_BYTE), "the token store")
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    log.info(f"tokenising {source.path} with {tokenizer_dir} → {target} ({dtype})")
    began = time.monotonic()
    with publish.Build(target, store.KIND, identity, overwrite=False) as build:
        counts, files = {}, []
        with Progress("tokenising", text_bytes, "B", progress) as bar:
            for name, split_dir in source.splits.items():
                counts[name], made = _write_split(split_dir, name, build.dir, dtype, encoder, bar)
                files += made
        summary = {"dtype": dtype, "vocab_size": encoder.vocab_size, "splits": counts,
                   "bos": encoder.bos, "eos": encoder.eos,
                   "policy": "[bos] document [eos], ends exclusive in *.ends.bin"}
        build.publish(stage="04_train_fsdp.py", options={"num_workers": num_workers}, files=files,
                      summary=summary)
    seconds = time.monotonic() - began
    for name, count in counts.items():
        log.info(f"  {name}: {count['tokens']:,} tokens in {count['documents']:,} documents")
    log.info(f"  {units.size(text_bytes / seconds)}/s, {units.duration(seconds)}")


def _write_split(split_dir: Path, name: str, out: Path, dtype: str, encoder: Encoder,
                 bar: Progress) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Tokenise one split; return its counts and the manifest entries of its two files."""
    tokens_path, ends_path = out / f"{name}.tokens.bin", out / f"{name}.ends.bin"
    tokens = documents = 0
    with tokens_path.open("wb") as token_file, ends_path.open("wb") as ends_file:
        token_sink, ends_sink = _Sink(token_file), _Sink(ends_file)
        for texts in sources.documents(split_dir):
            coded = encoder.encode(texts)
            ends = tokens + np.cumsum([len(ids) for ids in coded], dtype=np.int64)
            tokens, documents = int(ends[-1]), documents + len(coded)
            token_sink.write(np.concatenate(coded).astype(np.dtype(dtype).newbyteorder("<")))
            ends_sink.write(ends.astype("<i8"))
            bar.advance(sum(map(len, texts)))
    entries = [{"path": path.name, "bytes": sink.bytes, "digest": hashing.digest(sink.hasher)}
               for path, sink in ((tokens_path, token_sink), (ends_path, ends_sink))]
    return {"tokens": tokens, "documents": documents}, entries


class _Sink:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hasher, self.bytes = file, hashing.new(), 0

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self.hasher.update(data)
        self.bytes += self.file.write(data)
