"""AdamW whose moments take one byte per number instead of four: `--optimizer adamw8bit`.

A moment of a matrix is kept in blocks of up to 256 numbers of a row, each block as 8-bit floats
(e4m3) and one float32 scale, after Dettmers et al. 2022, "8-bit optimizers via block-wise
quantization" (arXiv:2110.02861). Three things differ from there:

- Of the second moment its root is kept: the range of gradients, not of their squares.
- Where between two codes a number is rounded up is another place in each step. Rounded always to
  the nearest, a moment that moves by less than half their distance would never move.
- Blocks end with their row, and sharding deals out whole rows: neither the update nor what a
  checkpoint holds depends on the number of ranks.

Vectors (norms, biases) keep float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lib.core import log, units
from lib.models.sharded import local_tensor, plain
from lib.optim import e4m3

BLOCK = 256  # numbers
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = 256.0  # of a block, in units of its scale; e4m3 ends at 448, so nothing is cut off
_SMALLEST_SCALE = 1e-30  # of a block of zeros
_CUT = 1 << 20  # what the last of a float32's 23 bits is worth that e4m3's fraction of 3 keeps
_GOLDEN = 0.6180339887498949  # multiples of it, less whole numbers, fill 0 to 1 evenly
# Numbers of a parameter that are float32 at a time: what a core's cache holds; on a GPU enough to
# be worth starting its kernels for.
AT_ONCE = {"cpu": 1 << 16}
_AT_ONCE_ON_GPU = 1 << 22
_TRIED = 64  # rows
_ROUNDING = 0.01  # mean difference, as a share of the mean
_CASTS_SINCE = (8, 9)  # the compute capability from which Triton casts to e4m3


class AdamW8bit(torch.optim.Optimizer):
    """Has nothing change where `found_inf` is set, as torch's fused AdamW.

    Gradients are divided by `grad_scale` where it is set (float32 scalar), and stay as they are.

    Per parameter: `step` float32 scalar; of a matrix [R, …] `exp_avg` and `exp_avg_root` uint8
    [R, …] and their `…_scale` float32 [R, blocks]; of a vector `exp_avg` and `exp_avg_root`
    float32. All but `step` are sharded like the parameter.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        wrap: Callable[..., Callable[..., None]] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._step_supports_amp_scaling = True
        self._update = _in_slices if wrap is None else _Fused(wrap)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in ("exp_avg", "exp_avg_root"):
            if parameter.ndim < 2:
                state[moment] = torch.zeros_like(parameter, requires_grad=False)
                continue
            state[moment] = _zeros(parameter, torch.uint8)
            state[f"{moment}_scale"] = _zeros(parameter, torch.float32, per_block=True)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self.new_state(parameter))
            if not parameters:
                continue
            counts = [self.state[parameter]["step"] for parameter in parameters]
            skip = torch.zeros_like(counts[0]) if self.found_inf is None else self.found_inf
            torch._foreach_add_(counts, [1 - skip] * len(counts))
            rule = _Rule.from_group(group, counts[0].device)
            scalars = step_scalars(group, torch.stack(counts)).unbind()
            skips = skip > 0
            for parameter, now in zip(parameters, scalars, strict=True):
                moments = list(self.state[parameter].values())[1:]
                tensors = [
                    local_tensor(t, padded=True) for t in (parameter, parameter.grad, *moments)
                ]
                if tensors[0].numel():
                    self._update(rule, now, skips, self.grad_scale, *tensors)


class _Rule(NamedTuple):
    """Holds what a group's parameters share in all steps.

    by_bits: compiled code computes e4m3 codes by integer arithmetic, since the compiler does not
    know casts to that type for this device.
    """

    beta1: float
    beta2: float
    eps: float
    by_bits: bool

    @classmethod
    def from_group(cls, group: dict[str, Any], device: torch.device) -> _Rule:
        by_bits = device.type == "cuda" and torch.cuda.get_device_capability(device) < _CASTS_SINCE
        beta1, beta2 = group["betas"]
        return cls(beta1, beta2, group["eps"], by_bits)


