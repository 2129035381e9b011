"""Gradient clipping, harmful steps that change nothing, and the loss scale of fp16."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from lib.models.sharded import local_tensor

_USUAL_OVER = 100  # good steps that the usual gradient norm is a running mean of
_USUAL_AFTER = 20  # good steps before there is a usual one
_NARROW = ("fp16", "fp8")  # precisions in which small gradients vanish


class Skipped(NamedTuple):
    """Counts steps. steps: skipped since the last look. spikes: those whose norm was finite.

    in_a_row: skipped since the last good step.
    """

    steps: int
    spikes: int
    in_a_row: int


class StepGuard:
    """Unscales and clips gradients, and has the optimizer skip a step that would do harm: one whose
    gradient norm is NaN or infinite, or `spike_factor` times the usual one (0: however large).

    The norm is global and the decision is made on the device (AdamW leaves weights and moments as
    they are where `found_inf` is set), so neither a rank nor the host waits for it. Only fp16 looks
    at it in every step, to adapt its loss scale; growth and back-off of that as in Micikevicius
    et al. 2018, "Mixed precision training".
    """

    def __init__(
        self,
        precision: str,
        spike_factor: float,
        device: torch.device,
        ranks: int = 1,
        fold: bool = False,
        divisor: int = 1,
    ) -> None:
        """ranks: gradients are summed over so many. divisor: and then divided by this number.

        fold: `clip` leaves the gradients as they are and has an optimizer that can do so scale them
        while it reads them. That spares a pass over all gradients, and rounds a scaled gradient in
        another way, by a relative 1e-7.
        """
        self.dynamic = precision == "fp16"
        self.scale = 2.0**16 if self.dynamic else 1.0
        self._fold = fold
        self._divisor = divisor
        # A rank's part of a sum is smaller the more ranks there are: it must not vanish.
        self._lift = 2.0 ** math.floor(math.log2(ranks)) if precision in _NARROW else 1.0
        self._rest = 1.0  # what the loss was not scaled by: see loss_factor
        self.good_steps = 0
        self.grow_every = 2000
        self._factor = spike_factor or float("inf")
        self._in_a_row, self._skipped, self._spikes, self._good, self._usual = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(5)
        )

    def loss_factor(self, label_tokens: int) -> float:
        """Return what to scale the loss by, for gradients of its mean over tokens after `clip`.

        label_tokens: of a step, on all ranks. A power of two, which no dtype rounds. `clip` applies
        the rest to the float32 gradients: bfloat16 would round it, by up to 0.4 %, and differently
        for other numbers of tokens.
        """
        mean = 1 / max(1, label_tokens)  # windows of conversations may hold nothing that is trained
        power = 2.0 ** math.floor(math.log2(mean)) * self._lift
        self._rest = mean / power * self._divisor
        return power * self.scale

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Prepare the gradients for `optimizer.step()`; all ranks must call this.

        max_norm: 0 clips nothing. With `fold`, the optimizer gets `grad_scale`, by which it divides
        the gradients. Returns the norm before clipping, float32 scalar on the device.
        """
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        exact = self._rest / self.scale
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * exact
        sound = self._judge(norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm else 1.0
        optimizer.found_inf = (~sound).float()
        optimizer.grad_scale = None
        if max_norm or exact != 1.0:
            # The mark by which torch's own gradient scaler knows such optimizers.
            if self._fold and getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale = torch.ones_like(norm) / (factor * exact)
            else:
                torch._foreach_mul_([local_tensor(g) for g in gradients], factor * exact)
        if self.dynamic:
            self._adapt(bool(torch.isfinite(norm)))
        return norm

    def _judge(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step is sound (bool scalar on the device), and keep count of it."""
        finite = torch.isfinite(norm)
        spike = finite & (self._good >= _USUAL_AFTER) & (norm > self._factor * self._usual)
        sound = finite & ~spike
        self._in_a_row = torch.where(sound, 0.0, self._in_a_row + 1)
        self._skipped += ~sound
        self._spikes += spike
        self._good += sound
        nearer = (norm - self._usual) / self._good.clamp(1, _USUAL_OVER)
        self._usual = torch.where(sound, self._usual + nearer, self._usual)
        return sound

    def count_skipped(self) -> torch.Tensor:
        """Return the numbers of a Skipped since the last call, float64 [3] on the device."""
        counts = torch.stack([self._skipped, self._spikes, self._in_a_row])
        self._skipped.zero_()
        self._spikes.zero_()
        return counts

    @property
    def in_a_row(self) -> int:
        """Return the steps skipped since the last good one; waits for the device."""
        return int(self._in_a_row)

    def _adapt(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.grow_every == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """Return what a resumed run has to know."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "in_a_row": self.in_a_row,
            "sound_steps": self._good.item(),
            "usual_norm": self._usual.item(),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Take up the state of an earlier run."""
        self.scale = state["scale"]
        self.good_steps = int(state["good_steps"])
        self._in_a_row.fill_(state["in_a_row"])
        self._good.fill_(state["sound_steps"])
        self._usual.fill_(state["usual_norm"])
        # A step may have been taken since the last look that the run now goes back behind.
        self._skipped.zero_()
        self._spikes.zero_()
