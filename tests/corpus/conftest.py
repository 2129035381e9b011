"""Reads tiny inputs through the whole of lib/corpus, in this process."""

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
    """rows: of the split train. problems: lines of errors.jsonl. sources: column, if kept. chats:
    the rows of a chat dataset."""

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
    """Return read({"a.json": b"…"}, **shape): what those files give."""

    def run(files: dict[str, bytes | str], **shape) -> Outcome:
        folder = tmp_path / "data"
        out = tmp_path / "out"
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
        found, skipped = inputs.find_inputs(folder, False)
        with DatasetWriter(out, RowOptions(**shape)) as dataset:
            dataset.note_skipped(skipped)
            for unit in work_units.cut_files(folder, found, out / PARTS, RowOptions(**shape)):
                dataset.add(work_units.process_unit(unit))
            dataset.finish()
        homes = (
            {split: out / split for split in RowOptions(**shape).splits}
            if shape.get("validation_percent")
            else {"train": out}
        )
        tables = {split: table(home) for split, home in homes.items()}
        problems = [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
        train = tables["train"]
        if shape.get("format") == "chat":
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
            splits={split: found["text"].to_pylist() for split, found in tables.items()},
            sources=train["source"].to_pylist() if shape.get("keep_source") else [],
        )

    return run
