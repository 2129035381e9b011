"""Read the text that a tokenizer is trained on: train splits of datasets.

For a chat dataset, that is the content of its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.core import artifacts, commands, hashing, manifest
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import PARTIAL

if TYPE_CHECKING:
    from datasets import Dataset

_ENDS_BYTES = 1 << 20  # at both ends of a file without a digest, to identify its content


def fingerprint(corpora: Sequence[Path]) -> str:
    """Return a fingerprint of some datasets' content without opening them.

    Raises ArtifactError if one is missing, unfinished or damaged, and UsageError if it is not a
    dataset with a train split.
    """
    fingerprints = [_fingerprint_one(corpus) for corpus in corpora]
    return fingerprints[0] if len(fingerprints) == 1 else hashing.fingerprint(fingerprints)


def _fingerprint_one(corpus: Path) -> str:
    # Not DatasetFiles.fingerprint, which covers all splits and composes its value differently:
    # models from scratch record this one, and with another they would seem made from other text.
    final, partial, _ = str(corpus).partition(PARTIAL)
    if not partial and (files := _plain_files(corpus)):
        return hashing.fingerprint(
            [
                [path.name, path.stat().st_size, hashing.ends_digest(path, _ENDS_BYTES)]
                for path in files
            ]
        )
    if partial or not corpus.is_dir():
        raise ArtifactError(
            f"the dataset {corpus} " + ("is not finished" if partial else "does not exist"),
            found=manifest.describe_leftovers(corpus),
            **(
                {"run": commands.script("02_build_hf_dataset.py", "--save-dir", final)}
                if Path("splits").is_dir()
                else {"hint": "stages 01 and 02 build a dataset from raw text"}
            ),
        )
    if content := manifest.read_if_any(corpus):
        remedy = manifest.make_remedy(content, "--overwrite", save_dir=corpus)
        manifest.require_intact(corpus, content, "the dataset", **remedy)
    train_split = _find_train_split(corpus)
    digests = {entry["path"]: entry["digest"] for entry in content["files"]} if content else {}
    state = "" if content else (train_split / "state.json").read_text(encoding="utf-8")
    shards = {
        path.relative_to(corpus).as_posix(): path.stat().st_size
        for path in sorted(train_split.glob("*.arrow"))
    }
    return hashing.fingerprint(
        [[name, size, digests.get(name, "")] for name, size in shards.items()] + [state]
    )


class TrainingText(NamedTuple):
    """A dataset with a column `text`. is_chat: some of the text is from conversations."""

    texts: Dataset
    is_chat: bool


def read_texts(corpora: Sequence[Path]) -> TrainingText:
    """Return the texts of the train splits.

    Raises UsageError or ArtifactError if there are none.
    """
    from datasets import concatenate_datasets

    splits = [_open_train_split(corpus) for corpus in corpora]
    texts = concatenate_datasets([_select_texts(split) for split in splits])
    return TrainingText(texts, any(map(_is_chat, splits)))


def _plain_files(corpus: Path) -> list[Path]:
    """Return the Arrow files of a train split, or [] if `save_to_disk` wrote the dataset."""
    described = ("state.json", "dataset_dict.json")
    if corpus.is_dir() and any((corpus / name).exists() for name in described):
        return []
    return artifacts.find_plain_splits(corpus).get("train", []) if corpus.exists() else []


def _find_train_split(corpus: Path) -> Path:
    """Return the directory of a train split that `save_to_disk` wrote."""
    if (corpus / "state.json").is_file():
        return corpus
    if (corpus / "train" / "state.json").is_file():
        return corpus / "train"
    raise UsageError(
        f"{corpus} is not a dataset to train a tokenizer on",
        expected="a directory written by save_to_disk: a Dataset, or a DatasetDict "
        "with a train split",
        found=", ".join(sorted(p.name for p in corpus.iterdir())[:10]) or "nothing",
    )


def _open_train_split(corpus: Path) -> Dataset:
    from datasets import concatenate_datasets

    shards = _plain_files(corpus) or artifacts.list_shards(_find_train_split(corpus))
    try:
        dataset = concatenate_datasets([_open_shard(path) for path in shards])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"the dataset {corpus} does not open", found=str(error)) from None
    kind = getattr(dataset.features.get("text"), "dtype", None)
    if len(dataset) and _is_chat(dataset):
        return dataset
    if kind not in ("string", "large_string"):
        raise UsageError(
            f"{corpus} has no column of strings called `text`",
            found=f"columns {', '.join(dataset.column_names) or '(none)'}",
        )
    if len(dataset) == 0:
        raise UsageError(f"{corpus} has no documents to train a tokenizer on")
    return dataset


def _is_chat(dataset: Dataset) -> bool:
    """Return whether stage 02 built a dataset from conversations."""
    return "messages" in dataset.features and "text" not in dataset.features


def _select_texts(dataset: Dataset) -> Dataset:
    """Return the texts of a dataset, or the contents of its messages, one per row."""
    import pyarrow
    import pyarrow.compute
    from datasets import Dataset
    from datasets.table import InMemoryTable  # maps pages, which are read when they are needed

    if _is_chat(dataset):
        turns = pyarrow.compute.list_flatten(dataset.data.column("messages"))
        texts = pyarrow.compute.struct_field(turns, "content").drop_null()
    else:
        texts = dataset.data.column("text")
    # One string type for all. The cast makes new offsets; it does not copy the text.
    return Dataset(InMemoryTable(pyarrow.table({"text": texts.cast(pyarrow.large_string())})))


def _open_shard(path: Path) -> Dataset:
    """Map an Arrow stream or file."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    is_file = artifacts.has_file_format(path)
    open_reader = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    return Dataset(InMemoryTable(open_reader(pyarrow.memory_map(str(path))).read_all()))
