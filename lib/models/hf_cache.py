"""The cache that Hugging Face libraries keep on a machine: found, read, never written.

    <root>/models--org--name/
        refs/main                       the commit that a branch or tag stood for
        snapshots/<commit>/<path>       links to
        blobs/<digest>                  SHA-256 of what lies in LFS, git blob SHA-1 of the rest

Layout: https://huggingface.co/docs/hub/local-cache. No library is needed to read it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lib.core import records
from lib.models.identity import INDEX, WEIGHTS

_COMMIT = re.compile(r"[0-9a-f]{40}")


def root() -> Path:
    """Return where the cache lies, as the environment says."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = (os.environ.get("HF_HOME") or f"{caches}/huggingface") + "/hub"
    return Path(os.path.expandvars(given)).expanduser()


def snapshot(name: str, revision: str = "main", kind: str = "model") -> Path | None:
    """Return the directory of a repository at a branch, tag or commit, if the cache has it."""
    where = home(name, kind)
    try:
        commit = revision if _COMMIT.fullmatch(revision) \
            else (where / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    found = where / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


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


def home(name: str, kind: str) -> Path:
    """Return where the cache keeps a repository."""
    return root() / f"{kind}s--{name.replace('/', '--')}"
