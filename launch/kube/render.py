"""Templates of launch/kubernetes/ to manifests.

`${NAME}` stands for a setting: alone and without quotes it keeps its type (a number, a list), and
a list in a list is spread. `!if-NAME` before a value leaves the whole entry out when that setting
is empty or 0. A name that is not a setting is an error.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import yaml

from lib.core import config_file
from lib.core.errors import UsageError

TEMPLATES = Path(__file__).resolve().parent.parent / "kubernetes"
_NAME = re.compile(r"\$\{(\w+)\}")
_LEFT_OUT = object()

Document = dict[str, Any]


def documents(template: str, settings: dict[str, Any]) -> list[Document]:
    """Return the manifests of a template; ${POD} in it is the pod of pod.yaml."""
    [pod] = _filled("pod.yaml", settings)
    return _filled(template, {**settings, "POD": pod})


def text(found: list[Document], headline: str) -> str:
    """Return manifests as they are applied; headline: a comment that says where they are from."""
    comment = "".join(f"# {line}\n" for line in headline.splitlines())
    return comment + yaml.safe_dump_all(found, sort_keys=False, width=100, allow_unicode=True)


def instances() -> dict[str, Any]:
    """Return what a node of each instance type has."""
    return config_file.read_yaml(TEMPLATES / "instances.yaml")


def _filled(template: str, settings: dict[str, Any]) -> list[Document]:
    path = TEMPLATES / template
    loader = type("Loader", (yaml.SafeLoader,), {})  # constructors of its own
    fill = functools.partial(_scalar, settings, path)
    loader.add_constructor("tag:yaml.org,2002:str", fill)
    loader.add_multi_constructor("!if-", functools.partial(_conditional, settings, path))
    with path.open(encoding="utf-8") as file:
        return [_pruned(document) for document in yaml.load_all(file, loader)]


def _setting(settings: dict[str, Any], path: Path, name: str) -> Any:
    if name not in settings:
        raise UsageError(f"{path} names {name}, which is not a setting",
                         expected=f"one of {', '.join(sorted(settings))}")
    return settings[name]


def _scalar(settings: dict[str, Any], path: Path, loader: yaml.SafeLoader, node: yaml.ScalarNode,
            ) -> Any:
    """Return a text with its names filled in; unquoted and nothing but a name: the setting."""
    if node.style is None and (alone := _NAME.fullmatch(node.value)):
        return _setting(settings, path, alone[1])
    return _NAME.sub(lambda found: str(_setting(settings, path, found[1])), node.value)


def _conditional(settings: dict[str, Any], path: Path, loader: yaml.SafeLoader, name: str,
                 node: yaml.Node) -> Any:
    if not _setting(settings, path, name):
        return _LEFT_OUT
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    filled = _scalar(settings, path, loader, node)
    return filled if node.style or not isinstance(filled, str) else yaml.safe_load(filled)


def _pruned(value: Any) -> Any:
    """Return a value without the entries that are left out, and with lists in lists spread."""
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not _LEFT_OUT}
    if not isinstance(value, list):
        return value
    pruned: list[Any] = []
    for item in value:
        if isinstance(item, list):
            pruned += item
        elif item is not _LEFT_OUT:
            pruned.append(_pruned(item))
    return pruned
