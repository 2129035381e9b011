"""Text to token ids, with one policy for the tokens around a document."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from lib.core import hashing
from lib.core.errors import ArtifactError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
                   "spiece.model", "vocab.txt")


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
        # The Rust tokenizer reads this when it first makes its thread pool.
        os.environ["RAYON_NUM_THREADS"] = str(num_workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True,
                                                           trust_remote_code=False)
        except Exception as error:  # each tokenizer class fails in a way of its own
            raise ArtifactError(f"the tokenizer in {directory} cannot be read",
                                found=(str(error).strip() or repr(error)).splitlines()[0]
                                ) from error
        self._fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            # A tokenizer.json may carry these from its training; documents must stay whole.
            self._fast.no_truncation()
            self._fast.no_padding()
        vocabulary = self.tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos: int | None = self.tokenizer.eos_token_id
        self.bos = self._leading_bos()

    def _leading_bos(self) -> int | None:
        ids = self.tokenizer("a")["input_ids"]
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None and ids and ids[0] == bos else None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return one int64 [tokens of the document] per text, BOS and EOS included."""
        if self._fast is not None:
            coded = self._fast.encode_batch_fast(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in coded]
        else:
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        before = [] if self.bos is None else [self.bos]
        after = [] if self.eos is None else [self.eos]
        return [np.array(before + one + after, dtype=np.int64) for one in ids]
