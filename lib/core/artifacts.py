"""Find, check and fingerprint the files of tokenizers and datasets, for all their readers.

A dataset was made by stage 02 or by another program. The latter wrote a directory with
`save_to_disk`, or Arrow files in the cache of the library `datasets`. The names of such files
contain the split, as in `wikitext-train.arrow` and `json-validation-00000-of-00002.arrow`. A
file with another name, or a single file given as the dataset, belongs to train. `cache-….arrow`
files are cached results of `Dataset.map`, and ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import data_names, hashing, manifest, placeholders, reading, records
from lib.core.data_names import TRAIN, VALIDATION
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
OLD_CHAT_TEMPLATE = "chat_template.json"
# A directory with one of these contains a tokenizer.
VOCABULARIES = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt")
# Every file from which transformers reads a tokenizer. None is a pickle or runs as code.
TOKENIZER_FILES = (*VOCABULARIES, *_SETTINGS, CHAT_TEMPLATE, OLD_CHAT_TEMPLATE)
# Further files of tokenizers, which only other programs read. They are copied byte for byte.
OTHER_TOKENIZER_FILES = (
    *("tokenizer.model.v3", "tokenizer.model.v7", "tiktoken.model", "qwen.tiktoken"),
    *("added_tokens.txt", "normalizer.json", "bpe.codes"),
)
# The directory with the named chat templates of a model, such as tool_use.jinja.
NAMED_TEMPLATES = "additional_chat_templates"
# The files that decide token ids, in the order in which a fingerprint lists them.
_FINGERPRINTED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "vocab.txt",
)


def list_tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of the tokenizer in a directory, [] if there is no vocabulary."""
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    return files if any(path.name in VOCABULARIES for path in files) else []


def list_named_templates(directory: Path) -> list[str]:
    """Return the relative paths of the named chat templates of a model."""
    return [
        f"{NAMED_TEMPLATES}/{path.name}"
        for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
        if path.is_file()
    ]


def tokenizer_fingerprint(directory: Path) -> str:
    """Identify a tokenizer by the content of its files. Raises ArtifactError if there is none."""
    present = [path.name for path in list_tokenizer_files(directory)]
    if not present:
        raise ArtifactError(
            f"no tokenizer in {directory}", expected="tokenizer.json or tokenizer.model"
        )
    vocabularies = [name for name in VOCABULARIES if name in present]
    names = [name for name in _FINGERPRINTED if name in present]
    if not set(vocabularies) & {*_FINGERPRINTED}:
        # Adding them in every case would change the identity of existing token stores.
        names += vocabularies
    return hashing.fingerprint(
        [[name, hashing.file_digest(directory / name, "sha256")] for name in names]
    )


SPLITS = (TRAIN, VALIDATION)
_MARK_OF_STAGE_02 = "errors.jsonl"  # stage 02 writes it beside the shards
_DATASET_DICT = "dataset_dict.json"
_DATASET_INFO = "dataset_info.json"
_STATE = "state.json"
_ENDS_BYTES = 1 << 20
_ARROW = ".arrow"
_MAP_RESULTS = "cache-"
_FILE_FORMAT = b"ARROW1"  # other files are streams, as `datasets` writes them


class NotADataset(UsageError):
    """Raised for a path that is not itself a dataset. datasets: the datasets directly in it."""

    def __init__(self, problem: str, found: str = "", datasets: Sequence[Path] = ()) -> None:
        super().__init__(
            problem, found=found, expected="a directory that stage 02 or `save_to_disk` wrote"
        )
        self.datasets = list(datasets)


