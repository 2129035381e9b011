"""Download files of a repository into a directory, or copy those that this machine has.

docs/explanation/log.md compares this with the download functions of huggingface_hub.
"""

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
from lib.hub.repository import RemoteFile, Repository, require_safe_paths
from lib.models.directory import LARGEST_HEADER

_MAX_CONNECTIONS = 8
_MAX_ATTEMPTS = 2
_FIRST_HEADER_BYTES = 1 << 16  # of the first request; most headers fit

Job = Callable[[], list["Job"]]  # returns the jobs that can start now


class Transfer:
    """Downloads files of a repository, reusing partial files of an earlier run in the directory.

    reuse_from: directories that may already contain some of the files (the artifact to be replaced,
    a preview). They and the Hugging Face cache are searched before the Hub is asked; every copied
    file is checked too. preview: the directory in reuse_from that this run has downloaded from the
    Hub. workers: busy threads; twice as many are started, because half of them wait for the
    network.
    """

    def __init__(
        self,
        hub: Hub,
        repository: Repository,
        reuse_from: Sequence[Path] = (),
        *,
        preview: Path | None = None,
        workers: int = 1,
        show_progress: bool = False,
    ) -> None:
        self._preview = preview
        self._hub = hub
        self._repository = repository
        self._reuse_from = reuse_from
        self._workers = min(2 * workers, _MAX_CONNECTIONS)
        self._show_progress = show_progress
        self._lock = threading.Lock()
        self.bytes_from: dict[str, int] = {"the Hub": 0, "this machine": 0, "an earlier run": 0}

    def fetch(self, files: Sequence[RemoteFile], directory: Path) -> list[dict[str, Any]]:
        """Download the files into a directory, several pieces at a time.

        Returns manifest entries with SHA-256. Raises UsageError if the Hub is unreachable or
        refuses, or if a path leads out of the directory. Raises ArtifactError if a file does not
        match the declared digest even after a second download.
        """
        require_safe_paths(files, self._repository.name)
        title = f"downloading {units.counted(len(files), 'file')}"
        total = sum(file.size for file in files)
        with Progress(title, total, "B", self._show_progress) as self._progress:
            self._run([functools.partial(self._start_file, file, directory) for file in files])
        for file in files:
            partial.delete_partial(file, directory)
        return [_make_entry(file, directory) for file in files]

    def _run(self, jobs: Sequence[Job]) -> None:
        """Run jobs, and the jobs that they return, until all are done or one fails."""
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            pending: set[Future[list[Job]]] = {pool.submit(job) for job in jobs}
            try:
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for task in done:
                        pending |= {pool.submit(job) for job in task.result()}
            except BaseException:
                self._hub.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _advance(self, amount: int) -> None:
        if self._hub.stopped.is_set():
            raise InterruptedError("another file failed")
        self._progress.advance(amount)

    def _count_bytes(self, source: str, amount: int) -> None:
        if source == "the Hub":
            self._advance(amount)
        else:
            self._progress.skip(amount)
        with self._lock:
            self.bytes_from[source] += amount

    def _start_file(self, file: RemoteFile, directory: Path) -> list[Job]:
        """Reuse the bytes of a file that this machine has, and return the jobs for the rest."""
        target = directory / file.path
        if file.declared_digest and target.is_file() and not file.describe_difference(target):
            self._count_bytes("an earlier run", file.size)
            return []
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._copy_from_this_machine(file, target):
            return []
        part = partial.PartialFile(file, directory)
        self._count_bytes("an earlier run", part.open())
        return self._list_jobs(part)

    def _list_jobs(self, part: partial.PartialFile) -> list[Job]:
        """Return a job for each incomplete piece, or finish the file if there is none."""
        jobs: list[Job] = [
            functools.partial(self._fetch_piece, part, piece)
            for piece in range(part.pieces)
            if len(range(*part.missing_range(piece)))
        ]
        return jobs or self._finish_file(part)

    def _fetch_piece(self, part: partial.PartialFile, piece: int) -> list[Job]:
        self._hub.fetch_piece(
            self._repository, part, piece, lambda amount: self._count_bytes("the Hub", amount)
        )
        return self._finish_file(part) if part.is_complete() else []

    def _finish_file(self, part: partial.PartialFile) -> list[Job]:
        """Check a complete file; if it is damaged, return the jobs that download it again."""
        if not part.claim():
            return []
        if not (difference := part.finish()):
            return []
        self._advance(-part.file.size)
        if part.failed_checks == _MAX_ATTEMPTS:
            raise ArtifactError(
                f"{self._repository.name}: {part.file.path} was downloaded twice and is damaged",
                expected="the digest that the Hub declares",
                found=difference,
                hint="finished files are kept; try again later:",
                run=commands.as_typed(),
            )
        part.open()
        return self._list_jobs(part)

    def _copy_from_this_machine(self, file: RemoteFile, target: Path) -> bool:
        """Copy a file from another directory or the cache, if it matches the declared digest."""
        cached = cache.find_blob(file, self._repository.name, self._repository.kind)
        sources = [directory / file.path for directory in self._reuse_from]
        sources += [cached] if cached else []
        for source in sources if file.declared_digest else []:
            if not source.is_file() or source.stat().st_size != file.size:
                continue
            _link_or_copy(source, target, link=source is not cached)
            if difference := file.describe_difference(target):
                log.warn(f"{source} is damaged and not used: {difference}")
                target.unlink()
                continue
            is_new = source.parent == self._preview and not cached
            self._count_bytes("the Hub" if is_new else "this machine", file.size)
            return True
        return False


