"""Find files in the Hugging Face cache of this machine (layout: lib/models/hf_cache.py)."""

from __future__ import annotations

import re
from pathlib import Path

from lib.hub.repository import RemoteFile, Repository
from lib.models import hf_cache


def find_cached_repository(name: str, revision: str, kind: str) -> Repository | None:
    """Return the cached files of a repository at a revision, or None if there are none.

    Each file is a link to a blob whose name is the digest that the Hub declared. Other entries are
    ignored.
    """
    directory = hf_cache.find_snapshot(name, revision, kind)
    if directory is None:
        return None
    files = {}
    for path in sorted(directory.rglob("*")):
        digest = path.resolve().name
        if (
            path.is_file()
            and path.is_symlink()
            and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest)
        ):
            relative = path.relative_to(directory).as_posix()
            files[relative] = RemoteFile(
                relative,
                path.stat().st_size,
                digest if len(digest) == 64 else "",
                digest if len(digest) == 40 else "",
            )
    return Repository(name, directory.name, files, kind, cached=True) if files else None


def find_blob(file: RemoteFile, name: str, kind: str) -> Path | None:
    """Return the path of a file's cached content (from any revision) if its size matches."""
    path = hf_cache.find_repository(name, kind) / "blobs" / file.declared_digest
    return (
        path
        if file.declared_digest and path.is_file() and path.stat().st_size == file.size
        else None
    )
