"""From the name of a model to its directory, offline and without importing any library of it."""

from __future__ import annotations

from pathlib import Path

from lib.core import log, manifest
from lib.core.errors import ArtifactError
from lib.core.paths import MANIFEST, model_dir_name, models_root
from lib.models.scratch import SIZES, default_name

KIND = "model/1"
_CONFIG = "config.json"
_PARTIAL = ".partial-"


def resolve(name: str | None, cache_dir: Path) -> Path:
    """Return the directory of a model, and log which one it is.

    name: a directory with a config.json, ours or one that `save_pretrained` wrote; or a name that
    stage 03 prepared (`org/name`, `org--name`, `scratch-tiny`); None for the one it prepared last.
    Raises ArtifactError, telling what there is and what to run, when it is missing, unfinished or
    has lost files.
    """
    if name is None:
        return _latest(cache_dir)
    path = Path(name).expanduser()
    if (path / _CONFIG).is_file():
        return _directory(path)
    target = models_root(cache_dir) / model_dir_name(name)
    if not (target / MANIFEST).is_file():
        raise _nothing(name, path, target, cache_dir)
    return _prepared(target, command(name))


def prepared(cache_dir: Path) -> list[Path]:
    """Return the finished models under a cache directory, the one prepared last in front."""
    found = []
    for path in models_root(cache_dir).glob(f"*/{MANIFEST}"):
        content = manifest.read_if_any(path.parent)
        if content and content["kind"] == KIND and _PARTIAL not in path.parent.name:
            found.append((content.get("created", ""), path.stat().st_mtime_ns, path.parent))
    return [directory for *_, directory in sorted(found, reverse=True)]


def command(name: str) -> str:
    """Return the command of stage 03 that prepares a model of this name."""
    for size in SIZES:
        if name == default_name(size):
            return "python 03_download_model.py --from-scratch " \
                   f"--model-size {size} --train-tokenizer hf_datasets/<corpus>"
    name = name.replace("--", "/", 1)
    return f"python 03_download_model.py --model-name {name}"


def _latest(cache_dir: Path) -> Path:
    found = prepared(cache_dir)
    if not found:
        raise ArtifactError(f"no model is prepared under {models_root(cache_dir)}",
                            run=f"{command('ORG/NAME')}\n{command('scratch-tiny')}")
    others = f" (of {len(found)}; -m names another)" if found[1:] else ""
    log.info(f"model: {found[0]}, the one prepared last{others}")
    return _check(found[0], command(found[0].name))


def _directory(path: Path) -> Path:
    """Return a directory given by its path: ours, an export, or one made elsewhere."""
    if _PARTIAL in path.resolve().name:
        raise ArtifactError(f"{path} is not finished", expected="a directory under its final name")
    if not (path / MANIFEST).is_file():
        log.info(f"model: {path}, made elsewhere (no {MANIFEST}), taken as it is")
        return path
    other = manifest.read_if_any(path)
    if other and other["kind"] != KIND:
        log.info(f"model: {path}, an artifact of kind {other['kind']}")
        manifest.check(path, other, "the model")
        return path
    return _prepared(path, command(path.resolve().name))


def _prepared(directory: Path, run: str) -> Path:
    log.info(f"model: {directory}")
    return _check(directory, run)


def _check(directory: Path, run: str) -> Path:
    content = manifest.read(directory, KIND, "the model", run)
    manifest.check(directory, content, "the model", f"{run} --overwrite")
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
    return ArtifactError(f"no finished model called {name}",
                         expected=f"a directory with {_CONFIG}, or a name that stage 03 prepared",
                         found="\n".join(filter(None, found)), run=command(name))
