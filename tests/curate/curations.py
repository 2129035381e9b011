"""Write datasets, curate them with `python -m lib.curate`, and read the results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.conftest import run_stage

SCRIPT = "lib/curate/__main__.py"
_BATCH_ROWS = 20
_UNIT_BYTES = 4000
_SHARD_BYTES = 6000


def write_texts(
    directory: Path, texts: Sequence[str], split: str = "train", **columns: Sequence[Any]
) -> Path:
    """Write a split of texts as another program does, in small record batches; return the dataset.

    columns: further columns.
    """
    return _write_split(directory, split, pa.table({"text": texts, **columns}))


def write_chats(
    directory: Path,
    chats: Sequence[Sequence[dict[str, str]]],
    split: str = "train",
    **columns: Sequence[Any],
) -> Path:
    """Write a split of conversations in small record batches; return the dataset.

    columns: further columns.
    """
    places = {
        "source": ["chats.jsonl"] * len(chats),
        "line": [*range(1, len(chats) + 1)],
        "offset": [0] * len(chats),
    }
    contents = {
        "messages": chats,
        "tools": pa.nulls(len(chats), pa.string()),
        "weights": [[1.0] * len(chat) for chat in chats],
    }
    return _write_split(directory, split, pa.table({**contents, **places, **columns}))


def _write_split(directory: Path, split: str, table: pa.Table) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with (
        pa.OSFile(str(directory / f"rows-{split}.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=_BATCH_ROWS)
    return directory


def curate(cwd: Path, *arguments: object, **settings: Any) -> subprocess.CompletedProcess:
    """Run the command in a directory. settings: see `run_stage`."""
    return run_stage(SCRIPT, *arguments, "--no-progress", cwd=cwd, **settings)


def curate_in_units(cwd: Path, *arguments: object, **settings: Any) -> subprocess.CompletedProcess:
    """Run the command as `curate` does, with so small units and shards that there are several."""
    return curate(cwd, *arguments, before=f"{__name__}:cut_small_units", **settings)


def cut_small_units(rank: int) -> None:
    """Change the sizes of units and shards in this process."""
    from lib.corpus import shards
    from lib.curate import reader

    reader.UNIT_BYTES = _UNIT_BYTES
    shards.SHARD_BYTES = _SHARD_BYTES


def read_rows(directory: Path) -> pa.Table:
    """Return the rows of a split."""
    files = sorted(directory.glob("*.arrow"))
    return pa.concat_tables([pa.ipc.open_stream(file.read_bytes()).read_all() for file in files])


def read_dropped(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of dropped.jsonl."""
    return [json.loads(line) for line in (directory / "dropped.jsonl").read_text().splitlines()]
