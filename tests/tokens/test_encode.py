"""Text to ids: one policy for the tokens around a document, whatever the tokenizer does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import ArtifactError
from lib.tokens import encode
from lib.tokens.encode import Encoder

from .conftest import TEXTS, save_tokenizer


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_document_gets_bos_if_the_tokenizer_adds_one_and_eos_if_it_has_one(
        tmp_path: Path, bos: bool, eos: bool) -> None:
    encoder = Encoder(save_tokenizer(tmp_path / "t", bos=bos, eos=eos), 1)
    assert (encoder.bos, encoder.eos) == (0 if bos else None, 1 if eos else None)
    assert encoder.vocab_size == 258
    word, nothing = encoder.encode(["ab", ""])
    plain = encoder.tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert len(plain) == 2
    before, after = [0] if bos else [], [1] if eos else []
    assert word.tolist() == before + plain + after and word.dtype == np.int64
    assert nothing.tolist() == before + after


def test_the_ids_are_those_of_the_tokenizer_on_its_own(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer, 1)
    for text, ids in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        assert ids.tolist() == [*encoder.tokenizer(text)["input_ids"], 1]


def test_truncation_and_padding_in_the_file_are_undone(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=True, truncate=True)
    saved = json.loads((directory / "tokenizer.json").read_text())
    assert saved["truncation"] and saved["padding"]
    short, long = Encoder(directory, 1).encode(["a", "x" * 300])
    assert (len(short), len(long)) == (3, 302)


def test_a_tokenizer_that_adds_eos_itself_gives_one(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=False)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "single": [{"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}}
    path.write_text(json.dumps(content))
    encoder = Encoder(directory, 1)
    assert encoder.tokenizer("ab")["input_ids"][-1] == 1
    [ids] = encoder.encode(["ab"])
    assert ids.tolist()[2:] == [1] and encoder.bos is None


def test_the_vocabulary_ends_above_the_largest_id(tmp_path: Path) -> None:
    assert Encoder(save_tokenizer(tmp_path / "t", bos=True, extra_ids=100), 1).vocab_size == 358


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no tokenizer in"):
        encode.tokenizer_fingerprint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_told(tokenizer: Path, content: str) -> None:
    (tokenizer / "tokenizer.json").write_text(content)
    with pytest.raises(ArtifactError, match="cannot be read") as caught:
        Encoder(tokenizer, 1)
    assert caught.value.found


def test_the_fingerprint_is_of_the_files_and_not_of_their_place(tokenizer: Path) -> None:
    before = encode.tokenizer_fingerprint(tokenizer)
    moved = tokenizer.rename(tokenizer.with_name("moved"))
    (moved / "config.json").write_text("{}")
    assert encode.tokenizer_fingerprint(moved) == before
    with (moved / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    assert encode.tokenizer_fingerprint(moved) != before


@pytest.mark.parametrize("split", [True, False])
def test_a_document_forges_a_boundary_only_where_the_tokenizer_lets_it(tmp_path: Path, split: bool,
                                                                       ) -> None:
    directory = save_tokenizer(tmp_path / "t", bos=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": split}))
    encoder = Encoder(directory, 1)
    [ids] = encoder.encode(["a</s>b"])
    assert (1 in ids[1:-1].tolist()) is not split
    assert ids.tolist() == [*encoder.tokenizer("a</s>b")["input_ids"], 1]
