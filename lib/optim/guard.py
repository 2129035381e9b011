"""Clip gradients, skip steps that would do harm, and adapt the loss scale of fp16."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lib.models.options import FLOAT8_RECIPES
from lib.models.sharded import group_by_mesh, local_tensor

_NORM_WINDOW = 100  # good steps in the running mean of the gradient norm
_NORM_MIN_STEPS = 20  # good steps before a norm can count as a spike
_ROW = 1 << 12  # numbers whose squares one float32 sums
_NARROW_PRECISIONS = ("fp16", *FLOAT8_RECIPES)  # precisions in which small gradients underflow


class SkippedSteps(NamedTuple):
    """Counts of skipped steps.

    steps: steps skipped since the last call of `count_skipped`. spikes: how many of these had a
    finite gradient norm. in_a_row: steps skipped since the last good step.
    """

    steps: int
    spikes: int
    in_a_row: int


class LossScale(NamedTuple):
    """The two factors that turn gradients of a summed loss into those of the mean loss per token.

    loss: the factor of the summed loss. gradients: the factor that `StepGuard.clip` applies to the
    gradients.
    """

    loss: float
    gradients: float


class StepGuard:
    """Unscales and clips gradients, and makes the optimizer skip harmful steps.

    A step is harmful if its gradient norm is NaN or infinite, or more than `spike_factor` times the
    running mean (0: no limit). The norm is global, and the decision is made on the device: with
    `found_inf` at 1, the optimizer changes neither weights nor states. So no rank and no host waits
    for the decision. Only with fp16 does the host read it in every step, to adapt the loss scale.
    The scale grows and backs off as in Micikevicius et al. 2018, "Mixed precision training".

    In each step, `scaled = guard.scale_for(tokens)` comes before the first backward pass, and
    `guard.clip(optimizer, max_norm, scaled)` after the last one.
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
        """Create a guard.

        ranks: number of ranks over which gradients are summed. divisor: the number by which FSDP
        then divides the sum. fold: let the optimizer scale the gradients while it reads them, if it
        can, instead of scaling them in `clip`. This saves a pass over all gradients; the results
        differ by rounding, a relative 1e-7. On a CPU, where memory is slow, all threads compute the
        norm then, which also changes its rounding.
        """
        self.dynamic = precision == "fp16"
        self.scale = 2.0**16 if self.dynamic else 1.0
        self._fold = fold
        self._by_rows = fold and device.type == "cpu"
        self._divisor = divisor
        # The more ranks, the smaller the gradient of each; it must not underflow before the sum.
        is_narrow = precision in _NARROW_PRECISIONS
        self._rank_scale = 2.0 ** math.floor(math.log2(ranks)) if is_narrow else 1.0
        self.good_steps = 0
        self.grow_every = 2000
        self._spike_factor = spike_factor or float("inf")
        self._in_a_row, self._skipped, self._spikes, self._good, self._mean_norm = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(5)
        )

    def scale_for(self, label_tokens: int) -> LossScale:
        """Return the factors that make the gradients of a step those of its mean loss per token.

        label_tokens: the trained tokens of the step, on all ranks. The factor of the loss is a
        power of two, which no dtype rounds. The rest is applied to the float32 gradients, because
        bfloat16 would round it by up to 0.4 %, and differently for each number of tokens.
        """
        mean = 1 / max(1, label_tokens)  # a batch of conversations can have no trained token
        power = 2.0 ** math.floor(math.log2(mean)) * self._rank_scale
        return LossScale(power * self.scale, mean / power * self._divisor / self.scale)

    def clip(
        self, optimizer: torch.optim.Optimizer, max_norm: float, scaled: LossScale
    ) -> torch.Tensor:
        """Prepare the gradients for `optimizer.step()`; all ranks must call this.

        max_norm: 0 disables clipping. scaled: the result of `scale_for` for this step.
        With `fold`, sets the optimizer's `grad_scale`, by which it divides the gradients. Returns
        the norm before clipping, a float32 scalar on the device.
        """
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norms = [_row_norms(g) for g in gradients] if self._by_rows else gradients
        norm = _total_norm(norms) * scaled.gradients
        good_step = self._check_norm(norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm else 1.0
        optimizer.found_inf = (~good_step).float()
        optimizer.grad_scale = None
        if max_norm or scaled.gradients != 1.0:
            # torch's own gradient scaler recognises such optimizers by this attribute too.
            if self._fold and getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.grad_scale = torch.ones_like(norm) / (factor * scaled.gradients)
            else:
                torch._foreach_mul_([local_tensor(g) for g in gradients], factor * scaled.gradients)
        if self.dynamic:
            self._adapt_scale(bool(torch.isfinite(norm)))
        return norm

    def _check_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step is good, as a bool scalar on the device, and update the counts."""
        finite = torch.isfinite(norm)
        limit = self._spike_factor * self._mean_norm
        spike = finite & (self._good >= _NORM_MIN_STEPS) & (norm > limit)
        good_step = finite & ~spike
        self._in_a_row = torch.where(good_step, 0.0, self._in_a_row + 1)
        self._skipped += ~good_step
        self._spikes += spike
        self._good += good_step
        change = (norm - self._mean_norm) / self._good.clamp(1, _NORM_WINDOW)
        self._mean_norm = torch.where(good_step, self._mean_norm + change, self._mean_norm)
        return good_step

    def count_skipped(self) -> torch.Tensor:
        """Return the fields of SkippedSteps and reset them, float64 [3] on the device."""
        counts = torch.stack([self._skipped, self._spikes, self._in_a_row])
        self._skipped.zero_()
        self._spikes.zero_()
        return counts

    @property
    def in_a_row(self) -> int:
        """Return the number of steps skipped since the last good one; waits for the device."""
        return int(self._in_a_row)

    def _adapt_scale(self, finite: bool) -> None:
        """Double the loss scale after many good steps, and halve it after an overflow."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.grow_every == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "in_a_row": self.in_a_row,
            "sound_steps": self._good.item(),
            "usual_norm": self._mean_norm.item(),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Load the state from a checkpoint."""
        self.scale = state["scale"]
        self.good_steps = int(state["good_steps"])
        self._in_a_row.fill_(state["in_a_row"])
        self._good.fill_(state["sound_steps"])
        self._mean_norm.fill_(state["usual_norm"])
        # After a rollback, the counts may include steps that the run will repeat.
        self._skipped.zero_()
        self._spikes.zero_()


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together, a float32 scalar; all ranks must call this.

    torch computes a norm over one mesh at a time, so gradients are grouped by mesh.
    """
    norms = []
    for tensors in group_by_mesh(gradients).values():
        norm = torch.nn.utils.get_total_norm(tensors)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def _row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norms of the rows of `_ROW` numbers of a gradient, which have the same norm.

    On a CPU, torch (2.11 to 2.13) computes the norm of a whole tensor with one thread, and loses
    digits in a large one; it computes those of rows with all threads. A short gradient is returned
    as it is. A DTensor stays one, sharded over the same ranks.
    """
    local = local_tensor(gradient).reshape(-1)
    rows = local.numel() // _ROW
    if rows < 2:
        return gradient
    norms = torch.linalg.vector_norm(local[: rows * _ROW].view(rows, _ROW), dim=1)
    rest = local[rows * _ROW :]
    if len(rest):
        norms = torch.cat([norms, torch.linalg.vector_norm(rest)[None]])
    if not isinstance(gradient, DTensor):
        return norms
    placements = tuple(Shard(0) if isinstance(p, Shard) else p for p in gradient.placements)
    meta = TensorMeta(norms.shape, norms.stride(), norms.dtype)
    spec = DTensorSpec(gradient.device_mesh, placements, meta)
    return DTensor(norms, spec, requires_grad=False)
