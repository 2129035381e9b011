"""Download files of a repository into a directory, or copy those that this machine has."""

from __future__ import annotations

import functools
import os
import queue
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, units
from lib.core.errors import ArtifactError
from lib.core.progress import Progress
from lib.hub import cache
from lib.hub.client import Hub
from lib.hub.repository import RemoteFile, Repository, require_safe_paths
from lib.models.directory import LARGEST_HEADER

_MAX_CONNECTIONS = 8
_MAX_ATTEMPTS = 2
_HUB = "the Hub"
_PATIENCE_S = 5.0  # with threads that are downloading when another one has failed
_FIRST_HEADER_BYTES = 1 << 16  # of the first request; most headers fit


class Transfer:
    """Downloads files of a repository, except those that an earlier run left in the directory.

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
        self._stopped = threading.Event()
        self.bytes_from: dict[str, int] = {_HUB: 0, "this machine": 0, "an earlier run": 0}

    def fetch(self, files: Sequence[RemoteFile], directory: Path) -> list[dict[str, Any]]:
        """Download the files into a directory, several at a time and the largest first.

        Returns manifest entries with SHA-256. Raises UsageError if the Hub is unreachable or
        refuses, or if a path leads out of the directory. Raises ArtifactError if a file does not
        match the declared digest even after a second download.
        """
        require_safe_paths(files, self._repository.name)
        title = f"downloading {units.counted(len(files), 'file')}"
        total = sum(file.size for file in files)
        with Progress(title, total, "B", self._show_progress) as self._progress:
            self._fetch_all(sorted(files, key=lambda file: -file.size), directory)
        return [_make_entry(file, directory) for file in files]

    def _fetch_all(self, files: Sequence[RemoteFile], directory: Path) -> None:
        """Fetch files in threads. After an error or Ctrl-C, no further file is begun.

        The threads are daemons, which the process does not wait for at its end: huggingface_hub can
        sleep for minutes.
        """
        waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for file in files:
            waiting.put(file)

        def work() -> None:
            with suppress(queue.Empty):
                while not self._stopped.is_set():
                    results.put(self._try_file(waiting.get_nowait(), directory))

        count = min(self._workers, len(files))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for _ in files:
                if error := results.get():
                    raise error
        except BaseException:
            self._stopped.set()
            for thread in threads:  # most end when their next bytes arrive
                thread.join(_PATIENCE_S / count)
            raise

    def _try_file(self, file: RemoteFile, directory: Path) -> BaseException | None:
        try:
            self._fetch_file(file, directory)
        except BaseException as error:
            return error
        return None

    def _count_bytes(self, source: str, amount: int) -> None:
        if amount > 0 and self._stopped.is_set():
            raise InterruptedError("another file failed")
        if source == _HUB:
            self._progress.advance(amount)
        else:
            self._progress.skip(amount)
        with self._lock:
            self.bytes_from[source] += amount

    def _fetch_file(self, file: RemoteFile, directory: Path) -> None:
        """Take a file from this machine if possible, else download it."""
        target = directory / file.path
        if file.declared_digest and target.is_file() and not file.describe_difference(target):
            self._count_bytes("an earlier run", file.size)
            return
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self._copy_from_this_machine(file, target):
            self._download(file, target)

    def _download(self, file: RemoteFile, target: Path) -> None:
        """Download a file, check it, and give it its final name.

        It is downloaded into a hidden directory, which also takes the records and locks of
        huggingface_hub, and which a killed run leaves behind.
        """
        directory = target.with_name(f".{target.name}.download")
        for _ in range(_MAX_ATTEMPTS):
            shutil.rmtree(directory, ignore_errors=True)
            try:
                path = self._hub.download(
                    self._repository, file, directory, functools.partial(self._count_bytes, _HUB)
                )
                if not (difference := file.describe_difference(path)):
                    path.replace(target)
                    return
                self._count_bytes(_HUB, -path.stat().st_size)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        raise ArtifactError(
            f"{self._repository.name}: {file.path} was downloaded twice and is damaged",
            expected="the digest that the Hub declares",
            found=difference,
            hint="finished files are kept; try again later:",
            run=commands.as_typed(),
        )

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
            self._count_bytes(_HUB if is_new else "this machine", file.size)
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
            size = min(size, file.size)
            if size <= len(content):
                continue
            if cached:
                with cached.open("rb") as blob:
                    content = blob.read(size)
            else:
                content = hub.read_start(repository, file, size)
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

    names = {file.path for file in files}
    for path in sorted(directory.rglob("*"), reverse=True):  # files before their directories
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # it is not empty
                path.rmdir()
        elif path.relative_to(directory).as_posix() not in names:
            path.unlink()
    return sum(
        file.size
        for file in files
        if not (directory / file.path).is_file() and not can_be_linked(file)
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
    shutil.copyfile(source, target)


def _make_entry(file: RemoteFile, directory: Path) -> dict[str, Any]:
    path = directory / file.path
    if not file.sha256:
        return manifest.file_entry(directory, path, "sha256")
    return {"path": file.path, "bytes": file.size, "digest": f"sha256:{file.sha256}"}
