"""The memory of one training step, from a trace in which every tensor is fake.

The trainer's own sharding, checkpointing, loss and optimizer run on tensors without memory, in a
process group without peers, so any model on any number of ranks is measured on a laptop.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # how collectives treat fake tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lib.models.architecture import decoder_layers
from lib.models.shards import local_tensor
from lib.tokens.loader import MicroBatch
from lib.train import blocks, loss, optimizer, sharding

# It prints a traceback of what fails here, which whoever asked for the trace hears of anyway.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

Bytes = dict[str, int]  # by kind

KINDS = ("parameters", "gradients", "optimizer", "activations", "loss", "gathered", "workspace")
_SHARDED = KINDS[:3]  # what lies in host memory with offload


@dataclass(frozen=True)
class Case:
    """What decides the memory of a step, beside the model.

    batch: samples per rank in a pass. shard_size: ranks per replica. accumulates: more than one
    pass per step. masked: attention by a mask, as packed documents have without a varlen kernel.
    chunked: the output layer makes the loss.
    """

    ranks: int
    shard_size: int
    batch: int
    seq_length: int
    precision: str
    recompute: str
    accumulates: bool = False
    offload: bool = False
    masked: bool = False
    chunked: bool = True


@dataclass(frozen=True)
class Step:
    """largest: of each kind. moments: what there is of all kinds where a phase has its peak."""

    largest: Bytes
    moments: tuple[Bytes, ...]
    offload: bool

    @property
    def peak(self) -> Bytes:
        """Return what is on the device when there is most."""
        here = KINDS[3:] if self.offload else KINDS
        return max(({kind: moment[kind] for kind in here} for moment in self.moments),
                   key=lambda moment: sum(moment.values()))

    @property
    def total(self) -> int:
        """Return the bytes on the device when there is most."""
        return sum(self.peak.values())

    def extended(self, longer: Step, by: int) -> Step:
        """Return the step of a model with `by` more blocks; `longer` has one more.

        Exact where blocks are alike: at the same place, counted from the beginning or the end of a
        pass, there is more of each kind by the same with every block.
        """
        def further(one: Bytes, other: Bytes) -> Bytes:
            return {kind: size + by * (other[kind] - size) for kind, size in one.items()}
        return Step(further(self.largest, longer.largest),
                    tuple(map(further, self.moments, longer.moments)), self.offload)

    def resharded(self, factor: float) -> Step:
        """Return the step with other shards: what is gathered from them does not change."""
        def other(sizes: Bytes) -> Bytes:
            return {kind: round(size * factor) if kind in _SHARDED else size
                    for kind, size in sizes.items()}
        return Step(other(self.largest), tuple(map(other, self.moments)), self.offload)


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages by kind, and what there were in each phase at most.

    making: the kind of what is created now. host: kinds that do not count for a phase's peak.
    Works on real tensors as on fake ones.
    """

    def __init__(self, host: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.making = "parameters"
        self.largest, self._now = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self.phases, self._peak, self._counted = [dict(self._now)], 0, set(KINDS) - set(host)
        self._known: dict[int, tuple[weakref.ref, str, int]] = {}
        self._paused = False
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def tracked(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if id(storage) in self._known:
                self._put(storage, "gathered")  # only FSDP does so

        def unseen(*arguments: Any) -> Any:
            self._paused = True
            try:
                return propagate(*arguments)
            finally:
                self._paused = False

        # Dispatch does not see the first, and takes the second, which works out the shape of a
        # whole DTensor, for real work. Private, the same in torch 2.11 to 2.13.
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", tracked))
        self._patches.enter_context(mock.patch.object(
            ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        super().__exit__(*error)

    def restart(self, making: str) -> None:
        """Forget the phases so far."""
        self.phases = []
        self.next_phase(making)

    def next_phase(self, making: str = "") -> None:
        """Begin to record another peak."""
        self.making = making or self.making
        self.phases.append(dict(self._now))
        self._peak = 0
        self._record()

    def put(self, tensors: Any, kind: str) -> None:
        """Say what tensors are, once that is known."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._put(local_tensor(tensor).untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on shards
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._put(tensor.untyped_storage(), self.making)
        if func.namespace in ("fsdp", "c10d"):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and self._kind(tensor) not in _SHARDED:
                    self._put(tensor.untyped_storage(), "gathered")
        return out

    def _kind(self, tensor: Tensor) -> str | None:
        known = self._known.get(id(tensor.untyped_storage()))
        return known[1] if known else None

    def _put(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        reference, before, size = self._known.get(key) or (
            weakref.ref(storage, partial(self._gone, key)), kind, 0)
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
            self._peak, self.phases[-1] = live, dict(self._now)


@contextlib.contextmanager
def fake_mesh(ranks: int, shard_size: int) -> Iterator[DeviceMesh]:
    """Join a process group of `ranks` of which this process is the only one, for the while."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        replicas = ranks // shard_size
        yield init_device_mesh("cpu", (replicas, shard_size) if replicas > 1 else (ranks,),
                               mesh_dim_names=("replicate", "shard")[replicas == 1:])
    finally:
        dist.destroy_process_group()


def trace(model: PreTrainedModel, case: Case, mesh: DeviceMesh) -> Step:
    """Return the memory of a step of a model on the meta device, which stays as it is."""
    model = copy.deepcopy(model)
    blocks.prepare(model, case.recompute, compiled=False)
    sharding.shard(model, mesh, case.precision)
    if case.chunked:
        head = model.get_output_embeddings()
        head.forward = loss.LossHead(head)
    with FakeTensorMode(allow_non_fake_inputs=True), _attention(model, case.masked):
        tracker = Tracker(_SHARDED if case.offload else ())
        with tracker:
            sharding.materialise(model, torch.device("cpu"), offload=False)
            return record(model, case, tracker)


def record(model: nn.Module, case: Case, tracker: Tracker) -> Step:
    """Run a step of a sharded model, fake or real, and return what was counted."""
    adamw = optimizer.adamw(model, 1e-5, (0.9, 0.95), 0.1)
    _mark(model, tracker)
    batch = _batch(case.batch, case.seq_length, case.masked)
    for last in (False, True) if case.accumulates else (True,):
        model.set_requires_all_reduce(last)
        tracker.restart("activations")
        total = loss.token_loss_sum(model, batch)
        tracker.next_phase("workspace")
        total.backward()
        del total
    passes = tracker.phases
    tracker.restart("workspace")
    optimizer.LossScale(case.precision).clip(model.parameters(), 1.0)
    tracker.making = "optimizer"
    adamw.step()
    for moment in passes:  # in the first step there are no states until now, in others there are
        moment["optimizer"] = tracker.largest["optimizer"]
    half = len(passes) // 2
    forward, backward = passes[:half], passes[half:]
    # The output layer and the loss come last in forward and first in backward; between the others
    # there are blocks alike, where memory rises or falls steadily.
    return Step(tracker.largest, (*forward[:2], *forward[-3:], *backward[:3], *backward[-2:],
                                  *tracker.phases), case.offload)


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel | None:
    """Return a copy with the first `layers` blocks, None where blocks are not all alike."""
    found = decoder_layers(model)
    parents = {name.rpartition(".")[0] for name in found}
    kinds = {(type(block), *((name, p.shape) for name, p in block.named_parameters()))
             for block in found.values()}
    attention = getattr(model.config.get_text_config(), "layer_types", None) or ()
    parent = model.get_submodule(parents.pop())
    if parents or len(kinds) > 1 or len(set(attention)) > 1 or len(found) <= layers \
            or not isinstance(parent, nn.ModuleList) or len(parent) != len(found):
        return None
    with mock.patch.object(parent, "_modules", dict(list(parent._modules.items())[:layers])):
        return copy.deepcopy(model)


def makes_loss(model: PreTrainedModel) -> bool:
    """Tell whether the model hands on what its output layer returns, so that it can be the loss."""
    model = copy.deepcopy(model)
    head, returned = model.get_output_embeddings(), []
    head.forward = loss.LossHead(head)
    head.register_forward_hook(lambda _, __, out: returned.append(out))
    with FakeTensorMode(allow_non_fake_inputs=True), _attention(model, masked=False):
        model.to_empty(device="cpu").to(torch.bfloat16)  # all that grouped products know
        try:
            return loss.token_loss_sum(model, _batch(1, 16, masked=False)) is returned[0]
        except (RuntimeError, TypeError, IndexError):  # what follows the layer needs logits
            return False


@contextlib.contextmanager
def _attention(model: PreTrainedModel, masked: bool) -> Iterator[None]:
    """Let attention do what it does with real tokens.

    Kernels for packed documents keep what sdpa keeps without a mask, and only that runs on fake
    tensors. transformers takes all fake positions for packed ones and would make a mask.
    """
    if model.config._attn_implementation != "eager":
        model.config._attn_implementation = "sdpa"
    not_packed = {} if masked else {"find_packed_sequence_indices": lambda _: None}
    with mock.patch.multiple("transformers.masking_utils", **not_packed) if not_packed \
            else contextlib.nullcontext():
        yield


def _batch(rows: int, length: int, masked: bool) -> MicroBatch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return MicroBatch(tokens, tokens.clone(), torch.zeros_like(tokens) if masked else None)


def _mark(model: nn.Module, tracker: Tracker) -> None:
    """Tell the tracker where blocks begin and end, what the loss makes and what gradients are."""
    def done(_: nn.Module, __: Any, out: Any) -> None:
        tracker.next_phase()
        hidden = next(tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor))
        hidden.register_hook(lambda _: tracker.next_phase())

    for block in decoder_layers(model).values():
        block.register_forward_hook(done)
    model.get_output_embeddings().register_forward_pre_hook(
        lambda *_: setattr(tracker, "making", "loss"))
    for parameter in model.parameters():  # called by FSDP
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.put(p.grad, "gradients"))
