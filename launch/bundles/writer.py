"""Write the files of a bundle to volumes: cut, copy and hash them, or reuse equal files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.bundles import unpacking
from launch.bundles.contents import Payload
from launch.bundles.unpacking import Entry
from lib.core import commands, hashing, manifest, publish, units
from lib.core.errors import ArtifactError
from lib.core.hashing import HashedFile
from lib.core.progress import Progress

_JOURNAL = "progress.jsonl"
_CHUNK = 4 << 20
_JOURNAL_MIN_BYTES = (
    1 << 20
)  # after a kill, smaller files are copied again: faster than an fsync for each


def plan_layout(payloads: Sequence[Payload], volume_bytes: int | None) -> dict[str, list[Entry]]:
    """Return the parts of each file. Files fill one volume after the other and are cut at its end.

    A volume contains at most one part of a file; the parts of cut files are under `.parts/`.
    """
    parts: dict[str, list[Entry]] = {}
    volume = 1
    free = volume_bytes or sum(payload.bytes for payload in payloads)
    for payload in payloads:
        cuts: list[tuple[int, int, int]] = []
        offset = 0
        while not cuts or offset < payload.bytes:
            if volume_bytes and not free:
                volume = volume + 1
                free = volume_bytes
            size = min(payload.bytes - offset, free)
            cuts.append((volume, offset, size))
            offset = offset + size
            free = free - size
        folder = "/.parts" if len(cuts) > 1 else ""
        parts[payload.to] = [
            {
                "path": f"volume_{number:03d}{folder}/{payload.to}",
                "to": payload.to,
                "offset": begin,
                "bytes": size,
                "mode": payload.mode,
                "mtime_ns": payload.mtime_ns,
            }
            for number, begin, size in cuts
        ]
    return parts


class Writer:
    """Fills the partial directory of a bundle.

    earlier: a finished bundle of the same name, whose equal files are linked instead of copied.
    missing_bytes: bytes that must be copied.
    """

    def __init__(
        self, place: Path, earlier: Path, payloads: Sequence[Payload], volume_bytes: int | None
    ) -> None:
        self._place = place
        self._payloads = payloads
        self._layout = plan_layout(payloads, volume_bytes)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._seconds = 0.0
        self._done = self._reuse(place, _read_journal(place / _JOURNAL))
        self._delete_others()
        linked = manifest.read_if_any(earlier) if earlier.is_dir() else None
        if linked and linked["kind"] == unpacking.KIND:
            self._done |= self._reuse(earlier, linked["files"])
        self._kept = sum(p.bytes for p in payloads if p.to in self._done)
        self.missing_bytes = sum(p.bytes for p in payloads) - self._kept

    def write(self, workers: int, show_progress: bool) -> list[Entry]:
        """Copy missing files and return the entries of all files, in the order of the layout."""
        missing = [payload for payload in self._payloads if payload.to not in self._done]
        with (
            Progress("packing", self.missing_bytes, "B", show_progress) as progress,
            (self._place / _JOURNAL).open("a", encoding="utf-8") as journal,
            ThreadPoolExecutor(workers) as pool,
        ):

            def advance(count: int) -> None:
                with self._lock:
                    progress.advance(count)

            def copy(payload: Payload) -> None:
                entries = self._copy(payload, advance)
                with self._lock:
                    self._done[payload.to] = entries
                    if payload.bytes >= _JOURNAL_MIN_BYTES:
                        journal.write(json.dumps(entries) + "\n")
                        journal.flush()

            try:
                list(pool.map(copy, missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._seconds = time.monotonic() - self._began
        return [entry for payload in self._payloads for entry in self._done[payload.to]]

    def delete_journal(self) -> None:
        """Delete the journal, since the manifest replaces it."""
        (self._place / _JOURNAL).unlink()

    def summary(self) -> str:
        """Return how much was copied and how fast."""
        rate = self.missing_bytes / max(self._seconds, 1e-9)
        reused = f", {units.size(self._kept)} reused" if self._kept else ""
        return f"{units.size(self.missing_bytes)} copied at {units.size(rate)}/s{reused}"

    def _reuse(self, place: Path, entries: Sequence[Entry]) -> dict[str, list[Entry]]:
        """Link files of a bundle that equal files to pack, and return their entries."""
        reused = {}
        for to, parts in unpacking.group_by_file(entries).items():
            without_digests = [
                {key: part[key] for key in part if key != "digest"} for part in parts
            ]
            if without_digests == self._layout.get(to) and all(
                _has_size(place, part) for part in parts
            ):
                for part in parts:
                    source = place / part["path"]
                    target = self._place / part["path"]
                    if not target.exists():
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.hardlink_to(source)
                reused[to] = parts
        return reused

    def _delete_others(self) -> None:
        """Delete files that a killed run left unfinished or packed for another layout."""
        known = {part["path"] for parts in self._done.values() for part in parts}
        for folder, _, names in os.walk(self._place, topdown=False):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(self._place).as_posix() not in {*known, _JOURNAL}:
                    path.unlink()

    def _copy(self, payload: Payload, advance: Callable[[int], None]) -> list[Entry]:
        """Write the parts of a file.

        Raises ArtifactError if the file does not match the digest that a stage recorded."""
        parts = self._layout[payload.to]
        algorithm = payload.digest.partition(":")[0]
        is_hashed = len(parts) == 1 and algorithm == "sha256"  # the part's hash is the file's
        file_hash = hashing.new_hasher(algorithm) if algorithm and not is_hashed else None
        entries = []
        for part in parts:
            path = self._place / part["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            with HashedFile(path, "sha256") as file:
                for chunk in _read_chunks(payload, part["offset"], part["bytes"]):
                    if file_hash:
                        file_hash.update(chunk)
                    file.write(chunk)
                    advance(len(chunk))
            if payload.bytes >= _JOURNAL_MIN_BYTES:
                publish.fsync(path)
            entries.append({**part, "digest": file.digest()})
        digest = (
            entries[0]["digest"]
            if is_hashed
            else file_hash and hashing.format_digest(file_hash, algorithm)
        )
        is_grown = (
            isinstance(payload.source, Path) and payload.source.stat().st_size != payload.bytes
        )
        if is_grown or (digest and digest != payload.digest):
            raise ArtifactError(
                f"{payload.source!s} has changed since it was written",
                hint="to find the damage in .cache/, and how to repair it:",
                run=commands.script("03_download_model.py", "--verify"),
            )
        return entries


def _read_chunks(payload: Payload, offset: int, size: int) -> Any:
    if isinstance(payload.source, bytes):
        yield payload.source[offset : offset + size]
        return
    with payload.source.open("rb", buffering=0) as file:
        file.seek(offset)
        while size:
            chunk = file.read(min(size, _CHUNK))
            if not chunk:
                raise ArtifactError(f"{payload.source} shrank while it was packed")
            size -= len(chunk)
            yield chunk


def _has_size(place: Path, part: Entry) -> bool:
    path = place / part["path"]
    return path.is_file() and path.stat().st_size == part["bytes"]


def _read_journal(path: Path) -> list[Entry]:
    """Return the entries that a killed run finished, without a torn last line."""
    entries: list[Entry] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entries += json.loads(line)
            except ValueError:
                break
    return entries
