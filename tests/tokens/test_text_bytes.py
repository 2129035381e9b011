# covers: lib/tokens/text_bytes.py, lib/tokens/split_writer.py
"""The bytes of tokens are known for several kinds of vocabularies, and sources get names."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lib.tokens import text_bytes
from lib.tokens.text_bytes import SPECIAL, TokenBytes


def make_word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, which normalises text and knows four words."""
    words = ["<unk>", "</s>", "file", "cafe", "a", "日本"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_bytes_of_normalised_text_add_up_to_those_of_the_document() -> None:
    tokenizer = make_word_tokenizer()
    texts = ["ﬁle  café unknown 日本", "", "a</s>a"]
    ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 1] for text in texts]
    counts = text_bytes.divide_bytes(
        np.array([token for ids_of_text in ids for token in ids_of_text], np.uint32),
        np.array([len(ids_of_text) for ids_of_text in ids]),
        [len(text.encode()) for text in texts],
        text_bytes.measure_vocabulary(tokenizer),
        has_bos=False,
        has_eos=True,
    )
    first, second, third = np.split(
        counts, np.cumsum([len(ids_of_text) for ids_of_text in ids])[:-1]
    )
    assert first[:-1].sum() == len(texts[0].encode()) and first[-1] == SPECIAL
    assert list(second) == [SPECIAL]
    assert list(third) == [1, SPECIAL, 1, SPECIAL]  # 4 bytes of the text count neither way


def test_a_byte_level_token_stands_for_its_own_bytes() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = text_bytes.measure_vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert vocabulary.bytes.tolist() == [1] * 256 and not vocabulary.special.any()


def test_a_token_of_more_bytes_than_fit_is_limited() -> None:
    vocabulary = TokenBytes(np.array([1]), np.array([False]))
    counts = text_bytes.divide_bytes(
        np.zeros(2, np.uint32), np.array([1, 1]), [1 << 20, 7], vocabulary, False, False
    )
    assert counts.tolist() == [SPECIAL - 1, 7]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["books/a/1.txt", "code/x.py", "c4-00001-of-00007.jsonl.gz"], ["books", "code", "c4"]),
        (["raw/en/books/1.txt", "raw/en/code/1.py"], ["books", "code"]),
        (["d/wiki_01.txt", "d/wiki_02.txt", "d/2024.txt"], ["wiki", "wiki", "2024"]),
        ([None, "", "a b\x1b/x", "c/x"], ["other", "other", "a_b_", "c"]),
        (["github", "arxiv"], ["github", "arxiv"]),
    ],
)
def test_a_source_is_named_by_the_first_part_of_the_path_that_differs(
    paths: list[str | None], names: list[str]
) -> None:
    source_names, indices = text_bytes.name_sources(lambda: [pa.array(paths), pa.array(paths[:1])])
    assert [source_names[i] for i in indices] == [*names, names[0]]


def test_the_smallest_of_many_sources_become_other() -> None:
    paths = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}/x" for i in range(40) for _ in range(40 - i)]
    names, indices = text_bytes.name_sources(lambda: [pa.array(paths)])
    assert len(names) == text_bytes.MOST_SOURCES and text_bytes.OTHER in names
    assert sum(names[i] == text_bytes.OTHER for i in indices) == sum(range(1, 10))
