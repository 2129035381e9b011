# covers: lib/models/keys.py, lib/models/architecture.py
"""The names and shapes of an export are those that transformers itself writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lib.models.architecture import build_on_meta
from lib.models.keys import convert_to_hub, group_for_export, list_expected
from tests.models.families import FAMILIES, make_checkpoint


def _streamed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {
        key: tensor
        for group in group_for_export(model)
        for key, tensor in convert_to_hub(model, {name: state[name] for name in group})
    }


def _same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[key], expected[key]) for key in expected
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_save_pretrained(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, FAMILIES[name]())
    written = load_file(tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in written.items()}
    assert list_expected(build_on_meta(tmp_path)) == shapes
    assert list_expected(model) == shapes
    assert _same(_streamed(model), written)


def test_names_of_the_hub_are_the_classic_ones(tmp_path: Path) -> None:
    FAMILIES["mixtral"]().save_pretrained(tmp_path)
    keys = list_expected(build_on_meta(tmp_path))
    assert keys["model.layers.1.block_sparse_moe.experts.2.w3.weight"] == (64, 32)
    FAMILIES["gpt_neox"]().save_pretrained(tmp_path)
    assert "embed_out.weight" in list_expected(build_on_meta(tmp_path))
    FAMILIES["llama_tied"]().save_pretrained(tmp_path)
    assert "lm_head.weight" not in list_expected(build_on_meta(tmp_path))


def test_one_parameter_is_exported_at_a_time(tmp_path: Path) -> None:
    for config in FAMILIES.values():
        config().save_pretrained(tmp_path)
        assert all(len(group) == 1 for group in group_for_export(build_on_meta(tmp_path)))


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="this transformers has no hrm_text")
def test_parameters_that_share_a_hub_tensor_are_exported_together(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["hrm_text"](
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
    )
    model = make_checkpoint(tmp_path, config)
    assert max(map(len, group_for_export(model))) == 4
    assert _same(_streamed(model), load_file(tmp_path / "model.safetensors"))
