"""From the name of a model to its directory, offline and without importing any library of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from lib.core import commands, log, manifest
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST, model_dir_name, models_root
from lib.models import hf_cache
from lib.models.identity import WEIGHTS, has_weights, strays

KIND = "model/1"
_CONFIG = "config.json"
_PARTIAL = ".partial-"
TRIAL_NAMES = ("demo", "test-quick")  # models that the Makefile makes, and no run is meant to take
_STAGE = "03_download_model.py"
_HOW = "stage 03 fetches a model from the Hub (--model-name), or makes one (--from-scratch)"


def resolve(name: str | None, cache_dir: Path) -> Path:
    """Return the directory of a model, and log which one it is.

    name: a directory with a config.json, ours or one that `save_pretrained` wrote; a name that
    stage 03 prepared (`org/name`, `org--name`, `scratch-tiny`); the name of a model whose snapshot
    the Hugging Face cache of this machine holds; None for the only one that stage 03 prepared,
    apart from those of `make demo` and `make test-quick`.
    Raises ArtifactError, telling what there is and what to run, when it is missing, unfinished or
    has lost files; UsageError when its weights are pickles, or when None stands for several.
    """
    if name is None:
        return _only(cache_dir)
    path = Path(name).expanduser()
    if (path / _CONFIG).is_file():
        return _directory(path)
    target = models_root(cache_dir) / model_dir_name(name)
    if (target / MANIFEST).is_file():
        return _prepared(target)
    snapshot = None if target.is_dir() else hf_cache.whole_model(name)
    if snapshot is None:
        raise _nothing(name, path, target, cache_dir)
    log.info(f"model: {snapshot}, a snapshot in the Hugging Face cache, taken as it is")
    return snapshot


def prepared(cache_dir: Path) -> list[Path]:
    """Return the finished models under a cache directory, the newest first."""
    found = []
    for path in models_root(cache_dir).glob(f"*/{MANIFEST}"):
        content = manifest.read_if_any(path.parent)
        if content and content["kind"] == KIND and _PARTIAL not in path.parent.name:
            found.append((content.get("created", ""), path.stat().st_mtime_ns, path.parent))
    return [directory for *_, directory in sorted(found, reverse=True)]


def remedy(directory: Path, *more: object) -> dict[str, str]:
    """Return what prepares a model, or fetches raw files, once more: parts of an error."""
    content = manifest.read_if_any(directory) or {}
    cache = {"cache_dir": directory.parent.parent} if directory.parent.name == "models" else {}
    if content.get("options") and content["kind"].startswith(("model/", "raw/")):
        return manifest.again(content | {"stage": _STAGE}, *more, **cache)
    return _prepared_by(directory.name.replace("--", "/", 1), directory, *more)


def _prepared_by(name: str, path: Path, *more: object) -> dict[str, str]:
    """Return what prepares a model of this name, as far as the name tells."""
    is_ours = path.parent.name == "models"
    if re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) and (is_ours or not path.exists()):
        return {"run": commands.script(_STAGE, "--model-name", name, *more)}
    return {"hint": _HOW}


def _only(cache_dir: Path) -> Path:
    """Return the one model that is prepared; which of several is meant is never guessed."""
    found = [path for path in prepared(cache_dir) if path.name not in TRIAL_NAMES]
    if not found:
        trial = ", ".join(path.name for path in prepared(cache_dir))
        raise ArtifactError(f"no model is prepared under {models_root(cache_dir)}",
                            found=f"{trial}, which only -m takes" if trial else "",
                            hint=_HOW)
    if found[1:]:
        raise UsageError(f"{len(found)} models are prepared under {models_root(cache_dir)}, and "
                         "none was named", expected="one of these words in the command",
                         found="\n".join(f"-m {shlex.quote(path.name)}" for path in found))
    log.info(f"model: {found[0]}, the only one prepared")
    return _check(found[0])


def _directory(path: Path) -> Path:
    """Return a directory given by its path: ours, an export, or one made elsewhere."""
    if any(_PARTIAL in part for part in path.resolve().parts[-2:]):
        raise ArtifactError(f"{path} is not finished", expected="a directory under its final name")
    if not (path / MANIFEST).is_file():
        _require_no_pickles(path)
        log.info(f"model: {path}, made elsewhere (no {MANIFEST}), taken as it is")
        return path
    other = manifest.read_if_any(path)
    if other and other["kind"] != KIND:
        log.info(f"model: {path}, made by {other.get('stage') or other['kind']}")
        return _whole(path, other, {})
    return _prepared(path)


def _require_no_pickles(path: Path) -> None:
    """Raise UsageError for pickled weights: without them, it would be trained from scratch."""
    pickles = sorted(found.name for found in path.glob("pytorch_model*.bin"))
    if pickles and not has_weights(path):
        raise UsageError(f"the weights of {path} are pickles, which are not read here",
                         expected=f"{WEIGHTS}, as `save_pretrained` writes it now",
                         found=", ".join(pickles[:5]),
                         hint="stage 03 converts those of the Hub, with --allow-pickle")


def _prepared(directory: Path) -> Path:
    log.info(f"model: {directory}")
    return _check(directory)


def _check(directory: Path) -> Path:
    content = manifest.read(directory, KIND, "the model", **remedy(directory))
    return _whole(directory, content, remedy(directory, "--overwrite"))


def _whole(directory: Path, content: dict[str, Any], remedy_: dict[str, str]) -> Path:
    """Return a directory that holds what its manifest names, and nothing else that is read."""
    manifest.check(directory, content, "the model", **remedy_)
    if found := strays(directory, content):
        raise ArtifactError(f"{directory} holds files that nobody verified",
                            found="\n".join(found), hint="move them away")
    return directory


def _nothing(name: str, path: Path, target: Path, cache_dir: Path) -> ArtifactError:
    """Return the error for a name that stands for nothing finished."""
    found = [manifest.unfinished(target)]
    if target.is_dir():
        found.append(f"{target} without {MANIFEST}: an incomplete copy? Give its path to use it "
                     "as it is")
    elif path.is_dir():
        found.append(f"{path} without {_CONFIG}")
    there = [directory.name for directory in prepared(cache_dir)]
    found.append(f"prepared under {models_root(cache_dir)}: {', '.join(there) or 'nothing'}")
    if cached := hf_cache.models():
        found.append(f"whole in the Hugging Face cache {hf_cache.root()}: {', '.join(cached)}")
    if hf_cache.snapshot(name):
        found.append(f"the Hugging Face cache {hf_cache.root()} holds only a part of {name}")
    return ArtifactError(f"no finished model called {name}",
                         expected=f"a directory with {_CONFIG}, a name that stage 03 prepared, or "
                                  "one of a model in the Hugging Face cache",
                         found="\n".join(filter(None, found)), **_prepared_by(name, path))
