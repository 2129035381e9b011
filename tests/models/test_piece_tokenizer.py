# covers: lib/models/piece_tokenizer.py, lib/models/tokenizer.py, 03_download_model.py
"""A tokenizer in the form of SentencePiece is the same in both of its files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from lib.core.errors import UsageError
from lib.models import piece_tokenizer, scratch, tokenizer
from tests.scripts import load_script

SIZE = 800
TEXTS = [path.read_text() for path in sorted(Path(tokenizer.__file__).parent.glob("[a-l]*.py"))]
STRANGE = (
    "",
    " ",
    "  a  ",
    "\n\n\r\n\t ",
    "\x00\x7f",
    "naïve Ж 漢字 👩🏽‍🚀",
    "e\u0301 \u200b",
    "<s>",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train such a tokenizer beside the config of its model."""
    root = tmp_path_factory.mktemp("pieces")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(root / "corpus")
    into = root / "it"
    into.mkdir()
    design = scratch.Design(
        "tiny", None, SIZE, (root / "corpus",), None, tokenizer_kind=tokenizer.PIECES
    )
    design.write_tokenizer(into, 1, False)
    design.write_configs(into, SIZE)
    return into


def read_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protocol buffer."""

    def read_number() -> int:
        nonlocal at
        value = 0
        shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    at = 0
    while at < len(content):
        tag = read_number()
        if tag & 7 == 0:
            yield tag >> 3, read_number()
            continue
        size = 4 if tag & 7 == 5 else read_number()
        yield tag >> 3, content[at : at + size]
        at += size


def read_pieces(path: Path) -> list[tuple[str, float, int]]:
    """Return piece, score and type of each entry in tokenizer.model."""
    entries = [dict(read_fields(value)) for field, value in read_fields(path) if field == 1]
    return [(e[1].decode(), struct.unpack("<f", e[2])[0], e[3]) for e in entries]


def encode_by_scores(text: str, pieces: list[tuple[str, float, int]]) -> list[int]:
    """Merge, as SentencePiece does, the two neighbours whose union has the highest score."""
    scores = {piece: score for piece, score, kind in pieces if kind == 1}
    ids = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [
            (scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores
        ]
        if not unions:
            break
        i = -max(unions)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    by_bytes = [[f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [
        ids[piece]
        for part, its_bytes in zip(parts, by_bytes, strict=True)
        for piece in ([part] if part in scores else its_bytes)
    ]


def test_both_files_encode_every_text_with_the_same_tokens(trained: Path) -> None:
    pieces = read_pieces((trained / "tokenizer.model").read_bytes())
    loaded = AutoTokenizer.from_pretrained(trained)
    assert len(pieces) == len(loaded) == SIZE
    assert [piece for piece, _, _ in pieces] == loaded.convert_ids_to_tokens(range(SIZE))
    draw = random.Random(0)
    alphabet = "abcdeff  \n\t.,(){}=self._é漢👩0123456789"
    strings = ["".join(draw.choices(alphabet, k=draw.randint(1, 40))) for _ in range(100)]
    words = [" ".join(draw.choices(["self", "return", "the", "  ", "path"], k=12)) for _ in "abc"]
    for text in (*STRANGE, *strings, *words, TEXTS[0][:400]):
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == encode_by_scores(text, pieces), text
        assert loaded.decode(ids) == text


def test_its_settings_suit_programs_that_read_tokenizer_model(trained: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(trained)
    assert loaded("a")["input_ids"][0] == loaded.bos_token_id == 1 != loaded("a")["input_ids"][1]
    assert tokenizer.EOS not in loaded.convert_ids_to_tokens(loaded(tokenizer.EOS)["input_ids"])
    settings = json.loads((trained / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True and settings["add_prefix_space"] is False
    content = (trained / "tokenizer.model").read_bytes()
    normalizer = dict(read_fields(dict(read_fields(content))[3]))
    assert normalizer[3] == 0 and normalizer[4] == 0 and normalizer[5] == 1  # spaces stay
    kinds = {piece: kind for piece, _, kind in read_pieces(content)}
    assert kinds[tokenizer.BOS] == 3 and kinds["<unk>"] == 2 and kinds["<0x0A>"] == 6
    config = json.loads((trained / "config.json").read_text())
    assert [config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 2, 3]


def test_a_chat_tokenizer_has_the_tokens_of_its_template(tmp_path: Path) -> None:
    special = tokenizer._list_special_tokens(True, 400, tokenizer.PIECES)  # as for conversations
    pieces = piece_tokenizer.train_pieces([["a b"]], 400, special)
    piece_tokenizer.write_tokenizer(pieces, special, 400, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    added = [token["content"] for token in content["added_tokens"]]
    assert added == ["<unk>", tokenizer.BOS, tokenizer.EOS, *tokenizer.TURN, tokenizer.PAD]


def test_a_tokenizer_that_llama_cpp_does_not_know_is_named(tmp_path: Path) -> None:
    for kind, says in ((tokenizer.BYTE_LEVEL, "llama.cpp"), (tokenizer.PIECES, "")):
        design = scratch.Design("1M", None, 300, (), None, tokenizer_kind=kind)
        (tmp_path / kind).mkdir()
        design.write_tokenizer(tmp_path / kind, 1, False)
        tokens = AutoTokenizer.from_pretrained(tmp_path / kind).get_vocab()
        line = tokenizer.describe_readers(tmp_path / kind, tokens)
        assert says in line and bool(says) == bool(line)
    with pytest.raises(UsageError, match="too few"):
        scratch.Design("1M", None, 259, (), None, tokenizer_kind=kind).write_tokenizer(
            tmp_path, 1, False
        )
    identities = [
        scratch.Design("1M", None, 300, (), None, tokenizer_kind=kind).identity("x")["options"]
        for kind in tokenizer.KINDS
    ]
    assert "tokenizer_kind" not in identities[0] and identities[1]["tokenizer_kind"]
    stage = load_script("03_download_model.py")
    with pytest.raises(UsageError, match="only copied"):
        words = ["--from-scratch", "--model-size", "1M", "--tokenizer", "t"]
        stage.parse([*words, "--tokenizer-kind", tokenizer.PIECES])
