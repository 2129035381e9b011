"""AdamW over sharded parameters, gradient clipping, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def adamw(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float,
          ) -> torch.optim.AdamW:
    """Return a fused AdamW; built after sharding, so its states are sharded like the weights.

    Norms and biases (all tensors of one dimension) are not decayed, as in the Hugging Face Trainer.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class LossScale:
    """Dynamic loss scaling for fp16, and what all precisions share: unscale, clip, or skip.

    The gradient norm is global, so every rank takes the same decision without a message of its
    own. Growth and back-off as in Micikevicius et al. 2018, "Mixed precision training".
    """

    def __init__(self, precision: str) -> None:
        self.dynamic = precision == "fp16"
        self.scale = 2.0**16 if self.dynamic else 1.0
        self.good_steps = 0
        self.grow_every = 2000

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float,
             ) -> tuple[torch.Tensor, bool]:
        """Unscale and clip the gradients; all ranks must call this.

        max_norm: 0 leaves them as they are. Returns the norm before clipping (float32 scalar on
        the device) and whether the optimizer may step. Only fp16 waits for the device here.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.dynamic:
            if not torch.isfinite(norm):
                self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
                return norm / self.scale, False
            self.good_steps += 1
            norm = norm / self.scale
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm else 1.0
        if max_norm or self.dynamic:
            torch._foreach_mul_([_local(g) for g in gradients], factor / self.scale)
        if self.dynamic and self.good_steps % self.grow_every == 0:
            self.scale *= 2
        return norm, True

    def state(self) -> dict[str, float]:
        """Return what a resumed run has to know."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Take up the state of an earlier run."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
