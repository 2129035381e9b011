"""Write the token store of a text dataset: its documents, one after the other, in one process.

The tokenizer itself uses several threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lib.core import log, units
from lib.core.progress import Progress
from lib.tokens import text_bytes
from lib.tokens.build import Tokenization
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.split_writer import Sink, SplitWriter, StoreContents
from lib.tokens.text_bytes import TokenBytes

# Limits for an estimate.
_SAMPLED_TEXTS = 200
_SAMPLED_BYTES = 4000  # of each text


@dataclass(frozen=True)
class TextTokenization(Tokenization):
    """Turns a text dataset into tokens, with BOS and EOS around each document."""

    unit: ClassVar[str] = "document"

    def check_encoder(self, model_vocab: int) -> None:
        """Raise UsageError as every kind does, and warn if nothing will separate documents."""
        super().check_encoder(model_vocab)
        if self.encoder.eos is None:
            log.warn(
                "the tokenizer has no EOS token, so nothing separates documents and the model does "
                "not learn where a text ends"
            )

    def tune_encoder(self) -> None:
        self.encoder.tune(self.dataset.sample())

    def write_splits(self, directory: Path, bar: Progress) -> StoreContents:
        contents = StoreContents({}, [], {}, [])
        for name in self.dataset.splits:
            is_held_out = name == "validation"
            vocabulary = (
                text_bytes.measure_vocabulary(self.encoder.tokenizer) if is_held_out else None
            )
            writer = TextWriter(directory, name, self.dtype, self.dataset, vocabulary)
            writer.run(self.encoder, bar)
            self.dataset.require_same()
            contents.counts[name] = writer.manifest_counts()
            contents.files.extend(writer.close())
            if is_held_out:
                names, entry = _write_sources(directory, name, self.dataset)
                contents.facts[text_bytes.FACT] = {"sources": names}
                contents.files.extend([entry] if entry else [])
        return contents

    def estimate_tokens(self) -> int:
        texts = self.dataset.sample(_SAMPLED_TEXTS, _SAMPLED_BYTES)
        ids, lengths = self.encoder.encode(texts)
        added = (self.encoder.bos is not None) + (self.encoder.eos is not None)
        per_byte = (len(ids) - added * len(lengths)) / max(1, sum(map(len, texts)))
        documents, size = self.dataset.extent()
        return round(size * per_byte) + added * documents


class TextWriter(SplitWriter):
    """Writes the documents of a text dataset, and the bytes of each token in the validation split.

    vocabulary: the bytes of each token in the vocabulary; None for another split.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        dtype: str,
        dataset: Dataset,
        vocabulary: TokenBytes | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        super().__init__(directory, name, dtype, dataset)
        if vocabulary:
            self._sinks.append(Sink(directory / f"{name}.{text_bytes.BYTES}", self.tokens * 2))

    def is_valid_note(self, note: dict[str, Any]) -> bool:
        counts_bytes = self._vocabulary is None or not note or note.get("bytes") is True
        return super().is_valid_note(note) and counts_bytes  # an older version counted none

    def progress_note(self) -> dict[str, Any]:
        return super().progress_note() | ({"bytes": True} if self._vocabulary else {})

    def run(self, encoder: Encoder, bar: Progress) -> None:
        """Tokenise the documents that are not in the token store yet."""
        if self.documents:
            log.detail(
                f"  continuing after {units.counted(self.documents, 'document')} from an "
                "interrupted run"
            )
        for texts in self._dataset.documents(self.name, self.documents):
            sizes = list(map(len, texts))
            ids, lengths = encoder.encode(texts)
            self.append(ids, lengths)
            if self._vocabulary:
                has_bos = encoder.bos is not None
                has_eos = encoder.eos is not None
                self._sinks[-1].write(
                    text_bytes.divide_bytes(
                        ids, lengths, sizes, self._vocabulary, has_bos, has_eos
                    ).astype("<u2")
                )
            bar.advance(sum(sizes))
            self.save_if_due()
        self.save()


def _write_sources(directory: Path, name: str, dataset: Dataset) -> tuple[list[str], Any]:
    """Write the source of each document of a split; return the names and the manifest entry.

    Returns [] and None if the dataset has no column `source`.
    """
    if not dataset.has_sources(name):
        return [], None
    names, indices = text_bytes.name_sources(lambda: dataset.sources(name))
    sink = Sink(directory / f"{name}.{text_bytes.SOURCES}", 0)
    sink.write(indices)
    return names, sink.close()
