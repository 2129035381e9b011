"""Artifacts hashed when they are used, and not again until their files change.

What was found whole is noted with inode, size and times of each file under `<cache>/verified/`. A
launch that finds them so need not read them once more; any write, copy or replacement shows in
these. A fault of the disk behind the back of the file system does not: that takes `--verify` of
stage 03, or stage 04 with --prepare-only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import hashing, lease, log, manifest, paths, records, units
from lib.core.progress import Progress

_RACY_NS = 2_000_000_000  # so much later than a file a note must be: clocks of disks are coarse
_LONG_BYTES = 1 << 30
_POLL_S = 1.0
_NOTE = "files.json"
_DIGESTS = "digests.json"


def require(
    directory: Path,
    content: dict[str, Any],
    what: str,
    cache_dir: Path,
    *,
    workers: int = 4,
    progress: bool = True,
    always: bool = False,
    **remedy: str,
) -> None:
    """Raise ArtifactError unless every byte of an artifact is as its manifest says.

    content: the manifest. workers: threads, each hashes one file at a time. always: hash also what
    has not changed since it was found whole. remedy: `run` or `hint` of the error. Of several
    launches and nodes that share `cache_dir` one reads the files and the others wait for it.
    """
    place = _place(directory, content, cache_dir)
    if not content["files"] or (not always and _is_noted(place, directory, content)):
        return
    with _alone(place) as is_first:
        if not always and not is_first and _is_noted(place, directory, content):
            return
        stamps = _stamps(directory, content)
        if found := _hash(directory, content, what, workers, progress):
            raise manifest.damaged(directory, what, found, **remedy)
        _note(place, stamps)


def note(directory: Path, content: dict[str, Any], cache_dir: Path) -> None:
    """Note that an artifact was just found whole by other means."""
    _note(_place(directory, content, cache_dir), _stamps(directory, content))


def digests(
    directory: Path,
    names: Iterable[str],
    cache_dir: Path,
    *,
    what: str,
    workers: int = 4,
    progress: bool = True,
    always: bool = False,
) -> dict[str, str]:
    """Return the digests of files that no manifest names, by name: hashed once until they change.

    As in `require`, of several launches and nodes that share `cache_dir` one reads them.
    """
    files = [{"path": name, "algorithm": hashing.FAST} for name in sorted(names)]
    content: dict[str, Any] = {"files": files}
    place = _place(directory, content, cache_dir)
    if noted := {} if always else _noted_digests(place, directory, content):
        return noted
    with _alone(place) as is_first:
        if not always and not is_first and (noted := _noted_digests(place, directory, content)):
            return noted
        stamps = _stamps(directory, content)
        total = sum(stamp[1] for stamp in stamps.values())
        if total > _LONG_BYTES:
            log.info(f"hashing {what} {directory}: {units.size(total)}, once until it changes")
        with (
            Progress(f"hashing {what}", total, "B", progress and total > _LONG_BYTES) as bar,
            ThreadPoolExecutor(max(1, workers)) as pool,
        ):
            found = dict(
                pool.map(
                    lambda entry: (
                        entry["path"],
                        hashing.file_digest(directory / entry["path"], advance=bar.advance),
                    ),
                    files,
                )
            )
        with suppress(OSError):  # `_note` tells it
            manifest.write_json(place / _DIGESTS, found)
        _note(place, stamps)
    return found


def _noted_digests(place: Path, directory: Path, content: dict[str, Any]) -> dict[str, str]:
    """Return the digests that were noted of files that have not been touched since, else {}."""
    if content["files"] and _is_noted(place, directory, content):
        with suppress(OSError, ValueError):
            noted = records.read_json(place / _DIGESTS)
            if isinstance(noted, dict) and noted.keys() == {
                entry["path"] for entry in content["files"]
            }:
                return noted
    return {}


def _place(directory: Path, content: dict[str, Any], cache_dir: Path) -> Path:
    """Return the directory of the note about an artifact: of this content at this place."""
    here = directory.resolve()
    key = hashing.fingerprint([str(here), content["files"]])
    return paths.verified_root(cache_dir) / f"{here.name}-{key[:12]}"


def _stamps(directory: Path, content: dict[str, Any]) -> dict[str, list[int]]:
    """Return inode, bytes and times of each file by its path; of one that is missing nothing."""
    stamps = {}
    for entry in content["files"]:
        with suppress(FileNotFoundError):
            info = (directory / entry["path"]).stat()
            stamps[entry["path"]] = [info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
    return stamps


def _is_noted(place: Path, directory: Path, content: dict[str, Any]) -> bool:
    """Tell whether the files are those that were found whole, and have not been touched since.

    A note that was made within moments of the last change may have missed a later one.
    """
    try:
        noted = records.read_json(place / _NOTE)
        at_ns = (place / _NOTE).stat().st_mtime_ns
    except (OSError, ValueError):
        return False
    stamps = _stamps(directory, content)
    return (
        noted == stamps
        and len(stamps) == len(content["files"])
        and all(at_ns - max(stamp[2:]) > _RACY_NS for stamp in stamps.values())
    )


def _note(place: Path, stamps: dict[str, list[int]]) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        manifest.write_json(place / _NOTE, stamps)
    except OSError as error:  # a cache that only others may write: hashed again next time
        log.info(f"what was verified cannot be noted in {place}: {error.strerror}")


@contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Wait until no other process hashes the same; tell whether none did.

    Where nothing can be written nobody waits for anybody.
    """
    is_first = True
    held = None
    while held is None:
        try:
            place.mkdir(parents=True, exist_ok=True)
            held = lease.Lease(place / "lock.json", lost=log.warn)
        except lease.Held as other:
            if is_first:
                log.info(
                    f"waiting for {other.holder or 'another process'}, which verifies the "
                    "same files"
                )
            is_first = False
            time.sleep(_POLL_S)
        except OSError:
            break
    try:
        yield is_first
    finally:
        if held:
            held.release()


def _hash(
    directory: Path, content: dict[str, Any], what: str, workers: int, progress: bool
) -> list[str]:
    """Return what is wrong with the files of an artifact, a sentence each."""
    files = content["files"]
    total = sum(entry["bytes"] for entry in files)
    began = time.monotonic()
    is_long = total > _LONG_BYTES
    if is_long:
        log.info(f"verifying {what} {directory}: {units.size(total)}, once until it changes")
    with (
        Progress(f"verifying {what}", total, "B", progress and is_long) as bar,
        ThreadPoolExecutor(max(1, workers)) as pool,
    ):
        damaged = list(
            filter(
                None,
                pool.map(
                    lambda entry: manifest.damage(
                        directory / entry["path"], entry, deep=True, advance=bar.advance
                    ),
                    files,
                ),
            )
        )
    if is_long and not damaged:
        log.info(f"every byte is as it was written, {units.duration(time.monotonic() - began)}")
    return damaged
