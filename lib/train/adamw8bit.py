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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lib.models.shards import local_tensor

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


class AdamW8bit(torch.optim.Optimizer):
    """Has nothing change where `found_inf` is set, as torch's fused AdamW.

    Per parameter: `step` float32 scalar; of a matrix [R, …] `exp_avg` and `exp_avg_root` uint8
    [R, …] and their `…_scale` float32 [R, blocks]; of a vector `exp_avg` and `exp_avg_root`
    float32. All but `step` are sharded like the parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self.found_inf: Tensor | None = None

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in ("exp_avg", "exp_avg_root"):
            if parameter.ndim < 2:
                state[moment] = torch.zeros_like(parameter, requires_grad=False)
                continue
            blocks = -(-parameter.shape[1:].numel() // BLOCK)
            state[moment] = _zeros(parameter, parameter.shape, torch.uint8)
            state[f"{moment}_scale"] = _zeros(parameter, (len(parameter), blocks), torch.float32)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.new_state(parameter))
                skip = torch.zeros_like(state["step"]) if self.found_inf is None \
                    else self.found_inf
                state["step"] += 1 - skip
                _update(parameter, group, state, skip > 0)


def _update(parameter: Tensor, group: dict[str, Any], state: dict[str, Tensor], skip: Tensor,
            ) -> None:
    """Take a step on this rank's shard, some rows at a time, unless `skip` (bool scalar)."""
    count, *moments = [local_tensor(tensor) for tensor in state.values()]
    beta1, beta2 = group["betas"]
    rate = group["lr"] / (1 - beta1**count)
    root_correction = (1 - beta2**count).sqrt()
    raised = ((count.double() * _GOLDEN).frac() * _CUT).to(torch.int32)
    tensors = [local_tensor(parameter), local_tensor(parameter.grad), *moments]
    at_once = AT_ONCE.get(tensors[0].device.type, _AT_ONCE_ON_GPU)
    rows = max(1, at_once * len(tensors[0]) // max(1, tensors[0].numel()))
    for weight, gradient, *kept in zip(*(t.split(rows) for t in tensors), strict=True):
        first, second = (kept[:len(kept) // 2], kept[len(kept) // 2:])
        average = _read(*first).lerp_(gradient, 1 - beta1)
        root = _read(*second).square_().lerp_(gradient.square(), 1 - beta2).sqrt_()
        new = weight * (1 - group["lr"] * group["weight_decay"])
        new -= rate * average / (root / root_correction + group["eps"])
        weight.copy_(torch.where(skip, weight, new))
        for values, places in ((average, first), (root, second)):
            for place, written in zip(places, _written(values, raised, places), strict=True):
                place.copy_(torch.where(skip, place, written))


def _read(codes: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return a moment in float32, as a new tensor."""
    if scale is None:
        return codes.clone()
    return _joined(_blocks(codes.view(_FLOAT8).float()) * scale[..., None], codes)


def _written(values: Tensor, raised: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return what keeps a moment: itself, or codes and scales.

    raised: int32 scalar, what is added to a float32's bits before they are cut off: 0 rounds all
    down, almost `_CUT` all up (in magnitude), and what a code is exact for stays as it is.
    """
    if len(like) == 1:
        return [values]
    blocks = _blocks(values)
    scale = (blocks.abs().amax(-1) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    bits = ((blocks / scale[..., None]).view(torch.int32) + raised) & -_CUT
    codes = bits.view(torch.float32).to(_FLOAT8)
    return [_joined(codes.view(torch.uint8), values), scale]


def _blocks(values: Tensor) -> Tensor:
    """[R, …] → [R, blocks, 256], zeros behind the end of a row."""
    rows = values.flatten(1)
    if short := -rows.shape[1] % BLOCK:
        rows = F.pad(rows, (0, short))
    return rows.unflatten(1, (-1, BLOCK))


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    """[R, blocks, 256] → the shape of `like`."""
    return blocks.flatten(1)[:, :like.flatten(1).shape[1]].reshape(like.shape)


def _zeros(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape with the parameter's rows, sharded like it, on the same device."""
    local = local_tensor(parameter)
    zeros = torch.zeros((len(local), *shape[1:]), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    assert all(p.dim == 0 for p in parameter.placements if isinstance(p, Shard)), "rows are split"
    strides = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, dtype)
    # Not `from_local`, which would move what is offloaded back to the mesh's device.
    return DTensor(zeros, DTensorSpec(parameter.device_mesh, parameter.placements, meta),
                   requires_grad=False)
