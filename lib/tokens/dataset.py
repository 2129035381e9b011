"""What is tokenised: an Arrow dataset of stage 02, or one made elsewhere.

Elsewhere `save_to_disk` wrote a directory, or the cache of `datasets` holds Arrow files. It has a
column `text`, or those of conversations, and a split `train` and perhaps `validation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import file_identity, log, manifest, paths
from lib.core.conversation import Conversation, Place
from lib.tokens import columns, dataset_files, lacking
from lib.tokens.chat import table_rows
from lib.tokens.columns import CHAT, TEXT

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 100_000
# Conversations take a hundred times as long.
_CHAT_BYTES = 2 << 20
_CHAT_ROWS = 2000


@dataclass(frozen=True)
class Dataset:
    """Reads a dataset on disk that has a `text` column, or the columns of conversations.

    fingerprint: identifies the content wherever the directory lies. splits: split name → its Arrow
    shards; `train` is always there. ours: written by stage 02. stamps: of the files that the
    fingerprint is of. format: TEXT or CHAT.
    """

    path: Path
    fingerprint: str
    splits: dict[str, list[Path]]
    ours: bool
    stamps: file_identity.Identities = field(default_factory=dict, compare=False)
    format: str = TEXT

    def require_same(self) -> None:
        """Raise UsageError when the dataset is not the one any more that was fingerprinted."""
        file_identity.require_same(
            self.stamps, f"the dataset {self.path}", "its tokens were prepared"
        )

    def check_content(self) -> None:
        """Hash every shard of a dataset of stage 02; ArtifactError names what is damaged."""
        if self.ours:
            manifest.check(
                self.path, manifest.read(self.path, "dataset/1", "dataset"), "dataset", deep=True
            )
        else:
            log.info(f"{self.path} was not made by stage 02: no digests to check it against")

    def total_bytes(self) -> int:
        """Return how many bytes the shards of all splits have."""
        return sum(shard.stat().st_size for shards in self.splits.values() for shard in shards)

    def extent(self) -> tuple[int, int]:
        """Return how many rows the training split has, and how many bytes of UTF-8 in all."""
        count = 0
        size = 0
        for batch in columns.read(self.splits["train"], mapped=True):
            count += len(batch)
            if self.format == CHAT:
                size += columns.content_bytes(batch)
            else:
                column = batch.column("text")
                offset_bytes = 8 if "large" in str(column.type) else 4
                size += max(0, column.nbytes - offset_bytes * len(column))
        return count, size

    def texts(self) -> Iterator[list[bytes]]:
        """Yield the words of the training split as UTF-8 in lists: its texts, or what its
        conversations say."""
        if self.format == TEXT:
            yield from self.documents("train")
        else:
            for rows in self.chats("train"):
                yield [text for words in columns.contents(rows) for text in words]

    def documents(self, split: str, first: int = 0) -> Iterator[list[bytes]]:
        """Yield the texts of a split from row `first` on, as UTF-8, in lists of about 16 MB."""
        texts: list[bytes] = []
        size = 0
        for part in self._parts(split, first, ["text"], _BATCH_BYTES, _BATCH_ROWS):
            if texts and (
                size + part.nbytes > _BATCH_BYTES or len(texts) + len(part) > _BATCH_ROWS
            ):
                yield texts
                texts = []
                size = 0
            texts += columns.texts(part.column(0))
            size += part.nbytes
        if texts:
            yield texts

    def chats(self, split: str, first: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the conversations of a split from row `first` on, as rows of about 2 MB."""
        return self._parts(split, first, columns.CHAT_COLUMNS, _CHAT_BYTES, _CHAT_ROWS)

    def conversations(
        self, split: str, first: int = 0
    ) -> Iterator[list[tuple[Conversation, Place]]]:
        """Yield the sound conversations of a split from row `first` on, in lists of about 2 MB."""
        return map(table_rows.conversations, self.chats(split, first))

    def _parts(
        self, split: str, first: int, names: Iterable[str], most_bytes: int, most_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield some columns of a split from row `first` on, few rows at a time.

        Read and not mapped: a shard that is cut meanwhile is an error then, and kills no process.
        """
        for batch in columns.read(self.splits[split], mapped=False):
            rest = batch.select(list(names)).slice(min(first, len(batch)))
            first -= len(batch) - len(rest)
            step = max(1, min(most_rows, len(rest) * most_bytes // max(1, rest.nbytes)))
            yield from (rest.slice(start, step) for start in range(0, len(rest), step))

    def sample(self, texts: int = 200, most_bytes: int = 20_000) -> list[bytes]:
        """Return the middles of texts or conversations, spread evenly over the training split."""
        chosen = [
            b"\n".join(columns.contents(row)[0])
            if self.format == CHAT
            else columns.texts(row.column("text"))[0]
            for row in self.spread(texts)
        ]
        cut = [text[max(0, len(text) - most_bytes) // 2 :][:most_bytes] for text in chosen]
        # A cut may fall inside a character: what is left of it is dropped.
        return [text.decode("utf-8", "ignore").encode() for text in cut]

    def some_chats(self, count: int = 200, most_bytes: int = 1 << 20) -> pa.RecordBatch | None:
        """Return about `count` conversations that lie evenly over the training split, as rows.

        most_bytes: of all, so that there are fewer where they are long. None of an empty split.
        """
        import pyarrow

        rows = [row.select(list(columns.CHAT_COLUMNS)) for row in self.spread(count)]
        while len(rows) > 1 and sum(row.nbytes for row in rows) > most_bytes:
            rows = rows[::2]
        return pyarrow.Table.from_batches(rows).combine_chunks().to_batches()[0] if rows else None

    def spread(self, count: int) -> Iterator[pa.RecordBatch]:
        """Yield about `count` single rows that lie evenly over the training split."""
        train = self.splits["train"]
        step = max(1, sum(map(len, columns.read(train, mapped=True))) // count)
        first = 0  # the next row, in its batch
        for batch in columns.read(train, mapped=True):
            rows = range(first, len(batch), step)
            yield from (batch.slice(row, 1) for row in rows)
            first += len(rows) * step - len(batch)


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
    dataset of text or conversations.
    """
    if not path.is_file() and not (path.is_dir() and any(path.iterdir())):
        raise lacking.missing(path)
    # Before anything is read that it is identified by.
    seen = file_identity.read_identities(dataset_files.list_files(path))
    content = dataset_files.require_dataset(path)
    homes = dataset_files.find_homes(path)
    splits = dataset_files.find_splits(path, homes)
    fingerprint = (
        dataset_files.fingerprint_ours(content)
        if content
        else dataset_files.fingerprint_foreign(homes, splits)
    )
    kind = dataset_files.require_format(path, homes, splits)
    if kind == CHAT and not content:
        dataset_files.require_chat_columns(path, splits)
    found = Dataset(path, fingerprint, splits, content is not None, seen, kind)
    found.require_same()
    return found