@dataclass(frozen=True)
class DatasetFiles:
    """Names the files of a dataset.

    manifest: written by stage 02, None for a dataset of another program. homes: the directory of
    each split; empty for Arrow files without state.json. splits: the shards of each split, in
    order; always contains `train`.
    """

    path: Path
    manifest: dict[str, Any] | None
    homes: dict[str, Path]
    splits: dict[str, list[Path]]

    def fingerprint(self) -> str:
        """Identify the content, independent of the path.

        For a dataset of stage 02, this covers the digests of its shards. Otherwise it covers the
        names, sizes and both ends of the shards, and the fingerprint in state.json.
        """
        if self.manifest:
            entries = [e for e in self.manifest["files"] if e["path"].endswith(_ARROW)]
            return hashing.fingerprint([[entry["path"], entry["digest"]] for entry in entries])
        content: list[Any] = []
        for name, shards in self.splits.items():
            home = self.homes.get(name)
            content.append([name, (home / _STATE).read_text(encoding="utf-8") if home else ""])
            content += (
                [shard.name, shard.stat().st_size, hashing.ends_digest(shard, _ENDS_BYTES)]
                for shard in (sorted(home.glob(f"*{_ARROW}")) if home else shards)
            )
        return hashing.fingerprint(content)


def list_dataset_files(path: Path) -> list[Path]:
    """Return the files that a dataset may consist of: manifest, shards and their descriptions."""
    if path.is_file():
        return [path]
    homes = [path, *(home for home in sorted(path.iterdir()) if _names_split(home))]
    described = (_DATASET_DICT, _DATASET_INFO, _STATE, MANIFEST)
    return [home / name for home in homes for name in described] + sorted(
        shard for home in homes for shard in home.glob(f"*{_ARROW}")
    )


def _names_split(path: Path) -> bool:
    """Return whether the name of a directory is one of a split that stage 04 reads."""
    return data_names.find_role(path.name) in SPLITS and path.is_dir()


def find_dataset_files(path: Path) -> DatasetFiles:
    """Find and check the files of a dataset without reading its rows.

    Raises NotADataset or UsageError if the path is not a dataset with a split `train`, and
    ArtifactError if it is missing, unfinished or damaged.
    """
    content = _require_dataset(path)
    placeholders.require_data(list_dataset_files(path), f"dataset {path}")
    homes = _find_homes(path)
    splits = {name: list_shards(home) for name, home in homes.items()} or _require_plain_splits(
        path
    )
    return DatasetFiles(path, content, homes, splits)


def find_plain_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split in order, for a directory or one file; may be empty."""
    if path.is_file():
        return {"train": [path]} if path.suffix == _ARROW else {}
    splits: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(path.glob(f"*{_ARROW}")):
        if not file.name.startswith(_MAP_RESULTS) and file.is_file():
            splits[data_names.find_role(file.name) or TRAIN].append(file)
    return dict(splits)


def list_shards(home: Path) -> list[Path]:
    """Return the shards of a split that `save_to_disk` wrote, in order.

    home: the split's directory. Raises ArtifactError if a shard is missing or state.json damaged.
    """
    try:
        names = [entry["filename"] for entry in _read_object(home / _STATE)["_data_files"]]
    except (KeyError, TypeError):
        raise _make_damage_error(home / _STATE) from None
    if not all(isinstance(name, str) for name in names):
        raise _make_damage_error(home / _STATE)
    # Only files directly in the directory count: state.json may not point elsewhere.
    existing = {path.name for path in home.glob(f"*{_ARROW}") if path.is_file()}
    if missing := [name for name in names if name not in existing]:
        raise ArtifactError(
            f"dataset {home} is damaged",
            found=f"{len(missing)} of {len(names)} shards are missing, first {missing[0]}",
        )
    return [home / name for name in names]


def has_file_format(path: Path) -> bool:
    """Return whether a file is in Arrow's IPC file format, not in its streaming format."""
    with path.open("rb") as file:
        return file.read(len(_FILE_FORMAT)) == _FILE_FORMAT


