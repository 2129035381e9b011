"""Open token stores: the tokens of a dataset as flat memory-mapped files.

    .cache/tokens/<dataset>-<key>/
        train.tokens.bin        uint16 or uint32 [tokens], concatenated documents
        train.ends.bin          int64 [documents], the end of each document (exclusive)
        validation.tokens.bin   … and the same for the validation split, if there is one
        manifest.json           written last: dtype, counts, BOS/EOS policy, digests

All files are little-endian. The key is a digest of the dataset's content, the tokenizer's files
and the options that decide which tokens are trained. If the manifest's `label_mask` is null, every
token is a label for the token before it. Otherwise it names a further file:

        train.labels.bin        uint8 [tokens ÷ 8], one bit per token, the lowest first: 1 for a
                                label; never for the first token of a document

A writer may add files and facts to a store, as lib/tokens/chat/write.py does. In a store of text,
lib/tokens/text_writer.py adds the bytes and sources of the validation split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import commands, hashing, log, manifest, paths, units
from lib.core.artifacts import SPLITS
from lib.core.errors import ArtifactError
from lib.tokens import text_bytes
from lib.tokens.encode import Encoder
from lib.tokens.synthetic import SyntheticTokens
from lib.tokens.text_bytes import SplitText

KIND = "tokens/1"
LABEL_MASK = "labels.bin"  # only in a store where some tokens are no labels
_CHUNK = 1 << 22  # label bits or documents that are counted at a time


class FileNumbers:
    """Reads the elements of an array file with `pread` on access, instead of mapping the file.

    Some parallel file systems map files slowly or not at all.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._file = path.open("rb", buffering=0)
        self._count = path.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | np.ndarray | int) -> Any:
        """Return a slice, or the element at each index. Raises OSError if the file is truncated."""
        if not isinstance(index, slice):
            at_each = [self[i : i + 1][0] for i in np.ravel(index).tolist()]
            return np.array(at_each, self.dtype).reshape(np.shape(index))[()]
        start, stop, _ = index.indices(self._count)
        size = max(0, stop - start) * self.dtype.itemsize
        parts = []
        offset = start * self.dtype.itemsize
        while size:
            part = os.pread(self._file.fileno(), size, offset)
            if not part:
                raise OSError(f"{self._file.name} ends at byte {offset}")
            parts.append(part)
            offset = offset + len(part)
            size = size - len(part)
        return np.frombuffer(b"".join(parts), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


Numbers = np.ndarray | FileNumbers | SyntheticTokens


class Labels:
    """Reads from packed bits which tokens are labels.

    packed: uint8 [N ÷ 8], the lowest bit first; length: N; total: the number of labels.
    """

    def __init__(self, packed: Numbers, length: int, total: int) -> None:
        self._packed = packed
        self._length = length
        self.total = total

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> np.ndarray:
        """Return bool [range]: whether each token of a range is a label."""
        start, stop, _ = index.indices(self._length)
        first = start // 8
        packed = np.asarray(self._packed[first : units.ceil_div(stop, 8)])
        bits = np.unpackbits(packed, bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].view(bool)

    def label_counts(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the number of labels in each range, int64. starts and ends must be ascending."""
        counts = np.zeros(len(starts), np.int64)
        first = 0
        while first < len(starts):
            last = max(first + 1, int(np.searchsorted(ends, starts[first] + _CHUNK, "right")))
            base = int(starts[first])
            before = np.concatenate([[0], np.cumsum(self[base : int(ends[last - 1])])])
            counts[first:last] = before[ends[first:last] - base] - before[starts[first:last] - base]
            first = last
        return counts


@dataclass(frozen=True)
class Split:
    """Holds a split of a store. tokens: uint16|uint32 [N]; ends: int64 [documents].

    labels: None if every token is a label. text: the bytes and sources of the tokens; None for a
    split that lacks them.
    """

    tokens: Numbers
    ends: Numbers
    labels: Labels | None = None
    text: SplitText | None = None


@dataclass(frozen=True)
class TokenStore:
    """Holds a finished store. vocab_size: the vocabulary size of the tokenizer.

    summary: from its manifest, with the facts that its writer added.
    """

    path: Path
    fingerprint: str
    vocab_size: int
    summary: dict[str, Any]
    splits: dict[str, Split]


def summarise_store(
    dtype: str, encoder: Encoder, counts: dict[str, dict[str, int]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary for the manifest of a store.

    counts: split → its counts. facts: entries from the writer, which replace entries here.
    """
    return {
        "dtype": dtype,
        "vocab_size": encoder.vocab_size,
        "splits": counts,
        "bos": encoder.bos,
        "eos": encoder.eos,
        "policy": "[bos] document [eos], ends exclusive in *.ends.bin",
        "label_mask": None,
        **facts,
    }


def open_store(path: Path) -> TokenStore:
    """Open a finished store. Raises ArtifactError if it is missing, unfinished or truncated."""
    content = manifest.read_manifest(path, KIND, "the token store")
    manifest.require_intact(path, content, "the token store", run=commands.delete_and_rerun(path))
    summary = content["summary"]
    if summary.get("label_mask") not in (None, LABEL_MASK):
        raise ArtifactError(
            f"{path} uses a label mask that this version cannot read",
            found=str(summary["label_mask"]),
            hint="update the code, or build the store again:",
            run=commands.delete_and_rerun(path),
        )
    if not _is_valid_summary(summary):
        raise make_damage_error(path)
    splits = {
        name: _open_split(path, name, summary, counts) for name, counts in summary["splits"].items()
    }
    # The dataset and the tokenizer decide every byte, so their fingerprints identify the store.
    fingerprint = hashing.fingerprint(content["identity"].get("inputs"))
    return TokenStore(path, fingerprint, summary["vocab_size"], summary, splits)


def count_longer(split: Split, length: int) -> int:
    """Return the number of documents with more than `length` tokens."""
    longer = 0
    before = 0
    for first in range(0, len(split.ends), _CHUNK):
        ends = split.ends[first : first + _CHUNK]
        longer += int((np.diff(ends, prepend=before) > length).sum())
        before = int(ends[-1])
    return longer


def make_damage_error(path: Path) -> ArtifactError:
    """Return the error for a store whose manifest is damaged, with a command to build it again."""
    return ArtifactError(
        f"{path / paths.MANIFEST} is damaged",
        run=commands.delete_and_rerun(path),
        expected="the manifest of a finished token store",
    )


def _open_split(path: Path, name: str, summary: Mapping[str, Any], counts: dict[str, int]) -> Split:
    tokens = open_file(path / f"{name}.tokens.bin", summary["dtype"])
    labels = (
        None
        if "labels" not in counts
        else Labels(
            open_file(path / f"{name}.{LABEL_MASK}", "uint8"), len(tokens), counts["labels"]
        )
    )
    ends = open_file(path / f"{name}.ends.bin", "int64")
    return Split(tokens, ends, labels, _open_text(path, name, summary, ends))


def _open_text(
    path: Path, name: str, summary: Mapping[str, Any], ends: Numbers
) -> SplitText | None:
    """Return the bytes and sources of a split; None if the store lacks them."""
    counts = path / f"{name}.{text_bytes.BYTES}"
    if text_bytes.FACT not in summary or not counts.is_file():
        return None
    names = summary[text_bytes.FACT]["sources"]
    sources = open_file(path / f"{name}.{text_bytes.SOURCES}", "uint8") if names else None
    return SplitText(open_file(counts, "uint16"), ends, sources, names)


def _is_valid_summary(summary: dict[str, Any]) -> bool:
    """Return whether a summary has the form that `summarise_store` writes."""
    splits = summary.get("splits")
    return (
        isinstance(splits, dict)
        and "train" in splits
        and splits.keys() <= {*SPLITS}
        and all(
            isinstance(counts, dict)
            and (summary.get("label_mask") is None or type(counts.get("labels")) is int)
            for counts in splits.values()
        )
        and _is_valid_fact(summary.get(text_bytes.FACT))
        and summary.get("dtype") in ("uint16", "uint32")
        and type(summary.get("vocab_size")) is int
        and summary["vocab_size"] > 0
    )


def _is_valid_fact(fact: Any) -> bool:
    """Return whether the entry about a split's text has the form that text_writer.py writes."""
    names = fact.get("sources") if isinstance(fact, dict) else None
    return fact is None or (
        isinstance(names, list)
        and len(names) <= text_bytes.MOST_SOURCES
        and all(isinstance(name, str) for name in names)
    )


def open_file(path: Path, dtype: str) -> Numbers:
    """Open a file of little-endian integers for reading, with pread if it cannot be mapped."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, little_endian)
    try:
        return np.memmap(path, dtype=little_endian, mode="r")
    except OSError as error:
        log.warn(f"{path} cannot be mapped ({error.strerror}); reading it with pread instead")
        return FileNumbers(path, little_endian)
