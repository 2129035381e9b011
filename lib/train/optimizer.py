"""AdamW over sharded parameters, gradient clipping, skipped steps, and fp16's loss scale."""

from __future__ import annotations

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


class StepGuard:
    """Unscales and clips gradients, and has the optimizer skip a step whose norm is no number.

    The norm is global and the decision is made on the device (AdamW leaves weights and moments as
    they are where `found_inf` is set), so neither a rank nor the host waits for it. Only fp16 looks
    at it in every step, to adapt its loss scale; growth and back-off of that as in Micikevicius
    et al. 2018, "Mixed precision training".

    in_a_row: skipped steps since the last good one, int64 scalar on the device.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.scale = 2.0**16 if self.dynamic else 1.0
        self.good_steps = 0
        self.grow_every = 2000
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Prepare the gradients for `optimizer.step()`; all ranks must call this.

        max_norm: 0 leaves them as they are. Returns the norm before clipping, float32 scalar on
        the device.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]
                     if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) / self.scale
        finite = torch.isfinite(norm)
        self.in_a_row = torch.where(finite, 0, self.in_a_row + 1)
        self._skipped += ~finite
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm else 1.0
        if max_norm or self.dynamic:
            torch._foreach_mul_([_local(g) for g in gradients], factor / self.scale)
        optimizer.found_inf, optimizer.grad_scale = (~finite).float(), None
        if self.dynamic:
            self._adapt(bool(finite))
        return norm

    def read(self) -> tuple[int, int]:
        """Return the steps skipped since the last call, and those in a row at the end."""
        skipped = int(self._skipped)
        self._skipped.zero_()
        return skipped, int(self.in_a_row)

    def _adapt(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.grow_every == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """Return what a resumed run has to know."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Take up the state of an earlier run."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
