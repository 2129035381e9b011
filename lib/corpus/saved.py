"""Recognise directories that `save_to_disk` of the library `datasets` has written.

Their JSON files contain metadata and no rows. Splits whose names do not say what they are for must
not be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lib.core import commands, data_names, records
from lib.core.data_names import TRAIN
from lib.core.errors import ArtifactError, UsageError

_SPLITS = "dataset_dict.json"
_INFO = "dataset_info.json"
_STATE = "state.json"
_KEYS = {_SPLITS: "splits", _INFO: "features", _STATE: "_data_files"}
_TOKENS = "input_ids"
_STRINGS = ("string", "large_string", "string_view")
_SHOWN = 6
_SHOWN_CHARACTERS = 100


class ScannedFile(Protocol):
    """Describes a file of a scan, and why it is skipped."""

    path: str
    skipped: str


def is_description(root: Path, place: str) -> bool:
    """Return whether a file is metadata of a saved dataset, or a cache file of `Dataset.map`.

    place: path relative to the root.
    """
    name = place.rpartition("/")[2]
    is_cache = name.startswith("cache-") and name.endswith(".arrow")
    if name not in _KEYS and not is_cache:
        return False
    path = root / place
    is_saved = _KEYS[_STATE] in records.read_mapping(path.parent / _STATE)
    if is_cache and not is_saved:  # beside the files that `load_dataset` has cached
        is_saved = _KEYS[_INFO] in records.read_mapping(path.parent / _INFO)
    if is_cache or _KEYS[name] not in records.read_mapping(path):
        return is_cache and is_saved
    return name != _INFO or is_saved or any(path.parent.glob("*.arrow"))


def require_readable(
    folder: Path, option: str, entries: Sequence[ScannedFile], by_name: bool = True
) -> None:
    """Raise UsageError if splits of a dataset would be mixed, or if it is already tokenised.

    option: the option with the folder. entries: the scan of the folder. by_name: the names of files
    decide to which split they belong; otherwise all of them are for training. Raises ArtifactError
    if the list of splits is damaged.
    """
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        if name == _SPLITS and is_description(folder, entry.path):
            if by_name:
                _require_named_splits(folder, option, parent, entries)
        elif name == _INFO and _is_read(parent, entries) and is_description(folder, entry.path):
            _require_text(folder / parent)


def _is_read(parent: str, entries: Iterable[ScannedFile]) -> bool:
    """Return whether stages 01 and 02 read an Arrow file that is directly in this directory."""
    return any(
        not entry.skipped
        and entry.path.endswith(".arrow")
        and entry.path.rpartition("/")[0] == parent
        for entry in entries
    )


def _require_named_splits(
    folder: Path, option: str, parent: str, entries: Iterable[ScannedFile]
) -> None:
    """Raise UsageError if several splits of a DatasetDict would be read whose use is unclear.

    It is clear if each name says training, validation or test, and one says training. Raises
    ArtifactError if its metadata does not name the splits.
    """
    names = records.read_mapping(folder / parent / _SPLITS)[_KEYS[_SPLITS]]
    splits = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if not splits or splits != names:
        raise ArtifactError(
            f"{folder / parent / _SPLITS} is damaged",
            expected="a list of split names",
            found=str(names)[:_SHOWN_CHARACTERS],
        )
    starts = {f"{parent}/{name}/" if parent else f"{name}/": name for name in splits}
    paths = [entry.path for entry in entries if not entry.skipped]
    roles = data_names.assign_roles(paths)
    role_of = {
        name: roles.get(path, "")
        for path in paths
        for start, name in starts.items()
        if path.startswith(start)
    }
    if len(role_of) > 1 and ("" in role_of.values() or TRAIN not in role_of.values()):
        first = next(name for name in (TRAIN, *splits) if name in role_of)
        raise _make_splits_error(folder / parent, option, first, role_of)


def _make_splits_error(directory: Path, option: str, first: str, read: Iterable[str]) -> UsageError:
    """Return the error for splits that would be mixed.

    first: the split in the command that the error suggests. read: the splits that would be mixed.
    """
    return UsageError(
        f"{directory} contains several splits of a dataset, which would all be trained on",
        found=", ".join(sorted(read)),
        expected="a single split",
        hint="read one split:",
        run=commands.as_typed(option, directory / first),
    )


def _require_text(directory: Path) -> None:
    """Raise UsageError if a saved dataset contains tokens but no text."""
    features = records.read_mapping(directory / _INFO)["features"]
    if not isinstance(features, dict) or _TOKENS not in features:
        return
    if not _has_strings(features):
        names = ", ".join([*features][:_SHOWN])
        raise UsageError(
            f"{directory} is already tokenised and contains no text",
            found=f"columns {names}",
            expected="the original text or conversations",
        )


def _has_strings(features: Any) -> bool:
    """Return whether features contain a string at any depth, such as in a list of messages."""
    if isinstance(features, dict):
        is_text = features.get("dtype") in _STRINGS or features.get("_type") == "Json"
        return is_text or _has_strings([*features.values()])
    return isinstance(features, list) and any(map(_has_strings, features))
