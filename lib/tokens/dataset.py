"""Open and read the dataset to tokenise, written by stage 02 or by another program.

A foreign dataset is a directory of `save_to_disk`, or Arrow files from the cache of `datasets`. It
contains a column `text`, or the columns of conversations, and a split `train`. A split `validation`
is optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import artifacts, file_identity, log, manifest, paths
from lib.core.artifacts import DatasetFiles, NotADataset
from lib.core.errors import UsageError
from lib.tokens import columns, dataset_errors
from lib.tokens.columns import CHAT, TEXT

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 100_000
# These are smaller, since a conversation takes a hundred times as long to prepare.
_CHAT_BYTES = 2 << 20
_CHAT_ROWS = 2000


@dataclass(frozen=True)
class Dataset:
    """Reads a dataset on disk that contains a `text` column, or the columns of conversations.

    fingerprint: identifies the content, independent of the path. splits: split name → its Arrow
    shards, always with `train`. is_of_stage_02: whether stage 02 wrote the dataset. identities: the
    identity of each fingerprinted file. format: TEXT or CHAT.
    """

    path: Path
    fingerprint: str
    splits: dict[str, list[Path]]
    is_of_stage_02: bool
    identities: file_identity.Identities = field(default_factory=dict, compare=False)
    format: str = TEXT

    def require_same(self) -> None:
        """Raise UsageError if the dataset has changed since its fingerprint was taken."""
        file_identity.require_same(
            self.identities, f"the dataset {self.path}", "its tokens were prepared"
        )

    def check_content(self) -> None:
        """Verify the digests of a stage 02 dataset. Raises ArtifactError if a shard is damaged."""
        if self.is_of_stage_02:
            manifest.require_intact(
                self.path,
                manifest.read_manifest(self.path, "dataset/1", "dataset"),
                "dataset",
                deep=True,
            )
        else:
            log.info(f"{self.path} was not made by stage 02, so there are no checksums to verify")

    def total_bytes(self) -> int:
        """Return the total bytes of the shards of all splits."""
        return sum(shard.stat().st_size for shards in self.splits.values() for shard in shards)

    def extent(self) -> tuple[int, int]:
        """Return the number of rows in the training split, and the bytes of their UTF-8 text."""
        count = 0
        size = 0
        for batch in columns.read_batches(self.splits["train"], mapped=True):
            count += len(batch)
            if self.format == CHAT:
                size += columns.count_content_bytes(batch)
            else:
                column = batch.column("text")
                offset_bytes = 8 if "large" in str(column.type) else 4
                size += max(0, column.nbytes - offset_bytes * len(column))
        return count, size

    def texts(self) -> Iterator[list[bytes]]:
        """Yield lists of the UTF-8 texts of the training split.

        These are its documents, or the texts in its conversations.
        """
        if self.format == TEXT:
            yield from self.documents("train")
        else:
            for rows in self.chats("train"):
                yield [text for texts in columns.list_contents(rows) for text in texts]

    def documents(self, split: str, first: int = 0) -> Iterator[list[bytes]]:
        """Yield the texts of a split from row `first` on, as UTF-8, in lists of about 16 MB."""
        texts: list[bytes] = []
        size = 0
        for part in self._read_parts(split, first, _select_text, _BATCH_BYTES, _BATCH_ROWS):
            if texts and (
                size + part.nbytes > _BATCH_BYTES or len(texts) + len(part) > _BATCH_ROWS
            ):
                yield texts
                texts = []
                size = 0
            texts += columns.decode_texts(part.column(0))
            size += part.nbytes
        if texts:
            yield texts

    def chats(self, split: str, first: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the conversations of a split from row `first` on, as rows of about 2 MB."""
        return self._read_parts(split, first, columns.select_chats, _CHAT_BYTES, _CHAT_ROWS)

    def has_sources(self, split: str) -> bool:
        """Return whether all files of a split have a column `source` of strings."""
        return all(
            columns.is_string(columns.read_column_types(shard).get("source", ""))
            for shard in self.splits[split]
        )

    def sources(self, split: str) -> Iterator[pa.Array]:
        """Yield the column `source` of a split in parts."""
        for part in columns.read_batches(self.splits[split], mapped=True):
            yield part.column("source")

    def _read_parts(
        self,
        split: str,
        first: int,
        select: Callable[[pa.RecordBatch], pa.RecordBatch],
        most_bytes: int,
        most_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the selected columns of a split from row `first` on, in small batches.

        The shards are read, not mapped. If a shard is truncated meanwhile, that raises an error
        instead of killing the process.
        """
        for batch in columns.read_batches(self.splits[split], mapped=False):
            rest = select(batch).slice(min(first, len(batch)))
            first -= len(batch) - len(rest)
            step = max(1, min(most_rows, len(rest) * most_bytes // max(1, rest.nbytes)))
            yield from (rest.slice(start, step) for start in range(0, len(rest), step))

    def sample(self, texts: int = 200, most_bytes: int = 20_000) -> list[bytes]:
        """Return excerpts of texts or conversations, spread evenly over the training split.

        An excerpt is the middle of a text, of at most `most_bytes`.
        """
        chosen = [
            b"\n".join(columns.list_contents(row)[0])
            if self.format == CHAT
            else columns.decode_texts(row.column("text"))[0]
            for row in self.spread(texts)
        ]
        cut = [text[max(0, len(text) - most_bytes) // 2 :][:most_bytes] for text in chosen]
        # A cut may fall inside a character; its remaining bytes are dropped.
        return [text.decode("utf-8", "ignore").encode() for text in cut]

    def sample_chats(self, count: int = 200, most_bytes: int = 1 << 20) -> pa.RecordBatch | None:
        """Return about `count` rows with conversations, spread evenly over the training split.

        most_bytes: the limit for all rows together; long conversations give fewer rows. Returns
        None for an empty split.
        """
        import pyarrow

        rows = [columns.select_chats(row) for row in self.spread(count)]
        while len(rows) > 1 and sum(row.nbytes for row in rows) > most_bytes:
            rows = rows[::2]
        return pyarrow.Table.from_batches(rows).combine_chunks().to_batches()[0] if rows else None

    def spread(self, count: int) -> Iterator[pa.RecordBatch]:
        """Yield about `count` single rows, spread evenly over the training split."""
        train = self.splits["train"]
        step = max(1, sum(map(len, columns.read_batches(train, mapped=True))) // count)
        first = 0  # the next row, in its batch
        for batch in columns.read_batches(train, mapped=True):
            rows = range(first, len(batch), step)
            yield from (batch.slice(row, 1) for row in rows)
            first += len(rows) * step - len(batch)


def _select_text(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(["text"])


def find_dataset(name: str) -> Path:
    """Return the path of the dataset that `-d` names: a path, or a name under hf_datasets/.

    `org/name` also stands for hf_datasets/org--name.
    """
    root = dataset_errors.DATASETS_ROOT
    places = (Path(name), root / name, root / paths.model_dir_name(name))
    return next((place for place in places if place.exists()), places[0])


def open_dataset(path: Path) -> Dataset:
    """Open and check a dataset in milliseconds, without importing `datasets`.

    Raises ArtifactError if it is missing, unfinished or truncated, and UsageError if it is not a
    dataset of text or conversations.
    """
    if not path.is_file() and not (path.is_dir() and any(path.iterdir())):
        raise dataset_errors.make_missing_error(path)
    # Read before the content, so a later change is noticed.
    identities = file_identity.read_identities(artifacts.list_dataset_files(path))
    try:
        files = artifacts.find_dataset_files(path)
    except NotADataset as error:
        raise dataset_errors.make_content_error(path, error) from None
    fingerprint = files.fingerprint()
    content_format = _require_format(files)
    is_of_stage_02 = files.manifest is not None
    if content_format == CHAT and not is_of_stage_02:
        _require_chat_columns(files)
    dataset = Dataset(path, fingerprint, files.splits, is_of_stage_02, identities, content_format)
    dataset.require_same()
    return dataset


def _require_format(files: DatasetFiles) -> str:
    """Return the format of a dataset, TEXT or CHAT. Raises UsageError if its splits differ."""
    columns_by_path = {home: artifacts.read_features(home) for home in files.homes.values()} or {
        shard: columns.read_column_types(shard)
        for shards in files.splits.values()
        for shard in shards
    }
    formats = {_detect_format(path, kinds) for path, kinds in columns_by_path.items()}
    if len(formats) > 1:
        raise UsageError(
            f"{files.path} contains both text and conversations",
            expected="the same format in all splits",
        )
    return formats.pop()


def _detect_format(path: Path, kinds: dict[str, str]) -> str:
    """Return the format of a split or a shard. Raises UsageError if it is neither text nor chat.

    kinds: column → its type.
    """
    detected = columns.detect_format(kinds)
    if detected != CHAT and (problem := columns.describe_text_problem(kinds)):
        name = str(path) if path.is_file() else f"dataset {path}"
        raise dataset_errors.make_columns_error(
            path, f"{name} has no column `text` of strings", kinds, problem
        )
    return detected


def _require_chat_columns(files: DatasetFiles) -> None:
    """Raise UsageError if the columns of a foreign chat dataset differ from those of stage 02."""
    for shard in (shard for shards in files.splits.values() for shard in shards):
        if problem := columns.describe_chat_problem(shard):
            raise dataset_errors.make_chats_error(
                files.path,
                f"{files.path} is not a chat dataset in the form of stage 02",
                f"{shard.name}: {problem}",
            )
