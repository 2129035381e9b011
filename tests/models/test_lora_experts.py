# covers: lib/models/lora.py, lib/models/sharded.py
"""Fused experts get adapters only by a regular expression; otherwise the log mentions them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from lib.core import units
from lib.core.errors import UsageError
from lib.models.lora import Lora
from lib.models.sharded import Placement
from tests.models.families import FAMILIES
from tests.models.two_ranks import TOKENS

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def on_meta(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(FAMILIES[family]())


@pytest.mark.parametrize(
    "targets",
    [
        "gate_up_proj",
        ".*experts.*",
        "experts",
        "q_proj|down_proj",
        r"model\.layers\.1\.mlp\.experts\.down_proj",
    ],
)
@pytest.mark.parametrize("family", [*MIXTURES, "gpt_oss"])
def test_adapters_of_experts_act_like_merged_weights(family: str, targets: str) -> None:
    """This includes weights that are transposed and have biases, as in gpt-oss."""
    torch.manual_seed(0)
    config = (
        FAMILIES[family]()
        if family in FAMILIES
        else GptOssConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = copy.deepcopy(plain)
    lora = Lora(3, 6.0, targets=targets)
    added = lora.attach(model)
    assert any(".experts.lora_" in name for name in added)
    for name in added:
        model.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu")
    with torch.no_grad():
        for name in added:
            model.get_parameter(name).normal_(0, 0.1)
        held = {name: model.get_parameter(name).detach() for name in added}
        before = plain(input_ids=TOKENS).logits
        for name, parameter in plain.named_parameters():
            parameter.copy_(lora.fold(plain, name, parameter.clone(), held))
    expected = plain(input_ids=TOKENS).logits
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-6)


def test_a_weight_is_restored_after_each_forward_pass() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["mixtral"](), dtype=torch.float32)
    before = dict(model.named_parameters())
    added = Lora(3, 6.0, targets="gate_up_proj").attach(model)
    for name in added:
        model.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    with pytest.raises(TypeError):
        experts()
    assert experts.gate_up_proj is before["model.layers.0.mlp.experts.gate_up_proj"]


def test_dropout_is_refused() -> None:
    with pytest.raises(UsageError, match="--lora-dropout"):
        Lora(4, 8.0, 0.1, targets="gate_up_proj").convert(on_meta("mixtral"), Placement())


@pytest.mark.parametrize("family", MIXTURES)
def test_a_run_says_how_many_parameters_of_experts_have_no_adapter(family: str) -> None:
    model = on_meta(family)
    held = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    )
    added, description = Lora(4, 8.0).convert(model, Placement())
    assert f"{units.count(held)} parameters are of fused" in description
    assert held and not any(".experts." in name for name in added)


def test_linear_layers_are_not_experts() -> None:
    for family in ("llama", "gpt2"):
        _, description = Lora(4, 8.0).convert(on_meta(family), Placement())
        assert "experts" not in description
    added, _ = Lora(4, 8.0, targets=r".*shared_expert\.down_proj").convert(
        on_meta("qwen2_moe"), Placement()
    )
    assert len(added) == 4
