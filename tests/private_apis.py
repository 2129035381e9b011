"""Read docs/explanation/private-apis.md, and compare it with the code and the packages.

python -m tests.private_apis    name what the installed versions lack, and exit with 1
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "private-apis.md"
PACKAGES = {
    "accelerate",
    "amzn_sagemaker_checkpointing",
    "datasets",
    "flash_attn",
    "functorch",
    "gigatoken",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "torchao",
    "transformers",
}
# Each of these is for one option, so the check does not need them installed.
OPTIONAL = {"amzn_sagemaker_checkpointing", "flash_attn", "torchao"}
# Modules with public names that the documentation of their package does not mention.
UNDOCUMENTED = (
    "huggingface_hub.constants",
    "torch.distributed.checkpoint.api",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.storage",
    "torch.distributed.checkpoint.utils",
    "torch.distributed.distributed_c10d",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.run",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.dynamic_module_utils",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models",
)
# Documented despite the underscore or the module: attributes of named tuples, `os` and
# `jinja2.Undefined`; the memory snapshots, the fake tensors, the modes, the dynamic shapes and the
# elastic processes of torch (torch_cuda_memory, fake tensor, extending PyTorch,
# torch.compiler_dynamic_shapes, elastic/multiprocessing).
_DOCUMENTED = {
    *("_asdict", "_exit", "_fields", "_make", "_replace", "_undefined_name"),
    *("_dump_snapshot", "_record_memory_history"),
    "torch._dynamo.maybe_mark_dynamic",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.distributed.elastic.multiprocessing.api.PContext",
    "torch.utils._python_dispatch.TorchDispatchMode",
}
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    is_choice: one of the names is enough. since: the package and first version that contain the
    names, such as ("transformers", "5.23"). users: the modules that use the names.
    """

    names: tuple[str, ...]
    is_choice: bool
    since: tuple[str, str] | None
    users: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return the names that the installed versions lack."""
        if self.since and _installed_version(self.since[0]) < _parse_version(self.since[1]):
            return []
        missing_names = [name for name in self.names if not is_available(name)]
        if self.is_choice and len(missing_names) < len(self.names):
            return []
        return missing_names


def read_table() -> list[Row]:
    """Return the rows of the page's tables."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            names = re.findall(r"`([^`]+)`", cells[0])
            is_choice = bool(re.search(r"` or `", cells[0]))
            since = re.search(r"` from (\w+) ([\d.]+)", cells[0])
            users = re.findall(r"`([^`]+)`", cells[1])
            rows.append(
                Row(tuple(names), is_choice, (since[1], since[2]) if since else None, tuple(users))
            )
    return rows


def _installed_version(package: str) -> tuple[int, ...]:
    if package == "Python":
        return sys.version_info[:2]
    return _parse_version(importlib.metadata.version(package))


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def is_available(name: str) -> bool:
    """Return whether a dotted name exists in the installed packages.

    `package.Class:word` asks for an attribute of instances, so the word must occur in the source
    file of the class. Names of an optional package exist if the package is not installed.
    """
    owner, _, word = name.partition(":")
    try:
        owner_object = import_name(owner)
    except ModuleNotFoundError as error:
        return error.name in OPTIONAL
    except (AttributeError, ImportError):
        return False
    if not word:
        return True
    source = Path(inspect.getsourcefile(owner_object) or "").read_text(encoding="utf-8")
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


def import_name(name: str) -> Any:
    """Import and return the object of a dotted name."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            if not inspect.ismodule(value):
                raise
            value = importlib.import_module(".".join(parts[:number]))
    return value


def find_private_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each private or undocumented name that a module uses from packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own_names = set(_defined_names(tree))
    documented_owners: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node in documented_owners or _get_name(node) in _DOCUMENTED
        ):
            documented_owners.add(node.value)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name) and _is_private(alias.name):
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _is_private(name):
                    yield name, node.lineno
        elif isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            is_inherited = ast.unparse(node.value) in ("self", "cls", "super()")
            if (
                node not in documented_owners
                and node.attr not in own_names | _DOCUMENTED
                and not (is_inherited and _is_ours(node.attr))
            ):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and _get_name(node.func) in _BY_NAME:
            for argument in node.args:
                text = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(text, str) and _PRIVATE.fullmatch(text) and not _is_ours(text):
                    yield text, node.lineno


_BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "mock.patch.object"}


def _get_name(function: ast.expr) -> str:
    """Return the dotted name of a function, "" for another expression.

    `ast.unparse` would take a second for all calls in lib/.
    """
    if isinstance(function, ast.Name):
        return function.id
    owner = _get_name(function.value) if isinstance(function, ast.Attribute) else ""
    return f"{owner}.{function.attr}" if owner else ""


def _is_ours(name: str) -> bool:
    """Return whether our code defines a name, since inherited methods may use it."""
    return any(name in text and name in _names_in(text) for text in _read_modules())


@functools.cache
def _read_modules() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in list_modules()]


@functools.cache
def _names_in(text: str) -> set[str]:
    """Return the names that a module defines. text: the code of the module."""
    return set(_defined_names(ast.parse(text)))


def list_modules() -> list[Path]:
    """Return the modules that the table covers."""
    return [
        *sorted((ROOT / "lib").rglob("*.py")),
        *sorted((ROOT / "launch").rglob("*.py")),
        *sorted(ROOT.glob("0[1-5]_*.py")),
    ]


def _defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _is_private(name: str) -> bool:
    if name in _DOCUMENTED:
        return False
    is_undocumented = any(name == part or name.startswith(f"{part}.") for part in UNDOCUMENTED)
    return is_undocumented or any(_PRIVATE.fullmatch(part) for part in name.split("."))


def main() -> None:
    """Print the missing names."""
    missing = [name for row in read_table() for name in row.missing()]
    for name in missing:
        print(f"missing: {name}")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
