"""Muon over shards: an orthogonal update for the matrices of the blocks, AdamW for all else.

Muon (https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the nearest
orthogonal matrix, so that each direction of its space moves by the same amount. Five Newton–Schulz
steps compute it, from products of the whole matrix. But ranks have only some rows of each:

1. Each rank updates its rows of the momentum, in float32, and rounds the update to bf16, which the
   steps do first in any case.
2. Each matrix has an owner. One all-to-all sends the rows of many matrices to their owners.
3. An owner orthogonalises its matrices. Owners are chosen by cost, the largest matrix first, since
   one that got the widest matrices of all layers would let the other ranks wait.
4. One all-to-all returns the rows.

So a rank sends twice 2 bytes for each of its numbers, no matrix is computed twice, and an update
does not depend on the number of ranks. A rank that has whole experts orthogonalises them itself.
The update is scaled by 0.2 · √(larger side), so that learning rates and decay of AdamW fit, as in
Moonlight (arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lib.core import log, units
from lib.models.sharded import local_tensor, plain, without_padding
from lib.optim.adamw import AdamW, list_updated
from lib.optim.optimizers import Groups, MuonOptions, Wrap

_MOMENTUM = 0.95
_EPS = 1e-7  # the smallest norm that a matrix is divided by
_RMS = 0.2  # of an update, like that of AdamW
# The coefficients (a, b, c) of each step: X ← aX + (bA + cA²)X with A = XXᵀ.
COEFFICIENTS = {
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    # arXiv 2505.16932, for five steps.
    "polar-express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}
_POLAR_MARGIN = 1.01  # Polar Express must never get a norm above 1
_BUCKET = 1 << 26  # numbers of a rank in one exchange, two bytes each


class _Matrix(NamedTuple):
    """A matrix whose rows are shared by ranks.

    parameter: its index among those of the group. expert: its index in a stack of matrices, 0 for a
    parameter that is a matrix. rows: the rows of each rank. owner: the rank that
    orthogonalises the matrix.
    """

    parameter: int
    expert: int
    rows: tuple[int, ...]
    columns: int
    owner: int = 0

    @property
    def cost(self) -> int:
        """Return the operations of a Newton–Schulz step, up to a factor."""
        short, long = sorted((sum(self.rows), self.columns))
        return short * short * (2 * long + short)

    def count(self, rank: int) -> int:
        """Return how many numbers of the matrix a rank has."""
        return self.rows[rank] * self.columns


@dataclass(frozen=True)
class _Plan:
    """How the ranks of a group compute its updates.

    local: indices of the parameters whose matrices are whole on each rank. buckets: matrices that
    are exchanged together. group: the ranks that share the rows; None without buckets.
    """

    local: list[int]
    buckets: list[list[_Matrix]]
    group: dist.ProcessGroup | None


class Muon(AdamW):
    """Muon for the groups with `is_muon`, AdamW for the others, with one learning rate.

    If `found_inf` is 1, a step changes nothing. The state of a parameter with Muon: `step`, and
    `momentum`, float32 and sharded like the parameter.
    """

    param_groups: Groups

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        coefficients: str = "jordan",
    ) -> None:
        """coefficients: a key of COEFFICIENTS."""
        super().__init__(groups, lr, betas)
        self._orthogonalise = _Orthogonaliser(coefficients)
        self._plans: dict[tuple[int, ...], _Plan] = {}  # by the parameters with a gradient

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        matrices = (p for g in self.param_groups if g.get("is_muon") for p in g["params"])
        if not any(parameter is p for p in matrices):
            return super().new_state(parameter)
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "momentum": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient. All ranks must call this."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("is_muon")]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("is_muon"):
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = list_updated(self, group)
        if not parameters:
            return
        counts = [self.state[parameter]["step"] for parameter in parameters]
        found_inf = getattr(self, "found_inf", None)
        skip = torch.zeros_like(counts[0]) if found_inf is None else found_inf
        torch._foreach_add_(counts, [1 - skip] * len(counts))
        step = _GroupStep(parameters, self, group, skip > 0)
        plan = self._plan(parameters)
        for number in plan.local:
            update = step.take_update(number)
            step.apply(number, self._orthogonalise(update) if update.numel() else update)
        # The rows of the next bucket travel while this one is orthogonalised.
        current: _OwnerExchange | None = None
        for bucket in plan.buckets:
            following = _OwnerExchange(bucket, step, plan.group)
            if current is not None:
                current.finish(self._orthogonalise)
            current = following
        if current is not None:
            current.finish(self._orthogonalise)

    def _plan(self, parameters: Sequence[Tensor]) -> _Plan:
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = _make_plan(parameters)
        return self._plans[key]


class _Orthogonaliser:
    """Computes an approximation of U·Vᵀ of a matrix U·S·Vᵀ, by Newton–Schulz steps in bf16."""

    def __init__(self, coefficients: str) -> None:
        self._coefficients = COEFFICIENTS[coefficients]
        self._margin = _POLAR_MARGIN if coefficients == "polar-express" else 1.0

    def __call__(self, update: Tensor) -> Tensor:
        """Return the result for a matrix, or for each matrix of a stack.

        update: bf16 [rows, columns] or [matrices, rows, columns]. The result has the same shape.
        The operations for a matrix are those of torch.optim.Muon, so the results are too.
        """
        is_tall = update.shape[-2] > update.shape[-1]
        x = update.mT if is_tall else update
        norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
        x = x / (norm.clamp(min=_EPS) * self._margin)
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        for a, b, c in self._coefficients:
            gram = x @ x.mT
            polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
            x = add_product(x, polynomial, x, beta=a)
        return x.mT if is_tall else x


class _GroupStep:
    """One step of the parameters of a group, on the rows of this rank."""

    def __init__(
        self, parameters: Sequence[Tensor], optimizer: Muon, group: dict[str, Any], skip: Tensor
    ) -> None:
        """skip: a bool scalar; if true, nothing changes."""
        self._parameters = parameters
        self._states = [optimizer.state[parameter] for parameter in parameters]
        self._scale = getattr(optimizer, "grad_scale", None)
        self._lr = group["lr"]
        self._decay = 1 - group["lr"] * group["weight_decay"]
        self._skip = skip
        self.device = skip.device

    def take_update(self, number: int) -> Tensor:
        """Add the gradient of a parameter to its momentum; return this rank's rows in bf16."""
        parameter = self._parameters[number]
        gradient, momentum = (
            local_tensor(without_padding(tensor, parameter))
            for tensor in (parameter.grad, self._states[number]["momentum"])
        )
        if self._scale is not None:
            gradient = gradient / self._scale
        average = momentum.lerp(gradient, 1 - _MOMENTUM)
        torch.where(self._skip, momentum, average, out=momentum)
        return gradient.lerp(average, _MOMENTUM).bfloat16()  # Nesterov's

    def apply(self, number: int, direction: Tensor) -> None:
        """Move the weights of a parameter. direction: this rank's rows of orthogonal matrices."""
        parameter = self._parameters[number]
        weight = local_tensor(parameter)
        rate = self._lr * _RMS * math.sqrt(max(plain(parameter).shape[-2:]))
        moved = (weight * self._decay).add_(direction, alpha=-rate)
        torch.where(self._skip, weight, moved, out=weight)


