"""Make samples of whole documents: `--packing documents`, or `--packing none` for one in each.

A document that fits a sample stays whole. A longer one is cut into pieces of the sequence length
and a remainder. The pieces are packed best-fit decreasing (Ding et al. 2024, "Fewer truncations
improve language modeling", arXiv 2404.10830). That order places short documents last and together,
so a few packs would contain many times more documents than the others. The attention kernel needs
memory for each document, and the memory estimate of a run uses the fullest pack. So packs far above
`choose_document_limit` are split (`split_overfull_packs`). The index is built once per store and
sequence length, next to the store; an index that an earlier version built is used unchanged. It
consists of these files and a manifest:

    .cache/tokens/<store>.packs-<T>/    with one document per sample: <store>.packs-<T>-single/
        train.starts.bin    int64 [pieces], start of each piece in train.tokens.bin, pack by pack
        train.lengths.bin   int32 [pieces], negative if a document ends with the piece
        train.packs.bin     int64 [packs + 1], the pieces of pack p are [packs[p], packs[p + 1])
        train.labels.bin    int32 [packs], label tokens of each pack

With one document per sample, each piece is a pack. Models that cannot keep packed documents apart,
such as those with a state, are trained in this way: what follows a token does not influence it in
a causal model, so neither does the padding. Every sample is padded to the sequence length, because
rows of one length need one compiled graph and one memory estimate, as in the other modes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import commands, hashing, log, manifest, publish, units, verified
from lib.core.errors import ArtifactError
from lib.core.paths import MANIFEST
from lib.tokens import build, store
from lib.tokens.samples import IGNORED, SampleArrays, Samples
from lib.tokens.store import Numbers, Split, TokenStore

KIND = "packs/1"
_MUCH = 0.1  # of the documents; if more are cut, that causes a warning
_MUCH_PADDING = 0.5  # of rows of one document; more causes a warning if shorter rows would do
_LENGTH_STEP = (
    16  # tokens; the warning advises a multiple, since products in 8 bits need such sizes
)
_LEAST_LIMIT = 64  # documents that a pack of any length may contain
_TOKENS_EACH = 32  # a longer pack may contain one document per this many tokens
_PACKS_PER_ADDED = 100  # splitting may add one pack per this many
_FILES = {"starts": "int64", "lengths": "int32", "packs": "int64", "labels": "int32"}


class Packs(Samples):
    """Builds sample p by concatenating the pieces of pack p and padding.

    Positions restart at each piece and at the padding. The last token of a document, the padding
    and tokens without a label in the store carry no label. is_single: each pack is one piece; then
    samples have no positions, since these run from 0 to T - 1.
    """

    def __init__(
        self, split: Split, index: dict[str, Numbers], seq_length: int, is_single: bool = False
    ) -> None:
        self.tokens = split.tokens
        self.seq_length = seq_length
        self._index = index
        self._is_single = is_single
        self._labels = split.labels
        self._documents = len(split.ends)

    def __len__(self) -> int:
        return max(0, len(self._index["packs"]) - 1)

    @cached_property
    def most_documents(self) -> int:
        """Return the largest number of pieces in a pack, plus one for its padding; 1 for single."""
        if self._is_single:
            return 1  # padding continues the positions of its document
        return int(np.diff(self._index["packs"][:]).max(initial=0)) + 1

    def read_samples(self, numbers: np.ndarray) -> SampleArrays:
        """Return the samples as inputs, labels, positions (if any) and lengths without padding."""
        shape = (len(numbers), self.seq_length)
        inputs = np.zeros(shape, np.int64)
        positions = np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        lengths = np.zeros(len(numbers), np.int64)
        for row, pack in enumerate(numbers):
            filled = 0
            for start, length, is_end in self._pieces(int(pack)):
                place = slice(filled, filled + length)
                piece = self.tokens[start : start + length + (not is_end)].astype(np.int64)
                inputs[row, place] = piece[:length]
                positions[row, place] = np.arange(length)
                after = (
                    piece[1:]
                    if self._labels is None
                    else np.where(self._labels[start + 1 : start + len(piece)], piece[1:], IGNORED)
                )
                labels[row, filled : filled + len(after)] = after
                filled += length
            positions[row, filled:] = np.arange(self.seq_length - filled)
            lengths[row] = filled
        return SampleArrays(inputs, labels, None if self._is_single else positions, lengths)

    def token_counts(self, numbers: np.ndarray) -> tuple[int, int]:
        packs = self._index["packs"]
        tokens = sum(
            int(np.abs(self._index["lengths"][packs[p] : packs[p + 1]]).sum()) for p in numbers
        )
        return int(self._index["labels"][numbers].sum()), tokens

    def mean_counts(self) -> tuple[float, float]:
        """Return the mean numbers of label tokens and of tokens without padding per sample.

        If the store has no label mask, all tokens but the first of each document are labels. This
        method does not read the index.
        """
        tokens = len(self.tokens)
        samples = max(1, len(self))
        labels = tokens - self._documents if self._labels is None else self._labels.total
        return labels / samples, tokens / samples

    def label_spans(self, number: int) -> list[tuple[int, int, int]]:
        spans = []
        filled = 0
        for start, length, is_end in self._pieces(number):
            spans.append((filled, start + 1, length - is_end))
            filled += length
        return spans

    def _pieces(self, pack: int) -> Iterator[tuple[int, int, bool]]:
        """Yield start and length of each piece, and whether a document ends with it."""
        first, last = self._index["packs"][pack : pack + 2]
        starts = self._index["starts"][first:last].tolist()
        for start, length in zip(starts, self._index["lengths"][first:last].tolist(), strict=True):
            yield start, abs(length), length < 0


def _warn_about_cuts(split: Split, cut: float, seq_length: int) -> None:
    """Warn that many documents are longer than a sample. cut: their share."""
    longest = int(np.diff(split.ends[:], prepend=0).max())
    log.warn(
        f"{100 * cut:.3g} % of the documents are longer than {seq_length:,} tokens and are cut "
        f"into windows that do not see each other. The longest has {longest:,} tokens: "
        f"--seq-length {longest} keeps them all whole"
    )


def _warn_about_padding(split: Split, padding: float, seq_length: int) -> None:
    """Warn that rows of one document are mostly padding, if shorter rows would do."""
    longest = int(np.diff(split.ends[:], prepend=0).max(initial=0))
    shorter = _LENGTH_STEP * units.ceil_div(longest, _LENGTH_STEP)
    if 0 < shorter < seq_length:
        log.warn(
            f"{100 * padding:.3g} % of the tokens that the model computes are padding. The longest "
            f"document has {longest:,} tokens: --seq-length {shorter} keeps all documents whole "
            "and takes less time"
        )


def prepare_packs(tokens: TokenStore, seq_length: int, is_single: bool = False) -> dict[str, Packs]:
    """Return the packs of every split; build the index if there is none.

    is_single: a pack contains one document. Every process of a launch may call this function,
    before the process group exists. Raises ArtifactError if the index or its manifest is damaged.
    """
    target = find_packs_dir(tokens, seq_length, is_single)
    options = {"seq_length": seq_length} | ({"is_single": True} if is_single else {})
    identity = {"options": options, "inputs": {"store": tokens.fingerprint}}
    cache_dir = target.parent.parent
    build.build_once(
        target,
        KIND,
        identity,
        lambda: _build_packs(tokens, target, identity),
        lambda content: verified.require_intact(
            target, content, "the packs", cache_dir, run=commands.delete_and_rerun(target)
        ),
    )
    summary = manifest.read_manifest(target, KIND, "the packs")["summary"]
    packs = {
        name: Packs(split, _open_index(target, name), seq_length, is_single)
        for name, split in tokens.splits.items()
    }
    try:
        for name, facts in summary["splits"].items():
            is_text = tokens.splits[name].labels is None
            if is_text and facts["cut"] > _MUCH and log.rank() == 0:
                _warn_about_cuts(tokens.splits[name], facts["cut"], seq_length)
            if is_single and facts["padding"] > _MUCH_PADDING and log.rank() == 0:
                _warn_about_padding(tokens.splits[name], facts["padding"], seq_length)
            log.detail(
                f"packs of {name}: {facts['packs']:,} of {seq_length} tokens, "
                f"{100 * facts['padding']:.3g} % padding, {100 * facts['cut']:.3g} % of the "
                + (
                    "documents cut, one per pack"
                    if is_single
                    else f"documents cut, at most {packs[name].most_documents - 1:,} per pack"
                )
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(
            f"{target / MANIFEST} is damaged",
            run=commands.delete_and_rerun(target),
            expected="the manifest of finished packs",
        ) from None
    return packs


def pack_in_memory(split: Split, seq_length: int, is_single: bool = False) -> Packs:
    """Return the packs of a split without writing an index."""
    index, _ = _pack_split(split, seq_length, is_single)
    return Packs(split, dict[str, Numbers](index), seq_length, is_single)


def find_packs_dir(tokens: TokenStore, seq_length: int, is_single: bool = False) -> Path:
    """Return the directory of the index for a store and a sequence length."""
    kind = "-single" if is_single else ""
    return tokens.path.with_name(f"{tokens.path.name}.packs-{seq_length}{kind}")


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each item, packed best-fit decreasing into bins of `capacity`.

    lengths: int [N], each from 1 to capacity. Best fit chooses the fullest bin with room for an
    item. For the next item of equal length, that is the same bin until the item no longer fits, so
    many items are placed at once.
    """
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = {}  # room left → bins
    rooms: list[int] = []  # the keys of by_room, in order
    opened = 0

    def put_back(numbers: list[int], room: int) -> None:
        if not numbers or not room:
            return
        if room not in by_room:
            by_room[room] = []
            insort(rooms, room)
        by_room[room] += numbers

    order = np.argsort(-lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    for items in np.split(order, ends) if len(order) else []:
        length = int(lengths[items[0]])
        done = 0
        while done < len(items):
            place = bisect_left(rooms, length)
            if place == len(rooms):
                room = capacity
                needed = units.ceil_div(len(items) - done, capacity // length)
                filled_bins = list(range(opened, opened + needed))
                opened += needed
            else:
                room = rooms[place]
                needed = units.ceil_div(len(items) - done, room // length)
                filled_bins = by_room[room][-needed:]
                by_room[room] = by_room[room][:-needed]
                if not by_room[room]:
                    del by_room[room], rooms[place]
            per_bin = room // length
            placed = min(len(items) - done, per_bin * len(filled_bins))
            bins[items[done : done + placed]] = np.repeat(filled_bins, per_bin)[:placed]
            in_last = placed - per_bin * (len(filled_bins) - 1)
            put_back(filled_bins[:-1], room - per_bin * length)
            put_back(filled_bins[-1:], room - in_last * length)
            done += placed
    return bins


def choose_document_limit(seq_length: int) -> int:
    """Return the number of documents that a pack may contain before it is split.

    In its backward pass, the attention kernel sums the gradient of the queries in float32, in one
    row per token and 128 more per document (mha_varlen_bwd in torch's flash_api.cpp). With a
    document for every 32 tokens, that is 5 rows per token: 20 bytes for each of a token's features,
    about half of what one decoder block stores. Without a limit, a pack of 8,192 documents of one
    token would take 17 GB with 32 heads of 128. Packs of fewer than 2,048 tokens may contain 64
    documents.
    """
    return max(_LEAST_LIMIT, seq_length // _TOKENS_EACH)


def split_overfull_packs(bins: np.ndarray, fewest: int) -> np.ndarray:
    """Return the bin of each item after items of overfull bins have moved to new bins.

    bins: int [N], the bin of each item; no bin is empty. A bin is overfull if it has more items
    than a limit: the smallest limit that adds at most 1 % of bins, but at least `fewest` and twice
    the mean. If any item moves, the number of bins grows, so a run can see from that number that
    its samples have changed.
    """
    if not len(bins):
        return bins
    items = np.bincount(bins)  # of each bin
    fewest = max(fewest, 2 * len(bins) // len(items))
    limits = range(fewest, max(fewest, int(items.max())) + 1)
    most_added = len(items) // _PACKS_PER_ADDED
    limit = limits[
        bisect_left(limits, True, key=lambda limit: ((items - 1) // limit).sum() <= most_added)
    ]
    full = np.flatnonzero(items[bins] > limit)
    full = full[np.argsort(bins[full], kind="stable")]
    _, group, count = np.unique(bins[full], return_inverse=True, return_counts=True)
    parts = (count + limit - 1) // limit
    place = np.arange(len(full)) - (np.cumsum(count) - count)[group]
    part = place * parts[group] // count[group]
    further = len(items) - 1 + np.cumsum(parts - 1) - (parts - 1)  # the number of part 1, minus one
    bins = bins.copy()
    bins[full] = np.where(part, further[group] + part, bins[full])
    return bins


def _build_packs(tokens: TokenStore, target: Path, identity: dict[str, Any]) -> None:
    options = identity["options"]
    with publish.Build(target, KIND, identity, overwrite=False) as building:
        splits = {}
        files = []
        for name, split in tokens.splits.items():
            index, splits[name] = _pack_split(
                split, options["seq_length"], options.get("is_single", False)
            )
            for part, dtype in _FILES.items():
                path = building.dir / f"{name}.{part}.bin"
                path.write_bytes(index[part].astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                files.append(manifest.file_entry(building.dir, path, hashing.FAST))
        building.publish(
            stage="04_train_fsdp.py",
            options=options,
            files=files,
            summary={"splits": splits},
        )


def _pack_split(
    split: Split, capacity: int, is_single: bool
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Cut the documents of a split into pieces and pack them; return the index and statistics.

    Single pieces stay in the order of the store. Those without a label would train nothing and are
    left out.
    """
    ends = np.asarray(split.ends, np.int64)
    firsts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    is_filled = ends > firsts
    firsts = firsts[is_filled]
    ends = ends[is_filled]
    per_document = (ends - firsts + capacity - 1) // capacity
    owner = np.repeat(np.arange(len(ends)), per_document)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    starts = firsts[owner] + number * capacity
    lengths = np.minimum(ends[owner] - starts, capacity)
    is_end = starts + lengths == ends[owner]
    label_counts = _count_labels(split, starts, lengths - is_end)
    if is_single:
        has_labels = label_counts > 0
        starts = starts[has_labels]
        lengths = lengths[has_labels]
        is_end = is_end[has_labels]
        label_counts = label_counts[has_labels]
        bins = np.arange(len(starts))
    else:
        bins = split_overfull_packs(best_fit(lengths, capacity), choose_document_limit(capacity))
    order = np.lexsort((starts, bins))
    count = int(bins.max()) + 1 if len(bins) else 0
    packs = np.searchsorted(bins[order], np.arange(count + 1))
    labels = np.bincount(bins, label_counts, minlength=count)
    # A negative length marks the last piece of a document, whose last token has no label.
    signed = np.where(is_end, -lengths, lengths)
    figures = {
        "packs": count,
        "padding": 1 - lengths.sum() / max(1, count * capacity),
        "cut": float((per_document > 1).mean()) if len(ends) else 0.0,
    }
    return {
        "starts": starts[order],
        "lengths": signed[order],
        "packs": packs,
        "labels": labels,
    }, figures


def _count_labels(split: Split, starts: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the number of labels among the `after` tokens that follow the first of each piece."""
    return (
        after if split.labels is None else split.labels.label_counts(starts + 1, starts + 1 + after)
    )


def _open_index(target: Path, name: str) -> dict[str, Numbers]:
    return {
        part: store.open_file(target / f"{name}.{part}.bin", dtype)
        for part, dtype in _FILES.items()
    }
