"""Deals files into splits and puts them there: as links or copies; sources are never touched."""

# Plain strings below: making a Path costs more than the system call that it is for.
# ruff: noqa: PTH103, PTH114, PTH116, PTH211

from __future__ import annotations

import errno
import heapq
import os
import shutil
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lib.core import commands, log, publish, units
from lib.core.errors import StageError, UsageError, is_of_disk
from lib.core.progress import Progress
from lib.corpus import kinds
from lib.corpus.scan import EMPTY, UNREADABLE, TreeEntry, count_files, escape_path

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 512
_SWAP_WORK = 3_000_000  # files looked at while exchanging: seconds, whatever the corpus
# Another file system, a file of someone else (protected_hardlinks), a file system without links.
_NO_HARDLINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS}


class Workers:
    """Starts processes that work through lists in chunks; this one works through a short list.

    They are forked, at the first long list: this stage has loaded nothing that forbids it, and a
    new interpreter would take as long as placing thousands of files.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def map(
        self, work: Callable[[list[Item]], list[Result]], items: Iterable[Item], total: int
    ) -> Iterator[Result]:
        """Yield what `work` makes of each item, in order; it gets a list of them at a time.

        total: how many items there are; only a few lists are made ahead. Raises StageError when a
        process died.
        """
        rest = iter(items)
        chunks = iter(lambda: list(islice(rest, _CHUNK)), [])
        if total <= _CHUNK:
            yield from chain.from_iterable(map(work, chunks))
            return
        from concurrent.futures.process import BrokenProcessPool

        if self._executor is None:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            from lib.core import workers

            self._executor = ProcessPoolExecutor(
                min(self._count, units.ceil_div(total, _CHUNK)),
                get_context("fork"),
                workers.set_up_worker,
            )
        flying: deque[Future[list[Result]]] = deque()
        try:
            for chunk in chunks:
                flying.append(self._executor.submit(work, chunk))
                if len(flying) > 4 * self._count:
                    yield from flying.popleft().result()
            for future in flying:
                yield from future.result()
        except BrokenProcessPool:
            raise _make_worker_error() from None


def _make_worker_error() -> StageError:
    return StageError(
        "a worker process has died",
        run=commands.as_typed(),
        expected="signal 9 mostly means that memory ran out: fewer --num-workers",
    )


def sniff_files(root: Path, entries: Iterable[TreeEntry], workers: Workers, progress: bool) -> None:
    """Set `kind` of the entries that are taken so far, and `skipped` of those that are not text."""
    candidates = [entry for entry in entries if not entry.skipped]
    total = len(candidates)
    found = workers.map(_sniff_chunk, (f"{root}/{entry.path}" for entry in candidates), total)
    with Progress("look", total, "files", progress) as bar:
        for entry, kind in zip(candidates, found, strict=True):
            entry.kind = kind
            if not kind:
                entry.skipped = UNREADABLE
            elif kind in ("binary", EMPTY):
                entry.skipped = kind
            bar.advance()


def _sniff_chunk(paths: list[str]) -> list[str]:
    """Return what files hold, "" for one that cannot be read; OSError when a disk fails."""
    found = []
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
            found.append("")
        else:
            found.append(kinds.sniff_kind(path, head))
    return found


def place_file(source: str, target: str, mode: str) -> str:
    """Put one file under a new name and return how: the mode, or `copy` where links fail.

    mode: hardlink, symlink (absolute) or copy (keeps the modification time).
    """
    if mode == "symlink":
        os.symlink(os.path.realpath(source), target)
    elif mode == "hardlink":
        try:
            # os.link does not follow a link on Linux, whatever it is asked.
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
    """Return `copy` where hard links are impossible, after saying why; else the mode.

    beside: an existing directory of the destination. needed: bytes that copies would take.
    """
    if mode == "hardlink":
        probe = beside / "hardlink-probe"
        try:
            os.link(source.resolve(), probe)
            probe.unlink()
        except OSError as error:
            if error.errno not in _NO_HARDLINKS:
                raise
            log.warn(f"hard links do not work here ({error.strerror}): copying instead")
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
    """Place every `(entry, split)` under `build/split/` and return how many went which way.

    Raises UsageError naming a file that vanished meanwhile, or has another size than planned.
    """
    names = ((f"{root}/{entry.path}", f"{build}/{split}/{entry.path}") for entry, split in files)
    placed = workers.map(partial(_place_chunk, mode), names, len(files))
    ways: dict[str, int] = {}
    with Progress("place", len(files), "files", progress) as bar:
        for (entry, _), (way, size, mtime_ns) in zip(files, placed, strict=True):
            if size < 0:
                raise UsageError(
                    f"{escape_path(entry.path)} vanished from {root} while it was organised",
                    run=commands.as_typed(),
                )
            if (size, mtime_ns) != (entry.bytes, entry.mtime_ns):
                resized = size != entry.bytes
                raise UsageError(
                    f"{escape_path(entry.path)} {'changed' if resized else 'was written to'} while it "
                    "was organised",
                    expected=f"{entry.bytes} bytes" if resized else "",
                    found=f"{size} bytes" if resized else "",
                    hint="once nothing writes to the source:",
                    run=commands.as_typed(),
                )
            ways[way] = ways.get(way, 0) + 1
            bar.advance()
    if "copy" in ways:
        os.sync()  # copies must outlast a power cut before the manifest vouches for them
    return ways


def _place_chunk(mode: str, files: list[tuple[str, str]]) -> list[tuple[str, int, int]]:
    """Place `(source, target)`s; return how, bytes (-1: no source) and when it was last written."""
    done = []
    for source, target in files:
        try:
            done.append(_place_one(source, target, mode))
        except FileNotFoundError:  # the first file of its directory, mostly
            os.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                done.append(_place_one(source, target, mode))
            except FileNotFoundError:
                done.append((mode, -1, 0))
    return done


def _place_one(source: str, target: str, mode: str) -> tuple[str, int, int]:
    """Place a file; return how, its bytes and when the source was last written."""
    way = place_file(source, target, mode)
    info = os.stat(target)
    # The time of a copy is that of another file system, which may be coarser.
    return way, info.st_size, (os.stat(source) if way == "copy" else info).st_mtime_ns


def list_missing_files(root: Path, splits: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the number of files in splits, a sentence each.

    splits: by name, how many files it should hold. Directories are listed, no file is looked at.
    """
    return [
        f"{root / name} holds {there:,} files instead of {expected:,}"
        for name, expected in splits.items()
        if (there := count_files(f"{root}/{name}")) < expected
    ]


