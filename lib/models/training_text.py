"""The text that a tokenizer is trained on: train splits of datasets, and what identifies them.

Of a chat dataset it is what the messages say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.core import arrow_files, commands, hashing, manifest
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import PARTIAL

if TYPE_CHECKING:
    from datasets import Dataset

_ENDS_BYTES = 1 << 20  # of a file without a digest, by which it is known


def fingerprint(corpora: Sequence[Path]) -> str:
    """Return a fingerprint of some datasets' content without opening them.

    Raises ArtifactError when one is missing, unfinished or damaged, UsageError when it is no
    dataset or has no train split.
    """
    each = [_fingerprint_one(corpus) for corpus in corpora]
    return each[0] if len(each) == 1 else hashing.fingerprint(each)


def _fingerprint_one(corpus: Path) -> str:
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
                else {"hint": "stages 01 and 02 make a dataset of raw text"}
            ),
        )
    if made := manifest.read_if_any(corpus):
        manifest.check(
            corpus, made, "the dataset", **manifest.remedy(made, "--overwrite", save_dir=corpus)
        )
    train_split = _find_train_split(corpus)
    digests = {entry["path"]: entry["digest"] for entry in made["files"]} if made else {}
    state = "" if made else (train_split / "state.json").read_text(encoding="utf-8")
    shards = {
        path.relative_to(corpus).as_posix(): path.stat().st_size
        for path in sorted(train_split.glob("*.arrow"))
    }
    return hashing.fingerprint(
        [[name, size, digests.get(name, "")] for name, size in shards.items()] + [state]
    )


class TrainingText(NamedTuple):
    """Holds a column `text`. is_chat: some of it is from conversations."""

    texts: Dataset
    is_chat: bool


def read(corpora: Sequence[Path]) -> TrainingText:
    """Return the texts of the train splits; UsageError or ArtifactError when there are none."""
    from datasets import concatenate_datasets

    opened = [_open_split(corpus) for corpus in corpora]
    return TrainingText(concatenate_datasets(list(map(_texts, opened))), any(map(_is_chat, opened)))


def _plain_files(corpus: Path) -> list[Path]:
    """Return the Arrow files of a train split that nothing beside them describes; [] elsewhere."""
    described = ("state.json", "dataset_dict.json")
    if corpus.is_dir() and any((corpus / name).exists() for name in described):
        return []
    return arrow_files.find_splits(corpus).get("train", []) if corpus.exists() else []


def _find_train_split(corpus: Path) -> Path:
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


def _open_split(corpus: Path) -> Dataset:
    from datasets import concatenate_datasets, load_from_disk

    try:
        files = _plain_files(corpus)
        dataset = (
            concatenate_datasets([_open_file(path) for path in files])
            if files
            else load_from_disk(str(_find_train_split(corpus)))
        )
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
    return dataset.with_format(None)


def _is_chat(dataset: Dataset) -> bool:
    """Tell whether a dataset is one that stage 02 makes of conversations."""
    return "messages" in dataset.features and "text" not in dataset.features


def _texts(dataset: Dataset) -> Dataset:
    """Return the texts of a dataset, or what the messages of its conversations say, a row each."""
    import pyarrow
    import pyarrow.compute
    from datasets import Dataset
    from datasets.table import InMemoryTable  # of pages that are mapped, and read when needed

    if _is_chat(dataset):
        turns = pyarrow.compute.list_flatten(dataset.data.column("messages"))
        texts = pyarrow.compute.struct_field(turns, "content").drop_null()
    else:
        texts = dataset.data.column("text")
    # One kind of string for all; what a cast makes anew is where each begins, not the text.
    return Dataset(InMemoryTable(pyarrow.table({"text": texts.cast(pyarrow.large_string())})))


def _open_file(path: Path) -> Dataset:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    is_file = arrow_files.has_file_format(path)
    opened = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(
        pyarrow.memory_map(str(path))
    )
    return Dataset(InMemoryTable(opened.read_all()))
