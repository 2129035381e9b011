"""Tiny tokenizers, and datasets of stage 02 and of `save_to_disk`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.conftest import run_stage

TEXTS = ["the cat sat", "on the mat\n", "", "naïve café 日本", "x" * 300, "the end </s> of it"]
BOS = "<s>"
EOS = "</s>"


def save_tokenizer(
    directory: Path, *, bos: bool, eos: bool = True, extra_ids: int = 0, truncate: bool = False
) -> Path:
    """Save a byte-level tokenizer without merges: ids 0 and 1 are BOS and EOS, then the bytes.

    bos: the tokenizer adds BOS before a text. extra_ids: further words of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{n}" for n in range(extra_ids)]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
        )
    if truncate:
        tokenizer.enable_truncation(5)
        tokenizer.enable_padding(length=8, pad_id=1, pad_token=EOS)
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS}
    settings |= {"eos_token": EOS} if eos else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return the directory of a tokenizer that adds BOS and has an EOS."""
    return save_tokenizer(tmp_path / "tokenizer", bos=True)


@pytest.fixture(scope="session")
def _of_stage_02(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stage_02")
    (root / "raw").mkdir()
    lines = "".join(
        json.dumps({"text": f"document number {n} " + "word " * (n % 9)}) + "\n" for n in range(60)
    )
    (root / "raw/a.jsonl").write_text(lines)
    run_stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        "raw",
        "--save-dir",
        "corpus",
        "--validation-percent",
        20,
        "--num-workers",
        1,
        cwd=root,
    )
    return root / "corpus"


@pytest.fixture
def of_stage_02(_of_stage_02: Path, tmp_path: Path) -> Path:
    """Return a copy of a dataset of stage 02 with train and validation."""
    import shutil

    return Path(shutil.copytree(_of_stage_02, tmp_path / "hf_datasets/corpus"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return a Dataset of TEXTS that `save_to_disk` wrote."""
    import datasets

    datasets.Dataset.from_dict({"n": list(range(len(TEXTS))), "text": TEXTS}).save_to_disk(
        str(tmp_path / "foreign")
    )
    return tmp_path / "foreign"


def texts(name: str, count: int = 60) -> list[str]:
    """Return short texts, the same for the same name."""
    draw = random.Random(name)
    return [f"{name} {i} " + "x" * draw.randrange(40) for i in range(count)]


def lines(some: list[str]) -> bytes:
    """Return texts as JSON Lines."""
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in some)
