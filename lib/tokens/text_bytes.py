"""Count the bytes of document text that tokens stand for, and name the source of each document.

Bits per byte of a validation split needs both. A token store of a text dataset contains them for
its validation split:

    validation.bytes.bin      uint16 [tokens], the bytes of text that each token stands for; SPECIAL
                              for BOS, EOS and other special tokens
    validation.sources.bin    uint8 [documents], index into the names in the store's summary; only
                              if the dataset has a column `source`

The bytes of a document's tokens add up to the bytes of its UTF-8 text, less those of special tokens
that the text spells. A byte-level token stands for its own bytes. If the tokenizer normalises text
or adds a space, the bytes of the text are divided in proportion to those of the tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


BYTES = "bytes.bin"
SOURCES = "sources.bin"
FACT = "text_bytes"  # the entry in the summary of a store: {"sources": names of the sources}
SPECIAL = np.iinfo(np.uint16).max
MOST_SOURCES = 32  # names of a dataset, with OTHER
OTHER = "other"
_LONGEST_NAME = 40
_LARGEST = SPECIAL - 1
_BYTE_LEVEL_SHARE = 0.95  # of the vocabulary, since some vocabularies contain a few plain words
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SUFFIXES = re.compile(r"(\.[A-Za-z][A-Za-z0-9]{0,9})+$")
_NUMBER = re.compile(r"[-_. ]*\d+([-_. ]*of[-_. ]*\d+)?$")
_UNSAFE = re.compile(r"[^\w.+-]")


class TokenBytes(NamedTuple):
    """Contains the number of bytes that each token of a vocabulary stands for.

    bytes: int64 [V]. special: bool [V], the special tokens; bits per byte counts neither their nats
    nor their bytes. The unknown token does not count as special.
    """

    bytes: np.ndarray
    special: np.ndarray


def measure_vocabulary(tokenizer: Any) -> TokenBytes:
    """Return the bytes of each token in the vocabulary of a Hugging Face tokenizer."""
    size = max(tokenizer.get_vocab().values()) + 1
    added = tokenizer.added_tokens_decoder
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    letters = _list_byte_letters()
    plain = [name for token, name in enumerate(names) if name and token not in added]
    is_byte_level = sum(letters.issuperset(name) for name in plain) > _BYTE_LEVEL_SHARE * len(plain)
    counts = np.zeros(size, np.int64)
    for token, name in enumerate(names):
        if name and token not in added and is_byte_level and letters.issuperset(name):
            counts[token] = len(name)
        elif name:
            counts[token] = _count_bytes(name)
    special = np.zeros(size, bool)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = {tokenizer.unk_token_id} - roles
    marked = [token for token, entry in added.items() if entry.special]
    special[[token for token in {*marked, *tokenizer.all_special_ids} - unknown]] = True
    return TokenBytes(counts, special)


def _list_byte_letters() -> set[str]:
    """Return the 256 characters with which a byte-level vocabulary writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return set(map(chr, printable)) | {chr(256 + i) for i in range(256 - len(printable))}


def _count_bytes(name: str) -> int:
    """Return the UTF-8 bytes of a token whose vocabulary is not byte-level."""
    if _BYTE.fullmatch(name):
        return 1
    text = name.replace("▁", " ").replace("</w>", " ")
    if len(text) > 2:
        text = text.removeprefix("##")
    return len(text.encode("utf-8", "replace"))


def divide_bytes(
    ids: np.ndarray,
    lengths: np.ndarray,
    sizes: Sequence[int],
    vocabulary: TokenBytes,
    has_bos: bool,
    has_eos: bool,
) -> np.ndarray:
    """Return the bytes of text that each token stands for, uint16 [tokens], as in BYTES.

    ids: uint32 [tokens], the documents one after the other. lengths: tokens of each document.
    sizes: bytes of its text. has_bos, has_eos: a BOS begins and an EOS ends each document; they
    stand for no text.
    """
    weights = vocabulary.bytes[ids]
    ends_at = np.cumsum(lengths)
    filled = lengths > 0
    if has_bos:
        weights[(ends_at - lengths)[filled]] = 0
    if has_eos:
        weights[(ends_at - 1)[filled]] = 0
    totals = np.concatenate([[0], np.cumsum(weights)])
    before = totals[ends_at - lengths]
    of_document = np.maximum(1, totals[ends_at] - before)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    size = np.asarray(sizes, np.int64)[owner]
    reached = (totals[1:] - before[owner]) * size // of_document[owner]
    counts = np.diff(reached, prepend=0)
    firsts = (ends_at - lengths)[filled]
    counts[firsts] = reached[firsts]
    counts = np.minimum(counts, _LARGEST).astype(np.uint16)
    counts[vocabulary.special[ids]] = SPECIAL
    return counts


