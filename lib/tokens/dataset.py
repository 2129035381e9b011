"""The text that is tokenised: an Arrow dataset of stage 02, or one made elsewhere.

Elsewhere `save_to_disk` wrote a directory, or the cache of `datasets` holds Arrow files. It has a
column `text`, and a split `train` and perhaps `validation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import (
    arrow_files,
    commands,
    hashing,
    log,
    manifest,
    paths,
    reading,
    records,
    stamps,
)
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST
from lib.tokens import columns, lacking

SPLITS = ("train", "validation")
_MARK_OF_OURS = "errors.jsonl"  # stage 02 writes it beside the shards
_DESCRIBED = ("dataset_dict.json", "dataset_info.json", "state.json")
_ENDS_BYTES = 1 << 20
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 100_000


@dataclass(frozen=True)
class Dataset:
    """Reads a dataset on disk that has a `text` column.

    fingerprint: identifies the content wherever the directory lies. splits: split name → its Arrow
    shards; `train` is always there. ours: written by stage 02. stamps: of the files that the
    fingerprint is of.
    """

    path: Path
    fingerprint: str
    splits: dict[str, list[Path]]
    ours: bool
    stamps: stamps.Stamps = field(default_factory=dict, compare=False)

    def require_same(self) -> None:
        """Raise UsageError when the dataset is not the one any more that was fingerprinted."""
        stamps.require_same(self.stamps, f"the dataset {self.path}", "its tokens were prepared")

    def check_content(self) -> None:
        """Hash every shard of a dataset of stage 02; ArtifactError names what is damaged."""
        if self.ours:
            manifest.check(self.path, manifest.read(self.path, "dataset/1", "dataset"), "dataset",
                           deep=True)
        else:
            log.info(f"{self.path} was not made by stage 02: no digests to check it against")

    def total_bytes(self) -> int:
        """Return how many bytes the shards of all splits have."""
        return sum(shard.stat().st_size for shards in self.splits.values() for shard in shards)

    def extent(self) -> tuple[int, int]:
        """Return how many texts the training split has, and how many bytes of UTF-8 in all."""
        count, size = 0, 0
        for column in columns.read(self.splits["train"], mapped=True):
            offset_bytes = 8 if "large" in str(column.type) else 4
            count, size = count + len(column), size + column.nbytes - offset_bytes * len(column)
        return count, max(0, size)

    def documents(self, split: str, first: int = 0) -> Iterator[list[bytes]]:
        """Yield the texts of a split from row `first` on, as UTF-8, in lists of about 16 MB.

        Read and not mapped: a shard that is cut meanwhile is an error then, and kills no process.
        """
        texts: list[bytes] = []
        size = 0
        for column in columns.read(self.splits[split], mapped=False):
            rest = column.slice(min(first, len(column)))
            first -= len(column) - len(rest)
            step = max(1, min(_BATCH_ROWS, len(rest) * _BATCH_BYTES // max(1, rest.nbytes)))
            for start in range(0, len(rest), step):
                part = rest.slice(start, step)
                if texts and (size + part.nbytes > _BATCH_BYTES
                              or len(texts) + len(part) > _BATCH_ROWS):
                    yield texts
                    texts, size = [], 0
                texts += columns.texts(part)
                size += part.nbytes
        if texts:
            yield texts

    def sample(self, texts: int = 200, most_bytes: int = 20_000) -> list[bytes]:
        """Return the middles of texts that lie evenly over the training split."""
        train = self.splits["train"]
        step = max(1, sum(map(len, columns.read(train, mapped=True))) // texts)
        chosen, first = [], 0  # first: of the next text, in its batch
        for column in columns.read(train, mapped=True):
            rows = range(first, len(column), step)
            chosen += [text for row in rows for text in columns.texts(column.slice(row, 1))]
            first += len(rows) * step - len(column)
        cut = [text[max(0, len(text) - most_bytes) // 2:][:most_bytes] for text in chosen]
        # A cut may fall inside a character: what is left of it is dropped.
        return [text.decode("utf-8", "ignore").encode() for text in cut]


def find_dataset(name: str) -> Path:
    """Return the path that `-d` names: itself, or of a dataset under hf_datasets/.

    `org/name` also stands for hf_datasets/org--name.
    """
    root = lacking.DATASETS_ROOT
    places = (Path(name), root / name, root / paths.model_dir_name(name))
    return next((place for place in places if place.exists()), places[0])


def open_dataset(path: Path) -> Dataset:
    """Check a dataset directory without importing `datasets`, in milliseconds.

    Raises ArtifactError when it is missing, unfinished or truncated, UsageError when it is no
    dataset of text.
    """
    if not path.is_file() and not (path.is_dir() and any(path.iterdir())):
        raise lacking.missing(path)
    seen = stamps.take(_files(path))  # before anything is read that it is identified by
    content = _require_dataset(path)
    homes = _homes(path)
    splits = {name: _shards(home) for name, home in homes.items()} or _plain_splits(path)
    fingerprint = _fingerprint_ours(content) if content else _fingerprint_foreign(homes, splits)
    found = Dataset(path, fingerprint, splits, content is not None, seen)
    found.require_same()
    return found


def _files(path: Path) -> list[Path]:
    """Return the files that make up a dataset: manifest, shards and what describes them."""
    if path.is_file():
        return [path]
    homes = [path, *(path / name for name in SPLITS)]
    return [home / name for home in homes for name in (*_DESCRIBED, MANIFEST)] \
        + sorted(shard for home in homes for shard in home.glob("*.arrow"))


def _require_dataset(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a dataset, None of one made elsewhere; raises for anything else."""
    if path.is_file():
        if path.suffix == arrow_files.SUFFIX:
            return None
        raise lacking.raw(path, f"{path} is a file, and not a dataset")
    content, kind = manifest.read_if_any(path), manifest.kind_of(path)
    if kind.startswith("splits/"):
        raise lacking.raw(path, f"{path} holds splits of stage 01, and is not a dataset yet")
    if kind and not kind.startswith("dataset/"):
        raise UsageError(f"{path} is not a dataset", expected="one that stage 02 has made",
                         found=f"kind {kind}")
    if content is not None:
        manifest.check(path, content, "dataset",
                       **manifest.remedy(content, "--overwrite", save_dir=path))
    elif (path / MANIFEST).exists():
        raise ArtifactError(f"{path / MANIFEST} is damaged", hint=f"move {path} away, and build it "
                            "again by stage 02")
    elif any(".partial-" in part for part in path.resolve().parts[-2:]) \
            or (path / _MARK_OF_OURS).exists():
        raise ArtifactError(f"dataset {path} is not finished (no {MANIFEST})",
                            found="what an interrupted stage 02, or a copy of a part, leaves",
                            hint="use it under its final name, when stage 02 has finished it")
    return content


