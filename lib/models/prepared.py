"""The models that stage 03 has prepared: which there are, and which one a run without -m means.

Also which dataset a printed command names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.core import commands, manifest
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST, PARTIAL, models_root

KIND = "model/1"
HOW = "stage 03 fetches a model from the Hub (--model-name), or makes one (--from-scratch)"
# What the Makefile calls models that no run is meant to take by itself.
TRIAL_NAMES = ("demo", "demo-chat", "test-quick")


def list_all(cache_dir: Path) -> list[Path]:
    """Return the finished models under a cache directory, the newest first."""
    found = []
    for path in models_root(cache_dir).glob(f"*/{MANIFEST}"):
        content = manifest.read_if_any(path.parent)
        if content and content["kind"] == KIND and PARTIAL not in path.parent.name:
            found.append((content.get("created", ""), path.stat().st_mtime_ns, path.parent))
    return [directory for *_, directory in sorted(found, reverse=True)]


def is_trial(model_dir: Path) -> bool:
    """Tell whether the Makefile made a model for a trial, whatever it is called now."""
    content: Mapping[str, Any] = manifest.read_if_any(model_dir) or {}
    names = {model_dir.name, content.get("options", {}).get("model_name")}
    return not names.isdisjoint(TRIAL_NAMES)


def find_only(cache_dir: Path) -> Path:
    """Return the one model that is prepared; which of several is meant is never guessed.

    Raises UsageError with a command for each of several, ArtifactError where there is none.
    """
    everything = list_all(cache_dir)
    found = [path for path in everything if not is_trial(path)]
    if not found:
        trial = ", ".join(path.name for path in everything)
        raise ArtifactError(
            f"no model is prepared under {models_root(cache_dir)}",
            found=f"{trial}, which only -m takes" if trial else "",
            hint=HOW,
        )
    if found[1:]:
        raise UsageError(
            f"{len(found)} models are prepared under {models_root(cache_dir)}, and none was named",
            expected="one of these commands\n"
            + "\n".join(commands.as_typed("-m", path.name) for path in found),
        )
    return found[0]


def guess_dataset() -> Path:
    """Return the one dataset below hf_datasets/, for a command that is printed, or a usual name."""
    found = [
        path.parent
        for path in Path("hf_datasets").glob(f"*/{MANIFEST}")
        if path.parent.name not in TRIAL_NAMES
    ]
    return found[0] if len(found) == 1 else Path("hf_datasets/corpus")
