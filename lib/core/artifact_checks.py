"""Check the artifacts under a cache directory: hash all files and compare them with manifests.

Stage 03 does this with --verify, and `launch/check.py setup` before a launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, paths, reading, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.manifest import Remedy
from lib.core.paths import MANIFEST, PARTIAL
from lib.core.progress import Progress

_MODEL = "model"
_KINDS = (
    _MODEL,
    "scratch",
    "tokens",
    "packs",
    "dataset-parts",
    "curation-part",
    "raw",
    "splits",
    "dataset",
    "export",
    "wheelhouse",
)


@dataclass
class FoundArtifact:
    """A directory with a manifest.

    content: the manifest, None if it is damaged. remedy: the parts of an error that say how to
    fetch or build the artifact again. problems: one sentence each.
    """

    directory: Path
    content: dict[str, Any] | None
    remedy: Remedy
    problems: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Return the directory of the files; a hidden one in it has the manifest of raw files."""
        return self.directory.parent if self.directory.name == paths.RAW_RECORD else self.directory

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(entry["bytes"] for entry in self.content["files"]) if self.content else 0


def find_artifacts(
    cache_dir: Path,
    raw_root: Path | None,
    list_strays: Callable[[Path, dict[str, Any]], list[str]],
    model_remedy: Callable[..., Remedy],
) -> list[FoundArtifact]:
    """Return all finished artifacts under a cache directory, in the order of their paths.

    raw_root: a directory with raw files of datasets, to check too. list_strays: returns a problem
    for each file that a model's manifest does not list. model_remedy: returns how to fetch a model
    again.
    Directories with a manifest of another program are ignored. Raises UsageError if neither
    directory exists, and ArtifactError if there is no artifact.
    """
    roots = [root for root in (cache_dir, raw_root) if root]
    if not any(root.is_dir() for root in roots):
        raise UsageError(
            f"there is no directory {_join_paths(roots)}",
            expected="--cache-dir DIR, and --dst-root DIR for raw files",
        )
    raw = sorted(raw_root.glob(f"*/{paths.RAW_RECORD}/{MANIFEST}")) if raw_root else []
    artifacts = []
    for path in sorted(cache_dir.rglob(MANIFEST)) + raw:
        directory = path.parent
        if any(PARTIAL in part for part in directory.parts):
            continue
        content = manifest.read_if_any(directory)
        kind = manifest.read_kind(directory).partition("/")[0]
        is_in_place = directory.name == paths.RAW_RECORD or directory.parent in (
            paths.models_root(cache_dir),
            paths.tokens_root(cache_dir),
        )
        if not is_in_place and kind not in _KINDS:
            log.info(f"not written by this pipeline: {path}")
            continue
        remedy = _find_remedy(directory, content, model_remedy)
        artifact = FoundArtifact(directory, content, remedy)
        if content is None:
            artifact.problems.append(f"{path} is damaged")
        elif kind == _MODEL:
            artifact.problems += list_strays(directory, content)
        artifacts.append(artifact)
    if not artifacts:
        raise ArtifactError(
            f"nothing to verify under {_join_paths(roots)}",
            found="\n".join(f"{path}, not finished" for path in list_unfinished(cache_dir)),
            expected="finished artifacts of stages 03 and 04",
        )
    return artifacts


def list_unfinished(cache_dir: Path) -> list[Path]:
    """Return the directories of models and token stores that have no manifest."""
    return [
        path
        for root in (paths.models_root(cache_dir), paths.tokens_root(cache_dir))
        for path in sorted(root.glob("*"))
        if path.is_dir() and not (path / MANIFEST).exists()
    ]


def hash_artifacts(artifacts: Sequence[FoundArtifact], workers: int, show_progress: bool) -> None:
    """Hash all files of artifacts, and add a sentence to `problems` for each damaged file.

    Raises StageError if a disk fails to read a file after retries; that does not mean damage.
    """
    total = sum(artifact.bytes for artifact in artifacts)
    with (
        Progress("verifying", total, "B", show_progress) as progress,
        ThreadPoolExecutor(workers) as threads,
    ):
        for artifact in artifacts:
            files = artifact.content["files"] if artifact.content else []
            problems = threads.map(
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
            log.info(f"  {'damaged' if artifact.problems else 'intact '}  {artifact.place}")


def require_intact_artifacts(artifacts: Sequence[FoundArtifact]) -> None:
    """Raise ArtifactError with all problems of artifacts, and the commands that repair them."""
    if damaged := [artifact for artifact in artifacts if artifact.problems]:
        raise ArtifactError(
            f"{units.counted(len(damaged), 'damaged artifact')} of {len(artifacts)}: "
            + _join_paths([artifact.place for artifact in damaged]),
            found="\n".join(problem for artifact in damaged for problem in artifact.problems),
            hint=_join_lines(artifact.remedy.get("hint") for artifact in damaged),
            run=_join_lines(artifact.remedy.get("run") for artifact in damaged),
        )


def _join_lines(parts: Iterable[str | None]) -> str:
    """Join texts as lines, without repetitions, None and ""."""
    return "\n".join(dict.fromkeys(filter(None, parts)))


def _join_paths(places: Sequence[Path]) -> str:
    return " and ".join(map(str, places))


def _find_remedy(
    directory: Path, content: dict[str, Any] | None, model_remedy: Callable[..., Remedy]
) -> Remedy:
    """Return the parts of an error that say how to fetch or build an artifact again."""
    script = (content or {}).get("stage", "")
    if directory.parent.name == paths.models_root(Path()).name or script.startswith("03"):
        remedy = model_remedy(directory, "--overwrite")
        if content is None and "run" in remedy:
            remedy["run"] = commands.move_away(directory, remedy["run"])
        return remedy
    if content and script[:2] in ("01", "02"):
        return manifest.make_remedy(content, "--overwrite")
    return {
        "run": commands.shell("rm", "-r", directory),
        "hint": "stage 04 builds token stores again (without training: --prepare-only); first:",
    }
