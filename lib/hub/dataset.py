"""Fetches shards of a dataset on the Hub one by one, when stage 04 with --online needs them.

A process of its own fetches them, the only one of the launch that may go online; what it brings
is as the Hub declares it, and stays in `.cache/streaming/`, where the next epoch and the next run
find it.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.core import log, publish, streams, units
from lib.core.workers import Worker
from lib.hub import partial
from lib.hub.client import Hub
from lib.hub.repository import RemoteFile, Repository, check_name, select
from lib.hub.transfer import Transfer

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class HubDataset:
    """Fetches files of a dataset at one commit.

    sizes: bytes and digest by path. Raises UsageError when the Hub is out of reach, has no such
    dataset, or no file matches `include`.
    """

    def __init__(self, name: str, revision: str, include: Sequence[str], directory: Path) -> None:
        check_name(name, "--dataset-name")
        self._worker = Worker("fetch", _go_online, name, revision, include, directory)
        self._worker.send(None)
        self.commit: str
        self.sizes: dict[str, tuple[int, str]]
        self.commit, self.sizes = self._worker.receive()

    def send(self, path: str) -> None:
        """Have a file fetched, after those that were sent before."""
        self._worker.send(path)

    def receive(self) -> Path:
        """Wait for the file that was sent first; UsageError, ArtifactError or DiskFullError when
        it cannot be had.
        """
        return self._worker.receive()

    def close(self) -> None:
        """Stop fetching; what has come of a file stays."""
        self._worker.close()


def _go_online(
    name: str, revision: str, include: Sequence[str], directory: Path
) -> Callable[[str | None], Any]:
    """Return what lists or fetches files; called in the process that fetches."""
    for variable in _OFFLINE:  # read when huggingface_hub is imported
        os.environ.pop(variable, None)
    streams.outlive_readers()
    log.setup()
    hub = Hub("")
    repository = hub.look_up(name, revision, "dataset")
    files = {file.path: file for file in select(repository.files.values(), include, name)}
    return functools.partial(_answer, hub, repository, files, directory)


def _answer(
    hub: Hub,
    repository: Repository,
    files: dict[str, RemoteFile],
    directory: Path,
    path: str | None,
) -> Any:
    """Return commit and files of the dataset, or the place of one of them once it is there."""
    if path is None:
        return repository.commit, {file.path: (file.size, file.declared) for file in files.values()}
    file = files[path]
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        left = file.size - partial.count_bytes(file, directory)
        if left > 0:
            log.info(f"fetching {path} of {repository.name}, {units.size(left)}")
            publish.require_space(directory, left, path)
        Transfer(hub, repository).fetch([file], directory)
    return target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Let one process of the machine fetch a file, while others that want it wait."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                raise
        yield
