"""Find models and datasets in the Hugging Face cache of this machine. The cache is never written.

    <root>/models--org--name/
        refs/main                       the commit of a branch or tag
        snapshots/<commit>/<path>       links to
        blobs/<digest>                  SHA-256 of files in LFS, git blob SHA-1 of the others

Layout: https://huggingface.co/docs/hub/local-cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lib.core import paths
from lib.models.directory import CONFIG, list_missing_weights

_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_cache() -> Path:
    """Return the directory of the Hugging Face cache, as the environment variables set it."""
    path = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(path)).expanduser() if path else paths.find_hf_home() / "hub"


def describe_cache() -> str:
    """Return the directory of the Hugging Face cache, and which environment variable set it."""
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
    source = next((name for name in names if os.environ.get(name)), None)
    reason = f"set by {source}" if source else "neither HF_HOME nor HF_HUB_CACHE is set"
    missing = "" if find_cache().is_dir() else "; it does not exist"
    return f"{find_cache()} ({reason}{missing})"


def find_repository(name: str, kind: str = "model") -> Path:
    """Return the directory of a repository in the cache; it may not exist."""
    return find_cache() / f"{kind}s--{name.replace('/', '--')}"


def find_snapshot(name: str, revision: str = "main", kind: str = "model") -> Path | None:
    """Return the snapshot of a repository at a branch, tag or commit, or None if not cached.

    It may contain only some of the repository's files.
    """
    repository = find_repository(name, kind)
    try:
        commit = (
            revision
            if _COMMIT.fullmatch(revision)
            else (repository / "refs" / revision).read_text(encoding="utf-8").strip()
        )
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def find_complete_snapshot(name: str) -> Path | None:
    """Return the snapshot of a model at `main` if it contains the config and all safetensors."""
    snapshot = find_snapshot(name)
    if not snapshot or not (snapshot / CONFIG).is_file() or list_missing_weights(snapshot):
        return None
    return snapshot


def list_complete_models() -> list[str]:
    """Return the names of all models in the cache whose snapshot at `main` is complete."""
    names = [
        path.name.removeprefix("models--").replace("--", "/")
        for path in sorted(find_cache().glob("models--*"))
    ]
    return [name for name in names if find_complete_snapshot(name)]
