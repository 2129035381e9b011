"""Draw random initial weights on the host, on each rank only those of its own shards.

The generators of a CPU and of a GPU give different numbers, so all are drawn on the CPU: in pieces,
by several threads. Each piece of each tensor has a generator of its own, so a rank can leave out
the pieces of other ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.core import units
from lib.models.nested import list_tensors

PIECE = 1 << 16  # elements; to draw them takes about 0.3 ms

Part = Sequence[slice]  # one slice per dimension, see `sharded.local_slice`

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_SEEDS = 1 << 32  # torch's generator for CPUs uses no more bits of a seed


class HostDraws(TorchDispatchMode):
    """Draws what `normal_` and `uniform_` would draw for tensors on the CPU inside this context.

    Any other operation on a tensor that was drawn in part first draws the rest of what it touches,
    so that rules of initialisation may read and change the weights that they have drawn.
    """

    def __init__(self, seed: int, pool: ThreadPoolExecutor) -> None:
        """Begin with the first piece of a seed. pool: its threads draw the pieces."""
        super().__init__()
        self._pool = pool
        self._next = int.from_bytes(hashlib.sha256(f"{seed}".encode()).digest()[:4], "big")
        self.begin({})

    def begin(self, parts: Mapping[Tensor, Part]) -> None:
        """Draw for other tensors from now on. parts: each contiguous one, and what is needed of it.

        The numbers of a tensor depend on the number and sizes of all draws before.
        """
        self._parts = {_address(tensor): (tensor, part) for tensor, part in parts.items()}
        self._draws: dict[int, _Draw] = {}  # the last draw of a whole tensor, by its address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch, or draw instead."""
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None and args[0].device.type == "cpu":
            self._draw(func, *args)
            return args[0]
        if not func.is_view:
            for tensor in list_tensors((args, kwargs)):
                self._complete(tensor)
        return func(*args, **kwargs)

    def _draw(self, func: Any, tensor: Tensor, *bounds: float) -> None:
        """Draw the needed part of a tensor; all of it, unless it is one of those of `begin`.

        bounds: the arguments of `func`.
        """
        is_direct = tensor.is_contiguous() and tensor.dtype == torch.float32
        target = tensor if is_direct else torch.empty(tensor.shape)
        draw = _Draw(func, bounds, self._next, target, self._pool)
        pieces = units.ceil_div(target.numel(), PIECE)
        self._next += pieces
        parameter, part = self._parts.get(_address(tensor), (None, ()))
        if is_direct and parameter is not None and parameter.shape == tensor.shape:
            self._draws[_address(tensor)] = draw
            draw.fill(list_pieces(tensor.shape, part))
            return
        self._complete(tensor)
        draw.fill(range(pieces))
        if not is_direct:
            tensor.copy_(target)

    def _complete(self, tensor: Tensor) -> None:
        """Draw the pieces of a tensor that its last draw left out. tensor: may be a view."""
        draw = self._draws.get(_address(tensor))
        if draw is None or not tensor.numel():
            return
        first = tensor.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        draw.fill(range(first // PIECE, last // PIECE + 1))


class _Draw:
    """Random numbers for one contiguous tensor, of which each piece is drawn once at most."""

    def __init__(
        self,
        func: Any,
        bounds: Sequence[float],
        seed: int,
        target: Tensor,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Prepare a draw. bounds: the arguments of `func`. seed: of the first piece."""
        self._func = func
        self._bounds = bounds
        self._seed = seed
        self._target = target.detach().view(-1)
        self._pool = pool
        self._filled: set[int] = set()

    def fill(self, pieces: Sequence[int]) -> None:
        """Draw pieces that are still missing. pieces: their numbers."""
        missing = [piece for piece in pieces if piece not in self._filled]
        self._filled.update(missing)
        run = self._pool.map if len(missing) > 1 else map
        for _ in run(self._fill_piece, missing):
            pass

    def _fill_piece(self, piece: int) -> None:
        generator = torch.Generator().manual_seed((self._seed + piece) % _SEEDS)
        target = self._target[piece * PIECE : (piece + 1) * PIECE]
        self._func(target, *self._bounds, generator=generator)


def list_pieces(shape: Sequence[int], part: Part) -> list[int]:
    """Return the numbers of the pieces of a contiguous tensor that contain elements of a part."""
    sizes = [bounds.stop - bounds.start for bounds in part]
    if not math.prod(sizes):
        return []
    cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    last = max(
        cut, default=-1
    )  # the dimensions after it are whole, so a run of elements spans them
    starts = np.zeros(1, np.int64)
    for dim in range(last + 1):
        run = math.prod(shape[dim + 1 :])
        indices = np.arange(part[dim].start, part[dim].stop) if dim < last else [part[dim].start]
        starts = np.add.outer(starts, np.multiply(indices, run)).ravel()
    length = math.prod(sizes[max(last, 0) :])
    begins = np.zeros(math.prod(shape) // PIECE + 2, np.int64)
    np.add.at(begins, starts // PIECE, 1)
    np.add.at(begins, (starts + length - 1) // PIECE + 1, -1)
    return np.flatnonzero(begins.cumsum()).tolist()


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor and of its views begins."""
    return tensor.untyped_storage().data_ptr()
