"""Tokenizers of the kinds that chat models use: bytes, merged bytes, sentencepiece."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lib.tokens.chat.encode import EncodedChats
from lib.tokens.encode import Encoder
from tests.tokens.chat.templates import SPECIAL
from tests.tokens.conftest import BOS, EOS, save_tokenizer

KINDS = ("bytes", "merged", "metaspace", "metaspace in front", "unigram")
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as Qwen splits
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def encoder(home: Path, kind: str, bos: bool, **settings: Any) -> Encoder:
    """Return the encoder of a tokenizer. settings: further keys of tokenizer_config.json."""
    save_tokenizer(home, bos=bos)
    backend = Tokenizer.from_file(str(home / "tokenizer.json"))
    if kind != "bytes":
        backend = _trained(kind, backend.post_processor if bos else None)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    backend.save(str(home / "tokenizer.json"))
    config = json.loads((home / "tokenizer_config.json").read_text()) | settings
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return Encoder(home, 1)


def _texts() -> list[str]:
    """Return invented paragraphs with line breaks and indented lists, the same ones each time."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(1500)]
    words += ["Number 12", "it's", "you'll", "def f(x):", "naïve", "日本", "<y>", "{z}", "'x'"]
    words += ["word", "hello", "system", "user", "assistant"] * 20
    ends = (" ", " ", " ", ", ", ".\n", "\n", "\n\n", "\n  - ", "\n    ", "!\n")
    return [
        "".join(word + rng.choice(ends) for word in rng.choices(words, k=400)) for _ in range(60)
    ]


def _trained(kind: str, around: Any) -> Tokenizer:
    texts = _texts()
    settings = {"vocab_size": 1200, "special_tokens": [BOS, EOS, "<unk>"], "show_progress": False}
    if kind == "merged":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(_WORDS, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            **settings, initial_alphabet=(pre_tokenizers.ByteLevel.alphabet())
        )
    else:
        scheme = "first" if kind == "metaspace in front" else "always"
        backend = Tokenizer(
            models.Unigram()
            if kind == "unigram"
            else models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        settings["special_tokens"] += _BYTES
        trainer = (
            trainers.UnigramTrainer(**settings, unk_token="<unk>")
            if kind == "unigram"
            else trainers.BpeTrainer(**settings)
        )
    # Sentencepiece learns line by line, so that none of its tokens holds a line break.
    backend.train_from_iterator(
        texts if kind == "merged" else [line for text in texts for line in text.split("\n")],
        trainer,
    )
    plain = json.loads(backend.to_str())  # bytes are words of the vocabulary, and not special
    plain["added_tokens"] = [
        token for token in plain["added_tokens"] if token["content"] not in _BYTES
    ]
    backend = Tokenizer.from_str(json.dumps(plain))
    if around is not None:
        backend.post_processor = around
    return backend


def shown(encoder: Encoder, encoded: EncodedChats) -> list[str]:
    """Return samples as text, with trained parts between ⟦ and ⟧."""
    samples = []
    ends = np.cumsum(encoded.lengths)
    for begin, end in zip([0, *ends], ends, strict=False):
        ids = encoded.tokens[begin:end]
        trained = encoded.trained[begin:end]
        cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1), len(ids)]
        parts = [
            (encoder.tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False), trained[a])
            for a, b in pairwise(cuts)
        ]
        samples.append("".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in parts))
    return samples
