"""Finds the directory of a model by the name that a person gives, or lists those there are.

Also which dataset a printed command names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.manifest import Remedy
from lib.core.paths import MANIFEST, PARTIAL, model_dir_name, models_root
from lib.models import directory, hf_cache, unread_weights
from lib.models.directory import CONFIG, KIND, count_parameters, has_weights, list_strays

HOW = "stage 03 fetches a model from the Hub (--model-name), or makes one (--from-scratch)"
# What the Makefile calls models that no run is meant to take by itself.
TRIAL_NAMES = ("demo", "demo-chat", "test-quick")
_ADAPTER = "adapter_config.json"  # of PEFT
_STAGE = "03_download_model.py"


def find_model(name: str | None, cache_dir: Path, why: str = "") -> Path:
    """Return the directory of a model, and log which one it is, with its parameters.

    name: a directory with a config.json, ours or one that `save_pretrained` wrote; a name that
    stage 03 prepared (`org/name`, `org--name`, `scratch-tiny`); the name of a model whose snapshot
    the Hugging Face cache of this machine holds; None for the only one that stage 03 prepared,
    apart from those of `make demo` and `make test-quick`. why: it is this one, for the log.
    Raises ArtifactError, saying what there is and what to run, when it is missing, unfinished or
    has lost files; UsageError when its weights are pickles, or when None stands for several.
    """
    if name is None:
        return _check_prepared(find_only_prepared(cache_dir), ", the only one prepared")
    path = Path(name).expanduser()
    if (path / CONFIG).is_file():
        return _check_directory(path, why)
    if (path / _ADAPTER).is_file():
        raise UsageError(
            f"{path} holds an adapter, not a model",
            hint="-m names the model that it belongs to, and in stage 04 --lora-from "
            "begins with the adapter",
        )
    target = models_root(cache_dir) / model_dir_name(name)
    if (target / MANIFEST).is_file():
        return _check_prepared(target)
    _require_read(path)
    snapshot = None if target.is_dir() else hf_cache.find_complete_snapshot(name)
    if snapshot is None:
        raise _nothing(name, path, target, cache_dir)
    log_model(snapshot, ", a snapshot in the Hugging Face cache, taken as it is")
    return snapshot


def find_recorded_model(path: str, fingerprint: str | None, cache_dir: Path) -> str | None:
    """Return the directory of the model that a run was started with, or None if it is gone.

    path: where the run found the model, "" if that is unknown. fingerprint: of the model; if the
    path no longer exists, a prepared model with this fingerprint is returned.
    """
    if path and Path(path).is_dir():
        return path
    for model in list_prepared(cache_dir) if fingerprint else ():
        if directory.fingerprint(model) == fingerprint:
            return str(model)
    return None


def list_prepared(cache_dir: Path) -> list[Path]:
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


def find_only_prepared(cache_dir: Path) -> Path:
    """Return the one model that is prepared; which of several is meant is never guessed.

    Raises UsageError with a command for each of several, ArtifactError where there is none.
    """
    everything = list_prepared(cache_dir)
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


def model_remedy(directory: Path, *more: object) -> Remedy:
    """Return what prepares a model, or fetches raw files, once more: parts of an error."""
    content = manifest.read_if_any(directory) or {}
    cache = {"cache_dir": directory.parent.parent} if directory.parent.name == "models" else {}
    if content.get("options") and content["kind"].startswith(("model/", "raw/")):
        return manifest.remedy(content | {"stage": _STAGE}, *more, **cache)
    return _prepared_by(directory.name.replace("--", "/", 1), directory, *more)


def _prepared_by(name: str, path: Path, *more: object) -> Remedy:
    """Return what prepares a model of this name, as far as the name tells."""
    is_ours = path.parent.name == "models"
    if re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) and (is_ours or not path.exists()):
        return {"run": commands.script(_STAGE, "--model-name", name, *more)}
    return {"hint": HOW}


def _check_directory(path: Path, why: str = "") -> Path:
    """Return a directory given by its path: ours, an export, or one made elsewhere."""
    if any(PARTIAL in part for part in path.resolve().parts[-2:]):
        raise ArtifactError(f"{path} is not finished", expected="a directory under its final name")
    if not (path / MANIFEST).is_file():
        _require_read(path)
        log_model(path, f"{why}, made elsewhere (no {MANIFEST}), taken as it is")
        return path
    other = manifest.read_if_any(path)
    if other and other["kind"] != KIND:
        log_model(path, f"{why}, made by {other.get('stage') or other['kind']}")
        return _check_files(path, other, {})
    return _check_prepared(path, why)


def _require_read(path: Path) -> None:
    """Raise for weights that are not read here: without them, it would be trained from scratch."""
    if not has_weights(path) and (error := unread_weights.find_error(path)):
        raise error


def _check_prepared(directory: Path, why: str = "") -> Path:
    log_model(directory, why)
    content = manifest.read(directory, KIND, "the model", **model_remedy(directory))
    return _check_files(directory, content, model_remedy(directory, "--overwrite"))


def log_model(model_dir: Path, why: str) -> None:
    """Log which model it is and how large, as far as its files tell without building it."""
    count = count_parameters(model_dir)
    log.info(f"model: {model_dir}{f', {units.count(count)} parameters' if count else ''}{why}")


def _check_files(directory: Path, content: dict[str, Any], remedy: Remedy) -> Path:
    """Return a directory that holds what its manifest names, and nothing else that is read."""
    manifest.check(directory, content, "the model", **remedy)
    if found := list_strays(directory, content):
        raise ArtifactError(
            f"{directory} holds files that nobody verified",
            found="\n".join(found),
            hint="move them away",
        )
    return directory


def _nothing(name: str, path: Path, target: Path, cache_dir: Path) -> ArtifactError:
    """Return the error for a name that stands for nothing finished."""
    found = [manifest.describe_leftovers(target)]
    if target.is_dir():
        found.append(
            f"{target} without {MANIFEST}: an incomplete copy? Give its path to use it as it is"
        )
    elif path.is_dir():
        found.append(f"{path} without {CONFIG}")
    there = [directory.name for directory in list_prepared(cache_dir)]
    found.append(f"prepared under {models_root(cache_dir)}: {', '.join(there) or 'nothing'}")
    cached = [
        path.name.removeprefix("models--").replace("--", "/")
        for path in sorted(hf_cache.find_cache().glob("models--*"))
    ]
    if whole := [name for name in cached if hf_cache.find_complete_snapshot(name)]:
        found.append(f"whole in the Hugging Face cache {hf_cache.find_cache()}: {', '.join(whole)}")
    if hf_cache.find_snapshot(name):
        found.append(f"the Hugging Face cache {hf_cache.find_cache()} holds only a part of {name}")
    return ArtifactError(
        f"no finished model called {name}",
        expected=f"a directory with {CONFIG}, a name that stage 03 prepared, or "
        "one of a model in the Hugging Face cache",
        found="\n".join(filter(None, found)),
        **_prepared_by(name, path),
    )
