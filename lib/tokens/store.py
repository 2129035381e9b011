"""The token store: a dataset's tokens as flat memory-mapped files.

    .cache/tokens/<dataset>-<key>/
        train.tokens.bin        uint16 or uint32 [tokens], documents one after the other
        train.ends.bin          int64 [documents], the end of each document (exclusive)
        validation.tokens.bin   … and the same for the validation split when there is one
        manifest.json           written last: dtype, counts, BOS/EOS policy, digests

The key is made of the dataset's content and the tokenizer's files. Little-endian throughout.
The manifest's `label_mask` is null: every token is a label of the one before it. It is the place
to name a further file per split, uint8 [tokens], 0 for a token that no loss is computed for; until
this module reads such a file, it refuses the store rather than have those tokens trained on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import commands, hashing, log, manifest, paths
from lib.core.errors import ArtifactError
from lib.tokens.chat_counts import ChatFacts
from lib.tokens.dataset import Dataset
from lib.tokens.dataset_files import SPLITS
from lib.tokens.encode import Encoder, tokenizer_fingerprint

KIND = "tokens/1"


class FileNumbers:
    """Reads numbers of a file by `pread` where they are asked for: an array, but not mapped.

    Some parallel file systems map slowly, or not at all.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._file = path.open("rb", buffering=0)
        self._count = path.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, wanted: slice | np.ndarray | int) -> Any:
        """Return a range, or the number at each place; OSError when the file is cut short."""
        if not isinstance(wanted, slice):
            at_each = [self[i:i + 1][0] for i in np.ravel(wanted).tolist()]
            return np.array(at_each, self.dtype).reshape(np.shape(wanted))[()]
        start, stop, _ = wanted.indices(self._count)
        size, parts = max(0, stop - start) * self.dtype.itemsize, []
        offset = start * self.dtype.itemsize
        while size:
            part = os.pread(self._file.fileno(), size, offset)
            if not part:
                raise OSError(f"{self._file.name} ends at byte {offset}")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return np.frombuffer(b"".join(parts), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


Numbers = np.ndarray | FileNumbers


@dataclass(frozen=True)
class Split:
    """Holds a split of a store. tokens: uint16|uint32 [N]; ends: int64 [documents]."""

    tokens: Numbers
    ends: Numbers


@dataclass(frozen=True)
class TokenStore:
    """Holds a finished store. vocab_size: of the tokenizer. splits: name → its tokens.

    reads: how its files are read, and those of indexes over it. chat: None for a dataset of text.
    """

    path: Path
    fingerprint: str
    vocab_size: int
    summary: dict[str, Any]
    splits: dict[str, Split]
    reads: str
    chat: ChatFacts | None = None


def identity(dataset: Dataset, tokenizer_dir: Path) -> dict[str, Any]:
    """Return what decides a store's content, in the form that identity.py compares."""
    return {"options": {}, "inputs": {"dataset": dataset.fingerprint,
                                      "tokenizer": tokenizer_fingerprint(tokenizer_dir)}}


def directory(cache_dir: Path, dataset: Dataset, identity_: dict[str, Any]) -> Path:
    """Return where the store of a dataset and a tokenizer lies, whatever the dataset is called."""
    key = hashing.fingerprint([KIND, identity_["inputs"]])[:12]
    root = paths.tokens_root(cache_dir)
    there = sorted(root.glob(f"*-{key}"))
    return there[0] if there else root / f"{dataset.path.resolve().name}-{key}"


def summarise(dtype: str, encoder: Encoder, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return what the manifest of a store says beside its files; counts: by split."""
    return {"dtype": dtype, "vocab_size": encoder.vocab_size, "splits": counts,
            "bos": encoder.bos, "eos": encoder.eos,
            "policy": "[bos] document [eos], ends exclusive in *.ends.bin",
            "label_mask": None}


def open_store(path: Path, reads: str = "mmap") -> TokenStore:
    """Open a finished store; ArtifactError when it is missing, unfinished or truncated.

    reads: `mmap`, or `pread` for file systems on which that is better.
    """
    content = manifest.read(path, KIND, "the token store")
    manifest.check(path, content, "the token store", run=commands.remade(path))
    summary = content["summary"]
    if summary.get("label_mask") is not None:
        raise ArtifactError(f"{path} has a label mask, which this version cannot read",
                            found=str(summary["label_mask"]),
                            hint="update the code, or make the store anew:",
                            run=commands.remade(path))
    if not _is_sound(summary):
        raise ArtifactError(f"{path / paths.MANIFEST} is damaged", run=commands.remade(path),
                            expected="the manifest that a finished token store has")
    splits = {name: Split(open_file(path / f"{name}.tokens.bin", summary["dtype"], reads),
                          open_file(path / f"{name}.ends.bin", "int64", reads))
              for name in summary["splits"]}
    # The dataset and the tokenizer decide every byte, so their fingerprints identify the store.
    fingerprint = hashing.fingerprint(content["identity"].get("inputs"))
    return TokenStore(path, fingerprint, summary["vocab_size"], summary, splits, reads)


def _is_sound(summary: dict[str, Any]) -> bool:
    """Tell whether a summary has the form in which it is written."""
    splits = summary.get("splits")
    return isinstance(splits, dict) and "train" in splits and splits.keys() <= {*SPLITS} \
        and all(isinstance(counts, dict) for counts in splits.values()) \
        and summary.get("dtype") in ("uint16", "uint32") \
        and type(summary.get("vocab_size")) is int and summary["vocab_size"] > 0


def open_file(path: Path, dtype: str, reads: str) -> Numbers:
    """Open a file of little-endian numbers, read-only; what cannot be mapped is read by pread."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, little_endian)
    if reads == "mmap":
        try:
            return np.memmap(path, dtype=little_endian, mode="r")
        except OSError as error:
            log.warn(f"{path} cannot be mapped ({error.strerror}): reading it by pread")
    return FileNumbers(path, little_endian)
