"""Experts that are one parameter have no adapters: a run says so, and targets are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from lib.core import units
from lib.core.errors import UsageError
from lib.models import lora_experts
from lib.models.lora import Lora
from lib.models.sharded import Placement
from tests.models.families import FAMILIES

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def on_meta(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(FAMILIES[family]())


@pytest.mark.parametrize("targets", [
    "gate_up_proj", ".*experts.*", "experts", "q_proj|down_proj",
    r"model\.layers\.1\.mlp\.experts\.down_proj"])
@pytest.mark.parametrize("family", MIXTURES)
def test_targets_that_match_experts_are_refused(family: str, targets: str) -> None:
    model = on_meta(family)
    before = dict(model.named_parameters())
    with pytest.raises(UsageError, match="matches experts") as error:
        Lora(4, 8.0, targets=targets).convert(model, Placement())
    assert "layers.1.mlp.experts" in error.value.render() and error.value.code == 2
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_run_says_how_many_parameters_of_experts_have_no_adapter(family: str) -> None:
    model = on_meta(family)
    held = sum(parameter.numel() for name, parameter in model.named_parameters()
               if ".experts." in name)
    added, said = Lora(4, 8.0).convert(model, Placement())
    assert said.endswith(f"; {units.count(held)} parameters are of fused experts, which have no "
                         "adapters")
    assert held and not any(".experts." in name for name in added)


def test_linears_are_no_experts() -> None:
    for family in ("llama", "gpt2"):
        _, said = Lora(4, 8.0).convert(on_meta(family), Placement())
        assert "experts" not in said
    added, _ = Lora(4, 8.0, targets=r".*shared_expert\.down_proj").convert(on_meta("qwen2_moe"),
                                                                          Placement())
    assert len(added) == 4


def test_experts_with_biases_are_found() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(
            vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=3))
    assert {name.rpartition(".")[2] for name in lora_experts.find(model)} == {
        "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
