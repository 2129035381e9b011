"""List the sizes of models that are created from scratch, without importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

VOCABULARY_MULTIPLE = 64  # of embedding rows, for even shards and full tiles of tensor cores


@dataclass(frozen=True)
class Size:
    """The shape of a decoder like Llama: grouped-query attention, RoPE, SwiGLU, RMSNorm.

    hidden, intermediate: features. heads, kv_heads: per layer; a head has hidden / heads features.
    context: tokens. vocabulary: the default of --vocab-size. like: the model with the same shape.
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
        """Return the number of parameters. vocabulary: padded rows of the embedding."""
        kv_features = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv_features
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden


# 125M has the layers, the width and the heads of GPT-3 Small (arXiv:2005.14165, table 2.1). Long
# contexts use the larger RoPE base, as in Llama 3 (arXiv:2407.21783, section 3.2).
SIZES = {
    #           layers hidden  inner heads kv context     theta
    "1M": Size(4, 128, 384, 4, 2, 1024, 10_000.0, tied=True, vocabulary=1024),
    "tiny": Size(4, 256, 512, 8, 2, 2048, 10_000.0, tied=True, vocabulary=4096),
    "125M": Size(12, 768, 2048, 12, 4, 2048, 10_000.0),
    "350M": Size(24, 1024, 2816, 16, 8, 2048, 10_000.0),
    "1B": Size(16, 2048, 8192, 32, 8, 4096, 10_000.0),
    "3B": Size(28, 3072, 8192, 24, 8, 4096, 10_000.0),
    "7B": Size(32, 4096, 11008, 32, 32, 4096, 10_000.0, like="Llama 2 7B"),
    "13B": Size(40, 5120, 13824, 40, 40, 4096, 10_000.0, like="Llama 2 13B"),
    "30B": Size(64, 6144, 20480, 48, 8, 8192, 500_000.0),
    "70B": Size(80, 8192, 28672, 64, 8, 8192, 500_000.0),
}


def pad_vocabulary(vocabulary: int) -> int:
    """Return the number of embedding rows for a vocabulary."""
    return math.ceil(vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
