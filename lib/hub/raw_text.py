"""Puts raw files of a dataset on the Hub where stage 01 finds them.

    raw_text/org--name/en/train.00000.json.gz    as in the repository
    raw_text/org--name/.hub/manifest.json        what they are; hidden, so no stage takes it as text

They arrive in `.hub.partial-…`, hidden too, and move to their places once all are whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from lib.core import log, manifest, paths, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.hub.repository import RemoteFile
from lib.models.directory import rename_in_errors

KIND = "raw/1"
_SHOWN = 5


def locate(root: Path, name: str) -> Path:
    """Return the directory whose manifest says what was fetched of a dataset."""
    return root / paths.model_dir_name(name) / paths.RAW_RECORD


def list_earlier(target: Path) -> list[str]:
    """Return the paths that an earlier run fetched, relative to the dataset's directory."""
    made = manifest.read_if_any(target)
    return [entry["path"].removeprefix("../") for entry in made["files"]] if made else []


def name_errors(target: Path) -> AbstractContextManager[None]:
    """Let errors name the dataset's directory, not the hidden one in it."""
    hidden = target.resolve()
    return rename_in_errors(str(target.parent), hidden / "..", hidden, target / "..", target)


def join_globs(
    target: Path, revision: str, include: list[str], overwrite: bool
) -> tuple[list[str], bool]:
    """Return these globs with those of an earlier run, and whether they are more than it had.

    The files of another revision are not mixed with these; `overwrite` has these alone.
    """
    made = manifest.read_if_any(target)
    before = made["identity"].get("options", {}) if made and made["kind"] == KIND else {}
    if overwrite or before.get("revision") != revision:
        return sorted(set(include)), False
    both = sorted({*include, *before["include"]})
    return both, both != before["include"]


def warn_of_outdated(target: Path, wanted: Iterable[RemoteFile]) -> None:
    """Say which files of an earlier run are not among those wanted, and will be deleted."""
    if outdated := sorted(set(list_earlier(target)) - {file.path for file in wanted}):
        log.warn(
            f"{units.counted(len(outdated), 'file')} of the earlier run that this one "
            f"does not ask for will be deleted: {units.join_names(outdated, _SHOWN)}"
        )


def require_free(target: Path, wanted: Iterable[RemoteFile]) -> None:
    """Raise UsageError when files that no run of ours put there are in the way of those wanted.

    A run that was killed while it moved them left whole ones.
    """
    ours = set(list_earlier(target))
    places = {file: target.parent / file.path for file in wanted if file.path not in ours}
    in_the_way = {
        file.path
        for file, place in places.items()
        if os.path.lexists(place)
        and (not place.is_file() or place.is_symlink() or file.differs(place))
    }
    for folder in {folder for file in places for folder in PurePosixPath(file.path).parents}:
        if (
            os.path.lexists(target.parent / folder)
            and not (target.parent / folder).is_dir()
            and folder.as_posix() not in ours
        ):
            in_the_way.add(folder.as_posix())
    if in_the_way:
        raise UsageError(
            f"{units.counted(len(in_the_way), 'file')} in the way in {target.parent}",
            found=", ".join(sorted(in_the_way)[:_SHOWN]),
            expected="files that this stage put there, or none",
            hint="move them away, or choose another --dst-root",
        )


def put_in_place(
    arrived: Path, target: Path, entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Move whole files from where they arrived to their places; return the manifest's entries.

    The entries' paths lead from the target to the files. When one cannot be moved, those that were
    come back.
    """
    moves = [(arrived / entry["path"], target.parent / entry["path"]) for entry in entries]
    moved = []
    try:
        for there, place in moves:
            place.parent.mkdir(parents=True, exist_ok=True)
            there.replace(place)
            there.unlink(missing_ok=True)  # two links to one file are left alone by rename
            moved.append((there, place))
    except OSError:
        for there, place in moved:
            place.replace(there)
        raise
    for directory in sorted((path for path in arrived.rglob("*") if path.is_dir()), reverse=True):
        directory.rmdir()
    return [{**entry, "path": f"../{entry['path']}"} for entry in entries]


def remove_outdated(target: Path, before: Iterable[str]) -> None:
    """Delete the files of an earlier manifest that the present one does not name."""
    for path in set(before) - set(list_earlier(target)):
        try:
            place = records.safe_join(target.parent, path)
        except ArtifactError:
            log.warn(f"{target.parent / path} is left alone: it lies behind a link")
            continue
        place.unlink(missing_ok=True)
        for directory in place.parents:
            if directory == target.parent or any(directory.iterdir()):
                break
            directory.rmdir()