class _OwnerExchange:
    """Sends the rows of a bucket of matrices to their owners, and the results back.

    Each result replaces its rows, so an exchange takes only two buffers.
    """

    def __init__(
        self, bucket: Sequence[_Matrix], step: _GroupStep, group: dist.ProcessGroup | None
    ) -> None:
        """Begin to send the rows."""
        self._step = step
        self._group = group
        self._rank = dist.get_rank(group)
        ranks = range(dist.get_world_size(group))
        self._bucket = sorted(bucket, key=lambda matrix: matrix.owner)
        self._owned = [matrix for matrix in bucket if matrix.owner == self._rank]
        self._mine = [
            sum(matrix.count(self._rank) for matrix in bucket if matrix.owner == rank)
            for rank in ranks
        ]
        self._theirs = [sum(matrix.count(rank) for matrix in self._owned) for rank in ranks]
        device = step.device
        self._rows = torch.empty(sum(self._mine), dtype=torch.bfloat16, device=device)
        self._whole = torch.empty(sum(self._theirs), dtype=torch.bfloat16, device=device)
        for number, slots in self._list_slots().items():
            update = step.take_update(number)
            torch._foreach_copy_(slots, list(update.unbind()) if update.ndim > 2 else [update])
        self._work = self._begin(self._whole, self._rows, self._theirs, self._mine)

    def finish(self, orthogonalise: _Orthogonaliser) -> None:
        """Orthogonalise the matrices of this rank, return the rows, and move the weights."""
        self._work.wait()
        parts = [
            part.split([matrix.count(rank) for matrix in self._owned])
            for rank, part in enumerate(self._whole.split(self._theirs))
        ]
        for matrix, rows in zip(self._owned, zip(*parts, strict=True), strict=True):
            result = orthogonalise(torch.cat(rows).view(-1, matrix.columns)).split(matrix.rows)
            slots = [row.view(part.shape) for row, part in zip(rows, result, strict=True)]
            torch._foreach_copy_(slots, list(result))
        self._begin(self._rows, self._whole, self._mine, self._theirs).wait()
        for number, slots in self._list_slots().items():
            self._step.apply(number, torch.stack(slots) if len(slots) > 1 else slots[0])

    def _list_slots(self) -> dict[int, list[Tensor]]:
        """Return by parameter where this rank's rows of its matrices are, a view for each."""
        sizes = [matrix.count(self._rank) for matrix in self._bucket]
        slots = zip(self._bucket, self._rows.split(sizes), strict=True)
        found: dict[int, list[Tensor]] = {}
        for matrix, slot in sorted(slots, key=lambda pair: pair[0][:2]):
            rows = slot.view(matrix.rows[self._rank], matrix.columns)
            found.setdefault(matrix.parameter, []).append(rows)
        return found

    def _begin(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> dist.Work:
        """Begin an all-to-all; return the work to wait for."""
        return dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self._group, async_op=True
        )


