"""Read JSON, YAML and paths that others wrote, within limits that are checked first.

A record may come from anywhere: a download, a bundle, a copy of a run. Records that are nested too
deeply, that grow by aliases, or that name a path outside their directory are refused as damaged.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from lib.core import placeholders
from lib.core.errors import ArtifactError

DEEPEST = 100  # levels of lists and mappings
LARGEST_JSON = 1 << 30  # bytes
LARGEST_YAML = 1 << 20  # bytes
MOST_NODES = 100_000  # of a YAML file, with its aliases expanded
_NUMBER_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_CONTENT = re.compile(r" '(?!<)[^']{5,}'")  # in a message of the YAML parser


def parse_json(text: str | bytes, deepest: int = DEEPEST) -> Any:
    """Parse a JSON text. Raises ValueError if it is invalid or nested too deeply.

    deepest: levels of lists and mappings.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise _make_depth_error(deepest) from None
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
            raise _make_depth_error(deepest)
    return content


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError, or ValueError if it is no JSON file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > LARGEST_JSON:
        raise ValueError(f"it has {status.st_size} bytes, more than {LARGEST_JSON}")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        placeholder = placeholders.find_in_file(path)
        raise (ValueError(f"it is {placeholder}") if placeholder else error) from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for anything else: a pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one if the file cannot be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def yaml_loader() -> Any:
    """Return a YAML loader class that builds only plain values, libyaml's if it is available."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _text_loader() -> Any:
    """Return a YAML loader that keeps the text of numbers: YAML 1.1 reads 010 as 8, 1:30 as 90."""

    loader = yaml_loader()
    resolvers = {
        first: [(tag, form) for tag, form in forms if tag not in _NUMBER_TAGS]
        for first, forms in loader.yaml_implicit_resolvers.items()
    }
    return type("TextLoader", (loader,), {"yaml_implicit_resolvers": resolvers})


def parse_yaml(text: str, numbers_as_text: bool = False) -> Any:
    """Parse a YAML text. Raises ValueError, without quoting the text, if it is invalid.

    numbers_as_text: return numbers and dates as they are written.
    """
    import yaml

    loader = _text_loader() if numbers_as_text else yaml_loader()
    try:
        if len(text.encode()) > LARGEST_YAML:
            raise ValueError(f"it has more than {LARGEST_YAML} bytes")
        _require_small(yaml.parse(text, Loader=loader))
        return _load_values(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = _CONTENT.sub("", error.problem or "")
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(where + problem) from None
    except (yaml.YAMLError, UnicodeError):
        raise ValueError("it contains characters that YAML does not allow") from None


def _load_values(text: str, loader: type) -> Any:
    """Return the values of a YAML text. Raises ValueError for `!!int x` and `2020-13-45`."""
    import yaml

    try:
        _require_keys_once(yaml.compose(text, Loader=loader))
        return yaml.load(text, Loader=loader)  # SafeLoader, or the same in C
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("a value is not of the type that it names or looks like") from None


def _require_keys_once(node: Any) -> None:
    """Raise MarkedYAMLError if the top-level mapping repeats a key: the last one would win."""
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
    open_collections: list[tuple[str | None, int]] = []  # their anchors and nodes so far
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, 1))
            if len(open_collections) > DEEPEST:
                raise _make_depth_error()
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
            size = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (open_ for open_, _ in open_collections):
                raise ValueError("an alias stands for a collection that contains it")
            anchor = None
            size = sizes.get(event.anchor, 1)
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if open_collections:
            open_collections[-1] = open_collections[-1][0], open_collections[-1][1] + size
            if open_collections[-1][1] > MOST_NODES:
                raise ValueError(f"it has more than {MOST_NODES:,} values, with aliases expanded")


def read_yaml(path: Path, numbers_as_text: bool = False) -> Any:
    """Parse a YAML or JSON file. Raises OSError, or ValueError as `parse_yaml` does."""
    with path.open("rb") as file:
        head = file.read(LARGEST_YAML + 1)
        if head.lstrip()[:1] == b"{" and len(head) > LARGEST_YAML:  # the manifest of many files
            return read_json(path)
    return parse_yaml(head.decode("utf-8"), numbers_as_text)


def leads_out(path: object) -> bool:
    """Return whether a path may lead out of its directory: absolute, with `..`, or not a path."""
    return (
        not isinstance(path, str)
        or not is_passable(path)
        or bool({"", ".", ".."} & {*path.split("/")})
    )


def is_passable(text: str) -> bool:
    """Return whether the system accepts a text as a path or a word of a command line."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def safe_join(root: Path, path: str) -> Path:
    """Return the path of a file that a record names below `root`, to write or delete it.

    Raises ArtifactError if the path leads out of `root`, by its parts or by links.
    """
    place = root / path if not leads_out(path) else root
    if (
        place == root
        or place.is_symlink()
        or not place.parent.resolve().is_relative_to(root.resolve())
    ):
        raise ArtifactError(
            f"a record in {root} names a file outside of it",
            found=repr(path),
            expected="a path inside that directory",
        )
    return place


def _make_depth_error(deepest: int = DEEPEST) -> ValueError:
    return ValueError(f"it is nested more than {deepest} levels deep")
