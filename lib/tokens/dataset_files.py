"""Find, check and fingerprint the files of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.core import arrow_files, commands, hashing, manifest, reading, records
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST
from lib.tokens import columns, dataset_errors
from lib.tokens.columns import CHAT

SPLITS = ("train", "validation")
_MARK_OF_OURS = "errors.jsonl"  # stage 02 writes it beside the shards
_DESCRIBED = ("dataset_dict.json", "dataset_info.json", "state.json")
_ENDS_BYTES = 1 << 20


def list_files(path: Path) -> list[Path]:
    """Return the files of a dataset: manifest, shards and their descriptions."""
    if path.is_file():
        return [path]
    homes = [path, *(path / name for name in SPLITS)]
    return [home / name for home in homes for name in (*_DESCRIBED, MANIFEST)] + sorted(
        shard for home in homes for shard in home.glob("*.arrow")
    )


def require_dataset(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a stage 02 dataset, or None for a foreign one.

    Raises UsageError if the path is not a dataset, and ArtifactError if it is damaged.
    """
    if path.is_file():
        if path.suffix == arrow_files.SUFFIX:
            return None
        raise dataset_errors.make_raw_text_error(path, f"{path} is a file, not a dataset")
    content = manifest.read_if_any(path)
    kind = manifest.kind_of(path)
    if kind.startswith("splits/"):
        raise dataset_errors.make_raw_text_error(
            path, f"{path} contains splits of stage 01 and is not a dataset yet"
        )
    if kind and not kind.startswith("dataset/"):
        raise UsageError(
            f"{path} is not a dataset", expected="a dataset made by stage 02", found=f"kind {kind}"
        )
    if content is not None:
        manifest.check(
            path, content, "dataset", **manifest.remedy(content, "--overwrite", save_dir=path)
        )
    elif (path / MANIFEST).exists():
        raise ArtifactError(
            f"{path / MANIFEST} is damaged",
            hint=f"move {path} away and build it again with stage 02",
        )
    elif (
        any(".partial-" in part for part in path.resolve().parts[-2:])
        or (path / _MARK_OF_OURS).exists()
    ):
        raise ArtifactError(
            f"dataset {path} is not finished (no {MANIFEST})",
            found="leftovers of an interrupted stage 02, or an incomplete copy",
            hint="use its final name after stage 02 has finished",
        )
    return content


