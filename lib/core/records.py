"""JSON, YAML and paths that others wrote: limits hold before anything is built of them or opened.

A record may come from anywhere: a download, a bundle, a copy of a run. What is nested without end,
grows by aliases, or names a path outside its directory is refused as damaged, here and for all.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.core.errors import ArtifactError

DEEPEST = 100  # levels of lists and mappings
LARGEST_JSON = 1 << 30  # bytes
LARGEST_YAML = 1 << 20  # bytes
MOST_NODES = 100_000  # of a YAML file, once its aliases stand for what they name
_CONTENT = re.compile(r" '(?!<)[^']{5,}'")  # in a message of the YAML parser


def parse_json(text: str | bytes, deepest: int = DEEPEST) -> Any:
    """Return what a JSON text holds; ValueError when it is none, or nested too deeply.

    deepest: levels of lists and mappings.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise _too_deep(deepest) from None
    marks = (
        text.count("[") + text.count("{")
        if isinstance(text, str)
        else text.count(b"[") + text.count(b"{")
    )
    if marks <= deepest:
        return content
    level = [content]
    depth = 0
    while level := [
        child
        for value in level
        if isinstance(value, (dict, list))
        for child in (value.values() if isinstance(value, dict) else value)
    ]:
        if (depth := depth + 1) > deepest:
            raise _too_deep(deepest)
    return content


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; OSError, or ValueError when it is no file of that kind."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > LARGEST_JSON:
        raise ValueError(f"it holds {status.st_size} bytes, more than {LARGEST_JSON}")
    return parse_json(path.read_text(encoding="utf-8"))


def mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one where there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def logged_row(line: bytes) -> dict[str, Any] | None:
    """Return a line of a run's log, a mapping with a `step`, with NaN for null.

    Returns None for a line that is torn or holds no such mapping.
    """
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {key: math.nan if value is None else value for key, value in row.items()}


def logged_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log, see logged_row, without lines that a crash has torn.

    Empty when there is no such file, or when it cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [row for row in map(logged_row, lines) if row]


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds; ValueError, which repeats nothing of it, when it is none."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if len(text.encode()) > LARGEST_YAML:
            raise ValueError(f"it holds more than {LARGEST_YAML} bytes")
        _require_small(yaml.parse(text, Loader=loader))
        return _built(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = _CONTENT.sub("", error.problem or "")
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(where + problem) from None
    except (yaml.YAMLError, UnicodeError):
        raise ValueError("it holds characters that YAML does not allow") from None


def _built(text: str, loader: type) -> Any:
    """Return what a YAML text holds; ValueError for `!!int x` and `2020-13-45`."""
    import yaml

    try:
        _require_keys_once(yaml.compose(text, Loader=loader))
        return yaml.load(text, Loader=loader)  # a safe one, the same in C
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("a value is not of the type that it names or looks like") from None


def _require_keys_once(node: Any) -> None:
    """Raise MarkedYAMLError if a mapping at the top has a key twice: the last one would win."""
    import yaml

    seen: set[str] = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem="a key is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)


def _require_small(events: Iterable[Any]) -> None:
    """Raise ValueError for YAML nested too deeply or too large once aliases are expanded."""
    import yaml

    sizes: dict[str | None, int] = {}
    begun: list[tuple[str | None, int]] = []  # anchor and nodes so far of what is not yet closed
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, 1))
            if len(begun) > DEEPEST:
                raise _too_deep()
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = begun.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
            size = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (open_ for open_, _ in begun):
                raise ValueError("an alias stands for what it is a part of")
            anchor = None
            size = sizes.get(event.anchor, 1)
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if begun:
            begun[-1] = begun[-1][0], begun[-1][1] + size
            if begun[-1][1] > MOST_NODES:
                raise ValueError(f"it holds more than {MOST_NODES:,} values, aliases expanded")


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, which may be JSON; OSError or ValueError as `parse_yaml`."""
    with path.open("rb") as file:
        head = file.read(LARGEST_YAML + 1)
        if head.lstrip()[:1] == b"{" and len(head) > LARGEST_YAML:  # the manifest of many files
            return read_json(path)
    return parse_yaml(head.decode("utf-8"))


def leads_out(path: object) -> bool:
    """Tell whether a path is anything but that of a file inside a directory, by its parts."""
    return (
        not isinstance(path, str)
        or not is_passable(path)
        or bool({"", ".", ".."} & {*path.split("/")})
    )


def is_passable(text: str) -> bool:
    """Tell whether the system takes a text as a path or a word of a command line."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def inside(root: Path, path: str) -> Path:
    """Return the place of a file that a record names, to write or delete it.

    Raises ArtifactError when that leads out of `root`, by its parts or by links.
    """
    place = root / path if not leads_out(path) else root
    if (
        place == root
        or place.is_symlink()
        or not place.parent.resolve().is_relative_to(root.resolve())
    ):
        raise ArtifactError(
            f"a record in {root} names a file that does not lie there",
            found=repr(path),
            expected="a path inside that directory",
        )
    return place


def _too_deep(deepest: int = DEEPEST) -> ValueError:
    return ValueError(f"it is nested more than {deepest} levels deep")
