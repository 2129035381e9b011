"""Find the input files of stage 02: the splits of stage 01, or any directory of files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

from lib.core import commands, data_names, log, manifest, paths, records, units
from lib.core.data_names import TEST, VALIDATION
from lib.core.errors import ArtifactError, UsageError, is_missing
from lib.core.paths import escape_path
from lib.corpus import saved
from lib.corpus.row_options import InputRowOptions, RowOptions
from lib.corpus.scan import (
    Rules,
    TreeEntry,
    count_files,
    count_reasons,
    identify_files,
    recognise_artifact,
    scan_tree,
    select_taken,
)

SPLITS_KIND = "splits/1"
FILE_LIST = "files.jsonl"
_NAMED = 3
_LEFT_BY_A_STAGE = re.compile(rf"{re.escape(paths.PARTIAL)}|\.errors\.jsonl$")


@dataclass(frozen=True, slots=True)
class InputFile:
    """Describes a file to read.

    path: relative to the data folder. source: the path relative to the source directory of stage 01
    (in a plain directory, the same as `path`). mtime_ns: modification time in nanoseconds. split:
    "" in a plain directory. role: the split of a dataset that the path names (data_names.py), ""
    if it names none. Test data is not read.
    """

    path: str
    source: str
    bytes: int
    mtime_ns: int
    split: str = ""
    role: str = ""


def find_inputs(
    folder: Path, progress: bool, by_name: bool = True
) -> tuple[list[InputFile], list[TreeEntry]]:
    """Return the files of a data folder in the order of their rows, and the skipped entries.

    by_name: give each file the split that its name says, among training, validation and test data.
    Raises ArtifactError if the folder contains splits that are missing, unfinished or damaged, and
    UsageError if it is not a directory or contains no file to read.
    """
    if folder.is_file():
        raise UsageError(f"--data-folder {folder} is a file", expected="a directory")
    if _is_splits(folder):
        files = _list_split_files(folder)
        skipped = []
    else:
        entries = scan_tree(folder, Rules(), progress=progress)
        saved.require_readable(folder, "--data-folder", entries, by_name)
        files = [
            InputFile(entry.path, entry.path, entry.bytes, entry.mtime_ns)
            for entry in select_taken(entries)
        ]
        skipped = [entry for entry in entries if entry.skipped]
        log.info(f"{folder} is a plain directory (no splits of stage 01): reading its files")
    if not files:
        raise UsageError(
            f"no file to read in {folder}",
            expected="files that contain text",
            found=count_reasons(skipped) or "an empty directory",
        )
    return assign_roles(folder, files) if by_name else files, skipped


def assign_roles(folder: Path, files: Sequence[InputFile]) -> list[InputFile]:
    """Return the files with the splits of a dataset that their names say.

    Raises UsageError if all of them are named as validation or test data.
    """
    roles = data_names.assign_roles([file.source for file in files])
    named = [replace(file, role=roles.get(file.source, "")) for file in files]
    if alone := data_names.find_unpaired([file.source for file in files], roles):
        log.warn(
            f"{units.counted_are(len(alone), 'file')} named as validation or test data and will be "
            f"trained on, since no training data stands beside: {units.join_names(alone, _NAMED)}. "
            f"To leave such a file out, run stage 01 with --exclude {Path(alone[0]).name}"
        )
    if all(file.role in (VALIDATION, TEST) for file in named):
        raise UsageError(
            f"the names in {folder} say that it contains no training data",
            found="; ".join(f"{role}: {names}" for role, names in describe_roles(named).items()),
            hint="to train on these files:",
            run=commands.as_typed("--splits-by-name", "off"),
        )
    return named


def add_validation(row_options: RowOptions, files: Sequence[InputFile]) -> InputRowOptions:
    """Return the options of rows for these files: with a validation split if one is named so."""
    values = {field.name: getattr(row_options, field.name) for field in fields(RowOptions)}
    has_validation = any(file.role == VALIDATION for file in files)
    return InputRowOptions(**values, has_validation=has_validation)


def describe_roles(files: Sequence[InputFile]) -> dict[str, str]:
    """Return the number and the first names of the files by the split that they name."""
    return name_roles({file.source: file.role for file in files if file.role})


def describe_size(files: Sequence[InputFile]) -> str:
    """Return the number of files and their size."""
    return f"{units.counted(len(files), 'file')}, {units.size(sum(file.bytes for file in files))}"


def name_roles(roles: Mapping[str, str]) -> dict[str, str]:
    """Return the number and the first names of files by their split. roles: the split by path."""
    by_role: dict[str, list[str]] = {}
    for path, role in roles.items():
        by_role.setdefault(role, []).append(escape_path(path))
    return {
        role: f"{units.counted(len(names), 'file')} ({units.join_names(names, _NAMED)})"
        for role, names in by_role.items()
    }


def describe_splits(files: Sequence[InputFile], validation_percent: float) -> dict[str, str]:
    """Return the lines of the plan about the splits: where validation comes from, and test data."""
    named = describe_roles(files).get(VALIDATION)
    share = f"{validation_percent:g} % of the {'other ' if named else ''}rows"
    origins = [*([named] if named else []), *([share] if validation_percent else [])]
    splits = f"train, validation: {' and '.join(origins)}" if origins else "train"
    return {"splits": splits} | describe_left_out(files)


def describe_left_out(files: Sequence[InputFile]) -> dict[str, str]:
    """Return the line of the plan about test data, with its label; {} if there is none."""
    named = describe_roles(files).get(TEST)
    remedy = "--splits-by-name off trains on all files"
    return {"left out": f"test data: {named}; {remedy}"} if named else {}


def identify_inputs(files: Sequence[InputFile]) -> dict[str, object]:
    """Return the identity of the input files, and of the validation and test data among them."""
    named = [file for file in files if file.role in (VALIDATION, TEST)]
    identity = identify_files(files)
    if named:
        hasher = hashlib.sha256()
        for file in named:
            hasher.update(b"%b\0%b\0" % (file.role.encode(), os.fsencode(file.source)))
        counts = Counter(file.role for file in named)
        identity["named_splits"] = {**counts, "fingerprint": hasher.hexdigest()[:16]}
    return identity


def require_raw(folder: Path, option: str) -> None:
    """Raise UsageError if a directory is the output of a stage, or contains only such outputs.

    option: the option with the directory. Raises ArtifactError if the directory does not exist and
    its name does not contain "split"; the caller reports missing splits itself.
    """
    if not folder.exists() and "split" not in folder.name:
        raise ArtifactError(
            f"{option} {folder} does not exist",
            expected="splits of stage 01, or a directory of raw files",
        )
    if kind := recognise_artifact(folder):
        raise UsageError(
            f"{option} {folder} is a {kind}, not raw text", **_suggest_remedy([folder], kind)
        )
    members = [
        path
        for path in sorted(folder.iterdir() if folder.is_dir() else [])
        if not path.name.startswith(".") and not _LEFT_BY_A_STAGE.search(path.name)
    ]
    kinds = [recognise_artifact(path) for path in members]
    if kinds and all(kinds):
        raise UsageError(
            f"{option} {folder} contains {' and '.join(sorted({f'{k}s' for k in kinds}))}"
            ", but no raw text",
            found=", ".join(path.name for path in members),
            **_suggest_remedy(members, kinds[0]),
        )


def _suggest_remedy(artifacts: Sequence[Path], kind: str) -> dict[str, str]:
    """Return the parts of an error that suggest what to do with these artifacts instead."""
    if kind != "dataset":
        return {"expected": "splits of stage 01, or a directory of raw files"}
    return {
        "hint": "train on it:" if len(artifacts) == 1 else "train on one, such as the first:",
        "run": commands.train("-e", "first", "-d", artifacts[0]),
    }


def _is_splits(folder: Path) -> bool:
    """Return whether a folder contains splits; ArtifactError if they are missing or unfinished."""
    # Raw data may contain a manifest.json too; only our stages write the key `stage`.
    is_artifact = "stage" in (manifest.read_if_any(folder) or {})
    looks_unfinished = paths.PARTIAL in folder.name or (
        (folder / FILE_LIST).exists() and any(folder.glob("split_[0-9]*"))
    )
    if folder.is_dir() and not is_artifact and not looks_unfinished:
        return False
    organise = "01_organize_data.py", "--dst-root", folder
    if Path("raw_text").is_dir():  # the default --src-dir of stage 01
        remedy = {"run": commands.script(*organise)}
    else:
        command = commands.script(*organise, "--src-dir", "DIR")
        remedy = {"hint": f"pass any directory of files, or make splits of DIR: {command}"}
    manifest.read_manifest(folder, SPLITS_KIND, "the splits", **remedy)
    return True


def _list_split_files(folder: Path) -> list[InputFile]:
    """Return the files that stage 01 listed; ArtifactError if a file or the list is damaged."""
    content = manifest.read_manifest(folder, SPLITS_KIND, "the splits")
    remedy = manifest.make_remedy(content, "--overwrite", dst_root=folder)
    manifest.require_intact(folder, content, "the splits", **remedy, deep=True)
    files = []
    missing = []
    changed = 0
    splits = content["summary"].get("splits")
    if not isinstance(splits, dict) or any(map(records.leads_out, splits)):
        raise ArtifactError(f"{folder / paths.MANIFEST} is damaged", **remedy)
    with (folder / FILE_LIST).open(encoding="ascii") as lines:
        for line in lines:
            try:
                entry = records.parse_json(line)
                if "split" not in entry:
                    continue
                split = str(entry["split"])
                size = int(entry["bytes"])
                path = f"{split}/{entry['path']}"
            except (ValueError, TypeError, KeyError):
                raise ArtifactError(f"{folder / FILE_LIST} is damaged", **remedy) from None
            try:
                if records.leads_out(path) or split not in splits:
                    raise FileNotFoundError(errno.ENOENT, "", path)
                info = (folder / path).stat()
            except OSError as error:
                if not is_missing(error):
                    raise
                missing.append(path)
                continue
            changed += info.st_size != size
            files.append(InputFile(path, entry["path"], info.st_size, info.st_mtime_ns, split))
    if missing:
        raise ArtifactError(
            f"the splits {folder} are damaged",
            **remedy,
            found=f"{len(missing):,} of {len(missing) + len(files):,} files in {FILE_LIST} are "
            f"missing, the first is {escape_path(missing[0])}",
        )
    if changed:
        log.warn(
            f"{units.counted(changed, 'file')} changed after stage 01; stage 02 reads the "
            "current content"
        )
    present = sum(count_files(f"{folder}/{split}") for split in splits)
    if extra := present - len(files):
        log.warn(
            f"{folder} contains {units.counted(extra, 'file')} that {FILE_LIST} does not list; "
            "they are not read (add them to the source and run stage 01 again)"
        )
    return sorted(files, key=lambda file: os.fsencode(file.path))


def group_by_split(files: Sequence[InputFile]) -> dict[str, list[InputFile]]:
    """Return the files by split. The files must be sorted by split."""
    return {split: list(members) for split, members in groupby(files, lambda file: file.split)}
