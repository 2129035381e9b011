"""The files of a dataset: which there are, what they hold, and what identifies their content."""

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
    """Return the files that make up a dataset: manifest, shards and what describes them."""
    if path.is_file():
        return [path]
    homes = [path, *(path / name for name in SPLITS)]
    return [home / name for home in homes for name in (*_DESCRIBED, MANIFEST)] + sorted(
        shard for home in homes for shard in home.glob("*.arrow")
    )


def require_dataset(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a dataset, None of one made elsewhere; raises for anything else."""
    if path.is_file():
        if path.suffix == arrow_files.SUFFIX:
            return None
        raise dataset_errors.make_raw_text_error(path, f"{path} is a file, and not a dataset")
    content = manifest.read_if_any(path)
    kind = manifest.kind_of(path)
    if kind.startswith("splits/"):
        raise dataset_errors.make_raw_text_error(
            path, f"{path} holds splits of stage 01, and is not a dataset yet"
        )
    if kind and not kind.startswith("dataset/"):
        raise UsageError(
            f"{path} is not a dataset", expected="one that stage 02 has made", found=f"kind {kind}"
        )
    if content is not None:
        manifest.check(
            path, content, "dataset", **manifest.remedy(content, "--overwrite", save_dir=path)
        )
    elif (path / MANIFEST).exists():
        raise ArtifactError(
            f"{path / MANIFEST} is damaged",
            hint=f"move {path} away, and build it again by stage 02",
        )
    elif (
        any(".partial-" in part for part in path.resolve().parts[-2:])
        or (path / _MARK_OF_OURS).exists()
    ):
        raise ArtifactError(
            f"dataset {path} is not finished (no {MANIFEST})",
            found="what an interrupted stage 02, or a copy of a part, leaves",
            hint="use it under its final name, when stage 02 has finished it",
        )
    return content


def find_homes(path: Path) -> dict[str, Path]:
    """Return the split directories of a DatasetDict, or the directory itself as `train`.

    Empty where only Arrow files are there, and nothing that says what they are.
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
    there = sorted(p.name for p in path.iterdir())
    found = ", ".join(there[:4]) + (", …" if there[4:] else "")
    if "config.json" in there:
        raise UsageError(
            f"{path} is not a dataset directory",
            found=found,
            expected="what stage 02 or `Dataset.save_to_disk` writes",
        )
    if inside := _list_datasets(path):
        raise UsageError(
            f"{path} is not a dataset, but holds {'several' if inside[1:] else 'one'}",
            found=", ".join(p.name for p in inside),
            hint=f"-d takes one of them, {inside[0].name} for example:"
            if inside[1:]
            else "-d takes it:",
            run=commands.replaced(dataset_errors.OPTION, path, inside[0]),
        )
    raise dataset_errors.make_raw_text_error(path, f"{path} is not a dataset directory", found)


def _list_datasets(directory: Path) -> list[Path]:
    """Return the datasets that lie directly in a directory; a split to train on comes first."""
    inside = [
        path
        for path in sorted(directory.iterdir())
        if manifest.kind_of(path).startswith("dataset/")
        or ((path / "state.json").is_file() and (path / "dataset_info.json").is_file())
    ]
    return sorted(inside, key=lambda path: path.name != "train")


def find_splits(path: Path, homes: dict[str, Path]) -> dict[str, list[Path]]:
    """Return the shards of each split in order; raises for one that lacks any. homes: see above."""
    return {name: _list_shards(home) for name, home in homes.items()} or _find_plain_splits(path)


def require_format(path: Path, homes: dict[str, Path], splits: dict[str, list[Path]]) -> str:
    """Return the format of a dataset, TEXT or CHAT; UsageError where its splits have several."""
    formats = {_detect_format(home) for home in homes.values()} or {
        _detect_plain_format(shard) for shards in splits.values() for shard in shards
    }
    if len(formats) > 1:
        raise UsageError(
            f"{path} holds both text and conversations", expected="one of them in all its splits"
        )
    return formats.pop()


def require_chat_columns(path: Path, splits: dict[str, list[Path]]) -> None:
    """Raise UsageError if the rows of a chat dataset that was made elsewhere have other columns."""
    for shard in (shard for shards in splits.values() for shard in shards):
        if problem := columns.describe_chat_problem(shard):
            raise dataset_errors.make_chats_error(
                path,
                f"{path} is not a chat dataset as stage 02 writes it",
                f"{shard.name}: {problem}",
            )


def _find_plain_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split; UsageError where there is none to train on."""
    found = arrow_files.find_splits(path)
    if "train" not in found:
        raise UsageError(
            f"{path} has no file of a split `train`",
            found=", ".join(file.name for files in found.values() for file in files),
        )
    return {name: found[name] for name in SPLITS if name in found}


def _detect_plain_format(shard: Path) -> str:
    """Return the format of an Arrow file; UsageError where it is neither text nor conversations."""
    kinds = columns.read_column_types(shard)
    if columns.detect_format(kinds) != CHAT and (lacks := columns.describe_text_problem(kinds)):
        raise dataset_errors.make_columns_error(
            shard, f"{shard} has no column `text` of strings", kinds, lacks
        )
    return columns.detect_format(kinds)


def _detect_format(directory: Path) -> str:
    """Return the format of a split; UsageError where it is neither text nor conversations."""
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
    """Return the shards of a split in order; ArtifactError where one is missing."""
    try:
        named = [entry["filename"] for entry in _read_json(directory / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise _make_damage_error(directory / "state.json") from None
    if not all(isinstance(name, str) for name in named):
        raise _make_damage_error(directory / "state.json")
    there = {path.name for path in directory.glob("*.arrow") if path.is_file()}  # and nowhere else
    if missing := [name for name in named if name not in there]:
        raise ArtifactError(
            f"dataset {directory} is damaged",
            found=f"{len(missing)} of {len(named)} shards are missing, {missing[0]} the first",
        )
    return [directory / name for name in named]


def _make_damage_error(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is damaged", expected="what `save_to_disk` writes")


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
    """Identify a dataset of stage 02 by the digests of its shards."""
    arrow = [e for e in content["files"] if e["path"].endswith(".arrow")]
    return hashing.fingerprint([[e["path"], e["digest"]] for e in arrow])


def fingerprint_foreign(homes: dict[str, Path], splits: dict[str, list[Path]]) -> str:
    """Identify shards that have no digests by names, sizes, both ends and datasets' own mark."""
    seen: list[Any] = []
    for name, shards in splits.items():
        home = homes.get(name)
        seen.append([name, (home / "state.json").read_text(encoding="utf-8") if home else ""])
        seen += (
            [shard.name, shard.stat().st_size, hashing.ends_digest(shard, _ENDS_BYTES)]
            for shard in (sorted(home.glob("*.arrow")) if home else shards)
        )
    return hashing.fingerprint(seen)
