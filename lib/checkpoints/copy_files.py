"""Write the files of copies: each is verified, and is complete or does not exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.commit import COMMIT, KIND, MANIFEST, Checkpoint
from lib.core import hashing, manifest, publish, records
from lib.core.errors import ArtifactError, StageError


def write_checkpoint(
    checkpoints: Path, step: int, read: Callable[[str], Iterable[bytes]]
) -> Checkpoint:
    """Write a copy of a checkpoint from another place, verify it, and publish it.

    The protocol is that of a save: files are hashed while they are written, fsynced, and read again
    from the disk; then come manifest and COMMIT. read: returns the content of a file by its path in
    the checkpoint. Raises ArtifactError if the content does not match the manifest, DiskFullError
    without disk space, or the error of `read`.
    """
    commit_bytes = b"".join(read(COMMIT))
    manifest_bytes = b"".join(read(MANIFEST))
    files = parse_manifest(step, commit_bytes, manifest_bytes)
    checkpoints.mkdir(parents=True, exist_ok=True)
    commit.require_free(checkpoints, sum(entry["bytes"] for entry in files))
    attempt = commit.create_attempt(checkpoints, step)
    try:
        for entry in files:
            _write_file(attempt / entry["path"], entry, read(entry["path"]))
        for name, content in ((MANIFEST, manifest_bytes), (COMMIT, commit_bytes)):
            if name == COMMIT and (damage := Checkpoint(attempt, step).content_problems(0, 1)):
                raise StageError(f"the copy differs from what was written: {damage[0]}")
            _write_bytes(attempt / name, content)
        for directory in {attempt, *((attempt / entry["path"]).parent for entry in files)}:
            publish.fsync(directory)
        return commit.publish_attempt(attempt, step)
    except BaseException:
        commit.delete_attempt(attempt)
        raise


def parse_manifest(step: int, commit_bytes: bytes, manifest_bytes: bytes) -> list[dict[str, Any]]:
    """Return the entries of a checkpoint's files; raise ArtifactError if COMMIT does not fit."""
    is_sound = False
    files: list[dict[str, Any]] = []
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = records.parse_json(commit_bytes)
        files = records.parse_json(manifest_bytes)["files"]
        is_sound = (
            commit.has_digest(content)
            and content["step"] == step
            and content["manifest"] == hashing.bytes_digest(manifest_bytes, "sha256")
            and all(manifest.is_valid_entry(entry, KIND) for entry in files)
        )
    if not is_sound:
        raise ArtifactError(f"{COMMIT} or {MANIFEST} of step {step:,} is damaged")
    return files


def _write_file(path: Path, entry: dict[str, Any], chunks: Iterable[bytes]) -> None:
    """Write a file, check its digest, and drop it from the page cache, for a later check."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with hashing.HashedFile(path, entry["digest"].partition(":")[0]) as file:
        for chunk in chunks:
            file.write(chunk)
        file.sync()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (file.bytes, file.digest()) != (entry["bytes"], entry["digest"]):
            raise ArtifactError(f"{entry['path']} has other content than when it was saved")


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
