"""AdamW with torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.optim.optimizers import AdamWOptions, Groups, Wrap


class AdamW(torch.optim.AdamW):
    """AdamW that can create its state before the first step.

    Build it after sharding, so that `exp_avg` and `exp_avg_sq` are sharded like the weights.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=True)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {
            "step": step,
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def build(groups: Groups, lr: float, options: AdamWOptions, wrap: Wrap | None) -> AdamW:
    """Return AdamW over groups of parameters."""
    return AdamW(groups, lr, (options.beta1, options.beta2))
