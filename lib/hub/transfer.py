"""Brings files of a repository into a directory, from this machine where it has them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, units
from lib.core.errors import ArtifactError
from lib.core.progress import Progress
from lib.hub import cache, partial
from lib.hub.client import Hub
from lib.hub.repository import RemoteFile, Repository, require_safe
from lib.models.directory import LARGEST_HEADER

_MOST_CONNECTIONS = 8
_ATTEMPTS = 2
_HEADER_AT_MOST = 1 << 16  # bytes, as a guess

Job = Callable[[], list["Job"]]  # returns the jobs that can begin now


class Transfer:
    """Fetches files of a repository; what an earlier run left in the directory is used.

    earlier: directories that may hold some of the files already (an artifact that is replaced, a
    preview); like the Hugging Face cache they are asked before the Hub, and trusted no more.
    preview: the one of them that was filled from the Hub just now.
    workers: threads with work to do; as many again wait for the network.
    """

    def __init__(
        self,
        hub: Hub,
        repository: Repository,
        earlier: Sequence[Path] = (),
        *,
        preview: Path | None = None,
        workers: int = 1,
        show_progress: bool = False,
    ) -> None:
        self._preview = preview
        self._hub = hub
        self._repository = repository
        self._earlier = earlier
        self._workers = min(2 * workers, _MOST_CONNECTIONS)
        self._show_progress = show_progress
        self._lock = threading.Lock()
        self.bytes_from: dict[str, int] = {"the Hub": 0, "this machine": 0, "an earlier run": 0}

    def fetch(self, files: Sequence[RemoteFile], directory: Path) -> list[dict[str, Any]]:
        """Bring the files into a directory, several pieces at a time.

        Returns manifest entries with SHA-256. Raises UsageError when the Hub is out of reach or
        refuses, or a path leads out of the directory; ArtifactError when a file differs from what
        the Hub declares at a second try too.
        """
        require_safe(files, self._repository.name)
        what = f"fetching {units.counted(len(files), 'file')}"
        total = sum(file.size for file in files)
        with Progress(what, total, "B", self._show_progress) as self._progress:
            self._run([functools.partial(self._begin, file, directory) for file in files])
        for file in files:
            partial.forget(file, directory)
        return [_make_entry(file, directory) for file in files]

    def _run(self, jobs: Sequence[Job]) -> None:
        """Run jobs and those that they return until none is left; the first error ends all."""
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            waiting: set[Future[list[Job]]] = {pool.submit(job) for job in jobs}
            try:
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for task in done:
                        waiting |= {pool.submit(job) for job in task.result()}
            except BaseException:
                self._hub.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _advance(self, amount: int) -> None:
        if self._hub.stopped.is_set():
            raise InterruptedError("another file failed")
        self._progress.advance(amount)

    def _note_bytes(self, place: str, amount: int) -> None:
        if place == "the Hub":
            self._advance(amount)
        else:
            self._progress.skip(amount)
        with self._lock:
            self.bytes_from[place] += amount

    def _begin(self, file: RemoteFile, directory: Path) -> list[Job]:
        """Use what is there of a file, and return what remains to do."""
        target = directory / file.path
        if file.declared and target.is_file() and not file.differs(target):
            self._note_bytes("an earlier run", file.size)
            return []
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._take_copy(file, target):
            return []
        part = partial.PartialFile(file, directory)
        self._note_bytes("an earlier run", part.open())
        return self._list_jobs(part)

    def _list_jobs(self, part: partial.PartialFile) -> list[Job]:
        left: list[Job] = [
            functools.partial(self._receive, part, piece)
            for piece in range(part.pieces)
            if len(range(*part.range_left(piece)))
        ]
        return left or self._finish(part)

    def _receive(self, part: partial.PartialFile, piece: int) -> list[Job]:
        self._hub.receive(
            self._repository, part, piece, lambda amount: self._note_bytes("the Hub", amount)
        )
        return self._finish(part) if part.is_complete() else []

    def _finish(self, part: partial.PartialFile) -> list[Job]:
        """Check a whole file; return the jobs that fetch it once more if it is damaged."""
        if not part.claim():
            return []
        if not (difference := part.finish()):
            return []
        self._advance(-part.file.size)
        if part.refused == _ATTEMPTS:
            raise ArtifactError(
                f"{self._repository.name}: {part.file.path} arrived damaged twice",
                expected="what the Hub declares for it",
                found=difference,
                hint="later; finished files are kept:",
                run=commands.as_typed(),
            )
        part.open()
        return self._list_jobs(part)

    def _take_copy(self, file: RemoteFile, target: Path) -> bool:
        """Copy a file from elsewhere on this machine if it is there and as the Hub declares it."""
        cached = cache.find_blob(file, self._repository.name, self._repository.kind)
        places = [*(place / file.path for place in self._earlier), *([cached] if cached else [])]
        for place in places if file.declared else []:
            if not place.is_file() or place.stat().st_size != file.size:
                continue
            _link_or_copy(place, target, link=place is not cached)
            if difference := file.differs(target):
                log.warn(f"{place} is damaged and not used: {difference}")
                target.unlink()
                continue
            is_new = place.parent == self._preview and not cached
            self._note_bytes("the Hub" if is_new else "this machine", file.size)
            return True
        return False


def bring_headers(
    hub: Hub, repository: Repository, files: Sequence[RemoteFile], directory: Path
) -> None:
    """Write the beginning of each safetensors file, its header, under the file's name."""
    require_safe(files, repository.name)

    def bring(file: RemoteFile) -> None:
        content = b""
        cached = cache.find_blob(file, repository.name, repository.kind)
        for size in (_HEADER_AT_MOST, 0):  # most headers need but one request
            size = size or 8 + min(int.from_bytes(content[:8], "little"), LARGEST_HEADER)
            if (end := min(size, file.size)) <= len(content):
                continue
            if cached:
                with cached.open("rb") as blob:
                    content = blob.read(end)
            else:  # in one request, but for a stream that ends early without an error
                while more := hub.read(repository, file, len(content), end):
                    content += more
                    if len(content) >= end:
                        break
        (directory / file.path).write_bytes(content)

    with ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
        list(pool.map(bring, files))


def clear_others(files: Sequence[RemoteFile], directory: Path, earlier: Sequence[Path] = ()) -> int:
    """Delete what belongs to none of the files, and return how many bytes of them are to come.

    earlier: as for Transfer; what can be linked from there takes no room.
    """

    def can_be_linked(file: RemoteFile) -> bool:
        return any(
            (place / file.path).is_file()
            and (place / file.path).stat().st_size == file.size
            and place.stat().st_dev == directory.stat().st_dev
            for place in earlier
        )

    wanted = {name for file in files for name in partial.list_names(file)}
    for path in directory.rglob("*"):
        if path.is_file() and path.relative_to(directory).as_posix() not in wanted:
            path.unlink()
    return sum(
        max(0, file.size - partial.count_bytes(file, directory))
        for file in files
        if not can_be_linked(file)
    )


def _link_or_copy(source: Path, target: Path, *, link: bool) -> None:
    """Copy a file; with `link`, one of our own that is about to go becomes the new one."""
    if link:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or one without links
    cache.copy(source, target)


def _make_entry(file: RemoteFile, directory: Path) -> dict[str, Any]:
    path = directory / file.path
    if not file.sha256:
        return manifest.file_entry(directory, path, "sha256")
    return {"path": file.path, "bytes": file.size, "digest": f"sha256:{file.sha256}"}
