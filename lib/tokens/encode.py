"""Documents to token ids, with one policy for the tokens around a document."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lib.core import hashing
from lib.core.errors import ArtifactError
from lib.tokens import engines
from lib.tokens import source as sources
from lib.tokens.source import Source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
                   "spiece.model", "vocab.txt")
_PIECE_BYTES = 4 << 20
_GROUP_BYTES = 32 << 20
_SAMPLED_TEXTS, _SAMPLED_BYTES = 200, 4000  # for an estimate: the most of each
# Between a line and the next word: where byte-level tokenizers start a new piece anyway.
_BOUNDARY = re.compile(rb"(?<=\S\n)(?=[A-Za-z])")


def tokenizer_fingerprint(directory: Path) -> str:
    """Identify a tokenizer by the content of its files; ArtifactError when there is none."""
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not any(f.name not in ("tokenizer_config.json", "special_tokens_map.json") for f in files):
        raise ArtifactError(f"no tokenizer in {directory}",
                            expected="tokenizer.json or tokenizer.model")
    return hashing.fingerprint([[f.name, hashing.file_digest(f, "sha256")] for f in files])


class Encoder:
    """A Hugging Face tokenizer as the token store uses it.

    A document becomes [BOS] ids [EOS]: BOS if the tokenizer itself puts one in front of a text,
    EOS whenever the tokenizer has one.

    vocab_size: one above the largest id it can give. Raises ArtifactError when it cannot be read.
    """

    def __init__(self, directory: Path, num_workers: int) -> None:
        # The Rust tokenizers read these when they first make their thread pools.
        os.environ["RAYON_NUM_THREADS"] = str(num_workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True,
                                                           trust_remote_code=False)
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            self.bos = self._leading_bos()
        except Exception as error:  # each tokenizer class fails in a way of its own
            raise ArtifactError(f"the tokenizer in {directory} cannot be read",
                                found=(str(error).strip() or repr(error)).splitlines()[0]
                                ) from error
        self.directory = directory
        self.eos: int | None = self.tokenizer.eos_token_id
        self._engine: engines.Engine = engines.HuggingFace(self.tokenizer)
        self._may_cut = False

    def tune(self, sample: Sequence[bytes]) -> None:
        """Take the fastest way that gives the tokenizer's ids on a sample of the corpus."""
        self._engine = engines.choose(self.directory, self.tokenizer, sample)
        self._may_cut = self._cutting_is_harmless(sample)

    def encode(self, texts: Sequence[bytes]) -> engines.Ids:
        """Return uint32 [tokens] of all texts, BOS and EOS included, and int64 [texts], how many
        belong to each.

        A text of hundreds of megabytes is encoded in pieces where the tokenizer allows it.
        """
        pieces, owners = self._pieces(texts)
        ids, lengths = self._encode_pieces(pieces)
        per_text = np.zeros(len(texts), np.int64)
        np.add.at(per_text, owners, lengths)
        return self._framed(ids, per_text)

    def _leading_bos(self) -> int | None:
        ids = self.tokenizer("a")["input_ids"]
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None and ids and ids[0] == bos else None

    def _framed(self, ids: np.ndarray, lengths: np.ndarray) -> engines.Ids:
        """Put BOS and EOS around each text's ids."""
        framed = lengths + (self.bos is not None) + (self.eos is not None)
        ends = np.cumsum(framed)
        out, is_text = np.empty(int(framed.sum()), np.uint32), np.ones(int(framed.sum()), bool)
        for token, places in ((self.bos, ends - framed), (self.eos, ends - 1)):
            if token is not None:
                out[places], is_text[places] = token, False
        out[is_text] = ids
        return out, framed

    def _encode_pieces(self, pieces: list[bytes]) -> engines.Ids:
        done, group, size = [], [], 0
        for piece in pieces:
            group.append(piece)
            size += len(piece)
            if size >= _GROUP_BYTES:
                done.append(self._engine.encode(group))
                group, size = [], 0
        done.append(self._engine.encode(group))
        return np.concatenate([ids for ids, _ in done]), np.concatenate([n for _, n in done])

    def _pieces(self, texts: Sequence[bytes]) -> tuple[list[bytes], np.ndarray]:
        """Cut long texts; return the pieces and the number of the text that each belongs to."""
        if not self._may_cut or max(map(len, texts), default=0) <= _PIECE_BYTES:
            return list(texts), np.arange(len(texts))
        pieces, owners = [], []
        for number, text in enumerate(texts):
            cut = [text] if len(text) <= _PIECE_BYTES else _cut(text, _PIECE_BYTES)
            pieces += cut
            owners += [number] * len(cut)
        return pieces, np.array(owners)

    def _cutting_is_harmless(self, sample: Sequence[bytes]) -> bool:
        """Tell whether ids stay the same when texts of the sample are cut at boundaries."""
        whole = [text for text in sample if _BOUNDARY.search(text)]
        cut = [piece for text in whole for piece in _cut(text, 1)]
        return bool(whole) and np.array_equal(self._engine.encode(whole)[0],
                                              self._engine.encode(cut)[0])


def estimated_tokens(source: Source, tokenizer_dir: Path) -> int:
    """Return about how many tokens the training split has, from the middles of some texts.

    Raises ArtifactError when the tokenizer or the text cannot be read.
    """
    train = source.splits["train"]
    texts = sources.sample(train, _SAMPLED_TEXTS, _SAMPLED_BYTES)
    encoder = Encoder(tokenizer_dir, os.cpu_count() or 1)
    ids, lengths = encoder.encode(texts)
    around = (encoder.bos is not None) + (encoder.eos is not None)
    per_byte = (len(ids) - around * len(lengths)) / max(1, sum(map(len, texts)))
    documents, size = sources.extent(train)
    return round(size * per_byte) + around * documents


def _cut(text: bytes, at_least: int) -> list[bytes]:
    """Cut a text at boundaries into pieces of `at_least` bytes, as near as they allow."""
    pieces, start = [], 0
    while boundary := _BOUNDARY.search(text, start + at_least):
        pieces.append(text[start:boundary.start()])
        start = boundary.start()
    return [*pieces, text[start:]]
