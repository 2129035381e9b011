"""Hash artifacts when they are used, and not again until their files change.

After an artifact was found intact, `<cache>/verified/` records inode, size and times of each file.
A launch that finds the same values does not read the files again; any write, copy or replacement
changes the values. Silent disk corruption does not change them; `--verify` of stage 03, or stage 04
with --prepare-only, finds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import file_identity, hashing, lease, log, manifest, paths, records, units
from lib.core.progress import Progress
from lib.core.retry import poll

_RACY_NS = 2_000_000_000  # a record must be this much later than a file: clocks of disks are coarse
_LONG_BYTES = 1 << 30
_POLL_S = 1.0
_RECORD = "files.json"
_DIGESTS = "digests.json"


def require_intact(
    directory: Path,
    content: dict[str, Any],
    name: str,
    cache_dir: Path,
    *,
    workers: int = 4,
    progress: bool = True,
    always: bool = False,
    **remedy: str,
) -> None:
    """Raise ArtifactError unless every byte of an artifact matches its manifest.

    content: the manifest. workers: threads, which hash one file each at a time. always: also hash
    files that have not changed since they were found intact. remedy: `run` or `hint` of the error.
    Among launches and nodes that share `cache_dir`, one reads the files and the others wait.
    """
    place = _locate_record(directory, content, cache_dir)
    if not content["files"] or (not always and _is_recorded(place, directory, content)):
        return
    with _take_turn(place) as is_first:
        if not always and not is_first and _is_recorded(place, directory, content):
            return
        identities = _read_identities(directory, content)
        if damage := _find_damage(directory, content, name, workers, progress):
            raise manifest.make_damage_error(directory, name, damage, **remedy)
        _write_record(place, identities)


def record_intact(directory: Path, content: dict[str, Any], cache_dir: Path) -> None:
    """Record that an artifact was just found intact by other means."""
    _write_record(
        _locate_record(directory, content, cache_dir), _read_identities(directory, content)
    )


def file_digests(
    directory: Path,
    names: Iterable[str],
    cache_dir: Path,
    *,
    name: str,
    workers: int = 4,
    progress: bool = True,
    always: bool = False,
) -> dict[str, str]:
    """Return the digests by name of files without a manifest; hash them again only after a change.

    As in `require_intact`, one of the launches and nodes that share `cache_dir` reads them.
    """
    files = [{"path": name, "algorithm": hashing.FAST} for name in sorted(names)]
    content: dict[str, Any] = {"files": files}
    place = _locate_record(directory, content, cache_dir)
    if noted := {} if always else _read_noted_digests(place, directory, content):
        return noted
    with _take_turn(place) as is_first:
        if (
            not always
            and not is_first
            and (noted := _read_noted_digests(place, directory, content))
        ):
            return noted
        identities = _read_identities(directory, content)
        total = sum(recorded[1] for recorded in identities.values())
        if total > _LONG_BYTES:
            log.detail(f"hashing {name} {directory}: {units.size(total)}, once until it changes")
        with (
            Progress(f"hashing {name}", total, "B", progress and total > _LONG_BYTES) as bar,
            ThreadPoolExecutor(max(1, workers)) as pool,
        ):
            digests = dict(
                pool.map(
                    lambda entry: (
                        entry["path"],
                        hashing.file_digest(directory / entry["path"], advance=bar.advance),
                    ),
                    files,
                )
            )
        with suppress(OSError):  # `_write_record` reports it
            manifest.write_json(place / _DIGESTS, digests)
        _write_record(place, identities)
    return digests


def _read_noted_digests(place: Path, directory: Path, content: dict[str, Any]) -> dict[str, str]:
    """Return the recorded digests of files that have not changed since, else {}."""
    if content["files"] and _is_recorded(place, directory, content):
        with suppress(OSError, ValueError):
            noted = records.read_json(place / _DIGESTS)
            if isinstance(noted, dict) and noted.keys() == {
                entry["path"] for entry in content["files"]
            }:
                return noted
    return {}


def _locate_record(directory: Path, content: dict[str, Any], cache_dir: Path) -> Path:
    """Return the directory of the record about an artifact with this content at this place."""
    here = directory.resolve()
    key = hashing.fingerprint([str(here), content["files"]])
    return paths.verified_root(cache_dir) / f"{here.name}-{key[:12]}"


def _read_identities(directory: Path, content: dict[str, Any]) -> dict[str, list[int]]:
    """Return inode, bytes and times of each existing file, by its path."""
    names = {directory / entry["path"]: entry["path"] for entry in content["files"]}
    identities = file_identity.read_identities(names)
    return {names[path]: identity.recorded for path, identity in identities.items() if identity}


def _is_recorded(place: Path, directory: Path, content: dict[str, Any]) -> bool:
    """Return whether the files were found intact and have not changed since.

    A record made right after the last change does not count: it may have missed a later one.
    """
    try:
        noted = records.read_json(place / _RECORD)
        at_ns = (place / _RECORD).stat().st_mtime_ns
    except (OSError, ValueError):
        return False
    identities = _read_identities(directory, content)
    return (
        noted == identities
        and len(identities) == len(content["files"])
        and all(at_ns - max(recorded[2:]) > _RACY_NS for recorded in identities.values())
    )


def _write_record(place: Path, identities: dict[str, list[int]]) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        manifest.write_json(place / _RECORD, identities)
    except OSError as error:  # a cache that only others may write: hash again next time
        log.info(f"{place} cannot be written, so the next launch verifies again: {error.strerror}")


@contextmanager
def _take_turn(place: Path) -> Iterator[bool]:
    """Wait until no other process hashes the same files. Yields False if it had to wait.

    Nobody waits if the cache cannot be written, or for a machine that its locks do not reach.
    """
    is_first = True
    record = place / "lock.json"
    lock = ExitStack()

    def delete_record() -> None:
        """Leave no file behind; the record is still locked."""
        with suppress(OSError):
            record.unlink()

    def take() -> bool:
        """Return whether this process need not wait: it holds the lock, or nobody can."""
        nonlocal is_first
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock.enter_context(lease.lock_to_build(record))
            lock.callback(delete_record)
        except lease.DirectoryHeld as other:
            if is_first:
                log.info(
                    f"waiting for {other.holder or 'another process'}, which verifies the "
                    "same files"
                )
            is_first = False
            return False
        except OSError:
            pass
        return True

    with lock:
        poll(take, _POLL_S)
        yield is_first


def _find_damage(
    directory: Path, content: dict[str, Any], name: str, workers: int, progress: bool
) -> list[str]:
    """Hash an artifact and return one sentence for each damaged file."""
    files = content["files"]
    total = sum(entry["bytes"] for entry in files)
    began = time.monotonic()
    is_long = total > _LONG_BYTES
    if is_long:
        log.detail(f"verifying {name} {directory}: {units.size(total)}, once until it changes")
    with (
        Progress(f"verifying {name}", total, "B", progress and is_long) as bar,
        ThreadPoolExecutor(max(1, workers)) as pool,
    ):
        damaged = list(
            filter(
                None,
                pool.map(
                    lambda entry: manifest.describe_damage(
                        directory / entry["path"], entry, deep=True, advance=bar.advance
                    ),
                    files,
                ),
            )
        )
    if is_long and not damaged:
        log.detail(f"every byte is intact, {units.duration(time.monotonic() - began)}")
    return damaged
