"""Find the directory of a model by its name, and list the models that stage 03 has prepared."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.manifest import Remedy
from lib.core.paths import MANIFEST, PARTIAL, TRIAL_NAMES, model_dir_name, models_root
from lib.models import directory, hf_cache, unread_weights
from lib.models.directory import CONFIG, KIND, count_parameters, has_weights, list_strays

HINT = (
    "stage 03 downloads a model from the Hub (--model-name) or creates one (--from-scratch); with "
    "--model-size, stage 04 creates one itself"
)
_ADAPTER = "adapter_config.json"  # of PEFT
_STAGE = "03_download_model.py"


def find_model(name: str | None, cache_dir: Path, why: str = "") -> Path:
    """Return the directory of a model, and log its path and number of parameters.

    name: one of
    - a directory with a config.json, from stage 03 or from `save_pretrained`
    - the name of a model that stage 03 has prepared (`org/name`, `org--name`, `scratch-tiny`)
    - the name of a model in the Hugging Face cache of this machine
    - None for the only model that stage 03 has prepared, not counting TRIAL_NAMES

    why: the reason for this choice, for the log. Raises ArtifactError if the model is missing,
    unfinished or has lost files. Raises UsageError if its weights are pickles, or if `name` is None
    and there are several models.
    """
    if name is None:
        return _check_prepared(find_only_prepared(cache_dir), ", the only one prepared")
    path = Path(name).expanduser()
    if (path / CONFIG).is_file():
        return _check_directory(path, why)
    if (path / _ADAPTER).is_file():
        raise UsageError(
            f"{path} contains an adapter, not a model",
            hint="name the base model of the adapter, or the model that stage 05 writes without "
            "--adapter; --lora-from of stage 04 continues to train the adapter",
        )
    target = models_root(cache_dir) / model_dir_name(name)
    if (target / MANIFEST).is_file():
        return _check_prepared(target)
    _require_readable_weights(path)
    snapshot = None if target.is_dir() else hf_cache.find_complete_snapshot(name)
    if snapshot is None:
        raise _missing_model_error(name, path, target, cache_dir)
    directory.require_data(snapshot)
    log_model(snapshot, ", a snapshot in the Hugging Face cache, used unverified")
    return snapshot


def find_recorded_model(path: str, fingerprint: str | None, cache_dir: Path) -> str | None:
    """Return the directory of the model that a run was started with, or None if it is gone.

    path: where the run found the model, "" if that is unknown. fingerprint: the model's
    fingerprint; if the path no longer exists, a prepared model with this fingerprint is returned.
    """
    if path and Path(path).is_dir():
        return path
    for model in list_prepared(cache_dir) if fingerprint else ():
        if directory.fingerprint_model(model) == fingerprint:
            return str(model)
    return None


def list_prepared(cache_dir: Path) -> list[Path]:
    """Return the directories of all finished models under a cache directory, newest first."""
    models = []
    for path in models_root(cache_dir).glob(f"*/{MANIFEST}"):
        content = manifest.read_if_any(path.parent)
        if content and content["kind"] == KIND and PARTIAL not in path.parent.name:
            models.append((content.get("created", ""), path.stat().st_mtime_ns, path.parent))
    return [directory for *_, directory in sorted(models, reverse=True)]


def is_trial(model_dir: Path) -> bool:
    """Return whether the Makefile created a model for a trial, even if it was renamed since."""
    content: Mapping[str, Any] = manifest.read_if_any(model_dir) or {}
    names = {model_dir.name, content.get("options", {}).get("model_name")}
    return not names.isdisjoint(TRIAL_NAMES)


def find_only_prepared(cache_dir: Path) -> Path:
    """Return the only prepared model.

    Raises ArtifactError if there is none, and UsageError with a command for each model if there are
    several.
    """
    prepared = list_prepared(cache_dir)
    models = [path for path in prepared if not is_trial(path)]
    if not models:
        trial = ", ".join(path.name for path in prepared)
        raise ArtifactError(
            f"no model is prepared under {models_root(cache_dir)}",
            found=f"only {trial}, made for a trial; to use it, name it with -m" if trial else "",
            hint=HINT,
        )
    if models[1:]:
        raise UsageError(
            f"{len(models)} models are prepared under {models_root(cache_dir)}, and none was named",
            expected="one of these commands\n"
            + "\n".join(commands.as_typed("-m", path.name) for path in models),
        )
    return models[0]


def guess_dataset() -> Path:
    """Return the dataset to show in a printed command: the only one, or `hf_datasets/corpus`."""
    datasets = [
        path.parent
        for path in Path("hf_datasets").glob(f"*/{MANIFEST}")
        if path.parent.name not in TRIAL_NAMES
    ]
    return datasets[0] if len(datasets) == 1 else Path("hf_datasets/corpus")


def model_remedy(directory: Path, *more: object) -> Remedy:
    """Return the command that prepares a model again, or downloads raw files again.

    The result contains keyword arguments for an error. more: further options of the command.
    """
    content = manifest.read_if_any(directory) or {}
    cache = {"cache_dir": directory.parent.parent} if directory.parent.name == "models" else {}
    if content.get("options") and content["kind"].startswith(("model/", "raw/")):
        return manifest.make_remedy(content | {"stage": _STAGE}, *more, **cache)
    return _guess_remedy(directory.name.replace("--", "/", 1), directory, *more)


def _guess_remedy(name: str, path: Path, *more: object) -> Remedy:
    """Return the command that downloads a model, or a hint if the Hub cannot have that name."""
    is_ours = path.parent.name == "models"
    if re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) and (is_ours or not path.exists()):
        return {"run": commands.script(_STAGE, "--model-name", name, *more)}
    return {"hint": HINT}


def _check_directory(path: Path, why: str = "") -> Path:
    """Check a model directory that the user named by its path, log it and return it."""
    if any(PARTIAL in part for part in path.resolve().parts[-2:]):
        raise ArtifactError(f"{path} is not finished", expected="a directory under its final name")
    if not (path / MANIFEST).is_file():
        directory.require_data(path)
        _require_readable_weights(path)
        log_model(path, f"{why}, made elsewhere (no {MANIFEST}), used unverified")
        return path
    content = manifest.read_if_any(path)
    if content and content["kind"] != KIND:
        log_model(path, f"{why}, made by {content.get('stage') or content['kind']}")
        return _check_files(path, content, {})
    return _check_prepared(path, why)


def _require_readable_weights(path: Path) -> None:
    """Raise an error for weights in other formats.

    If they were ignored, the model would be trained from scratch. Raises UsageError or
    ArtifactError with the command that converts the weights.
    """
    if not has_weights(path) and (error := unread_weights.find_error(path)):
        raise error


def _check_prepared(directory: Path, why: str = "") -> Path:
    """Log and check the directory of a model that stage 03 has prepared, and return it."""
    log_model(directory, why)
    content = manifest.read_manifest(directory, KIND, "the model", **model_remedy(directory))
    return _check_files(directory, content, model_remedy(directory, "--overwrite"))


def log_model(model_dir: Path, why: str) -> None:
    """Log the path of a model and, if its files say so, the number of its parameters."""
    count = count_parameters(model_dir)
    size = f", {units.count(count)} parameters" if count else ""
    log.info(f"model: {model_dir}{size}{why}{announce_import()}")


def announce_import() -> str:
    """Return a note for the last line before a process imports torch, which takes seconds."""
    return "" if "torch" in sys.modules else "; loading torch and transformers"


def _check_files(directory: Path, content: dict[str, Any], remedy: Remedy) -> Path:
    """Return a directory. Raises ArtifactError unless it contains the files of its manifest intact.

    Additional files are allowed unless they contain weights or code.
    """
    manifest.require_intact(directory, content, "the model", **remedy)
    if strays := list_strays(directory, content):
        raise ArtifactError(
            f"{directory} contains files that were not verified",
            found="\n".join(strays),
            hint="move them away",
        )
    return directory


def _missing_model_error(name: str, path: Path, target: Path, cache_dir: Path) -> ArtifactError:
    """Return the error for a name that matches no finished model."""
    found = [manifest.describe_leftovers(target)]
    if target.is_dir():
        found.append(
            f"{target} without {MANIFEST}: an incomplete copy? Give its path to use it as it is"
        )
    elif path.is_dir():
        found.append(f"{path} without {CONFIG}")
    prepared = [directory.name for directory in list_prepared(cache_dir)]
    found.append(f"prepared under {models_root(cache_dir)}: {', '.join(prepared) or 'nothing'}")
    cached = ", ".join(hf_cache.list_complete_models())
    if hf_cache.find_snapshot(name):
        cached = f"only a part of {name}" + (f"; complete: {cached}" if cached else "")
    found.append(f"in the Hugging Face cache {hf_cache.describe_cache()}: {cached or 'nothing'}")
    return ArtifactError(
        f"no finished model is called {name}",
        expected=f"a directory with {CONFIG}, the name of a model that stage 03 prepared, or "
        "the name of a model in the Hugging Face cache",
        found="\n".join(filter(None, found)),
        **_guess_remedy(name, path),
    )
