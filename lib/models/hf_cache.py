"""Finds what the cache of the Hugging Face libraries on this machine holds; it is never written:

    <root>/models--org--name/
        refs/main                       the commit that a branch or tag stood for
        snapshots/<commit>/<path>       links to
        blobs/<digest>                  SHA-256 of what lies in LFS, git blob SHA-1 of the rest

Layout: https://huggingface.co/docs/hub/local-cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lib.models.directory import CONFIG, list_missing_weights

_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_cache() -> Path:
    """Return where the Hugging Face cache lies, as the environment says."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = (os.environ.get("HF_HOME") or f"{caches}/huggingface") + "/hub"
    return Path(os.path.expandvars(given)).expanduser()


def find_repository(name: str, kind: str = "model") -> Path:
    """Return where the Hugging Face cache keeps a repository."""
    return find_cache() / f"{kind}s--{name.replace('/', '--')}"


def find_snapshot(name: str, revision: str = "main", kind: str = "model") -> Path | None:
    """Return the directory of a repository at a branch, tag or commit, if the cache has it."""
    where = find_repository(name, kind)
    try:
        commit = (
            revision
            if _COMMIT.fullmatch(revision)
            else (where / "refs" / revision).read_text(encoding="utf-8").strip()
        )
    except (OSError, ValueError):
        return None
    found = where / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def find_complete_snapshot(name: str) -> Path | None:
    """Return the snapshot of a model at `main` when config and all safetensors are there."""
    found = find_snapshot(name)
    is_whole = found and (found / CONFIG).is_file() and not list_missing_weights(found)
    return found if is_whole else None
