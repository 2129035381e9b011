"""AdamW with 8-bit moments, one byte per element instead of four (`--optimizer adamw8bit`).

Each row of a matrix is split into blocks of up to 256 elements. The moments of a block are stored
as 8-bit floats (e4m3) with one float32 scale, as in Dettmers et al. 2022, "8-bit optimizers via
block-wise quantization" (arXiv:2110.02861), with three differences:

- The square root of the second moment is stored. It has the range of the gradients, not of their
  squares.
- The rounding threshold between two codes changes in every step. With rounding to nearest,
  updates smaller than half the distance between two codes would never change a moment.
- No block spans two rows, and no row is split between ranks. So neither the update nor the content
  of a checkpoint depends on the number of ranks.

Vectors (norms, biases) keep float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lib.core import log, units
from lib.models.sharded import local_tensor, plain
from lib.optim import e4m3
from lib.optim.adamw import list_updated
from lib.optim.optimizers import AdamWOptions, Groups, Wrap

BLOCK = 256  # numbers; as in `OptimizerSpec.block`
_FLOAT8 = torch.float8_e4m3fn
_MAX_SCALED = 256.0  # in units of the block's scale; e4m3 reaches 448, so no code overflows
_MIN_SCALE = 1e-30  # of a block of zeros
_E4M3_ULP = 1 << 20  # last mantissa bit that e4m3 keeps (3 of a float32's 23)
_GOLDEN_RATIO = 0.6180339887498949  # the fractions of its multiples fill 0 to 1 evenly
# Elements of a parameter that are decoded to float32 at a time. On a CPU they fit in the cache of a
# core; on a GPU they are enough to amortise the kernel launches.
SLICE_NUMBERS = {"cpu": 1 << 16}
_GPU_SLICE_NUMBERS = 1 << 22
_CHECKED_ROWS = 64
_MAX_DIFFERENCE = 0.01  # mean difference, relative to the mean
_MIN_CAST_CAPABILITY = (8, 9)  # compute capability from which Triton can cast to e4m3


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments and the interface of torch's fused AdamW.

    `found_inf` and `grad_scale` are None or float32 scalars on the device. If `found_inf` is 1, a
    step changes nothing. The update divides the gradients by `grad_scale`, without changing them in
    place.

    State per parameter: `step`, a float32 scalar. For a matrix [R, …]: `exp_avg` and
    `exp_avg_root`, uint8 [R, …], and their `…_scale`, float32 [R, blocks]. For a vector: `exp_avg`
    and `exp_avg_root`, float32. All but `step` are sharded like the parameter.
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
        self._update = _apply_step_in_slices if wrap is None else _CompiledUpdate(wrap)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in ("exp_avg", "exp_avg_root"):
            if parameter.ndim < 2:
                state[moment] = torch.zeros_like(parameter, requires_grad=False)
                continue
            state[moment] = _sharded_zeros(parameter, torch.uint8)
            state[f"{moment}_scale"] = _sharded_zeros(parameter, torch.float32, per_block=True)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            parameters = list_updated(self, group)
            if not parameters:
                continue
            counts = [self.state[parameter]["step"] for parameter in parameters]
            skip = torch.zeros_like(counts[0]) if self.found_inf is None else self.found_inf
            torch._foreach_add_(counts, [1 - skip] * len(counts))
            settings = _Settings.from_group(group, counts[0].device)
            rows = step_scalars(group, torch.stack(counts)).unbind()
            skips = skip > 0
            for parameter, scalars in zip(parameters, rows, strict=True):
                moments = list(self.state[parameter].values())[1:]
                tensors = [
                    local_tensor(t, padded=True) for t in (parameter, parameter.grad, *moments)
                ]
                if tensors[0].numel():
                    self._update(settings, scalars, skips, self.grad_scale, *tensors)


class _Settings(NamedTuple):
    """Constants of a parameter group.

    use_integers: compute e4m3 codes with integer arithmetic, because the compiler cannot cast to
    that type on this device.
    """

    beta1: float
    beta2: float
    eps: float
    use_integers: bool

    @classmethod
    def from_group(cls, group: dict[str, Any], device: torch.device) -> _Settings:
        use_integers = (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) < _MIN_CAST_CAPABILITY
        )
        beta1, beta2 = group["betas"]
        return cls(beta1, beta2, group["eps"], use_integers)


def step_scalars(group: dict[str, Any], counts: Tensor) -> Tensor:
    """Return the scalars of each parameter's update, float32 [parameters, 4].

    counts: the number of steps per parameter, float32 [parameters]; lower for a parameter that had
    no gradient in some steps. Columns: `rate`, the factor of the first moment; `shrink`, the factor
    of the weight; `root_correction`, the divisor of the root; `round_offset`, an integer (see
    `_encode_moment`). They are computed once per step and group, because the compiled update would
    compute the float64 powers for each element. A row has 16 bytes, the alignment that the compiler
    requires of its inputs.
    """
    beta1, beta2 = group["betas"]
    counts = counts.double()
    rate = group["lr"] / (1 - beta1**counts)
    shrink = torch.full_like(counts, 1 - group["lr"] * group["weight_decay"])
    root_correction = (1 - beta2**counts).sqrt()
    round_offset = ((counts * _GOLDEN_RATIO).frac() * _E4M3_ULP).trunc()
    return torch.stack([rate, shrink, root_correction, round_offset], 1).float()


def _apply_step_in_slices(
    settings: _Settings, scalars: Tensor, skip: Tensor, scale: Tensor | None, *tensors: Tensor
) -> None:
    """Update this rank's shard, some rows at a time, unless `skip` (bool scalar) is true.

    scalars: the parameter's row of `step_scalars`. scale: divisor of the gradient.
    """
    numbers = SLICE_NUMBERS.get(tensors[0].device.type, _GPU_SLICE_NUMBERS)
    rows = max(1, numbers * len(tensors[0]) // tensors[0].numel())
    # Without the compiler, torch can cast to e4m3 on any device.
    settings = settings._replace(use_integers=False)
    for parts in zip(*(t.split(rows) for t in tensors), strict=True):
        _apply_step(settings, scalars, skip, scale, *parts)


class _CompiledUpdate:
    """The compiled update: one kernel per parameter instead of about fifty per slice.

    One graph serves all matrices, viewed as rows of one block, and another one all vectors. A
    matrix whose rows end with an incomplete block is updated in slices, because the compiled update
    gives wrong results for it (torch 2.13, on a CPU). For the same reason, the first call of each
    graph compares its result with the uncompiled update.
    """

    def __init__(self, wrap: Callable[..., Callable[..., None]]) -> None:
        self._update = wrap(_apply_step, instead=_apply_step_in_slices)
        self._is_correct: dict[int, bool] = {}  # by number of dimensions

    def __call__(
        self,
        settings: _Settings,
        scalars: Tensor,
        skip: Tensor,
        scale: Tensor | None,
        *tensors: Tensor,
    ) -> None:
        columns = tensors[0].shape[1:].numel()
        kind = min(tensors[0].ndim, 2)
        if kind == 2 and columns % BLOCK == 0:
            tensors = tuple(
                t.view(-1, BLOCK if t.shape == tensors[0].shape else 1) for t in tensors
            )
        elif kind == 2:
            return _apply_step_in_slices(settings, scalars, skip, scale, *tensors)
        if kind not in self._is_correct:
            self._is_correct[kind] = self._matches_uncompiled(
                settings, scalars, scale, *(t[:_CHECKED_ROWS] for t in tensors)
            )
        update = self._run if self._is_correct[kind] else _apply_step_in_slices
        return update(settings, scalars, skip, scale, *tensors)

    def _run(
        self,
        settings: _Settings,
        scalars: Tensor,
        skip: Tensor,
        scale: Tensor | None,
        *tensors: Tensor,
    ) -> None:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        self._update(settings, scalars, skip, scale, *tensors)

    def _matches_uncompiled(
        self, settings: _Settings, scalars: Tensor, scale: Tensor | None, *tensors: Tensor
    ) -> bool:
        """Return whether the compiled update of a copy equals the uncompiled one, up to rounding.

        The first step in float16 often overflows and is skipped. So NaN and infinite gradients are
        replaced by 0 here, and invalid scalars by 1.
        """
        weight, gradient, *moments = tensors
        tensors = (weight, torch.nan_to_num(gradient, 0.0, 0.0, 0.0), *moments)
        scale = None if scale is None else torch.where(torch.isfinite(scale), scale, 1.0)
        scalars = torch.where(torch.isfinite(scalars) & (scalars != 0), scalars, 1.0)
        compiled, expected = ([t.clone() for t in tensors] for _ in range(2))
        for update, copies in ((self._run, compiled), (_apply_step_in_slices, expected)):
            update(
                settings,
                scalars,
                torch.zeros((), dtype=torch.bool, device=scalars.device),
                scale,
                *copies,
            )
        size = len(moments) // 2  # tensors of each moment
        pairs = [(compiled[0] - tensors[0], expected[0] - tensors[0])]
        pairs += [
            (_decode_moment(compiled[i : i + size]), _decode_moment(expected[i : i + size]))
            for i in range(2, len(tensors), size)
        ]
        if all((a - b).abs().mean() <= _MAX_DIFFERENCE * b.abs().mean() for a, b in pairs):
            return True
        log.warn(
            "adamw8bit runs uncompiled, which is slower: its compiled update gave other results"
        )
        return False


def _apply_step(
    settings: _Settings,
    scalars: Tensor,
    skip: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    gradient: Tensor,
    *moments: Tensor,
) -> None:
    """Update a weight and its moments, unless `skip` is true."""
    rate, shrink, root_correction, round_offset = scalars.unbind()
    first = moments[: len(moments) // 2]
    second = moments[len(moments) // 2 :]
    if scale is not None:
        gradient = gradient / scale
    average = _decode_moment(first, settings.use_integers).lerp_(gradient, 1 - settings.beta1)
    root = (
        _decode_moment(second, settings.use_integers)
        .square_()
        .lerp_(gradient.square(), 1 - settings.beta2)
        .sqrt_()
    )
    new_weight = weight * shrink
    new_weight -= rate * average / (root / root_correction + settings.eps)
    weight.copy_(torch.where(skip, weight, new_weight))
    for values, stored in ((average, first), (root, second)):
        encoded = _encode_moment(
            values, round_offset.to(torch.int32), stored, settings.use_integers
        )
        for old, new in zip(stored, encoded, strict=True):
            old.copy_(torch.where(skip, old, new))


def _decode_moment(stored: Sequence[Tensor], use_integers: bool = False) -> Tensor:
    """Return a moment in float32, as a new tensor.

    stored: [values], or [codes, scales].
    """
    if len(stored) == 1:
        return stored[0].clone()
    codes, scale = stored
    values = e4m3.decode(codes) if use_integers else codes.view(_FLOAT8).float()
    return _join_blocks(_split_blocks(values) * scale[..., None], codes)


def _encode_moment(
    values: Tensor, round_offset: Tensor, like: Sequence[Tensor], use_integers: bool
) -> list[Tensor]:
    """Return a moment as it is stored: [values] for a vector, [codes, scales] for a matrix.

    round_offset: int32 scalar, added to the bits of a float32 before they are truncated. 0 rounds
    down and almost `_E4M3_ULP` rounds up (in magnitude); values that a code represents exactly do
    not change.
    """
    if len(like) == 1:
        return [values]
    blocks = _split_blocks(values)
    scale = (blocks.abs().amax(-1) / _MAX_SCALED).clamp_(min=_MIN_SCALE)
    bits = ((blocks / scale[..., None]).view(torch.int32) + round_offset) & -_E4M3_ULP
    rounded = bits.view(torch.float32)
    codes = e4m3.encode(rounded) if use_integers else rounded.to(_FLOAT8).view(torch.uint8)
    return [_join_blocks(codes, values), scale]


def _split_blocks(values: Tensor) -> Tensor:
    """Return the blocks of the rows [R, …] as [R, blocks, 256], each row padded with zeros."""
    rows = values.flatten(1)
    if padding := -rows.shape[1] % BLOCK:
        rows = F.pad(rows, (0, padding))
    return rows.unflatten(1, (-1, BLOCK))


def _join_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Return [R, blocks, 256] in the shape of `like`, without the padding."""
    return blocks.flatten(1)[:, : like.flatten(1).shape[1]].reshape(like.shape)


