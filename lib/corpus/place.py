"""Assign files to splits and place them there as links or copies; sources are never changed."""

# This module uses plain strings, because creating a Path costs more than the system call for it.
# ruff: noqa: PTH103, PTH114, PTH116, PTH211

from __future__ import annotations

import errno
import heapq
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lib.core import commands, log, publish, units
from lib.core.errors import UsageError, is_of_disk
from lib.core.paths import escape_path
from lib.core.progress import Progress
from lib.corpus import kinds
from lib.corpus.scan import EMPTY, UNREADABLE, TreeEntry, count_files

if TYPE_CHECKING:
    from lib.core.workers import Pool

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 512
_SWAP_WORK = 3_000_000  # the most files to examine for exchanges, which takes a few seconds
# Errors of os.link for another file system, another user's file (protected_hardlinks), and a file
# system without hard links.
_NO_HARDLINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS}


class Workers:
    """Processes lists in chunks in worker processes, or in this process if a list is short.

    The workers are forked at the first long list. Stage 01 loads no library that makes forking
    unsafe, and starting new interpreters would take as long as placing thousands of files.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: Pool | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.close()

    def map(
        self, work: Callable[[list[Item]], list[Result]], items: Iterable[Item], total: int
    ) -> Iterator[Result]:
        """Yield the result of `work` for each item, in order.

        work: takes a list of items and returns the list of their results. total: number of items.
        Only a few chunks are processed ahead of the caller. Raises StageError if a worker dies.
        """
        rest = iter(items)
        chunks = iter(lambda: list(islice(rest, _CHUNK)), [])
        if total <= _CHUNK:
            yield from chain.from_iterable(map(work, chunks))
            return
        if self._pool is None:
            from multiprocessing import get_context

            from lib.core.workers import Pool

            count = min(self._count, units.ceil_div(total, _CHUNK))
            self._pool = Pool(count, "files", _get_task_function, context=get_context("fork"))
        for results in self._pool.run((work, chunk) for chunk in chunks):
            yield from results


def _get_task_function() -> Callable[[tuple[Callable[[Any], Any], Any]], Any]:
    """Return the function that a worker calls with each task."""
    return _run_task


def _run_task(task: tuple[Callable[[Any], Any], Any]) -> Any:
    work, chunk = task
    return work(chunk)


def sniff_files(root: Path, entries: Iterable[TreeEntry], workers: Workers, progress: bool) -> None:
    """Set `kind` of all entries that are not skipped, and `skipped` of files without text."""
    candidates = [entry for entry in entries if not entry.skipped]
    total = len(candidates)
    detected = workers.map(_sniff_chunk, (f"{root}/{entry.path}" for entry in candidates), total)
    with Progress("look", total, "files", progress) as bar:
        for entry, kind in zip(candidates, detected, strict=True):
            entry.kind = kind
            if not kind:
                entry.skipped = UNREADABLE
            elif kind in ("binary", EMPTY):
                entry.skipped = kind
            bar.advance()


def _sniff_chunk(paths: list[str]) -> list[str]:
    """Return the kind of each file, "" if it cannot be read; OSError if a disk fails."""
    detected = []
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                head = os.read(descriptor, kinds.HEAD_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            if is_of_disk(error):
                raise OSError(error.errno, error.strerror, path) from error
            detected.append("")
        else:
            detected.append(kinds.sniff_kind(path, head))
    return detected


def explain_faults(root: Path, entries: Iterable[TreeEntry]) -> list[str]:
    """Return a sentence for each kind of files that stage 02 will list as failed."""
    failing: dict[str, list[TreeEntry]] = {}
    for entry in entries:
        if entry.kind in kinds.FAULTS or entry.kind in kinds.UNREAD:
            failing.setdefault(entry.kind, []).append(entry)
    sentences = []
    for kind, members in failing.items():
        content, cure = kinds.UNREAD.get(kind, ("", ""))
        reason: object = f"{content}, which is not read; {cure}"
        if kind in kinds.FAULTS:
            with Path(root, members[0].path).open("rb") as file:
                head = file.read(kinds.HEAD_BYTES)
            reason = kinds.find_fault(members[0].path, head)
        sentences.append(
            f"stage 02 cannot read {units.counted(len(members), 'file')} of the kind `{kind}`, "
            f"the first is {escape_path(members[0].path)}: {reason}"
        )
    return sentences


def place_file(source: str, target: str, mode: str) -> str:
    """Place one file under a new name and return the mode used: `copy` if hard links fail.

    mode: hardlink, symlink (absolute) or copy (keeps the modification time).
    """
    if mode == "symlink":
        os.symlink(os.path.realpath(source), target)
    elif mode == "hardlink":
        try:
            # On Linux os.link does not follow a symbolic link, even with follow_symlinks=True.
            os.link(os.path.realpath(source) if os.path.islink(source) else source, target)
        except OSError as error:
            if error.errno not in _NO_HARDLINKS | {errno.EMLINK}:
                raise
            return place_file(source, target, "copy")
    else:
        shutil.copyfile(source, target)
        info = os.stat(source)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    return mode


def choose_mode(source: Path, beside: Path, mode: str, needed: int) -> str:
    """Return the mode, or `copy` after a warning if hard links are impossible.

    beside: an existing directory on the file system of the destination. needed: bytes that copies
    of all files would take.
    """
    if mode == "hardlink":
        probe = beside / "hardlink-probe"
        try:
            os.link(source.resolve(), probe)
            probe.unlink()
        except OSError as error:
            if error.errno not in _NO_HARDLINKS:
                raise
            log.warn(f"hard links do not work here ({error.strerror}); the files are copied")
            mode = "copy"
    if mode == "copy":
        publish.require_space(beside, needed, "copies of the files")
    return mode


def place_files(
    root: Path,
    build: Path,
    files: Sequence[tuple[TreeEntry, str]],
    mode: str,
    workers: Workers,
    progress: bool,
) -> dict[str, int]:
    """Place every `(entry, split)` under `build/split/` and return the number of files per mode.

    Raises UsageError if a file has vanished or changed since the scan.
    """
    names = ((f"{root}/{entry.path}", f"{build}/{split}/{entry.path}") for entry, split in files)
    placed = workers.map(partial(_place_chunk, mode), names, len(files))
    files_by_mode: dict[str, int] = {}
    with Progress("place", len(files), "files", progress) as bar:
        for (entry, _), (used_mode, size, mtime_ns) in zip(files, placed, strict=True):
            if size < 0:
                raise UsageError(
                    f"{escape_path(entry.path)} vanished from {root} during stage 01",
                    run=commands.as_typed(),
                )
            if (size, mtime_ns) != (entry.bytes, entry.mtime_ns):
                resized = size != entry.bytes
                change = "changed" if resized else "was written to"
                raise UsageError(
                    f"{escape_path(entry.path)} {change} during stage 01",
                    expected=f"{entry.bytes} bytes" if resized else "",
                    found=f"{size} bytes" if resized else "",
                    hint="when no other process writes to the source:",
                    run=commands.as_typed(),
                )
            files_by_mode[used_mode] = files_by_mode.get(used_mode, 0) + 1
            bar.advance()
    if "copy" in files_by_mode:
        os.sync()  # the copies must survive a power cut before the manifest lists them
    return files_by_mode


def _place_chunk(mode: str, files: list[tuple[str, str]]) -> list[tuple[str, int, int]]:
    """Place `(source, target)` pairs; return mode, bytes (-1: no source) and mtime_ns of each."""
    results = []
    for source, target in files:
        try:
            results.append(_place_one(source, target, mode))
        except FileNotFoundError:  # usually the target directory does not exist yet
            os.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                results.append(_place_one(source, target, mode))
            except FileNotFoundError:
                results.append((mode, -1, 0))
    return results


def _place_one(source: str, target: str, mode: str) -> tuple[str, int, int]:
    """Place a file; return the mode, its bytes and the mtime_ns of the source."""
    used_mode = place_file(source, target, mode)
    info = os.stat(target)
    # The file system of a copy may store a coarser time.
    return used_mode, info.st_size, (os.stat(source) if used_mode == "copy" else info).st_mtime_ns


def list_missing_files(root: Path, splits: Mapping[str, int]) -> list[str]:
    """Return a sentence for each split with too few files.

    splits: expected number of files, by name. The directories are listed; no file is opened.
    """
    return [
        f"{root / name} contains {present:,} files instead of {expected:,}"
        for name, expected in splits.items()
        if (present := count_files(f"{root}/{name}")) < expected
    ]


def assign_to_splits(sizes: Sequence[int], splits: int) -> list[int]:
    """Return the split of each file, so that counts differ by at most one and bytes are balanced.

    sizes: bytes per file. First each file, in decreasing size, goes to the lightest split that may
    still take one (longest processing time first). Then pairs of splits exchange files as long as
    the heavier split of a pair becomes lighter. The result depends on the sizes only.
    """
    bins = _assign_largest_first(sizes, splits)
    _exchange_files(bins, sizes)
    split_of = [0] * len(sizes)
    for number, members in enumerate(bins):
        for file in members:
            split_of[file] = number
    return split_of


def _assign_largest_first(sizes: Sequence[int], splits: int) -> list[list[int]]:
    """Return the files of each split; each file, largest first, goes to the lightest with room."""
    base = len(sizes) // splits
    bins: list[list[int]] = [[] for _ in range(splits)]
    heap = [(0, 0, number) for number in range(splits)]
    for file in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        _, load, number = heap[0]
        bins[number].append(file)
        # Splits with `base` files come last; the lightest of these take one more file each.
        over = max(0, len(bins[number]) - base + 1)
        heapq.heapreplace(heap, (over, load + sizes[file], number))
    return bins


def _exchange_files(bins: list[list[int]], sizes: Sequence[int]) -> None:
    """Exchange files between the heaviest split and lighter ones until nothing improves."""
    loads = [sum(sizes[file] for file in members) for members in bins]
    for members in bins:
        members.sort(key=lambda file: sizes[file])
    open_bins = list(range(len(bins)))
    work = 0
    while len(open_bins) > 1 and work < _SWAP_WORK:
        open_bins.sort(key=lambda number: (loads[number], number))
        heavy = open_bins[-1]
        for light in open_bins[:-1]:
            work += len(bins[heavy]) + len(bins[light])
            if gain := _swap_files(bins[heavy], bins[light], sizes, loads[heavy] - loads[light]):
                loads[heavy] -= gain
                loads[light] += gain
                break
            if work >= _SWAP_WORK:
                break
        else:
            open_bins.pop()  # it cannot become lighter; balance the others


def _swap_files(heavy: list[int], light: list[int], sizes: Sequence[int], gap: int) -> int:
    """Exchange the pair of files that reduces the gap between two splits most.

    heavy, light: files sorted by size. If the heavy split has more files, it may also give a file
    away without taking one. Returns the number of bytes moved, 0 if no exchange helps.
    """
    best = gap  # the smallest remaining gap so far
    pair = None
    least = gap % 2  # moving n bytes changes the gap by 2 n, so an odd gap cannot reach 0
    if best == least:
        return 0
    light_sizes = [sizes[file] for file in light]
    if len(heavy) > len(light):
        light_sizes.insert(0, 0)  # stands for giving a file and taking none
    for position, file in enumerate(heavy):
        ideal_size = sizes[file] - gap / 2
        near = bisect_left(light_sizes, ideal_size)
        for candidate in (near - 1, near):
            if 0 <= candidate < len(light_sizes):
                remaining = abs(gap - 2 * (sizes[file] - light_sizes[candidate]))
                if remaining < best:
                    best = remaining
                    pair = (position, candidate)
        if best == least:
            break
    if pair is None:
        return 0
    from_heavy = heavy.pop(pair[0])
    moved = sizes[from_heavy] - light_sizes[pair[1]]
    index = pair[1] - (len(light_sizes) - len(light))
    if index >= 0:
        from_light = light.pop(index)
        heavy.insert(bisect_left(heavy, sizes[from_light], key=lambda f: sizes[f]), from_light)
    light.insert(bisect_left(light, sizes[from_heavy], key=lambda f: sizes[f]), from_heavy)
    return moved
