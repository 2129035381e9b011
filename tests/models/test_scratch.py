# covers: lib/models/scratch.py, lib/models/scratch_sizes.py, lib/models/architecture.py
"""The sizes of models from scratch, counted on the meta device."""

from __future__ import annotations

import pytest

from lib.models import architecture, scratch, scratch_sizes
from lib.models.scratch import Design

NAMED = {
    "1M": 1e6,
    "tiny": 3e6,
    "125M": 125e6,
    "350M": 350e6,
    "1B": 1e9,
    "3B": 3e9,
    "7B": 7e9,
    "13B": 13e9,
    "30B": 30e9,
    "70B": 70e9,
}


@pytest.mark.parametrize("size", scratch_sizes.SIZES)
def test_the_formula_counts_parameters_close_to_the_name_of_the_size(size, tmp_path):
    vocabulary = scratch_sizes.SIZES[size].vocabulary
    scratch.make_config(size, vocabulary, 0, 1).save_pretrained(tmp_path)
    model = architecture.build_on_meta(tmp_path)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == scratch_sizes.SIZES[size].parameters(vocabulary)
    assert count == pytest.approx(NAMED[size], rel=0.11)
    assert (model.config.num_key_value_heads < model.config.num_attention_heads) != bool(
        scratch_sizes.SIZES[size].like
    )


def test_some_sizes_are_those_of_llama_2() -> None:
    """The numbers of parameters are those of its safetensors on the Hub."""
    assert scratch_sizes.SIZES["7B"].parameters(32_000) == 6_738_415_616
    assert scratch_sizes.SIZES["13B"].parameters(32_000) == 13_015_864_320
    assert "Llama 2 7B" in scratch.describe_size("7B", 32_000)["size"]
    assert "32 heads, MLP width 11008" in scratch.describe_size("7B", 32_000)["layers"]
    identities = [Design(size, None, 300, (), None).identity("x") for size in ("7B", "tiny")]
    assert identities[0]["options"]["shapes"] == "Llama 2 7B"  # no model of other shapes is taken
    assert "shapes" not in identities[1]["options"]


def test_the_vocabulary_is_padded(tmp_path):
    assert [scratch_sizes.pad_vocabulary(n) for n in (1, 64, 65, 32_000)] == [64, 64, 128, 32_000]
    assert scratch.make_config("tiny", 4097, None, None).vocab_size == 4160


def test_the_same_size_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Design("tiny", None, None, (), None).write(tmp_path / name, 4096, None)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