def assign_to_splits(sizes: Sequence[int], splits: int) -> list[int]:
    """Return the split of each file: counts differ by at most one, byte sums are even.

    sizes: bytes per file. First the largest files go to the lightest splits that still have room
    in number (longest processing time first), then files are exchanged between splits while that
    lowers the heavier of the two. The same sizes always give the same answer.
    """
    bins = _assign_largest_first(sizes, splits)
    _exchange_files(bins, sizes)
    split_of = [0] * len(sizes)
    for number, members in enumerate(bins):
        for file in members:
            split_of[file] = number
    return split_of


def _assign_largest_first(sizes: Sequence[int], splits: int) -> list[list[int]]:
    """Return the files of each split, dealt one by one to the lightest split that has room."""
    base = len(sizes) // splits
    bins: list[list[int]] = [[] for _ in range(splits)]
    heap = [(0, 0, number) for number in range(splits)]
    for file in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        _, load, number = heap[0]
        bins[number].append(file)
        # Splits of `base` files come after all others; of them the lightest take one file more.
        over = max(0, len(bins[number]) - base + 1)
        heapq.heapreplace(heap, (over, load + sizes[file], number))
    return bins


def _exchange_files(bins: list[list[int]], sizes: Sequence[int]) -> None:
    """Exchange files between the heaviest and lighter splits until it helps no more."""
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
            open_bins.pop()  # as light as it gets: even out the others


def _swap_files(heavy: list[int], light: list[int], sizes: Sequence[int], gap: int) -> int:
    """Exchange one file each so that the gap between two splits shrinks most.

    heavy, light: files sorted by size. A split that has one file more may also just give one.
    Returns the bytes that moved, 0 when nothing helps.
    """
    best = gap  # what remains of the gap
    pair = None
    least = gap % 2  # bytes are whole, and moving some changes the gap by twice as many
    if best == least:
        return 0
    light_sizes = [sizes[file] for file in light]
    if len(heavy) > len(light):
        light_sizes.insert(0, 0)  # giving without taking is taking a file of no size
    for position, file in enumerate(heavy):
        wanted = sizes[file] - gap / 2
        near = bisect_left(light_sizes, wanted)
        for other in (near - 1, near):
            if 0 <= other < len(light_sizes):
                left = abs(gap - 2 * (sizes[file] - light_sizes[other]))
                if left < best:
                    best = left
                    pair = (position, other)
        if best == least:
            break
    if pair is None:
        return 0
    mine = heavy.pop(pair[0])
    moved = sizes[mine] - light_sizes[pair[1]]
    index = pair[1] - (len(light_sizes) - len(light))
    if index >= 0:
        theirs = light.pop(index)
        heavy.insert(bisect_left(heavy, sizes[theirs], key=lambda f: sizes[f]), theirs)
    light.insert(bisect_left(light, sizes[mine], key=lambda f: sizes[f]), mine)
    return moved
