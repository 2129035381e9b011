"""Encode documents as token ids, with BOS and EOS around each document.

The engine is the Hugging Face tokenizer itself, or a faster one with equal ids.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lib.core import log
from lib.core.artifacts import TOKENIZER
from lib.core.errors import ArtifactError
from lib.tokens import framing

_PIECE_BYTES = 4 << 20
_GROUP_BYTES = 32 << 20
# The place between a line break and a word, where byte-level tokenizers start a new piece anyway.
_BOUNDARY = re.compile(rb"(?<=\S\n)(?=[A-Za-z])")

Ids = tuple[
    np.ndarray, np.ndarray
]  # the ids (uint32 [tokens]) and the number of ids per text (int64 [texts])


class Engine(Protocol):
    """Encodes UTF-8 texts without adding tokens around them."""

    def encode(self, texts: Sequence[bytes]) -> Ids: ...


class HuggingFace:
    """Encodes with the tokenizer that transformers loads; a Rust one uses several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        if self._rust is not None:
            # A tokenizer.json may set these, but documents must stay whole.
            self._rust.no_truncation()
            self._rust.no_padding()

    def encode(self, texts: Sequence[bytes]) -> Ids:
        if not texts:  # a tokenizer without a Rust part would raise an error
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        strings = [text.decode("utf-8", "replace") for text in texts]
        if self._rust is not None:
            coded = self._rust.encode_batch_fast(strings, add_special_tokens=False)
            ids = [encoding.ids for encoding in coded]
        else:
            ids = self._tokenizer(strings, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = [np.array(one, dtype=np.uint32) for one in ids]
        return np.concatenate(flat), lengths


class Gigatoken:
    """Encodes with gigatoken, dozens of times as fast as the Hugging Face tokenizer.

    special: the special tokens. A text that spells one of them is encoded by `reference`, since a
    setting of each tokenizer decides whether the text becomes the token. The constructor raises
    gigatoken's own errors for a tokenizer.json that it does not support.
    """

    def __init__(self, directory: Path, reference: HuggingFace, special: Sequence[str]) -> None:
        import gigatoken

        self._reference = reference
        text = (directory / TOKENIZER).read_text(encoding="utf-8")
        self._tokenizer = gigatoken.Tokenizer.from_json(text)
        self._special = [one.encode() for one in special if one]
        self._prefix = _find_common_prefix(self._special)

    def encode(self, texts: Sequence[bytes]) -> Ids:
        is_slow = np.array([self._spells_special(text) for text in texts], dtype=bool)
        if not is_slow.any():
            return self._encode_fast(texts)
        reference_ids = self._reference.encode(
            [text for text, slow in zip(texts, is_slow, strict=True) if slow]
        )
        fast_ids = self._encode_fast(
            [text for text, slow in zip(texts, is_slow, strict=True) if not slow]
        )
        lengths = np.empty(len(texts), np.int64)
        lengths[is_slow] = reference_ids[1]
        lengths[~is_slow] = fast_ids[1]
        is_slow_id = np.repeat(is_slow, lengths)
        flat = np.empty(len(is_slow_id), np.uint32)
        flat[is_slow_id] = reference_ids[0]
        flat[~is_slow_id] = fast_ids[0]
        return flat, lengths

    def _encode_fast(self, texts: Sequence[bytes]) -> Ids:
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        # An awkward array: a flat array of ids, and the offset of each text.
        rows = self._tokenizer.encode_batch(list(texts)).layout.to_ListOffsetArray64(True)
        offsets = np.asarray(rows.offsets.data, dtype=np.int64)
        return np.asarray(rows.content.data[: offsets[-1]], dtype=np.uint32), np.diff(offsets)

    def _spells_special(self, text: bytes) -> bool:
        return self._prefix in text and any(special in text for special in self._special)


class Encoder:
    """Encodes documents with a Hugging Face tokenizer for the token store.

    A document becomes [BOS] ids [EOS]: BOS if the tokenizer itself adds one before a text, EOS if
    the tokenizer has one.

    vocab_size: the largest id plus one. changes, disagreements: see framing.follow_settings. Raises
    ArtifactError if the tokenizer cannot be read.
    """

    def __init__(self, directory: Path, num_workers: int) -> None:
        # The Rust tokenizers read these when they create their thread pool.
        os.environ["RAYON_NUM_THREADS"] = str(num_workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            self.changes, self.disagreements = framing.follow_settings(self.tokenizer, directory)
            self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
            self.bos = self._find_leading_bos()
        except Exception as error:  # each tokenizer class raises other errors
            raise ArtifactError(
                f"the tokenizer in {directory} cannot be read",
                found=(str(error).strip() or repr(error)).splitlines()[0],
            ) from error
        self.directory = directory
        self.eos: int | None = self.tokenizer.eos_token_id
        self._engine: Engine = HuggingFace(self.tokenizer)
        self._may_cut = False

    def tune(self, sample: Sequence[bytes], spelled: bool = False) -> None:
        """Choose the fastest engine that gives the tokenizer's ids on a sample of the corpus.

        spelled: the texts contain special tokens as text, so the engine must read those as well.
        """
        self._engine = _choose_engine(self.directory, self.tokenizer, sample, spelled)
        self._may_cut = self._is_cutting_harmless(sample)

    def encode(self, texts: Sequence[bytes]) -> Ids:
        """Return the ids of texts with BOS and EOS, and the number of ids per text.

        A text of hundreds of megabytes is encoded in pieces if the tokenizer allows it.
        """
        pieces, owners = self._cut_texts(texts)
        ids, lengths = self._encode_pieces(pieces)
        per_text = np.zeros(len(texts), np.int64)
        np.add.at(per_text, owners, lengths)
        return self._add_bos_eos(ids, per_text)

    def read_special_tokens(self) -> None:
        """Let the tokenizer encode special tokens in a text as such, even if it is set not to.

        A chat template writes special tokens as text. Call this method before `tune`.
        """
        self.tokenizer.split_special_tokens = False
        rust = getattr(self.tokenizer, "backend_tokenizer", None)
        if rust is not None:
            rust.encode_special_tokens = False

    def encode_bare(self, texts: Sequence[bytes]) -> Ids:
        """Return the ids of texts without BOS and EOS, and the number of ids per text."""
        return self._engine.encode(texts)

    def _find_leading_bos(self) -> int | None:
        ids = self.tokenizer("a")["input_ids"]
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None and ids and ids[0] == bos else None

    def _add_bos_eos(self, ids: np.ndarray, lengths: np.ndarray) -> Ids:
        """Add BOS and EOS to the ids of each text."""
        framed = lengths + (self.bos is not None) + (self.eos is not None)
        ends = np.cumsum(framed)
        out = np.empty(int(framed.sum()), np.uint32)
        is_text = np.ones(int(framed.sum()), bool)
        for token, places in ((self.bos, ends - framed), (self.eos, ends - 1)):
            if token is not None:
                out[places] = token
                is_text[places] = False
        out[is_text] = ids
        return out, framed

    def _encode_pieces(self, pieces: list[bytes]) -> Ids:
        done = []
        group = []
        size = 0
        for piece in pieces:
            group.append(piece)
            size += len(piece)
            if size >= _GROUP_BYTES:
                done.append(self._engine.encode(group))
                group = []
                size = 0
        done.append(self._engine.encode(group))
        return np.concatenate([ids for ids, _ in done]), np.concatenate([n for _, n in done])

    def _cut_texts(self, texts: Sequence[bytes]) -> tuple[list[bytes], np.ndarray]:
        """Cut long texts; return the pieces, and for each piece the index of its text."""
        if not self._may_cut or max(map(len, texts), default=0) <= _PIECE_BYTES:
            return list(texts), np.arange(len(texts))
        pieces = []
        owners = []
        for number, text in enumerate(texts):
            cut = [text] if len(text) <= _PIECE_BYTES else _cut_text(text, _PIECE_BYTES)
            pieces += cut
            owners += [number] * len(cut)
        return pieces, np.array(owners)

    def _is_cutting_harmless(self, sample: Sequence[bytes]) -> bool:
        """Return whether cutting the texts of a sample at boundaries leaves the ids the same."""
        texts = [text for text in sample if _BOUNDARY.search(text)]
        cut = [piece for text in texts for piece in _cut_text(text, 1)]
        return bool(texts) and np.array_equal(
            self._engine.encode(texts)[0], self._engine.encode(cut)[0]
        )


def make_worker_encoder(directory: Path) -> Encoder:
    """Return the Encoder of a worker process, which uses one thread.

    Tokenizers of transformers need no torch. Without it a worker starts in a quarter of the time
    and takes a third of the memory. Afterwards this process cannot import torch.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes the import fail
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # "PyTorch was not found"
    return Encoder(directory, 1)


def _cut_text(text: bytes, at_least: int) -> list[bytes]:
    """Cut a text at the first boundary after every `at_least` bytes."""
    pieces = []
    start = 0
    while boundary := _BOUNDARY.search(text, start + at_least):
        pieces.append(text[start : boundary.start()])
        start = boundary.start()
    return [*pieces, text[start:]]


def _choose_engine(
    directory: Path, tokenizer: Any, sample: Sequence[bytes], spelled: bool
) -> Engine:
    """Return the fastest engine whose ids equal the Hugging Face tokenizer's on a sample.

    sample: texts of the corpus. spelled: the engine must read special tokens in texts. The choice
    and its reason are logged.
    """
    reference = HuggingFace(tokenizer)
    if not (directory / TOKENIZER).is_file():
        return reference
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if spelled:
        sample = [
            *sample,
            *(f"a {token}b {token}\n {token}{token} \nc".encode() for token in special),
        ]
        special = []
    try:
        fast = Gigatoken(directory, reference, special)
        if _are_equal(fast.encode(sample), reference.encode(sample)):
            log.detail(
                f"  encoder: gigatoken, same ids as the tokenizer on {len(sample)} sampled texts"
            )
            return fast
        reason = "its ids differ from the tokenizer's on a sample of this corpus"
    except ImportError:
        reason = "it is not installed (pip install gigatoken)"
    except Exception as error:  # whatever gigatoken raises, the reference still works
        reason = (
            f"it does not support this tokenizer ({(str(error) or repr(error)).splitlines()[0]})"
        )
    log.detail(f"  encoder: tokenizers, not gigatoken: {reason}")
    return reference


def _are_equal(one: Ids, other: Ids) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _find_common_prefix(words: Sequence[bytes]) -> bytes:
    """Return the common prefix of words; most texts do not contain it, so one search is enough."""
    if not words:
        return b"\0 no special token"
    low = min(words)
    high = max(words)
    length = next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )
    return low[:length]
