"""Random weights of the model whose code lies here."""

import torch


def tensors(vocabulary: int = 320, width: int = 32, layers: int = 2) -> dict[str, torch.Tensor]:
    """Return a state dict."""
    torch.manual_seed(0)
    state = {
        "embed.weight": torch.randn(vocabulary, width),
        "head.weight": torch.randn(vocabulary, width) * 0.05,
    }
    for i in range(layers):
        state |= {
            f"blocks.{i}.norm.weight": torch.ones(width),
            f"blocks.{i}.norm.bias": torch.zeros(width),
            f"blocks.{i}.mix.weight": torch.randn(width, width) * 0.1,
            f"blocks.{i}.out.weight": torch.randn(width, width) * 0.1,
        }
    return state
