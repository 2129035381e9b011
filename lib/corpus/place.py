"""Puts files into splits: hard links, symbolic links or copies; sources are never touched."""

# Plain strings below: making a Path costs more than the system call that it is for.
# ruff: noqa: PTH114, PTH116, PTH211

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lib.core import log, publish
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.corpus import kinds
from lib.corpus.scan import EMPTY, UNREADABLE, Entry, shown

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 512
# Another file system, a file of someone else (protected_hardlinks), a file system without links.
_NO_HARDLINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS}


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], workers: int,
               ) -> Iterator[Result]:
    """Yield `work(item)` in order; threads hide the latency of network file systems."""
    chunks = [items[start:start + _CHUNK] for start in range(0, len(items), _CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for results in pool.map(lambda chunk: [work(item) for item in chunk], chunks):
            yield from results


def sniff_all(root: Path, entries: Iterable[Entry], workers: int, progress: bool) -> None:
    """Set `kind` of the entries that are taken so far, and `skipped` of those that are no text."""
    def head_of(entry: Entry) -> bytes | None:
        try:
            descriptor = os.open(f"{root}/{entry.path}", os.O_RDONLY)
        except OSError:
            return None
        try:
            return os.read(descriptor, kinds.HEAD_BYTES)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    candidates = [entry for entry in entries if not entry.skipped]
    with Progress("look", len(candidates), "files", progress) as bar:
        heads = in_threads(head_of, candidates, workers)
        for entry, head in zip(candidates, heads, strict=True):
            entry.kind = kinds.sniff(entry.path, head) if head is not None else ""
            if not entry.kind:
                entry.skipped = UNREADABLE
            elif entry.kind in ("binary", EMPTY):
                entry.skipped = entry.kind
            bar.advance()


def place(source: str, target: str, mode: str) -> str:
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
            return place(source, target, "copy")
    else:
        shutil.copyfile(source, target)
        info = os.stat(source)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    return mode


def mode_that_works(source: Path, beside: Path, mode: str, needed: int) -> str:
    """Return `copy` where hard links are impossible, after telling why; else the mode.

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


def place_all(root: Path, build: Path, files: Sequence[tuple[Entry, str]], mode: str, workers: int,
              progress: bool) -> dict[str, int]:
    """Place every `(entry, split)` under `build/split/` and return how many went which way.

    Raises UsageError naming a file that vanished meanwhile.
    """
    for directory in sorted({f"{split}/{entry.path}".rpartition("/")[0]
                             for entry, split in files}):
        (build / directory).mkdir(parents=True, exist_ok=True)

    def put(item: tuple[Entry, str]) -> str:
        entry, split = item
        try:
            return place(f"{root}/{entry.path}", f"{build}/{split}/{entry.path}", mode)
        except FileNotFoundError:
            raise UsageError(f"{shown(entry.path)} vanished from {root} while it was organised",
                             run="the same command again") from None

    ways: dict[str, int] = {}
    with Progress("place", len(files), "files", progress) as bar:
        for way in in_threads(put, files, workers):
            ways[way] = ways.get(way, 0) + 1
            bar.advance()
    if "copy" in ways:
        os.sync()  # copies must outlast a power cut before the manifest vouches for them
    return ways


def verify(build: Path, files: Iterable[tuple[Entry, str]]) -> None:
    """Check that every file is there with the size that was planned; UsageError if one changed."""
    for entry, split in files:
        size = os.stat(f"{build}/{split}/{entry.path}").st_size
        if size != entry.bytes:
            raise UsageError(f"{shown(entry.path)} changed while it was organised",
                             expected=f"{entry.bytes} bytes", found=f"{size} bytes",
                             run="the same command again, once nothing writes to the source")
