"""Hashes everything prepared under a cache directory again and compares it with its manifests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, paths, reading, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.manifest import Remedy
from lib.core.paths import MANIFEST, PARTIAL
from lib.core.progress import Progress
from lib.models.directory import KIND, list_strays
from lib.models.lookup import model_remedy

_KINDS = (
    "model",
    "tokens",
    "packs",
    "dataset-parts",
    "raw",
    "splits",
    "dataset",
    "export",
    "wheelhouse",
)


@dataclass
class PreparedArtifact:
    """Describes a directory with a manifest.

    problems: one sentence each. remedy: what makes it whole again, as parts of an error.
    """

    directory: Path
    content: dict[str, Any] | None
    remedy: Remedy
    problems: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Return what a person knows it as: the manifest of raw files is hidden beside them."""
        return self.directory.parent if self.directory.name == paths.RAW_RECORD else self.directory

    @property
    def bytes(self) -> int:
        """Return the size of all its files."""
        return sum(entry["bytes"] for entry in self.content["files"]) if self.content else 0


def find_artifacts(cache_dir: Path, raw_root: Path | None) -> list[PreparedArtifact]:
    """Return everything finished under a cache directory, in the order of paths.

    raw_root: a directory of raw files of datasets, to verify too. What has a manifest that is not
    ours is left alone. Raises UsageError when neither directory is there, ArtifactError when there
    is nothing to verify.
    """
    found = []
    roots = [root for root in (cache_dir, raw_root) if root]
    if not any(root.is_dir() for root in roots):
        raise UsageError(
            f"there is no directory {_join(roots)}",
            expected="--cache-dir DIR, and --dst-root DIR for raw files",
        )
    raw = sorted(raw_root.glob(f"*/{paths.RAW_RECORD}/{MANIFEST}")) if raw_root else []
    for path in sorted(cache_dir.rglob(MANIFEST)) + raw:
        directory = path.parent
        if any(PARTIAL in part for part in directory.parts):
            continue
        content = manifest.read_if_any(directory)
        is_in_place = directory.name == paths.RAW_RECORD or directory.parent in (
            paths.models_root(cache_dir),
            paths.tokens_root(cache_dir),
        )
        if not is_in_place and manifest.kind_of(directory).partition("/")[0] not in _KINDS:
            log.info(f"not ours: {path}")
            continue
        artifact = PreparedArtifact(directory, content, _find_remedy(directory, content))
        if content is None:
            artifact.problems.append(f"{path} is damaged")
        elif content["kind"] == KIND:
            artifact.problems += list_strays(directory, content)
        found.append(artifact)
    if not found:
        left = "\n".join(f"{directory}, not finished" for directory in find_unfinished(cache_dir))
        raise ArtifactError(
            f"nothing to verify under {_join(roots)}",
            found=left,
            expected="what stages 03 and 04 finished there",
        )
    return found


def find_unfinished(cache_dir: Path) -> list[Path]:
    """Return the directories of models and token stores that have no manifest."""
    return [
        path
        for root in (paths.models_root(cache_dir), paths.tokens_root(cache_dir))
        for path in sorted(root.glob("*"))
        if path.is_dir() and not (path / MANIFEST).exists()
    ]


def check_all(found: Sequence[PreparedArtifact], workers: int, show_progress: bool) -> None:
    """Hash all files of artifacts and note in each what is wrong with them."""
    total = sum(artifact.bytes for artifact in found)
    with (
        Progress("verifying", total, "B", show_progress) as progress,
        ThreadPoolExecutor(workers) as pool,
    ):
        for artifact in found:
            files = artifact.content["files"] if artifact.content else []
            # Patiently: what is not known to be damaged, since a disk fails to read it, is not
            # remade.
            problems = pool.map(
                lambda entry, root=artifact.directory: reading.with_retries(
                    lambda: manifest.describe_damage(
                        Path(os.path.normpath(root / entry["path"])),
                        entry,
                        deep=True,
                        advance=progress.advance,
                    )
                ),
                files,
            )
            artifact.problems += filter(None, problems)
            log.info(f"  {'damaged' if artifact.problems else 'whole  '}  {artifact.place}")


def require_whole(found: Sequence[PreparedArtifact]) -> None:
    """Raise ArtifactError naming all that is damaged, and the commands that mend it."""
    if damaged := [artifact for artifact in found if artifact.problems]:
        raise ArtifactError(
            f"{units.counted(len(damaged), 'damaged artifact')} of {len(found)}: "
            + _join([artifact.place for artifact in damaged]),
            found="\n".join(problem for artifact in damaged for problem in artifact.problems),
            hint=_together(artifact.remedy.get("hint") for artifact in damaged),
            run=_together(artifact.remedy.get("run") for artifact in damaged),
        )


def _together(parts: Iterable[str | None]) -> str:
    return "\n".join(dict.fromkeys(filter(None, parts)))


def _join(places: Sequence[Path]) -> str:
    return " and ".join(map(str, places))


def _find_remedy(directory: Path, content: dict[str, Any] | None) -> Remedy:
    """Return what fetches or builds an artifact again, as parts of an error."""
    made_by = (content or {}).get("stage", "")
    if directory.parent.name == paths.models_root(Path()).name or made_by.startswith("03"):
        found = model_remedy(directory, "--overwrite")
        if content is None and "run" in found:
            found["run"] = commands.move_away(directory, found["run"])
        return found
    if content and made_by[:2] in ("01", "02"):
        return manifest.remedy(content, "--overwrite")
    return {
        "run": commands.shell("rm", "-r", directory),
        "hint": "stage 04 makes token stores again, --prepare-only without training; first:",
    }