def _sharded_zeros(parameter: Tensor, dtype: torch.dtype, per_block: bool = False) -> Tensor:
    """Return zeros in the shape of a parameter, or [R, blocks], sharded like it."""

    def state_shape(tensor: Tensor) -> torch.Size:
        """Return the shape of the state for a full parameter or for a shard of it."""
        if not per_block:
            return tensor.shape
        return torch.Size((len(tensor), units.ceil_div(tensor.shape[1:].numel(), BLOCK)))

    local = local_tensor(parameter, padded=True)
    zeros = torch.zeros(state_shape(local), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    splits_blocks = plain(parameter).shape != parameter.shape or local.shape[1:].numel() % BLOCK
    assert not (
        splits_blocks and any(p.dim for p in parameter.placements if isinstance(p, Shard))
    ), "blocks are split between ranks"  # see OptimizerSpec.block
    size = state_shape(parameter)
    strides = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    # `from_local` would move offloaded tensors back to the mesh's device.
    return DTensor(
        zeros,
        DTensorSpec(parameter.device_mesh, parameter.placements, TensorMeta(size, strides, dtype)),
        requires_grad=False,
    )


def build(groups: Groups, lr: float, options: AdamWOptions, wrap: Wrap | None) -> AdamW8bit:
    """Return AdamW with 8-bit moments over groups of parameters."""
    return AdamW8bit(groups, lr, (options.beta1, options.beta2), wrap)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let `AdamW8bit` update as many elements at a time on a CPU as on a GPU."""
    before = dict(SLICE_NUMBERS)
    SLICE_NUMBERS.clear()
    try:
        yield
    finally:
        SLICE_NUMBERS.update(before)