def _homes(path: Path) -> dict[str, Path]:
    """Return the split directories of a DatasetDict, or the directory itself as `train`.

    Empty where only Arrow files are there, and nothing that says what they are.
    """
    if (path / "dataset_dict.json").exists():
        named = _read_json(path / "dataset_dict.json").get("splits", [])
        if "train" not in named:
            raise UsageError(f"dataset {path} has no split `train`",
                             found=f"splits {', '.join(named)}")
        return {name: path / name for name in SPLITS if name in named}
    if (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return {"train": path}
    if not (path / "state.json").exists() and arrow_files.splits(path):
        return {}
    there = sorted(p.name for p in path.iterdir())
    found = ", ".join(there[:4]) + ", …" * bool(there[4:])
    if "config.json" in there:
        raise UsageError(f"{path} is not a dataset directory", found=found,
                         expected="what stage 02 or `Dataset.save_to_disk` writes")
    inside = [p for p in sorted(path.iterdir()) if manifest.kind_of(p).startswith("dataset/")]
    if inside:
        raise UsageError(f"{path} is not a dataset, but holds {'several' if inside[1:] else 'one'}",
                         found=", ".join(p.name for p in inside),
                         hint="-d takes one of them, as the first:" if inside[1:] else
                         "-d takes it:",
                         run=commands.replaced(lacking.OPTION, path, inside[0]))
    raise lacking.raw(path, f"{path} is not a dataset directory", found)


def _plain_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split, read only as far as to know that they hold text."""
    found = arrow_files.splits(path)
    if "train" not in found:
        raise UsageError(f"{path} has no file of a split `train`",
                         found=", ".join(file.name for files in found.values() for file in files))
    splits = {name: found[name] for name in SPLITS if name in found}
    for shard in (shard for shards in splits.values() for shard in shards):
        if lacks := columns.lack(shard):
            raise UsageError(f"{shard} has no column `text` of strings", found=lacks,
                             hint="stage 02 makes a dataset of it with --fields NAME")
    return splits


def _require_text(directory: Path) -> None:
    features = _read_json(directory / "dataset_info.json").get("features") or {}
    text = features.get("text") or {}
    kind = text.get("dtype") if isinstance(text, dict) else "a list"
    if kind not in ("string", "large_string"):
        raise UsageError(f"dataset {directory} has no column `text` of strings",
                         found=f"`text` of {kind}" if "text" in features
                         else f"columns {', '.join(features) or 'none'}",
                         hint="rename one with `dataset.rename_column`, or make it by stage 02 "
                              "with --fields")


def _shards(directory: Path) -> list[Path]:
    """Return the shards of a split in order; raises for one without text or with shards missing."""
    _require_text(directory)
    try:
        named = [entry["filename"] for entry in _read_json(directory / "state.json")["_data_files"]]
    except (KeyError, TypeError):
        raise ArtifactError(f"{directory / 'state.json'} is damaged",
                            expected="what `save_to_disk` writes") from None
    there = {path.name for path in directory.glob("*.arrow") if path.is_file()}  # and nowhere else
    if missing := [name for name in named if name not in there]:
        raise ArtifactError(f"dataset {directory} is damaged",
                            found=f"{len(missing)} of {len(named)} shards are missing, "
                                  f"{missing[0]} the first")
    return [directory / name for name in named]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(reading.patiently(lambda: records.read_json(path), path))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"dataset {path.parent} is damaged",
                            found=f"no readable {path.name} ({error})") from None


def _fingerprint_ours(content: dict[str, Any]) -> str:
    arrow = [e for e in content["files"] if e["path"].endswith(".arrow")]
    return hashing.fingerprint([[e["path"], e["digest"]] for e in arrow])


def _fingerprint_foreign(homes: dict[str, Path], splits: dict[str, list[Path]]) -> str:
    """Identify shards that have no digests by names, sizes, both ends and datasets' own mark."""
    seen: list[Any] = []
    for name, shards in splits.items():
        home = homes.get(name)
        seen.append([name, (home / "state.json").read_text(encoding="utf-8") if home else ""])
        seen += ([shard.name, shard.stat().st_size, hashing.ends_digest(shard, _ENDS_BYTES)]
                 for shard in (sorted(home.glob("*.arrow")) if home else shards))
    return hashing.fingerprint(seen)
