"""Place raw files of a Hub dataset where stage 01 reads them.

    raw_text/org--name/en/train.00000.json.gz    at the same path as in the repository
    raw_text/org--name/.hub/manifest.json        the list of files; hidden, so stage 01 skips it

The files are downloaded into `.hub.partial-…`, which is hidden too, and are moved to their places
when all are complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from lib.core import log, manifest, paths, placeholders, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.hub.repository import RemoteFile
from lib.models.directory import rename_in_errors

KIND = "raw/1"
_SHOWN = 5
_TEXTS = (".md", ".txt", ".htm", ".html", ".xhtml", ".xml")  # which may be pages


def locate_record(root: Path, name: str) -> Path:
    """Return the directory with the manifest of a dataset's downloaded files."""
    return root / paths.model_dir_name(name) / paths.RAW_RECORD


def list_fetched(target: Path) -> list[str]:
    """Return the paths that an earlier run downloaded, relative to the dataset's directory."""
    record = manifest.read_if_any(target)
    return [entry["path"].removeprefix("../") for entry in record["files"]] if record else []


def rename_paths_in_errors(target: Path) -> AbstractContextManager[None]:
    """Make error messages name the dataset's directory instead of the hidden one inside it."""
    hidden = target.resolve()
    return rename_in_errors(str(target.parent), hidden / "..", hidden, target / "..", target)


def merge_globs(
    target: Path, revision: str, include: list[str], overwrite: bool
) -> tuple[list[str], bool]:
    """Return the globs of this run merged with those of an earlier run, and whether any is new.

    With `overwrite`, or if the earlier run used another revision, the earlier globs are dropped.
    """
    record = manifest.read_if_any(target)
    earlier = record["identity"].get("options", {}) if record and record["kind"] == KIND else {}
    if overwrite or earlier.get("revision") != revision:
        return sorted(set(include)), False
    merged = sorted({*include, *earlier["include"]})
    return merged, merged != earlier["include"]


def warn_about_outdated(target: Path, files: Iterable[RemoteFile]) -> None:
    """Warn about files of an earlier run that this run does not ask for and will delete."""
    if outdated := sorted(set(list_fetched(target)) - {file.path for file in files}):
        log.warn(
            f"this run will delete {units.counted(len(outdated), 'file')} that an earlier run "
            f"downloaded and no --include matches: {units.join_names(outdated, _SHOWN)}"
        )


def require_no_conflicts(target: Path, files: Iterable[RemoteFile]) -> None:
    """Raise UsageError if a wanted path is taken by a file that no earlier run downloaded.

    A file with the right content is accepted: a run that was killed while it moved its files leaves
    such files.
    """
    ours = set(list_fetched(target))
    places = {file: target.parent / file.path for file in files if file.path not in ours}
    conflicts = {
        file.path
        for file, place in places.items()
        if os.path.lexists(place)
        and (not place.is_file() or place.is_symlink() or file.describe_difference(place))
    }
    for folder in {folder for file in places for folder in PurePosixPath(file.path).parents}:
        if (
            os.path.lexists(target.parent / folder)
            and not (target.parent / folder).is_dir()
            and folder.as_posix() not in ours
        ):
            conflicts.add(folder.as_posix())
    if conflicts:
        raise UsageError(
            f"stage 03 would overwrite {units.counted(len(conflicts), 'file')} in {target.parent} "
            "that it did not write",
            found=", ".join(sorted(conflicts)[:_SHOWN]),
            expected="no files at these paths, or files that stage 03 downloaded",
            hint="move the files away, or choose another --dst-root",
        )


def warn_about_placeholders(source: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Warn about pointers and error pages that the repository itself contains in place of data."""
    found = []
    for path in (entry["path"] for entry in entries):
        placeholder = placeholders.find_in_file(source / path)
        is_page = placeholder is not None and placeholder.kind == placeholders.ERROR_PAGE
        if placeholder and not (is_page and path.lower().endswith(_TEXTS)):
            found.append(f"{path} is {placeholder.description}")
    if found:
        log.warn(
            f"the repository contains {units.counted(len(found), 'file')} without data, which "
            f"stage 02 will report as failed:\n{units.join_lines(found, _SHOWN)}"
        )


def move_into_place(
    source: Path, target: Path, entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Move downloaded files from `source` to their final places; return their manifest entries.

    The paths in the entries are relative to `target`. If one file cannot be moved, the files moved
    so far are moved back.
    """
    moves = [(source / entry["path"], target.parent / entry["path"]) for entry in entries]
    completed = []
    try:
        for old, new in moves:
            new.parent.mkdir(parents=True, exist_ok=True)
            old.replace(new)
            old.unlink(missing_ok=True)  # rename keeps both names if they are links to one file
            completed.append((old, new))
    except OSError:
        for old, new in completed:
            new.replace(old)
        raise
    for directory in sorted((path for path in source.rglob("*") if path.is_dir()), reverse=True):
        directory.rmdir()
    return [{**entry, "path": f"../{entry['path']}"} for entry in entries]


def delete_outdated(target: Path, before: Iterable[str]) -> None:
    """Delete the files of an earlier manifest that the current one does not name."""
    for path in set(before) - set(list_fetched(target)):
        try:
            place = records.safe_join(target.parent, path)
        except ArtifactError:
            log.warn(f"{target.parent / path} is not deleted: its path leads through a link")
            continue
        place.unlink(missing_ok=True)
        for directory in place.parents:
            if directory == target.parent or any(directory.iterdir()):
                break
            directory.rmdir()
