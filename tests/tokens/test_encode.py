# covers: lib/tokens/encode.py
"""Encode documents, with BOS and EOS whatever the tokenizer adds itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from lib.core import artifacts
from lib.core.errors import ArtifactError
from lib.tokens import encode
from lib.tokens.encode import Encoder

from .conftest import TEXTS, save_tokenizer


def ids_of(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text."""
    flat, lengths = encoder.encode([text.encode() for text in texts])
    assert flat.dtype == np.uint32 and len(flat) == lengths.sum()
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_document_gets_bos_if_the_tokenizer_adds_one_and_eos_if_it_has_one(
    tmp_path: Path, bos: bool, eos: bool
) -> None:
    encoder = Encoder(save_tokenizer(tmp_path / "t", bos=bos, eos=eos), 1)
    assert (encoder.bos, encoder.eos) == (0 if bos else None, 1 if eos else None)
    assert encoder.vocab_size == 258
    word, nothing = ids_of(encoder, ["ab", ""])
    plain = encoder.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert len(plain) == 2
    before = [0] if bos else []
    after = [1] if eos else []
    assert word == before + plain + after
    assert nothing == before + after


def test_the_encoder_gives_the_tokenizer_s_ids(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer, 1)
    for text, ids in zip(TEXTS, ids_of(encoder, TEXTS), strict=True):
        assert ids == [*encoder.tokenizer(text)["input_ids"], 1]


def test_truncation_and_padding_in_the_file_are_undone(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=True, truncate=True)
    saved = json.loads((directory / "tokenizer.json").read_text())
    assert saved["truncation"] and saved["padding"]
    short, long = ids_of(Encoder(directory, 1), ["a", "x" * 300])
    assert (len(short), len(long)) == (3, 302)


def test_a_tokenizer_that_adds_eos_itself_gives_one(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=False)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    path.write_text(json.dumps(content))
    encoder = Encoder(directory, 1)
    assert encoder.tokenizer("ab")["input_ids"][-1] == 1
    [ids] = ids_of(encoder, ["ab"])
    assert ids[2:] == [1] and encoder.bos is None


def test_the_vocabulary_ends_above_the_largest_id(tmp_path: Path) -> None:
    assert Encoder(save_tokenizer(tmp_path / "t", bos=True, extra_ids=100), 1).vocab_size == 358


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no tokenizer in"):
        artifacts.tokenizer_fingerprint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_reported(tokenizer: Path, content: str) -> None:
    (tokenizer / "tokenizer.json").write_text(content)
    with pytest.raises(ArtifactError, match="cannot be read") as caught:
        Encoder(tokenizer, 1)
    assert caught.value.found


def test_the_fingerprint_does_not_depend_on_the_path(tokenizer: Path) -> None:
    before = artifacts.tokenizer_fingerprint(tokenizer)
    moved = tokenizer.rename(tokenizer.with_name("moved"))
    (moved / "config.json").write_text("{}")
    assert artifacts.tokenizer_fingerprint(moved) == before
    with (moved / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    assert artifacts.tokenizer_fingerprint(moved) != before


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_text_follow_the_tokenizer_setting(tmp_path: Path, split: bool) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": split}))
    encoder = Encoder(directory, 1)
    encoder.tune([b"some text\nof the corpus"])  # the faster engine keeps to it as well
    [ids] = ids_of(encoder, ["a</s>b"])
    assert (1 in ids[1:-1]) is not split
    assert ids == [*encoder.tokenizer("a</s>b")["input_ids"], 1]


def test_a_long_text_is_cut_only_where_that_changes_nothing(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = [b"a line\nand the next\n  indented\n\nlast"]
    text = "words and\nmore words\n\n  of it\n" * 50
    expected = ids_of(Encoder(tokenizer, 1), ["short", text, ""])
    monkeypatch.setattr(encode, "_PIECE_BYTES", 64)
    monkeypatch.setattr(encode, "_GROUP_BYTES", 200)
    encoder = Encoder(tokenizer, 1)
    encoder.tune(sample)
    pieces, _ = encoder._cut_texts([b"short", text.encode(), b""])
    assert len(pieces) > 20 and b"".join(pieces) == b"short" + text.encode()
    assert ids_of(encoder, ["short", text, ""]) == expected


def test_a_tokenizer_in_python_encodes_texts_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last text completes a group, so no text is left after it."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "t")
    monkeypatch.setattr(encode, "_GROUP_BYTES", 4)
    assert ids_of(Encoder(tmp_path / "t", 1), ["ab", "long text"]) == [
        [*(3 + byte for byte in text), 1] for text in (b"ab", b"long text")
    ]


def test_texts_are_not_cut_if_that_changes_the_ids(tmp_path: Path) -> None:
    """This tokenizer puts a space before every text, as SentencePiece models do."""
    directory = save_tokenizer(tmp_path / "t", bos=False)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(content))
    encoder = Encoder(directory, 1)
    encoder.tune([b"a line\nand the next"])
    assert not encoder._may_cut


def test_gigatoken_is_used_only_if_its_ids_are_equal(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    encoder = Encoder(tokenizer, 1)
    sample = [text.encode() for text in TEXTS]
    encoder.tune(sample)
    assert isinstance(encoder._engine, encode.Gigatoken)
    assert ids_of(encoder, TEXTS) == ids_of(Encoder(tokenizer, 1), TEXTS)
    honest = encode.Gigatoken._encode_fast
    monkeypatch.setattr(
        encode.Gigatoken,
        "_encode_fast",
        lambda self, texts: (honest(self, texts)[0] + 1, honest(self, texts)[1]),
    )
    encoder.tune(sample)
    assert isinstance(encoder._engine, encode.HuggingFace)
