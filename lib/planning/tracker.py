"""Count the bytes of live tensors by kind while a step runs."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from lib.models.nested import list_tensors
from lib.models.sharded import local_tensor

Bytes = dict[str, int]  # by kind of tensor, one of KINDS or OFFLOADED

SHARDED = ("parameters", "gradients", "optimizer")  # in host memory with --cpu-offload
KINDS = (*SHARDED, "activations", "loss", "gathered", "workspace")
OFFLOADED = "activations in host memory"  # with --activation-offload; a kind that is never on a GPU


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages by kind, for real and for fake tensors.

    new_kind: the kind of tensors that are created from now on. largest: the maximum of each kind.
    phases: for each phase, the bytes of all kinds at the time when their sum was largest. host:
    kinds that are in host memory, which do not count in that sum.
    """

    def __init__(self, host: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.new_kind = "parameters"
        self.largest = dict.fromkeys((*KINDS, OFFLOADED), 0)
        self._live = dict(self.largest)
        self.phases = [dict(self._live)]
        self._peak = 0
        self._counted = set(KINDS) - set(host)
        # By the ID of a storage: a reference that calls `_forget`, its kind, and its bytes.
        self._storages: dict[int, tuple[weakref.ref, str, int]] = {}
        self._paused = False
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if id(storage) in self._storages:
                self._count(storage, "gathered")  # only FSDP resizes storages

        def propagate_uncounted(*arguments: Any) -> Any:
            self._paused = True
            try:
                return propagate(*arguments)
            finally:
                self._paused = False

        # `resize_` bypasses dispatch. The other function, which is private (torch 2.13), computes
        # the shape of an unsharded DTensor by operations that would count as real ones.
        self._patches.enter_context(
            mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        )
        self._patches.enter_context(
            mock.patch.object(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted
            )
        )
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        super().__exit__(*error)

    def restart(self, new_kind: str) -> None:
        """Discard the phases so far and begin the first one."""
        self.phases = []
        self.begin_phase(new_kind)

    def begin_phase(self, new_kind: str = "") -> None:
        """Begin the next phase. new_kind: empty to leave it unchanged."""
        self.new_kind = new_kind or self.new_kind
        self.phases.append(dict(self._live))
        self._peak = 0
        self._record()

    def assign_kind(self, tensors: Any, kind: str) -> None:
        """Count tensors as a kind that was not known when they were created."""
        for tensor in list_tensors(tensors):
            self._count(local_tensor(tensor).untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatch calls this again with the operations on the shards
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        for tensor in list_tensors(out):
            if id(tensor.untyped_storage()) not in self._storages:
                self._count(tensor.untyped_storage(), self.new_kind)
        if func.namespace in ("fsdp", "c10d"):
            for tensor in list_tensors((args, kwargs)):
                self._count(tensor.untyped_storage(), "gathered")
        return out

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        reference, before, size = self._storages.get(key) or (
            weakref.ref(storage, partial(self._forget, key)),
            kind,
            0,
        )
        if before in SHARDED:
            kind = before  # also when it takes part in a collective
        self._live[before] -= size
        self._storages[key] = (reference, kind, storage.nbytes())
        self._live[kind] += storage.nbytes()
        self._record()

    def _forget(self, key: int, _: weakref.ref) -> None:
        _, kind, size = self._storages.pop(key)
        self._live[kind] -= size

    def _record(self) -> None:
        for kind, size in self._live.items():
            self.largest[kind] = max(self.largest[kind], size)
        live = sum(self._live[kind] for kind in self._counted)
        if live > self._peak:
            self._peak = live
            self.phases[-1] = dict(self._live)
