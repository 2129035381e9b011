"""Handles code that comes with a model: it is fetched, and run, only when a command says so.

`config.json` names it in `auto_map`: `"AutoModelForCausalLM": "modeling_new.NewForCausalLM"`, or
`"org/other--modeling_new.NewForCausalLM"` for code that lies in another repository. Nothing that
lies in a directory makes its code run: `--trust-remote-code` has to be typed for each stage. The
digests that stage 03 notes beside the code only tell whether it is still what was fetched.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.core import hashing, manifest, records
from lib.core.errors import ArtifactError, UsageError
from lib.models import lookup
from lib.models.directory import CODE_DIGESTS

NEEDED = ("AutoConfig", "AutoModelForCausalLM")
OPTION = "--trust-remote-code"
_REFERENCE = re.compile(r"((?P<repository>[\w./-]+)--)?(?P<module>\w+)\.\w+", re.ASCII)
_FILE = re.compile(r"\w+\.py", re.ASCII)

Bring = Callable[[str, list[str]], Path]  # repository ("" for the model's own), names → directory


def is_needed(content: dict[str, Any]) -> bool:
    """Tell whether the content of a config.json names a type that only its own code knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return content.get("model_type") not in CONFIG_MAPPING and isinstance(
        content.get("auto_map"), dict
    )


def record(model_dir: Path, names: list[str]) -> None:
    """Note the digests of code files as they were fetched."""
    manifest.write_json(
        model_dir / CODE_DIGESTS,
        {name: hashing.file_digest(model_dir / name, "sha256") for name in sorted(names)},
    )


def list_fetched(model_dir: Path) -> list[str]:
    """Return the code files that stage 03 fetched with a model, none for any other directory.

    Raises ArtifactError when they are no longer what was fetched.
    """
    if not (model_dir / CODE_DIGESTS).exists():
        return []
    try:
        digests = records.read_json(model_dir / CODE_DIGESTS)
    except ValueError:
        digests = None
    if isinstance(digests, dict) and all(map(_FILE.fullmatch, digests)):
        changed = [
            name
            for name, digest in digests.items()
            if not (model_dir / name).is_file()
            or digest != hashing.file_digest(model_dir / name, "sha256")
        ]
        changed += [path.name for path in model_dir.glob("*.py") if path.name not in digests]
    else:
        changed = [CODE_DIGESTS]
    if changed:
        raise ArtifactError(
            f"the code in {model_dir} is not the code that stage 03 fetched",
            found=", ".join(sorted(changed)),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )
    return list(digests)


def carry(model_dir: Path, target: Path) -> None:
    """Copy the code of a model with its digests to a directory that gets a copy of the config."""
    for name in (names := list_fetched(model_dir)) and [*names, CODE_DIGESTS]:
        shutil.copyfile(model_dir / name, target / name)


def collect(config_path: Path, bring: Bring) -> dict[str, list[str]]:
    """Return the code files that a model needs, by the repository they are in.

    bring: fetches files of a repository. Raises UsageError when the config does not name the
    classes it must, in modules beside it, or files of two repositories have the same name.
    """
    content = records.read_json(config_path)
    auto_map = {key: value for key, value in content["auto_map"].items() if key in NEEDED}
    if len(auto_map) < len(NEEDED) or not all(isinstance(v, str) for v in auto_map.values()):
        raise UsageError(
            "the model's code is not a causal language model",
            expected=f"{' and '.join(NEEDED)} in auto_map of config.json",
            found=", ".join(content["auto_map"]) or "nothing",
        )
    found: dict[str, list[str]] = {}
    for reference in auto_map.values():
        if not (parts := _REFERENCE.fullmatch(reference)):
            raise UsageError(
                "the model's code does not lie beside its config.json",
                expected="module.Class, or ORG/NAME--module.Class, in auto_map",
                found=repr(reference),
            )
        repository = parts["repository"] or ""
        waiting = [f"{parts['module']}.py"]
        while waiting:
            name = waiting.pop()
            if name in found.setdefault(repository, []):
                continue
            found[repository].append(name)
            waiting += _relative_imports(bring(repository, [name]) / name)
    names = [name for files in found.values() for name in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(
            "the model's code comes from two repositories with files of equal name",
            found=", ".join(sorted(twice)),
        )
    return found


def make_local(config_path: Path) -> None:
    """Rewrite a config.json so that its code is looked for beside it, never on the Hub."""
    content = records.read_json(config_path)
    content["auto_map"] = {key: content["auto_map"][key].rpartition("--")[2] for key in NEEDED}
    manifest.write_json(config_path, content)


def _relative_imports(path: Path) -> list[str]:
    """Return the files beside a module that it imports."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the model's code {path.name} is not Python", found=str(error)) from None
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules |= {node.module} if node.module else {alias.name for alias in node.names}
    if nested := sorted(module for module in modules if "." in module):
        raise UsageError(
            f"the model's code {path.name} imports from directories, which "
            "transformers does not copy",
            found=", ".join(nested),
        )
    return [f"{module}.py" for module in sorted(modules)]
