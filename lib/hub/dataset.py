"""Download the shards of a Hub dataset one by one while stage 04 runs with `--online`.

A child process downloads them; no other process of the launch may use the network. Each shard is
checked against the digest that the Hub declares. It stays in `.cache/streaming/` for the next epoch
and the next run.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.core import log, publish, streams, units
from lib.core.workers import Worker
from lib.hub.client import Hub
from lib.hub.repository import RemoteFile, Repository, check_name, select_by_globs
from lib.hub.transfer import Transfer

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class HubDataset:
    """Downloads files of a dataset at one commit, in a child process.

    sizes: (bytes, digest) by path. Raises UsageError if the Hub is unreachable, the dataset does
    not exist, or no file matches `glob`.
    """

    def __init__(self, name: str, revision: str, glob: str, directory: Path) -> None:
        check_name(name, "--dataset-name")
        self._worker = Worker("fetch", _go_online, name, revision, glob, directory)
        self._worker.send(None)
        self.commit: str
        self.sizes: dict[str, tuple[int, str]]
        self.commit, self.sizes = self._worker.receive()

    def send(self, path: str) -> None:
        """Queue a file for download."""
        self._worker.send(path)

    def receive(self) -> Path:
        """Wait for the oldest queued file and return its path.

        Raises UsageError, ArtifactError or DiskFullError if it cannot be downloaded.
        """
        return self._worker.receive()

    def close(self) -> None:
        """Stop downloading; a file that is not complete is downloaded again by the next run."""
        self._worker.close()


def _go_online(name: str, revision: str, glob: str, directory: Path) -> Callable[[str | None], Any]:
    """Set up the child process, and return the function with which it answers requests."""
    for variable in _OFFLINE:  # huggingface_hub reads them at import
        os.environ.pop(variable, None)
    streams.outlive_readers()
    log.setup()
    hub = Hub("")
    repository = hub.find_repository(name, revision, "dataset")
    files = {file.path: file for file in select_by_globs(repository.files.values(), [glob], name)}
    return functools.partial(_answer_request, hub, repository, files, directory)


def _answer_request(
    hub: Hub,
    repository: Repository,
    files: dict[str, RemoteFile],
    directory: Path,
    path: str | None,
) -> Any:
    """Download a file and return its path; for None, return the commit and the file list."""
    if path is None:
        return repository.commit, {
            file.path: (file.size, file.declared_digest) for file in files.values()
        }
    file = files[path]
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(target):
        if not target.is_file():
            log.info(f"downloading {path} of {repository.name}, {units.size(file.size)}")
            publish.require_space(directory, file.size, path)
        Transfer(hub, repository).fetch([file], directory)
    return target


@contextmanager
def _file_lock(target: Path) -> Iterator[None]:
    """Hold a lock on a file, so that only one process of this machine downloads it at a time."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                raise
        yield
