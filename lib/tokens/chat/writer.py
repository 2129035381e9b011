"""Write a split of a chat dataset: tokens, labels, and the dropped conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import log, units
from lib.core.progress import Progress
from lib.core.workers import Worker
from lib.tokens.chat import checks, processes
from lib.tokens.chat.outcome import ChatCounts
from lib.tokens.chat.processes import DroppedChat
from lib.tokens.dataset import Dataset
from lib.tokens.split_writer import Sink, SplitWriter
from lib.tokens.store import ERRORS, LABEL_MASK


class ChatWriter(SplitWriter):
    """Writes the samples of a chat dataset, with one label bit per token."""

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        super().__init__(directory, name, dtype, dataset)
        note = self._earlier.get("chat")
        self.chats = ChatCounts.from_record(note["counts"]) if note else ChatCounts()
        self._bits = np.array(note["bits"] if note else [], bool)  # bits of the last, partial byte
        self._labels = Sink(directory / f"{name}.{LABEL_MASK}", self.tokens // 8)
        self._errors = Sink(directory / f"{name}.{ERRORS}", note["errors"] if note else 0)
        self._sinks += [self._labels, self._errors]

    def is_valid_note(self, note: dict[str, Any]) -> bool:
        chat: Any = note.get("chat")
        try:
            return super().is_valid_note(note) and (
                not note
                or (
                    chat["errors"] >= 0
                    and all(type(bit) is bool for bit in chat["bits"])
                    and ChatCounts.from_record(chat["counts"]).samples == note["documents"]
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return False

    def run(self, workers: Sequence[Worker], bar: Progress) -> None:
        """Prepare the conversations that are not in the files yet."""
        if done := self.chats.conversations:
            log.info(
                f"  continuing after {units.counted(done, 'conversation')} from an interrupted run"
            )
        rows = self._dataset.chats(self.name, done)
        for samples, size in processes.encode_rows(workers, rows):
            self.append(samples.tokens, samples.lengths)
            self._mark(samples.trained)
            self._errors.write(
                np.frombuffer(b"".join(map(_make_error_line, samples.dropped)), np.uint8)
            )
            self.chats.add(samples.counts)
            checks.require_maskable(self.chats, self._dataset.path)
            bar.advance(size)
            self.save_if_due()
        self.save()

    def progress_note(self) -> dict[str, Any]:
        return {
            **super().progress_note(),
            "chat": {
                "counts": self.chats.to_record(),
                "bits": self._bits.tolist(),
                "errors": self._errors.bytes,
            },
        }

    def manifest_counts(self) -> dict[str, int]:
        return {**super().manifest_counts(), "labels": self.chats.trained}

    def close(self) -> list[dict[str, Any]]:
        """Close the files and return their manifest entries, with errors.jsonl last."""
        self._labels.write(np.packbits(self._bits, bitorder="little"))
        return super().close()

    def _mark(self, trained: np.ndarray) -> None:
        """Write a label bit for each token, and keep the bits of a partial byte."""
        bits = np.concatenate([self._bits, trained])
        complete = len(bits) // 8 * 8
        self._labels.write(np.packbits(bits[:complete], bitorder="little"))
        self._bits = bits[complete:]


def _make_error_line(one: DroppedChat) -> bytes:
    """Return a line of errors.jsonl."""
    return (
        json.dumps(
            {
                "path": one.place.source,
                "offset": one.place.offset,
                "line": one.place.line,
                "kind": one.kind,
                "message": one.message,
                "action": "kept in part" if one.partly else "dropped",
            }
        ).encode()
        + b"\n"
    )
