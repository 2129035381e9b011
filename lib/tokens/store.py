"""The token store: a dataset's tokens as flat memory-mapped files.

    .cache/tokens/<dataset>-<key>/
        train.tokens.bin        uint16 or uint32 [tokens], documents one after the other
        train.ends.bin          int64 [documents], the end of each document (exclusive)
        validation.tokens.bin   … and the same for the validation split when there is one
        manifest.json           written last: dtype, counts, BOS/EOS policy, digests

The key is made of the dataset's content and the tokenizer's files. Little-endian throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import hashing, manifest, paths
from lib.tokens import encode
from lib.tokens.source import Source

KIND = "tokens/1"


@dataclass(frozen=True)
class Split:
    """One split of a store: tokens: uint16|uint32 [N]; ends: int64 [documents]."""

    tokens: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class TokenStore:
    """A finished store. vocab_size: of the tokenizer. splits: name → its tokens."""

    path: Path
    fingerprint: str
    vocab_size: int
    summary: dict[str, Any]
    splits: dict[str, Split]


def identity(source: Source, tokenizer_dir: Path) -> dict[str, Any]:
    """Return what decides a store's content, in the form publish.py compares."""
    return {"options": {}, "inputs": {"dataset": source.fingerprint,
                                      "tokenizer": encode.tokenizer_fingerprint(tokenizer_dir)}}


def directory(cache_dir: Path, source: Source, identity_: dict[str, Any]) -> Path:
    """Return where the store of a dataset and a tokenizer lies, whatever the dataset is called."""
    key = hashing.fingerprint([KIND, identity_["inputs"]])[:12]
    root = paths.tokens_root(cache_dir)
    there = sorted(root.glob(f"*-{key}"))
    return there[0] if there else root / f"{source.path.resolve().name}-{key}"


def open_store(path: Path) -> TokenStore:
    """Map a finished store; ArtifactError when it is missing, unfinished or truncated."""
    content = manifest.read(path, KIND, "token store")
    manifest.check(path, content, "token store", run=f"rm -r {path}, then the same command again")
    summary = content["summary"]
    splits = {name: Split(map_file(path / f"{name}.tokens.bin", summary["dtype"]),
                          map_file(path / f"{name}.ends.bin", "int64"))
              for name in summary["splits"]}
    # The dataset and the tokenizer decide every byte, so their fingerprints identify the store.
    fingerprint = hashing.fingerprint(content["identity"]["inputs"])
    return TokenStore(path, fingerprint, summary["vocab_size"], summary, splits)


def map_file(path: Path, dtype: str) -> np.ndarray:
    """Map a file of little-endian numbers, read-only."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, little_endian)
    return np.memmap(path, dtype=little_endian, mode="r")
