"""The files of a tokenizer, and its identity: one list for every room that reads or copies them."""

from __future__ import annotations

from pathlib import Path

from lib.core import hashing
from lib.core.errors import ArtifactError

CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
# A directory with one of these contains a tokenizer.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
# Every file from which transformers reads a tokenizer. None is a pickle or runs as code.
TOKENIZER_FILES = (*VOCABULARIES, *_SETTINGS, *CHAT_TEMPLATES)
# The files that decide token ids, in the order in which a fingerprint lists them.
_FINGERPRINTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "vocab.txt",
)


def tokenizer_fingerprint(directory: Path) -> str:
    """Identify a tokenizer by the content of its files. Raises ArtifactError without one."""
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    vocabularies = [name for name in VOCABULARIES if name in present]
    if not vocabularies:
        raise ArtifactError(
            f"no tokenizer in {directory}", expected="tokenizer.json or tokenizer.model"
        )
    names = [name for name in _FINGERPRINTED if name in present]
    if not set(vocabularies) & {*_FINGERPRINTED}:
        # Otherwise these stay out, so that token stores of earlier versions keep their identity.
        names += vocabularies
    return hashing.fingerprint(
        [[name, hashing.file_digest(directory / name, "sha256")] for name in names]
    )
