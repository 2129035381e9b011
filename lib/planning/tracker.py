"""Count the bytes of live tensors by kind, as PyTorch allocates and frees storages."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.models.sharded import local_tensor

Bytes = dict[str, int]  # by kind

SHARDED = ("parameters", "gradients", "optimizer")  # in host memory with --cpu-offload
KINDS = (*SHARDED, "activations", "loss", "gathered", "workspace")


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages by kind, and their peak in each phase.

    making: the kind of tensors that are created now. host: kinds that do not count for a phase's
    peak. Both real and fake tensors work.
    """

    def __init__(self, host: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.making = "parameters"
        self.largest = dict.fromkeys(KINDS, 0)
        self._now = dict.fromkeys(KINDS, 0)
        self.phases = [dict(self._now)]
        self._peak = 0
        self._counted = set(KINDS) - set(host)
        self._known: dict[int, tuple[weakref.ref, str, int]] = {}
        self._paused = False
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def tracked(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if id(storage) in self._known:
                self._put(storage, "gathered")  # only FSDP resizes storages

        def unseen(*arguments: Any) -> Any:
            self._paused = True
            try:
                return propagate(*arguments)
            finally:
                self._paused = False

        # Dispatch does not see the first. It would count the second as real work, although that
        # only computes the shape of an unsharded DTensor; it is private (torch 2.13).
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", tracked))
        self._patches.enter_context(
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)
        )
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        super().__exit__(*error)

    def restart(self, making: str) -> None:
        """Discard the phases so far and begin another."""
        self.phases = []
        self.next_phase(making)

    def next_phase(self, making: str = "") -> None:
        """Begin another phase, with a peak of its own."""
        self.making = making or self.making
        self.phases.append(dict(self._now))
        self._peak = 0
        self._record()

    def put(self, tensors: Any, kind: str) -> None:
        """Assign a kind to tensors, once it is known."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._put(local_tensor(tensor).untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatch returns with the operations on its shards
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._put(tensor.untyped_storage(), self.making)
        if func.namespace in ("fsdp", "c10d"):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._put(tensor.untyped_storage(), "gathered")
        return out

    def _put(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        reference, before, size = self._known.get(key) or (
            weakref.ref(storage, partial(self._gone, key)),
            kind,
            0,
        )
        if before in SHARDED:
            kind = before  # it takes part in a collective, and keeps its kind
        self._now[before] -= size
        self._known[key] = (reference, kind, storage.nbytes())
        self._now[kind] += storage.nbytes()
        self._record()

    def _gone(self, key: int, _: weakref.ref) -> None:
        _, kind, size = self._known.pop(key)
        self._now[kind] -= size

    def _record(self) -> None:
        for kind, size in self._now.items():
            self.largest[kind] = max(self.largest[kind], size)
        live = sum(self._now[kind] for kind in self._counted)
        if live > self._peak:
            self._peak = live
            self.phases[-1] = dict(self._now)
