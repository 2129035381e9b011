"""Everything prepared under a cache directory, hashed again and compared with its manifests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import hashing, log, manifest, paths
from lib.core.errors import ArtifactError
from lib.core.paths import MANIFEST
from lib.core.progress import Progress
from lib.models import raw_files, resolve

_CHUNK = 1 << 22
_UNFINISHED = (".partial-", ".old-")


@dataclass
class Artifact:
    """A directory with a manifest. problems: one sentence each. run: what makes it whole again."""

    directory: Path
    content: dict[str, Any] | None
    run: str
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.content["files"]) if self.content else 0


def artifacts(cache_dir: Path, raw_root: Path | None) -> list[Artifact]:
    """Return everything finished under a cache directory, in the order of paths.

    raw_root: a directory of raw files of datasets, to verify too.
    """
    found = []
    raw = sorted(raw_root.glob(f"*/{raw_files.HIDDEN}/{MANIFEST}")) if raw_root else []
    for path in sorted(cache_dir.rglob(MANIFEST)) + raw:
        directory = path.parent
        if any(mark in part for part in directory.parts for mark in _UNFINISHED):
            continue
        content = manifest.read_if_any(directory)
        artifact = Artifact(directory, content, _command(directory, content))
        if content is None:
            artifact.problems.append(f"{path} is damaged")
        found.append(artifact)
    return found


def unfinished(cache_dir: Path) -> list[Path]:
    """Return the directories of models and token stores that have no manifest."""
    return [path for root in (paths.models_root(cache_dir), paths.tokens_root(cache_dir))
            for path in sorted(root.glob("*"))
            if path.is_dir() and not (path / MANIFEST).exists()]


def check_all(found: Sequence[Artifact], workers: int, show_progress: bool) -> None:
    """Hash all files of artifacts and note in each what is wrong with them."""
    lock, total = threading.Lock(), sum(artifact.bytes for artifact in found)
    with Progress("verifying", total, "B", show_progress) as progress, \
            ThreadPoolExecutor(workers) as pool:
        def advance(amount: int) -> None:
            with lock:
                progress.advance(amount)

        for artifact in found:
            files = artifact.content["files"] if artifact.content else []
            problems = pool.map(lambda entry, root=artifact.directory: _problem(
                Path(os.path.normpath(root / entry["path"])), entry, advance), files)
            artifact.problems += filter(None, problems)
            log.info(f"  {'damaged' if artifact.problems else 'whole  '}  {artifact.directory}")


def require_whole(found: Sequence[Artifact], cache_dir: Path) -> None:
    """Raise ArtifactError naming all that is damaged, and the commands that mend it."""
    if damaged := [artifact for artifact in found if artifact.problems]:
        raise ArtifactError(
            f"{len(damaged)} of {len(found)} artifacts under {cache_dir} are damaged",
            found="\n".join(problem for artifact in damaged for problem in artifact.problems),
            run="\n".join(artifact.run for artifact in damaged))


def _problem(path: Path, entry: dict[str, Any], advance: Callable[[int], None]) -> str:
    """Return what is wrong with a file in a sentence, "" when nothing is."""
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            advance(entry["bytes"])
            return f"{path} holds {size} bytes instead of {entry['bytes']}"
        algorithm = entry["digest"].partition(":")[0]
        hasher = hashing.new(algorithm)
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                advance(len(chunk))
    except FileNotFoundError:
        advance(entry["bytes"])
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    is_same = hashing.digest(hasher, algorithm) == entry["digest"]
    return "" if is_same else f"{path} has other content than when it was written"


def _command(directory: Path, content: dict[str, Any] | None) -> str:
    """Return the command that fetches or builds an artifact again."""
    if directory.parent.name == paths.models_root(Path()).name or (
            content and content["kind"] == raw_files.KIND):
        return f"{resolve.command(directory.name, content)} --overwrite"
    stage = (content or {}).get("stage") or "04_train_fsdp.py"
    return f"rm -r {directory}, then python {stage} again" + (
        " (--prepare-only makes it without training)" if stage.startswith("04") else "")
