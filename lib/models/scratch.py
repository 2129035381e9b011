"""Offers sizes of models from scratch, and makes the config of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lib.core import units

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY_MULTIPLE = 64  # rows of the embedding: even shards, and full tiles of matrix units


@dataclass(frozen=True)
class Size:
    """Describes a decoder of the Llama family: grouped-query attention, RoPE, SwiGLU, RMSNorm.

    hidden, intermediate: features. heads, kv_heads: per layer, each of hidden / heads features.
    context: tokens. vocabulary: the default of --vocab-size. like: whose shapes these are.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int
    rope_theta: float
    tied: bool = False
    vocabulary: int = 32_000
    like: str = ""

    def parameters(self, vocabulary: int) -> int:
        """Return the number of parameters with a (padded) vocabulary, from the shapes alone."""
        kv_features = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv_features
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden


# Long contexts take the larger RoPE base, as in Llama 3 (arXiv:2407.21783, section 3.2).
SIZES = {
    #           layers hidden  inner heads kv context     theta
    "1M": Size(4, 128, 384, 4, 2, 1024, 10_000.0, tied=True, vocabulary=1024),
    "tiny": Size(4, 256, 512, 8, 2, 2048, 10_000.0, tied=True, vocabulary=4096),
    "350M": Size(24, 1024, 2816, 16, 8, 2048, 10_000.0),
    "1B": Size(16, 2048, 8192, 32, 8, 4096, 10_000.0),
    "3B": Size(28, 3072, 8192, 24, 8, 4096, 10_000.0),
    "7B": Size(32, 4096, 11008, 32, 32, 4096, 10_000.0, like="Llama 2 7B"),
    "13B": Size(40, 5120, 13824, 40, 40, 4096, 10_000.0, like="Llama 2 13B"),
    "30B": Size(64, 6144, 20480, 48, 8, 8192, 500_000.0),
    "70B": Size(80, 8192, 28672, 64, 8, 8192, 500_000.0),
}


def pad_vocabulary(vocabulary: int) -> int:
    """Return the rows of an embedding that holds `vocabulary` tokens."""
    return math.ceil(vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def describe_rows(rows: int, vocabulary: int) -> str:
    """Return in words how many rows an embedding has, and why."""
    return (
        f"{rows:,} rows for {units.counted(vocabulary, 'token')}, a multiple of "
        f"{VOCABULARY_MULTIPLE}"
    )


def describe(size: str, vocabulary: int) -> dict[str, str]:
    """Return what a size is made of, in words, for the plan of a stage."""
    shape = SIZES[size]
    rows = pad_vocabulary(vocabulary)
    return {
        "size": f"{size}, {units.count(shape.parameters(rows))} parameters"
        + (f", the shapes of {shape.like}" if shape.like else ""),
        "layers": f"{shape.layers} of width {shape.hidden}, {shape.heads} heads"
        + (f" sharing {shape.kv_heads} key-value heads" if shape.kv_heads < shape.heads else "")
        + f", inner width {shape.intermediate}",
        "vocabulary": describe_rows(rows, vocabulary),
        "context": f"{shape.context:,} tokens",
    }


def make_config(
    size: str, vocabulary: int, bos: int | None, eos: int | None, pad: int | None = None
) -> LlamaConfig:
    """Return the config of a size; the vocabulary is padded; bos, eos and pad are token ids."""
    from transformers import LlamaConfig

    shape = SIZES[size]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=pad_vocabulary(vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