def step_scalars(group: dict[str, Any], counts: Tensor) -> Tensor:
    """Return what the update of each parameter multiplies by, float32 [parameters, 4].

    counts: the steps that each parameter has taken, float32 [parameters]; they differ where one had
    no gradient at times. The columns: `rate` and `shrink`, which a moment and a weight are
    multiplied by; `root_correction`, which divides a root; `raised`, a whole number. Computed once
    per step and group: within the compiled update, the float64 powers would be computed for each
    number. A row takes 16 bytes, so each is as aligned as the compiler wants its inputs.
    """
    beta1, beta2 = group["betas"]
    counts = counts.double()
    rate = group["lr"] / (1 - beta1**counts)
    shrink = torch.full_like(counts, 1 - group["lr"] * group["weight_decay"])
    root_correction = (1 - beta2**counts).sqrt()
    raised = ((counts * _GOLDEN).frac() * _CUT).trunc()
    return torch.stack([rate, shrink, root_correction, raised], 1).float()


def _in_slices(
    rule: _Rule, now: Tensor, skip: Tensor, scale: Tensor | None, *tensors: Tensor
) -> None:
    """Take a step on this rank's shard, some rows at a time, unless `skip` (bool scalar).

    now: the parameter's row of `step_scalars`. scale: divides the gradient.
    """
    at_once = AT_ONCE.get(tensors[0].device.type, _AT_ONCE_ON_GPU)
    rows = max(1, at_once * len(tensors[0]) // tensors[0].numel())
    rule = rule._replace(by_bits=False)  # without the compiler, torch's casts work on any device
    for parts in zip(*(t.split(rows) for t in tensors), strict=True):
        _take(rule, now, skip, scale, *parts)


class _Fused:
    """The compiled update: a kernel per parameter, which reads and writes each number once, where
    there are some fifty per slice otherwise.

    One graph serves all matrices, as rows of one block, and one all vectors. Rows that end within
    a block are updated in slices: the compiler gets them wrong (torch 2.13, on a CPU). So each
    graph is tried, on the first rows that it is for.
    """

    def __init__(self, wrap: Callable[..., Callable[..., None]]) -> None:
        self._update = wrap(_take, instead=_in_slices)
        self._is_right: dict[int, bool] = {}  # by dimensions

    def __call__(
        self, rule: _Rule, now: Tensor, skip: Tensor, scale: Tensor | None, *tensors: Tensor
    ) -> None:
        columns = tensors[0].shape[1:].numel()
        kind = min(tensors[0].ndim, 2)
        if kind == 2 and columns % BLOCK == 0:
            tensors = tuple(
                t.view(-1, BLOCK if t.shape == tensors[0].shape else 1) for t in tensors
            )
        elif kind == 2:
            return _in_slices(rule, now, skip, scale, *tensors)
        if kind not in self._is_right:
            self._is_right[kind] = self._tries(rule, now, scale, *(t[:_TRIED] for t in tensors))
        update = self._run if self._is_right[kind] else _in_slices
        return update(rule, now, skip, scale, *tensors)

    def _run(
        self, rule: _Rule, now: Tensor, skip: Tensor, scale: Tensor | None, *tensors: Tensor
    ) -> None:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        self._update(rule, now, skip, scale, *tensors)

    def _tries(self, rule: _Rule, now: Tensor, scale: Tensor | None, *tensors: Tensor) -> bool:
        """Tell whether copies change as they do without the compiler, but for rounding.

        The first step in float16 often overflows and is skipped. So NaN and infinite gradients
        count as 0 here, and the scalars of a step that has not been counted as 1.
        """
        weight, gradient, *kept = tensors
        tensors = (weight, torch.nan_to_num(gradient, 0.0, 0.0, 0.0), *kept)
        scale = None if scale is None else torch.where(torch.isfinite(scale), scale, 1.0)
        now = torch.where(torch.isfinite(now) & (now != 0), now, 1.0)
        updated, wanted = ([t.clone() for t in tensors] for _ in range(2))
        for update, copies in ((self._run, updated), (_in_slices, wanted)):
            update(rule, now, torch.zeros((), dtype=torch.bool, device=now.device), scale, *copies)
        moments = (len(tensors) - 2) // 2  # tensors of each
        pairs = [(updated[0] - tensors[0], wanted[0] - tensors[0])]
        pairs += [
            (_read(updated[i : i + moments]), _read(wanted[i : i + moments]))
            for i in range(2, len(tensors), moments)
        ]
        if all((a - b).abs().mean() <= _ROUNDING * b.abs().mean() for a, b in pairs):
            return True
        log.warn(
            "adamw8bit runs uncompiled, which is slower: compiled it does not compute the same here"
        )
        return False


def _take(
    rule: _Rule,
    now: Tensor,
    skip: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    gradient: Tensor,
    *kept: Tensor,
) -> None:
    rate, shrink, root_correction, raised = now.unbind()
    first = kept[: len(kept) // 2]
    second = kept[len(kept) // 2 :]
    if scale is not None:
        gradient = gradient / scale
    average = _read(first, rule.by_bits).lerp_(gradient, 1 - rule.beta1)
    root = _read(second, rule.by_bits).square_().lerp_(gradient.square(), 1 - rule.beta2).sqrt_()
    new = weight * shrink
    new -= rate * average / (root / root_correction + rule.eps)
    weight.copy_(torch.where(skip, weight, new))
    for values, places in ((average, first), (root, second)):
        written = _written(values, raised.to(torch.int32), places, rule.by_bits)
        for place, value in zip(places, written, strict=True):
            place.copy_(torch.where(skip, place, value))


def _read(kept: Sequence[Tensor], by_bits: bool = False) -> Tensor:
    """Return a moment in float32, as a new tensor."""
    if len(kept) == 1:
        return kept[0].clone()
    codes, scale = kept
    values = e4m3.decode(codes) if by_bits else codes.view(_FLOAT8).float()
    return _joined(_blocks(values) * scale[..., None], codes)


def _written(values: Tensor, raised: Tensor, like: Sequence[Tensor], by_bits: bool) -> list[Tensor]:
    """Return what keeps a moment: itself, or codes and scales.

    raised: int32 scalar, what is added to a float32's bits before they are cut off: 0 rounds all
    down, almost `_CUT` all up (in magnitude), and what a code is exact for stays as it is.
    """
    if len(like) == 1:
        return [values]
    blocks = _blocks(values)
    scale = (blocks.abs().amax(-1) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    bits = ((blocks / scale[..., None]).view(torch.int32) + raised) & -_CUT
    cut = bits.view(torch.float32)
    codes = e4m3.encode(cut) if by_bits else cut.to(_FLOAT8).view(torch.uint8)
    return [_joined(codes, values), scale]


def _blocks(values: Tensor) -> Tensor:
    """Return [R, …] as [R, blocks, 256], zeros behind the end of a row."""
    rows = values.flatten(1)
    if short := -rows.shape[1] % BLOCK:
        rows = F.pad(rows, (0, short))
    return rows.unflatten(1, (-1, BLOCK))


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    """Return [R, blocks, 256] in the shape of `like`."""
    return blocks.flatten(1)[:, : like.flatten(1).shape[1]].reshape(like.shape)


def _zeros(parameter: Tensor, dtype: torch.dtype, per_block: bool = False) -> Tensor:
    """Return zeros of a parameter's shape, or [R, blocks], sharded like it, on the same device."""

    def shape(of: Tensor) -> torch.Size:
        """Return the shape for a whole parameter or a shard of it."""
        if not per_block:
            return of.shape
        return torch.Size((len(of), units.ceil_div(of.shape[1:].numel(), BLOCK)))

    local = local_tensor(parameter, padded=True)
    zeros = torch.zeros(shape(local), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    is_cut = plain(parameter).shape != parameter.shape or local.shape[1:].numel() % BLOCK
    assert not (is_cut and any(p.dim for p in parameter.placements if isinstance(p, Shard))), (
        "blocks are cut"
    )  # see OptimizerSpec.block
    whole = shape(parameter)
    strides = tuple(math.prod(whole[i + 1 :]) for i in range(len(whole)))
    # Not `from_local`, which would move what is offloaded back to the mesh's device.
    return DTensor(
        zeros,
        DTensorSpec(parameter.device_mesh, parameter.placements, TensorMeta(whole, strides, dtype)),
        requires_grad=False,
    )
