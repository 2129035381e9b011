"""Activations that are computed again give the gradients of those that are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from lib.train import blocks

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("config", [
    LlamaConfig(**SMALL), MixtralConfig(**SMALL, **EXPERTS),
    GptOssConfig(**SMALL, **EXPERTS, sliding_window=8)], ids=lambda config: config.model_type)
def test_gradients_stay(config: PretrainedConfig, recompute: str) -> None:
    torch.manual_seed(0)
    kept = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, parameter in kept.named_parameters():
        if name.endswith("bias"):  # zero at first, and adding zero twice is no mistake
            torch.nn.init.normal_(parameter)
    again = copy.deepcopy(kept)
    blocks.prepare(again, recompute, compiled=False)
    tokens = torch.randint(0, 96, (2, 24))
    for model in (kept, again):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert any(block.forward.__name__ == "recomputed" for block in again.model.layers)
    for (name, one), other in zip(kept.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
