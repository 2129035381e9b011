# covers: lib/models/tokenizer.py, lib/models/training_text.py, lib/models/scratch.py
"""Stage 03 trains, copies and checks tokenizers."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import datasets
import pyarrow
import pytest
from transformers import AutoTokenizer

from lib.core.conversation import Conversation, Place
from lib.core.errors import ArtifactError, UsageError
from lib.models import scratch, tokenizer, training_text
from tests.tokens.chat import chats

HARD = [
    "",
    " ",
    "  a  ",
    "\n\n\r\n\t ",
    "\x00\x01\x7f\x1b[0m",
    "don't 'S 12345",
    "naïve Ж 漢字 👩🏽‍🚀",
    "e\u0301 \u200b\ufeff\u2028",
    f"{tokenizer.BOS}{tokenizer.EOS}",
    "<s></s>[INST]<|pad|>",
    "a ,b .c n't",
    "\ufffd\uffff\U0010ffff",
    "Ġ Ċ ▁",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of words, numbers and other alphabets."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdluäЖ漢", k=draw.randint(1, 8))) for _ in range(900)]
    texts = [" ".join(draw.choices(words, k=60)) + f" {i}.\n" for i in range(400)]
    path = tmp_path_factory.mktemp("data") / "corpus"
    datasets.Dataset.from_dict({"text": [*texts, None, ""], "other": ["x"] * 402}).save_to_disk(
        path
    )
    return path


def train_tokenizer(
    corpus: Path, into: Path, vocabulary: int = 600, **more
) -> tuple[int, tokenizer.Sample]:
    into.mkdir()
    return tokenizer.train_tokenizer(
        [corpus], vocabulary, 128, into, workers=1, show_progress=False, **more
    )


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tokenizer beside the config of its model."""
    into = tmp_path_factory.mktemp("tokenizer") / "it"
    assert train_tokenizer(corpus, into)[0] == 600
    scratch.make_config("tiny", 600, 0, 1).save_pretrained(into)
    return into


def test_every_string_is_decoded_unchanged(trained):
    loaded = AutoTokenizer.from_pretrained(trained, local_files_only=True)
    draw = random.Random(1)
    strange = [
        "".join(
            chr(
                draw.choice(
                    [draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)]
                )
            )
            for _ in range(draw.randint(1, 40))
        )
        for _ in range(300)
    ]
    for text in HARD + strange:
        ids = loaded(text)["input_ids"]
        assert ids[0] == loaded.bos_token_id
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) == text


def test_text_cannot_forge_a_special_token(trained):
    loaded = tokenizer.load_tokenizer(trained)
    ids = loaded(f"a{tokenizer.EOS}b{tokenizer.BOS}")["input_ids"]
    assert ids.count(loaded.bos_token_id) == 1 and loaded.eos_token_id not in ids
    fast = loaded.backend_tokenizer.encode(tokenizer.EOS, add_special_tokens=False).ids
    assert loaded.eos_token_id not in fast


def test_transformers_reads_the_special_tokens_and_the_context(trained):
    loaded = tokenizer.load_tokenizer(trained)
    assert (len(loaded), loaded.model_max_length) == (600, 128)
    special = (loaded.bos_token, loaded.eos_token, loaded.pad_token)
    assert special == (tokenizer.BOS, tokenizer.EOS, tokenizer.PAD)
    assert len(set(loaded.convert_tokens_to_ids(list(special)))) == 3


def test_a_batch_is_padded_with_a_token_that_occurs_in_no_text(trained):
    loaded = tokenizer.load_tokenizer(trained)
    batch = loaded(["a b c d e f", f"a{tokenizer.PAD}"], padding=True)
    assert [sum(mask) for mask in batch["attention_mask"]] == [
        len(ids) - ids.count(loaded.pad_token_id) for ids in batch["input_ids"]
    ]
    assert loaded.pad_token_id not in loaded(f"a{tokenizer.PAD}")["input_ids"]


def test_the_smallest_vocabulary_has_no_room_for_padding(corpus, tmp_path):
    size, _ = train_tokenizer(corpus, tmp_path / "it", vocabulary=tokenizer.SMALLEST_VOCABULARY)
    loaded = tokenizer.load_tokenizer(tmp_path / "it")
    assert size == len(loaded) == tokenizer.SMALLEST_VOCABULARY and loaded.pad_token is None


def test_ollama_knows_how_words_are_split(trained):
    """Ollama recognises the pre-tokenizer llama-bpe by the SHA-256 of its expression."""
    content = json.loads((trained / "tokenizer.json").read_text())
    steps = content["pre_tokenizer"]["pretokenizers"]
    words = "".join(step["pattern"]["Regex"] for step in steps if step["type"] == "Split")
    assert hashlib.sha256(words.encode()).hexdigest() == (
        "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f"
    )


def test_the_same_text_gives_the_same_bytes(corpus, trained, tmp_path):
    train_tokenizer(corpus, tmp_path / "again")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (trained / file).read_bytes()


def test_a_small_corpus_leaves_tokens_unused(corpus, tmp_path):
    size, sample = train_tokenizer(corpus, tmp_path / "it", vocabulary=50_000)
    assert 600 < size < 50_000 == len(tokenizer.load_tokenizer(tmp_path / "it"))
    assert sample.documents_used == 402 and str(sample).startswith("all 402 documents")


def test_the_sample_is_bounded_and_spread(corpus, tmp_path):
    size, sample = train_tokenizer(corpus, tmp_path / "it", vocabulary=300, limit=20_000)
    assert size == 300
    assert 18_000 < sample.bytes_used <= 20_000 < sample.bytes_total
    assert 40 < sample.documents_used < 60 and "evenly spread" in str(sample)


