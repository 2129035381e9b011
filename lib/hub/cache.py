"""Finds files in the Hugging Face cache of this machine, see lib/models/directory.py."""

from __future__ import annotations

import fcntl
import re
import shutil
from pathlib import Path

from lib.hub.repository import RemoteFile, Repository
from lib.models import hf_cache

_FICLONE = 0x40049409  # ioctl_ficlone(2)


def look_up(name: str, revision: str, kind: str) -> Repository | None:
    """Return what the cache holds of a repository at a revision, None when it holds nothing.

    The names of the blobs are the digests that the Hub declared; what is not a link is left out.
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
    """Return the cached content of a file, of whatever revision, if its size is right."""
    path = hf_cache.find_repository(name, kind) / "blobs" / file.declared
    return path if file.declared and path.is_file() and path.stat().st_size == file.size else None


def copy(source: Path, destination: Path) -> None:
    """Copy a file's content; where the file system can, both share the blocks until one changes."""
    with source.open("rb") as old, destination.open("wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
            return
        except OSError:
            pass  # another file system, or one without shared blocks
        shutil.copyfileobj(old, new, 1 << 22)