def read_features(home: Path) -> dict[str, str]:
    """Return the column names and types of a split from its dataset_info.json.

    Raises ArtifactError if the file is damaged.
    """
    features = _read_object(home / _DATASET_INFO).get("features") or {}
    if not isinstance(features, dict):
        raise _make_damage_error(home / _DATASET_INFO)
    return {
        name: str(feature.get("dtype") or feature.get("_type", ""))
        if isinstance(feature, dict)
        else "a list"
        for name, feature in features.items()
    }


def _require_dataset(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a stage 02 dataset, or None for one of another program."""
    if path.is_file():
        if path.suffix == _ARROW:
            return None
        raise NotADataset(f"{path} is a file, not a dataset")
    content = manifest.read_if_any(path)
    kind = manifest.read_kind(path)
    if kind.startswith("splits/"):
        raise NotADataset(f"{path} contains splits of stage 01 and is not a dataset yet")
    if kind and not kind.startswith("dataset/"):
        raise UsageError(
            f"{path} is not a dataset", expected="a dataset made by stage 02", found=f"kind {kind}"
        )
    if content is not None:
        manifest.require_intact(
            path, content, "dataset", **manifest.make_remedy(content, "--overwrite", save_dir=path)
        )
    elif (path / MANIFEST).exists():
        raise ArtifactError(
            f"{path / MANIFEST} is damaged",
            hint=f"move {path} away and build it again with stage 02",
        )
    elif (
        any(".partial-" in part for part in path.resolve().parts[-2:])
        or (path / _MARK_OF_STAGE_02).exists()
    ):
        raise ArtifactError(
            f"dataset {path} is not finished (no {MANIFEST})",
            found="leftovers of an interrupted stage 02, or an incomplete copy",
            hint="use its final name after stage 02 has finished",
        )
    return content


def _find_homes(path: Path) -> dict[str, Path]:
    """Return the split directories of a DatasetDict, or the directory itself as `train`.

    Returns an empty dict if there are only Arrow files without state.json.
    """
    if (path / _DATASET_DICT).exists():
        names = _read_object(path / _DATASET_DICT).get("splits", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _make_damage_error(path / _DATASET_DICT)
        if "train" not in names:
            raise UsageError(
                f"dataset {path} has no split `train`", found=f"splits {', '.join(names)}"
            )
        validation = [name for name in names if data_names.find_role(name) == VALIDATION]
        first = VALIDATION if VALIDATION in names else next(iter(validation), "")
        return {TRAIN: path / TRAIN} | ({VALIDATION: path / first} if first else {})
    if (path / _STATE).exists() and (path / _DATASET_INFO).exists():
        return {"train": path}
    if not (path / _STATE).exists() and find_plain_splits(path):
        return {}
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:4]) + (", …" if names[4:] else "")
    if "config.json" in names:
        raise UsageError(
            f"{path} is not a dataset directory",
            found=found,
            expected="a directory that stage 02 or `Dataset.save_to_disk` wrote",
        )
    raise NotADataset(f"{path} is not a dataset directory", found, _list_datasets(path))


def _list_datasets(directory: Path) -> list[Path]:
    """Return the datasets directly in a directory, with `train` first."""
    datasets = [
        path
        for path in sorted(directory.iterdir())
        if manifest.read_kind(path).startswith("dataset/")
        or ((path / _STATE).is_file() and (path / _DATASET_INFO).is_file())
    ]
    return sorted(datasets, key=lambda path: path.name != "train")


def _require_plain_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split. Raises UsageError if there is no split `train`."""
    files = find_plain_splits(path)
    if "train" not in files:
        raise UsageError(
            f"{path} contains no file of a split `train`",
            found=", ".join(file.name for split in files.values() for file in split),
        )
    return {name: files[name] for name in SPLITS if name in files}


def _make_damage_error(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is damaged", expected="a file that `save_to_disk` wrote")


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ArtifactError if there is none."""
    try:
        content = reading.with_retries(lambda: records.read_json(path), path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"dataset {path.parent} is damaged", found=f"no readable {path.name} ({error})"
        ) from None
    if not isinstance(content, dict):
        raise _make_damage_error(path)
    return content
