"""Tiny models of many families: configs, and checkpoints with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}


def make_tiny_llama(**changes: Any) -> LlamaConfig:
    """Return the config of a Llama with two blocks; `changes` are other fields of the config."""
    fields = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2}
    return LlamaConfig(**{**fields, **changes})


def _family(kind: type[PretrainedConfig], **fields: Any) -> Callable[..., PretrainedConfig]:
    def config(vocabulary: int = 97, **changes: Any) -> PretrainedConfig:
        return kind(**{**SIZES, **_SPECIAL, **fields, "vocab_size": vocabulary, **changes})

    return config


_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

# Each takes the vocabulary's size (odd by default, so that shards are uneven) and further fields.
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": _family(LlamaConfig, num_key_value_heads=2),  # Llama 2
    "llama_tied": _family(LlamaConfig, num_key_value_heads=2, tie_word_embeddings=True),
    "llama3": _family(LlamaConfig, num_key_value_heads=2, rope_parameters=LLAMA3),
    "llama3_tied": _family(
        LlamaConfig, num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),  # 3.2 1B and 3B
    "codellama": _family(LlamaConfig, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "mistral": _family(MistralConfig, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "mathstral": _family(MistralConfig, num_key_value_heads=2, head_dim=16, sliding_window=None),
    "mixtral": _family(MixtralConfig, num_key_value_heads=2, head_dim=8, num_local_experts=3),
    "falcon_7b": _family(FalconConfig, multi_query=True, parallel_attn=True, alibi=False),
    "falcon_40b": _family(FalconConfig, new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "phi": _family(PhiConfig),  # Phi-1, 1.5 and 2
    "phi3": _family(Phi3Config, num_key_value_heads=2, rope_parameters=LONGROPE),
    "gpt_neox": _family(GPTNeoXConfig),
    "pythia": _family(
        GPTNeoXConfig,
        use_parallel_residual=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    ),
    "qwen2": _family(Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_moe": _family(Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3": _family(Qwen3Config, num_key_value_heads=2, head_dim=16),
    "qwen3_moe": _family(Qwen3MoeConfig, **_EXPERTS, head_dim=16),
    "gemma": _family(GemmaConfig, num_key_value_heads=1, head_dim=8),
    "gemma3": _family(
        Gemma3TextConfig,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
        tie_word_embeddings=True,
    ),
    "gpt2": _family(GPT2Config),
}


def make_checkpoint(
    directory: Path, config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, **saving: Any
) -> PreTrainedModel:
    """Save a model with random weights, norms and biases included, and return it.

    saving: arguments for `save_pretrained`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.to(dtype).save_pretrained(directory, **saving)
    return model
