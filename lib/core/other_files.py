"""Keep the files that a person has put into an artifact when --overwrite replaces it.

A manifest lists what a stage wrote. Everything else in the directory is moved beside it, into
`corpus.kept` (or `corpus.kept-2` …), with its relative path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lib.core import log, manifest, records, units
from lib.core.paths import MANIFEST

_SPLITS = "splits/"
_SPLIT_LIST = "files.jsonl"  # stage 01 lists the placed files here, not in the manifest
_NAMED = 5


def announce_kept(target: Path) -> None:
    """Print the files of a person in an artifact that is about to be replaced, and their place."""
    if paths := list_others(target.resolve()):
        log.info(
            f"--overwrite will move {units.counted(len(paths), 'file')} that no stage wrote from "
            f"{target} to {_choose_place(target)}: {units.join_names(paths, _NAMED)}"
        )


def keep_others(target: Path) -> None:
    """Move the files of a person out of an artifact, to a place beside it."""
    if not (paths := list_others(target)):
        return
    place = _choose_place(target)
    for name in paths:
        new_path = place / name
        new_path.parent.mkdir(parents=True, exist_ok=True)
        (target / name).rename(new_path)


def list_others(target: Path) -> list[str]:
    """Return the relative paths of the files in an artifact that its stage did not write."""
    content = manifest.read_if_any(target)
    if content is None:
        return []
    written = {MANIFEST, *(entry["path"] for entry in content["files"])}
    if content["kind"].startswith(_SPLITS):
        written |= set(_list_placed(target / _SPLIT_LIST))
    return sorted(name for name in _walk(target) if name not in written)


def _list_placed(path: Path) -> Iterator[str]:
    """Yield the relative paths of the files that stage 01 has placed."""
    try:
        with path.open(encoding="ascii") as lines:
            for line in lines:
                entry = records.parse_json(line)
                if "split" in entry:
                    yield f"{entry['split']}/{entry['path']}"
    except (OSError, ValueError, TypeError, KeyError):
        return  # the list is damaged: all files that it should name are kept


def _walk(target: Path) -> Iterator[str]:
    """Yield the relative paths of all files; a link to a directory is a file."""
    for folder, directories, files in os.walk(target):
        links = [name for name in directories if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            yield Path(folder, name).relative_to(target).as_posix()


def _choose_place(target: Path) -> Path:
    """Return an unused name beside the target."""
    place = target.with_name(f"{target.name}.kept")
    number = 1
    while os.path.lexists(place):
        number = number + 1
        place = target.with_name(f"{target.name}.kept-{number}")
    return place
