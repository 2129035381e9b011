"""Download, check and copy modeling code from a model's repository.

`config.json` names the code in `auto_map`: `"AutoModelForCausalLM": "modeling_new.NewForCausalLM"`,
or `"org/other--modeling_new.NewForCausalLM"` for code in another repository. No file in a model
directory is a permission to run its code: every stage needs `--trust-remote-code`, and stage 03
needs it to download the code. The digests that stage 03 writes beside the code only show whether
the code has changed since.
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

# Downloads files (repository, or "" for the model's own; names) and returns their directory.
FetchFiles = Callable[[str, list[str]], Path]


def is_needed(content: dict[str, Any]) -> bool:
    """Return whether a model needs its own code, because transformers does not know its type.

    content: the JSON object in config.json.
    """
    from transformers import CONFIG_MAPPING

    return content.get("model_type") not in CONFIG_MAPPING and isinstance(
        content.get("auto_map"), dict
    )


def write_digests(model_dir: Path, names: list[str]) -> None:
    """Write the digests of downloaded code files."""
    manifest.write_json(
        model_dir / CODE_DIGESTS,
        {name: hashing.file_digest(model_dir / name, "sha256") for name in sorted(names)},
    )


def list_code_files(model_dir: Path) -> list[str]:
    """Return the names of the code files that stage 03 downloaded, or [] if there are none.

    Raises ArtifactError if the files have changed since.
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
            f"the code in {model_dir} has changed since stage 03 downloaded it",
            found=", ".join(sorted(changed)),
            **lookup.model_remedy(model_dir, "--overwrite"),
        )
    return list(digests)


def copy_code(model_dir: Path, target: Path) -> None:
    """Copy the code of a model and its digests to another directory."""
    for name in (names := list_code_files(model_dir)) and [*names, CODE_DIGESTS]:
        shutil.copyfile(model_dir / name, target / name)


def fetch_code(config_path: Path, fetch_files: FetchFiles) -> dict[str, list[str]]:
    """Download the code files that a model needs, and return their names by repository.

    Follows relative imports. Raises UsageError if the config does not name the required classes, if
    a module is not at the top level of a repository, or if files of two repositories have the same
    name.
    """
    content = records.read_json(config_path)
    auto_map = {key: value for key, value in content["auto_map"].items() if key in NEEDED}
    if len(auto_map) < len(NEEDED) or not all(isinstance(v, str) for v in auto_map.values()):
        raise UsageError(
            "the model's code is not a causal language model",
            expected=f"{' and '.join(NEEDED)} in auto_map of config.json",
            found=", ".join(content["auto_map"]) or "nothing",
        )
    files: dict[str, list[str]] = {}
    for reference in auto_map.values():
        if not (parts := _REFERENCE.fullmatch(reference)):
            raise UsageError(
                "the model's code is not in the same directory as its config.json",
                expected="module.Class, or ORG/NAME--module.Class, in auto_map",
                found=repr(reference),
            )
        repository = parts["repository"] or ""
        waiting = [f"{parts['module']}.py"]
        while waiting:
            name = waiting.pop()
            if name in files.setdefault(repository, []):
                continue
            files[repository].append(name)
            waiting += _list_relative_imports(fetch_files(repository, [name]) / name)
    names = [name for repository_files in files.values() for name in repository_files]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise UsageError(
            "the model's code comes from two repositories that have files of the same name",
            found=", ".join(sorted(duplicates)),
        )
    return files


def use_local_code(config_path: Path) -> None:
    """Rewrite a config.json so that transformers loads the code from its directory, not the Hub."""
    content = records.read_json(config_path)
    content["auto_map"] = {key: content["auto_map"][key].rpartition("--")[2] for key in NEEDED}
    manifest.write_json(config_path, content)


def _list_relative_imports(path: Path) -> list[str]:
    """Return the names of the files that a module imports from its own directory."""
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
            f"the model's code {path.name} imports from subdirectories, which transformers does "
            "not copy",
            found=", ".join(nested),
        )
    return [f"{module}.py" for module in sorted(modules)]
