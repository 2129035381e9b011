"""The cache that Hugging Face libraries keep on a machine: found, read, never written.

    <root>/models--org--name/
        refs/main                       the commit that a branch or tag stood for
        snapshots/<commit>/<path>       links to
        blobs/<digest>                  SHA-256 of what lies in LFS, git blob SHA-1 of the rest

Layout: https://huggingface.co/docs/hub/local-cache. No library is needed to read it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from lib.core import records
from lib.models.identity import INDEX, WEIGHTS
from lib.models.repository import RemoteFile, Repository

_COMMIT = re.compile(r"[0-9a-f]{40}")
_FICLONE = 0x40049409  # ioctl_ficlone(2)


def root() -> Path:
    """Return where the cache lies, as the environment says."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = (os.environ.get("HF_HOME") or f"{caches}/huggingface") + "/hub"
    return Path(os.path.expandvars(given)).expanduser()


def snapshot(name: str, revision: str = "main", kind: str = "model") -> Path | None:
    """Return the directory of a repository at a branch, tag or commit, if the cache has it."""
    home = _home(name, kind)
    try:
        commit = revision if _COMMIT.fullmatch(revision) \
            else (home / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    found = home / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def repository(name: str, revision: str, kind: str) -> Repository | None:
    """Return what the cache holds of a repository at a revision, None when it holds nothing.

    The names of the blobs are the digests that the Hub declared; what is not a link is left out.
    """
    directory = snapshot(name, revision, kind)
    if directory is None:
        return None
    files = {}
    for path in sorted(directory.rglob("*")):
        digest = path.resolve().name
        if path.is_file() and path.is_symlink() and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}",
                                                                 digest):
            relative = path.relative_to(directory).as_posix()
            files[relative] = RemoteFile(relative, path.stat().st_size,
                                         digest if len(digest) == 64 else "",
                                         digest if len(digest) == 40 else "")
    return Repository(name, directory.name, files, kind, cached=True) if files else None


def blob(file: RemoteFile, name: str, kind: str) -> Path | None:
    """Return the cached content of a file, of whatever revision, if its size is right."""
    digest = file.sha256 or file.blob_sha1
    path = _home(name, kind) / "blobs" / digest
    return path if digest and path.is_file() and path.stat().st_size == file.size else None


def whole_model(name: str) -> Path | None:
    """Return the snapshot of a model at `main` when config and all safetensors are there."""
    directory = snapshot(name)
    if directory is None or not (directory / "config.json").is_file():
        return None
    if (directory / WEIGHTS).is_file():
        return directory
    try:
        weights = records.read_json(directory / INDEX)["weight_map"]
        return directory if all((directory / n).is_file() for n in weights.values()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def models() -> list[str]:
    """Return the names of all whole models in the cache."""
    found = [path.name.removeprefix("models--").replace("--", "/")
             for path in sorted(root().glob("models--*"))]
    return [name for name in found if whole_model(name)]


def copy(source: Path, destination: Path) -> None:
    """Copy a file's content; where the file system can, both share the blocks until one changes."""
    with source.open("rb") as old, destination.open("wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
            return
        except OSError:
            pass  # another file system, or one without shared blocks
        shutil.copyfileobj(old, new, 1 << 22)


def _home(name: str, kind: str) -> Path:
    return root() / f"{kind}s--{name.replace('/', '--')}"
