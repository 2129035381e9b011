"""What turns text into ids: the Hugging Face tokenizer itself, or a faster one with equal ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lib.core import log

Ids = tuple[np.ndarray, np.ndarray]  # uint32 [tokens], int64 [texts]: the ids, and how many of each


class Engine(Protocol):
    """Encodes UTF-8 texts without adding tokens around them."""

    def encode(self, texts: Sequence[bytes]) -> Ids: ...


class HuggingFace:
    """The tokenizer as transformers loads it; a Rust one uses all threads it may."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        if self._rust is not None:
            # A tokenizer.json may carry these from its training; documents must stay whole.
            self._rust.no_truncation()
            self._rust.no_padding()

    def encode(self, texts: Sequence[bytes]) -> Ids:
        strings = [text.decode("utf-8", "replace") for text in texts]
        if self._rust is not None:
            coded = self._rust.encode_batch_fast(strings, add_special_tokens=False)
            ids = [encoding.ids for encoding in coded]
        else:
            ids = self._tokenizer(strings, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = [np.array(one, dtype=np.uint32) for one in ids]
        return np.concatenate(flat) if flat else np.empty(0, np.uint32), lengths


class Gigatoken:
    """The gigatoken library (dozens of times as fast), for tokenizers that it gets right.

    Texts in which a special token is spelled out go to the Hugging Face tokenizer: whether they
    count as that token is a setting of each tokenizer. Raises whatever gigatoken raises for a
    tokenizer.json that it does not support.
    """

    def __init__(self, directory: Path, reference: HuggingFace, special: Sequence[str]) -> None:
        import gigatoken

        self._reference = reference
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = gigatoken.Tokenizer.from_json(text)
        self._special = [one.encode() for one in special if one]
        self._prefix = _common_prefix(self._special)

    def encode(self, texts: Sequence[bytes]) -> Ids:
        odd = np.array([self._spells_special(text) for text in texts], dtype=bool)
        if not odd.any():
            return self._fast(texts)
        slow = self._reference.encode([text for text, is_odd in zip(texts, odd, strict=True)
                                       if is_odd])
        fast = self._fast([text for text, is_odd in zip(texts, odd, strict=True) if not is_odd])
        lengths = np.empty(len(texts), np.int64)
        lengths[odd], lengths[~odd] = slow[1], fast[1]
        of_odd = np.repeat(odd, lengths)
        flat = np.empty(len(of_odd), np.uint32)
        flat[of_odd], flat[~of_odd] = slow[0], fast[0]
        return flat, lengths

    def _fast(self, texts: Sequence[bytes]) -> Ids:
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        # An awkward array: one flat array of ids, and where each text's begin.
        rows = self._tokenizer.encode_batch(list(texts)).layout.to_ListOffsetArray64(True)
        offsets = np.asarray(rows.offsets.data, dtype=np.int64)
        return np.asarray(rows.content.data[:offsets[-1]], dtype=np.uint32), np.diff(offsets)

    def _spells_special(self, text: bytes) -> bool:
        return self._prefix in text and any(special in text for special in self._special)


def choose(directory: Path, tokenizer: Any, sample: Sequence[bytes]) -> Engine:
    """Return the fastest engine whose ids equal the Hugging Face tokenizer's on a sample.

    sample: texts of the corpus at hand. The choice and its reason are logged.
    """
    reference = HuggingFace(tokenizer)
    if not (directory / "tokenizer.json").is_file():
        return reference
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    try:
        fast = Gigatoken(directory, reference, special)
        if _equal(fast.encode(sample), reference.encode(sample)):
            log.info(f"  encoder: gigatoken, equal to the tokenizer on {len(sample)} sampled texts")
            return fast
        reason = "its ids differ from the tokenizer's on a sample of this corpus"
    except ImportError:
        reason = "it is not installed (pip install gigatoken)"
    except Exception as error:  # a young library: whatever it raises, the reference remains
        reason = f"it does not take this tokenizer ({(str(error) or repr(error)).splitlines()[0]})"
    log.info(f"  encoder: tokenizers; not gigatoken, {reason}")
    return reference


def _equal(one: Ids, other: Ids) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _common_prefix(words: Sequence[bytes]) -> bytes:
    """Return what all words begin with: one search for it rules most texts out."""
    if not words:
        return b"\0 no special token"
    low, high = min(words), max(words)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
                  min(len(low), len(high)))
    return low[:length]