def test_one_long_document_is_truncated(tmp_path):
    datasets.Dataset.from_dict({"text": ["é" * 10_000]}).save_to_disk(tmp_path / "long")
    size, sample = train_tokenizer(tmp_path / "long", tmp_path / "it", vocabulary=259, limit=1001)
    assert size == 259 and sample.bytes_used == 1001


def test_the_fingerprint_of_a_dataset_depends_on_its_content(corpus, tmp_path):
    moved = tmp_path / "moved"
    datasets.load_from_disk(str(corpus)).save_to_disk(moved)
    assert training_text.fingerprint([corpus]) == training_text.fingerprint([corpus])
    datasets.Dataset.from_dict({"text": ["b"]}).save_to_disk(tmp_path / "other")
    assert training_text.fingerprint([corpus]) != training_text.fingerprint([tmp_path / "other"])
    (tmp_path / "far.partial-1").mkdir()
    with pytest.raises(ArtifactError, match="not exist") as caught:
        training_text.fingerprint([tmp_path / "far"])
    assert "far.partial-1" in caught.value.found
    with pytest.raises(ArtifactError, match="not finished"):
        training_text.fingerprint([tmp_path / "far.partial-1"])


def test_a_tokenizer_is_trained_on_several_datasets_or_none(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    datasets.Dataset.from_dict({"text": ["zyzzyva " * 500]}).save_to_disk(tmp_path / "other")
    options = {"workers": 1, "show_progress": False}
    tokenizer.train_tokenizer([corpus, tmp_path / "other"], 600, None, tmp_path / "both", **options)
    assert len(tokenizer.load_tokenizer(tmp_path / "both").tokenize(" zyzzyva")) <= 2
    shard = next(corpus.rglob("*.arrow"))  # a file as the cache of `datasets` contains it
    (tmp_path / "plain").mkdir()
    tokenizer.train_tokenizer([shard], 600, None, tmp_path / "plain", **options)
    alone = tmp_path / "alone"
    train_tokenizer(corpus, alone)
    assert (
        json.loads((tmp_path / "plain/tokenizer.json").read_text())["model"]
        == json.loads((alone / "tokenizer.json").read_text())["model"]
    )
    assert training_text.fingerprint([shard]) == training_text.fingerprint([shard])
    (tmp_path / "bytes").mkdir()
    size, _ = tokenizer.train_tokenizer([], 300, None, tmp_path / "bytes", **options)
    loaded = tokenizer.load_tokenizer(tmp_path / "bytes")
    assert (size, len(loaded)) == (tokenizer.BYTE_VOCABULARY, 300)
    assert len(loaded("naïve", add_special_tokens=False)["input_ids"]) == 6
    assert not tokenizer.find_losses(loaded, tmp_path / "bytes")


def test_only_tokenizer_files_are_copied_and_the_context_is_set(trained, tmp_path):
    tokenizer.copy_tokenizer(trained, 64, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 64


def test_a_tokenizer_that_does_not_load_is_a_usage_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UsageError, match="does not load"):
        tokenizer.load_tokenizer(tmp_path)


def save_changed_tokenizer(into: Path, change) -> Path:
    """Save a byte-level tokenizer without merges, with some changes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    change(bpe)
    bpe.save(str(into / "tokenizer.json"))
    (into / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return into


def test_normalising_text_is_reported_and_garbling_it_is_an_error(trained, tmp_path):
    from tokenizers import decoders, normalizers

    assert tokenizer.find_losses(tokenizer.load_tokenizer(trained), trained) == []
    for name, change, words in (
        ("lower", lambda backend: setattr(backend, "normalizer", normalizers.BertNormalizer()), 4),
        ("gaps", lambda backend: setattr(backend, "normalizer", normalizers.Replace("e", "")), 3),
    ):
        (tmp_path / name).mkdir()
        where = save_changed_tokenizer(tmp_path / name, change)
        assert len(tokenizer.find_losses(tokenizer.load_tokenizer(where), where)) >= words
    (tmp_path / "broken").mkdir()
    where = save_changed_tokenizer(
        tmp_path / "broken", lambda backend: setattr(backend, "decoder", decoders.Fuse())
    )
    with pytest.raises(UsageError, match="decodes its own tokens") as caught:
        tokenizer.find_losses(tokenizer.load_tokenizer(where), where)
    assert "ĠquickĠ" in caught.value.found


def test_a_tokenizer_of_conversations_gets_a_chat_template(tmp_path: Path, corpus: Path) -> None:
    contents = ["Where does the heron stand?", "In the reeds by the water."]
    turns = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant"), contents, strict=True)
    ]
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    rows = [(Conversation([*turns, calls]), Place("a", n)) for n in range(50)]
    chat = datasets.Dataset(pyarrow.Table.from_batches([chats.make_batch(rows)]))
    chat.save_to_disk(tmp_path / "chat")

    train_tokenizer(tmp_path / "chat", tmp_path / "it", 300)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "it", local_files_only=True)
    assert "Ġheron" in loaded.get_vocab()
    ids = loaded.apply_chat_template(turns)["input_ids"]
    assert ids.count(loaded.convert_tokens_to_ids("<|im_end|>")) == 2
    assert tokenizer.TURN[0] + "assistant\n" + contents[1] in loaded.decode(ids)

    # Strings, and large strings.
    training_texts = training_text.read_texts([corpus, tmp_path / "chat"])
    assert training_texts.is_chat and len(training_texts.texts) == 402 + 150
    with pytest.raises(UsageError, match="too few"):
        train_tokenizer(tmp_path / "chat", tmp_path / "small", 259)
