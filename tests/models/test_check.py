# covers: lib/models/check.py, lib/models/scratch.py
"""The check of a model directory finds missing and contradictory files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lib.core.errors import ArtifactError
from lib.models import check, scratch, scratch_sizes

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def write_config(directory: Path, size: str, vocabulary: int) -> None:
    scratch.make_config(size, vocabulary, 0, 1).save_pretrained(directory)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Write a tiny model with random bf16 weights and a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_config(tmp_path, "tiny", 300)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change_weights(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    change(tensors)
    save_file(tensors, model_dir / WEIGHTS)


def problems(model_dir: Path, weights: bool = True) -> str:
    with pytest.raises(ArtifactError) as caught:
        check.check_model(model_dir, weights=weights)
    return caught.value.found


def test_a_complete_model_has_no_problems(model_dir):
    facts = check.check_model(model_dir, weights=True)
    assert facts == check.ModelFacts(
        scratch_sizes.SIZES["tiny"].parameters(320), "bfloat16", 320, 256, 2048
    )


def test_a_model_from_scratch_has_no_weights(model_dir):
    assert "unexpected weights" in problems(model_dir, weights=False)
    (model_dir / WEIGHTS).unlink()
    write_config(model_dir, "tiny", 300)
    assert check.check_model(model_dir, weights=False).dtype == "float32"


def test_all_problems_are_reported_at_once(model_dir):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors[Q_PROJ] = tensors[Q_PROJ][:5].clone()
        tensors["model.layers.9.extra"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.ones(256, dtype=torch.int64)

    change_weights(model_dir, spoil)
    problem_list = problems(model_dir)
    for problem in (
        "model.layers.0.mlp.up_proj.weight",
        Q_PROJ,
        "(5, 256)",
        "model.layers.9.extra",
        "model.norm.weight: expected floating-point numbers, found I64",
    ):
        assert problem in problem_list


@pytest.mark.parametrize("cut", [-1, -1000, 5000, 100, 4, 0])
def test_a_truncated_file_is_reported(model_dir, cut):
    content = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(content[:cut])
    assert WEIGHTS in problems(model_dir)


def test_trailing_bytes_and_a_wrong_header_are_reported(model_dir):
    path = model_dir / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content + b"x")
    assert "too long" in problems(model_dir)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[Q_PROJ]["data_offsets"][0] += 2
    lying = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(lying)) + lying + content[8 + length :])
    assert f"{Q_PROJ} in {WEIGHTS} lies at" in problems(model_dir)
    path.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    assert "header would have" in problems(model_dir)


def test_an_index_that_contradicts_its_shards_is_reported(model_dir):
    (model_dir / WEIGHTS).unlink()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)).bfloat16()
    model.save_pretrained(model_dir, max_shard_size="4MB")
    assert check.check_model(model_dir, weights=True).dtype == "bfloat16"
    index = model_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "model.norm.weight is not in" in problems(model_dir)


def test_a_tokenizer_larger_than_the_vocabulary_is_reported(model_dir):
    (model_dir / WEIGHTS).unlink()
    write_config(model_dir, "tiny", 64)
    assert "only 64 rows" in problems(model_dir, weights=False)


def test_nothing_is_allocated_for_a_large_model(model_dir):
    (model_dir / WEIGHTS).unlink()
    write_config(model_dir, "70B", 32_000)
    assert check.check_model(model_dir, weights=False).parameters > 68e9


def test_headers_alone_are_enough_to_find_problems(model_dir):
    path = model_dir / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[: 8 + struct.unpack("<Q", content[:8])[0]])
    sizes = {WEIGHTS: len(content)}
    assert check.check_model(model_dir, weights=True, expected_sizes=sizes).parameters
    with pytest.raises(ArtifactError, match="not a complete model"):
        check.check_model(model_dir, weights=True, expected_sizes={WEIGHTS: len(content) - 1})
    path.unlink()
    assert check.check_model(model_dir, weights=True, expected_sizes={}).parameters
