"""The split of a chat dataset, as it is written: tokens, labels, and what gave no sample."""

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
    """Writes the samples of a chat dataset, with a bit for each token that is a label."""

    def __init__(self, directory: Path, name: str, dtype: str, dataset: Dataset) -> None:
        super().__init__(directory, name, dtype, dataset)
        noted = self._earlier.get("chat")
        self.chats = ChatCounts.of_record(noted["counts"]) if noted else ChatCounts()
        self._bits = np.array(noted["bits"] if noted else [], bool)  # of a byte that is not full
        self._labels = Sink(directory / f"{name}.{LABEL_MASK}", self.tokens // 8)
        self._errors = Sink(directory / f"{name}.{ERRORS}", noted["errors"] if noted else 0)
        self._sinks += [self._labels, self._errors]

    def is_sound(self, noted: dict[str, Any]) -> bool:
        chat: Any = noted.get("chat")
        try:
            return super().is_sound(noted) and (
                not noted
                or (
                    chat["errors"] >= 0
                    and all(type(bit) is bool for bit in chat["bits"])
                    and ChatCounts.of_record(chat["counts"]).samples == noted["documents"]
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return False

    def run(self, workers: Sequence[Worker], bar: Progress) -> None:
        """Make samples of the conversations that have not been looked at yet."""
        if done := self.chats.conversations:
            log.info(
                f"  going on after {units.counted(done, 'conversation')} of an interrupted run"
            )
        rows = self._dataset.chats(self.name, done)
        for samples, size in processes.encoded(workers, rows):
            self.append(samples.tokens, samples.lengths)
            self._mark(samples.trained)
            self._errors.write(np.frombuffer(b"".join(map(_line, samples.dropped)), np.uint8))
            self.chats.add(samples.counts)
            checks.require_maskable(self.chats, self._dataset.path)
            bar.advance(size)
            self.save_if_due()
        self.save()

    def noted(self) -> dict[str, Any]:
        return {
            **super().noted(),
            "chat": {
                "counts": self.chats.record(),
                "bits": self._bits.tolist(),
                "errors": self._errors.bytes,
            },
        }

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "labels": self.chats.trained}

    def close(self) -> list[dict[str, Any]]:
        """Close the files; the entry of the errors comes last."""
        self._labels.write(np.packbits(self._bits, bitorder="little"))
        return super().close()

    def _mark(self, trained: np.ndarray) -> None:
        """Write a bit for each token; what fills no byte waits."""
        bits = np.concatenate([self._bits, trained])
        whole = len(bits) // 8 * 8
        self._labels.write(np.packbits(bits[:whole], bitorder="little"))
        self._bits = bits[whole:]


def _line(one: DroppedChat) -> bytes:
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