def find_homes(path: Path) -> dict[str, Path]:
    """Return the split directories of a DatasetDict, or the directory itself as `train`.

    Returns an empty dict if the directory contains only Arrow files without a description.
    """
    if (path / "dataset_dict.json").exists():
        named = _read_json(path / "dataset_dict.json").get("splits", [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise _make_damage_error(path / "dataset_dict.json")
        if "train" not in named:
            raise UsageError(
                f"dataset {path} has no split `train`", found=f"splits {', '.join(named)}"
            )
        return {name: path / name for name in SPLITS if name in named}
    if (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return {"train": path}
    if not (path / "state.json").exists() and arrow_files.find_splits(path):
        return {}
    names = sorted(p.name for p in path.iterdir())
    found = ", ".join(names[:4]) + (", …" if names[4:] else "")
    if "config.json" in names:
        raise UsageError(
            f"{path} is not a dataset directory",
            found=found,
            expected="a directory that stage 02 or `Dataset.save_to_disk` wrote",
        )
    if datasets := _list_datasets(path):
        raise UsageError(
            f"{path} is not a dataset but contains {'several' if datasets[1:] else 'one'}",
            found=", ".join(p.name for p in datasets),
            hint=f"choose one with -d, for example {datasets[0].name}:"
            if datasets[1:]
            else "choose it with -d:",
            run=commands.replaced(dataset_errors.OPTION, path, datasets[0]),
        )
    raise dataset_errors.make_raw_text_error(path, f"{path} is not a dataset directory", found)


def _list_datasets(directory: Path) -> list[Path]:
    """Return the datasets directly in a directory, with `train` first."""
    datasets = [
        path
        for path in sorted(directory.iterdir())
        if manifest.kind_of(path).startswith("dataset/")
        or ((path / "state.json").is_file() and (path / "dataset_info.json").is_file())
    ]
    return sorted(datasets, key=lambda path: path.name != "train")


def find_splits(path: Path, homes: dict[str, Path]) -> dict[str, list[Path]]:
    """Return the shards of each split in order. Raise ArtifactError if one is missing.

    homes: the result of `find_homes`.
    """
    return {name: _list_shards(home) for name, home in homes.items()} or _find_plain_splits(path)


def require_format(path: Path, homes: dict[str, Path], splits: dict[str, list[Path]]) -> str:
    """Return the format of a dataset, TEXT or CHAT. Raise UsageError if its splits differ."""
    formats = {_detect_format(home) for home in homes.values()} or {
        _detect_plain_format(shard) for shards in splits.values() for shard in shards
    }
    if len(formats) > 1:
        raise UsageError(
            f"{path} contains both text and conversations", expected="the same format in all splits"
        )
    return formats.pop()


def require_chat_columns(path: Path, splits: dict[str, list[Path]]) -> None:
    """Raise UsageError if the columns of a foreign chat dataset differ from those of stage 02."""
    for shard in (shard for shards in splits.values() for shard in shards):
        if problem := columns.describe_chat_problem(shard):
            raise dataset_errors.make_chats_error(
                path,
                f"{path} is not a chat dataset in the form of stage 02",
                f"{shard.name}: {problem}",
            )


def _find_plain_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split. Raise UsageError if there is no split `train`."""
    found = arrow_files.find_splits(path)
    if "train" not in found:
        raise UsageError(
            f"{path} contains no file of a split `train`",
            found=", ".join(file.name for files in found.values() for file in files),
        )
    return {name: found[name] for name in SPLITS if name in found}


def _detect_plain_format(shard: Path) -> str:
    """Return the format of an Arrow file. Raise UsageError if it is neither text nor chat."""
    kinds = columns.read_column_types(shard)
    if columns.detect_format(kinds) != CHAT and (lacks := columns.describe_text_problem(kinds)):
        raise dataset_errors.make_columns_error(
            shard, f"{shard} has no column `text` of strings", kinds, lacks
        )
    return columns.detect_format(kinds)


def _detect_format(directory: Path) -> str:
    """Return the format of a split. Raise UsageError if it is neither text nor chat."""
    features = _read_json(directory / "dataset_info.json").get("features") or {}
    if not isinstance(features, dict):
        raise _make_damage_error(directory / "dataset_info.json")
    kinds = {
        name: str(feature.get("dtype") or feature.get("_type", ""))
        if isinstance(feature, dict)
        else "a list"
        for name, feature in features.items()
    }
    if columns.detect_format(kinds) != CHAT and (lacks := columns.describe_text_problem(kinds)):
        raise dataset_errors.make_columns_error(
            directory, f"dataset {directory} has no column `text` of strings", kinds, lacks
        )
    return columns.detect_format(kinds)


def _list_shards(directory: Path) -> list[Path]:
    """Return the shards of a split in order. Raise ArtifactError if one is missing."""
    try:
        named = [entry["filename"] for entry in _read_json(directory / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise _make_damage_error(directory / "state.json") from None
    if not all(isinstance(name, str) for name in named):
        raise _make_damage_error(directory / "state.json")
    # Only files directly in the directory count: state.json may not point elsewhere.
    existing = {path.name for path in directory.glob("*.arrow") if path.is_file()}
    if missing := [name for name in named if name not in existing]:
        raise ArtifactError(
            f"dataset {directory} is damaged",
            found=f"{len(missing)} of {len(named)} shards are missing, first {missing[0]}",
        )
    return [directory / name for name in named]


def _make_damage_error(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is damaged", expected="a file that `save_to_disk` wrote")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = reading.with_retries(lambda: records.read_json(path), path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"dataset {path.parent} is damaged", found=f"no readable {path.name} ({error})"
        ) from None
    if not isinstance(content, dict):
        raise _make_damage_error(path)
    return content


def fingerprint_ours(content: dict[str, Any]) -> str:
    """Return the fingerprint of a stage 02 dataset, from the digests of its shards."""
    arrow = [e for e in content["files"] if e["path"].endswith(".arrow")]
    return hashing.fingerprint([[e["path"], e["digest"]] for e in arrow])


def fingerprint_foreign(homes: dict[str, Path], splits: dict[str, list[Path]]) -> str:
    """Return the fingerprint of a foreign dataset.

    It covers the names, sizes and both ends of the shards, and the fingerprint that `datasets`
    stored in state.json.
    """
    seen: list[Any] = []
    for name, shards in splits.items():
        home = homes.get(name)
        seen.append([name, (home / "state.json").read_text(encoding="utf-8") if home else ""])
        seen += (
            [shard.name, shard.stat().st_size, hashing.ends_digest(shard, _ENDS_BYTES)]
            for shard in (sorted(home.glob("*.arrow")) if home else shards)
        )
    return hashing.fingerprint(seen)
