"""Build datasets from tiny inputs in this process, with all of lib/corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from lib.core.conversation import Conversation, Place
from lib.corpus import inputs, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.tokens.chat import conversations


@dataclass
class Outcome:
    """Holds the content of a built dataset.

    rows: of the split train. problems: lines of errors.jsonl. sources: the column, if it is kept.
    chats: the rows of a chat dataset.
    """

    rows: list[str]
    problems: list[dict]
    dataset: DatasetWriter
    splits: dict[str, list[str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    chats: list[tuple[Conversation, Place]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [problem["kind"] for problem in self.problems]


Read = Callable[..., Outcome]


def table(directory: Path) -> pa.Table:
    tables = []
    for shard in sorted(directory.glob("*.arrow")):
        with pa.OSFile(str(shard)) as file:
            tables.append(pa.ipc.open_stream(file).read_all())
    return pa.concat_tables(tables)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return read({"a.json": b"…"}, **options), which builds a dataset from these files."""

    def run(files: dict[str, bytes | str], **options) -> Outcome:
        folder = tmp_path / "data"
        out = tmp_path / "out"
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
        files_found, skipped = inputs.find_inputs(folder, False)
        with DatasetWriter(out, RowOptions(**options)) as dataset:
            dataset.note_skipped(skipped)
            for unit in work_units.cut_files(
                folder, files_found, out / PARTS, RowOptions(**options)
            ):
                dataset.add(work_units.process_unit(unit))
            dataset.finish()
        homes = (
            {split: out / split for split in RowOptions(**options).splits}
            if options.get("validation_percent")
            else {"train": out}
        )
        tables = {split: table(home) for split, home in homes.items()}
        problems = [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
        train = tables["train"]
        if options.get("format") == "chat":
            return Outcome(
                [],
                problems,
                dataset,
                chats=[
                    chat
                    for batch in train.to_batches()
                    for chat in conversations.read_valid_rows(batch)
                ],
            )
        return Outcome(
            rows=train["text"].to_pylist(),
            problems=problems,
            dataset=dataset,
            splits={split: rows["text"].to_pylist() for split, rows in tables.items()},
            sources=train["source"].to_pylist() if options.get("keep_source") else [],
        )

    return run
