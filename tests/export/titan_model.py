"""Compute a Llama as torchtitan does, under its names: rotary embedding by complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Normalises by the root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, 1e-6)


class Attention(nn.Module):
    """Grouped-query attention with rotated pairs of neighbouring features."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = hidden.shape

        def split(layer: nn.Linear) -> Tensor:
            return layer(hidden).view(batch, length, -1, self.size)

        def rotate(tensor: Tensor) -> Tensor:
            pairs = torch.view_as_complex(tensor.reshape(*tensor.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns[:, None]).flatten(-2)

        parts = (rotate(split(self.wq)), rotate(split(self.wk)), split(self.wv))
        heads = (tensor.transpose(1, 2) for tensor in parts)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, inner)
        self.attention_norm = Norm(width)
        self.ffn_norm = Norm(width)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), turns)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class Titan(nn.Module):
    """A Llama with random weights; `freqs_cis` is saved, as early versions of torchtitan do."""

    def __init__(self, base: float = 1e4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(97, 32)
        self.layers = nn.ModuleDict({str(i): Block(32, 64, 4, 2) for i in range(2)})
        self.norm = Norm(32)
        self.output = nn.Linear(32, 97, bias=False)
        angles = torch.outer(torch.arange(128.0), base ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, self.freqs_cis[: tokens.shape[1]])
        return self.output(self.norm(hidden))