def fetch_headers(
    hub: Hub, repository: Repository, files: Sequence[RemoteFile], directory: Path
) -> None:
    """Download the header of each safetensors file, and write it under the file's name."""
    require_safe_paths(files, repository.name)

    def fetch_header(file: RemoteFile) -> None:
        content = b""
        cached = cache.find_blob(file, repository.name, repository.kind)
        for size in (_FIRST_HEADER_BYTES, 0):  # a long header needs a second request
            size = size or 8 + min(int.from_bytes(content[:8], "little"), LARGEST_HEADER)
            if (end := min(size, file.size)) <= len(content):
                continue
            if cached:
                with cached.open("rb") as blob:
                    content = blob.read(end)
            else:  # a stream can end early without an error
                while chunk := hub.read_range(repository, file, len(content), end):
                    content += chunk
                    if len(content) >= end:
                        break
        (directory / file.path).write_bytes(content)

    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        list(pool.map(fetch_header, files))


def prepare_directory(
    files: Sequence[RemoteFile], directory: Path, reuse_from: Sequence[Path] = ()
) -> int:
    """Delete files that do not belong to the download, and return the bytes still to be written.

    reuse_from: as for Transfer. Files that can be linked from there need no disk space.
    """

    def can_be_linked(file: RemoteFile) -> bool:
        return any(
            (place / file.path).is_file()
            and (place / file.path).stat().st_size == file.size
            and place.stat().st_dev == directory.stat().st_dev
            for place in reuse_from
        )

    names = {name for file in files for name in partial.list_possible_names(file)}
    for path in directory.rglob("*"):
        if path.is_file() and path.relative_to(directory).as_posix() not in names:
            path.unlink()
    return sum(
        max(0, file.size - partial.count_fetched_bytes(file, directory))
        for file in files
        if not can_be_linked(file)
    )


def _link_or_copy(source: Path, target: Path, *, link: bool) -> None:
    """Copy a file; with `link`, try a hard link first.

    Linking our own files is safe, because they are replaced and never changed in place.
    """
    if link:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or one without links
    cache.copy_file(source, target)


def _make_entry(file: RemoteFile, directory: Path) -> dict[str, Any]:
    path = directory / file.path
    if not file.sha256:
        return manifest.file_entry(directory, path, "sha256")
    return {"path": file.path, "bytes": file.size, "digest": f"sha256:{file.sha256}"}
