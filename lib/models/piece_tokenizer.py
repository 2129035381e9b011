"""Train a tokenizer in the form of SentencePiece, which converters to GGUF and Ollama read.

It is a BPE on characters: a space is written as ▁, and a character without a token of its own is
written as the tokens of its bytes. Two files describe it: tokenizer.json for transformers, and
tokenizer.model, the format of SentencePiece, for other programs. SentencePiece merges the pair of
tokens whose result has the highest score, however the result is divided. So tokenizer.json lists
every division of each token as a merge, in the order of the tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SPACE = "▁"
UNKNOWN = "<unk>"  # never produced, since every byte has a token
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MODEL_FILE = "tokenizer.model"
_LETTERS = 4  # a fourth of the vocabulary at most is for single characters
# Types of pieces in SentencePiece.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_UNUSED = 5
_BYTE = 6
_BPE = 2  # model type of SentencePiece
# Splits text into words for the training, as the expression in tokenizer.py does: words with the
# preceding space, up to three digits, punctuation, line ends, other space.
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|▁?[^\s▁\p{L}\p{N}]+[\r\n]*|[\s▁]*[\r\n]+"
    r"|▁+(?=▁)|[\s▁]+"
)


def train_pieces(
    texts: Iterable[Sequence[str]], vocabulary: int, special: Sequence[str]
) -> list[str]:
    """Return the pieces of a trained vocabulary in the order of their IDs.

    texts: batches of documents. vocabulary: the largest number of pieces. special: the special
    tokens, which come first. There are fewer pieces if there is too little text.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    reserved = [UNKNOWN, *special, *BYTES]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=reserved,
        limit_alphabet=max(1, (vocabulary - len(reserved)) // _LETTERS),
        initial_alphabet=[SPACE],
    )
    tokenizer.train_from_iterator(texts, trainer)
    pieces = tokenizer.get_vocab()
    return sorted(pieces, key=pieces.__getitem__)


def build_json(pieces: Sequence[str], special: Sequence[str]) -> dict[str, Any]:
    """Return the content of tokenizer.json, which puts the first special token before a text.

    pieces: as `train_pieces` returns them.
    """
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        pair for piece in pieces if _is_normal(piece, special) for pair in _divide_piece(piece, ids)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in (UNKNOWN, *special)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": _template(special[0], "A"),
            "pair": _template(special[0], "A") + _template(special[0], "B", 1),
            "special_tokens": {
                special[0]: {"id": special[0], "ids": [ids[special[0]]], "tokens": [special[0]]}
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(pair) for pair in merges],
        },
    }


def build_model(pieces: Sequence[str], special: Sequence[str], unused: Sequence[str] = ()) -> bytes:
    """Return the content of tokenizer.model, a protocol buffer of SentencePiece.

    pieces: as `train_pieces` returns them. unused: further pieces that never occur.
    """
    out = bytearray()
    for index, piece in enumerate((*pieces, *unused)):
        kind = _NORMAL
        if piece == UNKNOWN:
            kind = _UNKNOWN
        elif piece in special:
            kind = _CONTROL
        elif piece in BYTES:
            kind = _BYTE
        elif index >= len(pieces):
            kind = _UNUSED
        score = -float(index) if kind == _NORMAL else 0.0
        entry = _text(1, piece) + _float(2, score) + _number(3, kind)
        out += _bytes(1, entry)
    place = {token: index for index, token in enumerate(pieces)}
    trainer = _number(3, _BPE) + _number(4, len(pieces) + len(unused)) + _number(35, 1)
    for field, token in ((40, UNKNOWN), (41, special[0]), (42, special[1])):
        trainer += _number(field, place[token])
    trainer += _text(45, UNKNOWN) + _text(46, special[0]) + _text(47, special[1])
    normalizer = _text(1, "identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return bytes(out + _bytes(2, trainer) + _bytes(3, normalizer))


def write_tokenizer(
    pieces: Sequence[str], special: Sequence[str], size: int, directory: Path
) -> None:
    """Write tokenizer.json and tokenizer.model with unused pieces up to a size."""
    unused = [f"<|unused_{index}|>" for index in range(len(pieces), size)]
    content = build_json(pieces, special)
    content["model"]["vocab"] |= {token: len(pieces) + i for i, token in enumerate(unused)}
    (directory / MODEL_FILE).write_bytes(build_model(pieces, special, unused))
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")


def _template(bos: str, sequence: str, kind: int = 0) -> list[dict[str, Any]]:
    """Return the part of a post-processor that puts BOS before a text."""
    return [
        {"SpecialToken": {"id": bos, "type_id": kind}},
        {"Sequence": {"id": sequence, "type_id": kind}},
    ]


def _is_normal(piece: str, special: Sequence[str]) -> bool:
    return piece != UNKNOWN and piece not in special and piece not in BYTES


def _divide_piece(piece: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield each division of a piece into two others, ordered by their IDs."""
    pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
    known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    return iter(sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]])))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())