def name_sources(
    read: Callable[[], Iterable[pa.Array]],
) -> tuple[list[str], np.ndarray]:
    """Return the names of the sources of documents, and the index of each document's name.

    read: a function that returns the column `source` in parts; it is called twice. A name is the
    first part of the path that differs between documents: a directory, or the name of the file
    without its suffixes and number. The 31 names of the most documents stay, and OTHER takes the
    rest.
    """
    paths = {path for part in read() for path in part.unique().to_pylist()}
    group_of = _group_paths(paths)
    counts: Counter[str] = Counter()
    for part in read():
        for entry in part.value_counts().to_pylist():
            counts[group_of[entry["values"]]] += entry["counts"]
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    if len(ranked) > MOST_SOURCES:
        ranked = [name for name in ranked if name != OTHER][: MOST_SOURCES - 1]
    names = sorted({*ranked, OTHER} if len(ranked) < len(counts) else ranked)
    number = {name: index for index, name in enumerate(names)}
    index_of = {path: number.get(name, number.get(OTHER)) for path, name in group_of.items()}
    indices = [index_of[path] for part in read() for path in part.to_pylist()]
    return names, np.array(indices, np.uint8)


def _group_paths(paths: Iterable[str | None]) -> dict[str | None, str]:
    """Return a short name for each path; OTHER for a path that is null or empty."""
    parts = {
        path: [part for part in (path or "").replace("\\", "/").split("/") if part]
        for path in paths
    }
    directories = [split[:-1] for split in parts.values() if split]
    common = 0
    while directories and all(
        len(split) > common and split[common] == directories[0][common] for split in directories
    ):
        common += 1
    names = {}
    for path, split in parts.items():
        rest = split[common:]
        name = rest[0] if len(rest) > 1 else _drop_number("".join(rest))
        names[path] = _UNSAFE.sub("_", name)[:_LONGEST_NAME] or OTHER
    return names


def _drop_number(name: str) -> str:
    """Return the name of a file without its suffixes and the number of its shard."""
    stem = _SUFFIXES.sub("", name)
    return _NUMBER.sub("", stem) or stem


class LabelledSamples(Protocol):
    """The part of `Samples` that says where labels come from."""

    seq_length: int

    def label_spans(self, number: int) -> list[tuple[int, int, int]]: ...


class SplitText:
    """Reads the bytes and the sources of a validation split.

    counts: uint16 [tokens], as in BYTES. ends: int64 [documents], the end of each document.
    sources: uint8 [documents], as in SOURCES, or None. All three are arrays or files. names: the
    sources; [] if the dataset has no column `source`.
    """

    def __init__(self, counts: Any, ends: Any, sources: Any, names: Sequence[str]) -> None:
        self.names = list(names)
        self._counts = counts
        self._ends = ends
        self._sources = sources

    def read_labels(
        self, samples: LabelledSamples, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the bytes of each label, int64 [samples, T] both.

        The source is the index of a name, 0 without names, and -1 where no loss counts: at ignored
        labels and special tokens.
        """
        shape = (len(numbers), samples.seq_length)
        sources = np.full(shape, -1, np.int64)
        sizes = np.zeros(shape, np.int64)
        for row, number in enumerate(numbers.tolist()):
            for column, start, count in samples.label_spans(number):
                counts = np.asarray(self._counts[start : start + count]).astype(np.int64)
                is_text = counts != SPECIAL
                place = slice(column, column + count)
                sizes[row, place] = np.where(is_text, counts, 0)
                sources[row, place] = np.where(is_text, self._find_sources(start, count), -1)
        return sources, sizes

    def _find_sources(self, start: int, count: int) -> np.ndarray | int:
        """Return the source of each token in a range of the split."""
        if self._source_of is None:
            return 0
        documents = np.searchsorted(
            self._ends_in_memory, np.arange(start, start + count), side="right"
        )
        return self._source_of[documents]

    @cached_property
    def _ends_in_memory(self) -> np.ndarray:
        return np.asarray(self._ends, np.int64)

    @cached_property
    def _source_of(self) -> np.ndarray | None:
        return None if self._sources is None else np.asarray(self._sources, np.int64)