def _make_plan(parameters: Sequence[Tensor]) -> _Plan:
    """Return how ranks share the work for parameters on one mesh. It is the same on all ranks."""
    local: list[int] = []
    matrices: list[list[_Matrix]] = []  # of each parameter
    group: dist.ProcessGroup | None = None
    for number, parameter in enumerate(parameters):
        shared = _split_rows(parameter)
        if shared is None:
            local.append(number)
            continue
        rows, columns, group = shared
        experts = range(len(parameter) if parameter.ndim > 2 else 1)
        matrices.append([_Matrix(number, expert, rows, columns) for expert in experts])
    ranks = dist.get_world_size(group) if group is not None else 1
    buckets: list[list[_Matrix]] = [[]]
    size = 0
    for of_parameter in matrices:
        numbers = sum(sum(matrix.rows) * matrix.columns for matrix in of_parameter)
        if size and size + numbers > _BUCKET * ranks:
            buckets.append([])
            size = 0
        buckets[-1] += of_parameter
        size += numbers
    return _Plan(local, [choose_owners(bucket, ranks) for bucket in buckets if bucket], group)


def _split_rows(
    parameter: Tensor,
) -> tuple[tuple[int, ...], int, dist.ProcessGroup] | None:
    """Return the rows of each rank, the columns, and the ranks; None if each has whole matrices."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    placement = parameter.placements[-1]  # of the dimension of the mesh that shards
    ranks = mesh.size(-1)
    rows_dim = parameter.ndim - 2
    if ranks == 1 or not isinstance(placement, Shard) or placement.dim != rows_dim:
        return None
    whole = plain(parameter).shape
    most = math.ceil(parameter.shape[rows_dim] / ranks)
    rows = tuple(min(most, max(0, whole[rows_dim] - rank * most)) for rank in range(ranks))
    return rows, whole[-1], mesh.get_group(mesh.ndim - 1)


def choose_owners(bucket: Sequence[_Matrix], ranks: int) -> list[_Matrix]:
    """Return the matrices with owners: the most expensive first, each to the least busy rank."""
    busy = [(0, rank) for rank in range(ranks)]
    owners: dict[int, int] = {}
    for index in sorted(range(len(bucket)), key=lambda index: -bucket[index].cost):
        cost, rank = heapq.heappop(busy)
        owners[index] = rank
        heapq.heappush(busy, (cost + bucket[index].cost, rank))
    return [matrix._replace(owner=owners[index]) for index, matrix in enumerate(bucket)]


def build(groups: Groups, lr: float, options: MuonOptions, wrap: Wrap | None) -> Muon:
    """Return Muon over groups of parameters, and log which of them it updates."""
    matrices = [p for group in groups if group.get("is_muon") for p in group["params"]]
    if not matrices:
        log.warn("no matrix of a block is trained, so Muon leaves everything to AdamW")
    elif matrices[0].device.type == "cpu" and torch.cuda.is_available():
        log.warn("Muon orthogonalises offloaded matrices on the CPU, which may take minutes a step")
    for group in groups:
        count = sum(map(Tensor.numel, group["params"]))
        name = "Muon" if group.get("is_muon") else "AdamW"
        tensors = units.counted(len(group["params"]), "tensor")
        log.detail(
            f"optimizer: {name} for {tensors} with {units.count(count)} parameters, "
            f"decay {group['weight_decay']:g}"
        )
    return Muon(groups, lr, (options.beta1, options.beta2), options.muon_coefficients)
