"""Trace the memory of one training step with fake tensors.

The trainer's own sharding, checkpointing, loss and optimizer run on tensors without memory, in a
process group without other members. So a laptop can measure any model on any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # how collectives treat fake tensors
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from lib.core.options import AUTO
from lib.models.architecture import decoder_layers
from lib.models.nested import list_tensors
from lib.models.options import FLOAT8_RECIPES
from lib.models.tensors import COMPUTE_DTYPES
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.optim.optimizers import Choice
from lib.parallel import attention, context, loss, parallelize, varlen
from lib.parallel.activation_offload import ActivationOffload
from lib.parallel.degrees import ALLGATHER, ULYSSES
from lib.parallel.layout import make_mesh
from lib.planning.tracker import KINDS, OFFLOADED, SHARDED, Bytes, Tracker
from lib.tokens.batches import MicroBatch, Pass

_ROWS_PER_DOCUMENT = 128

# It prints a traceback of each failure, which the caller of the trace reports anyway.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class StepConfig:
    """The settings that decide the memory of a step, besides the model.

    batch: samples of a micro-batch. shard_size: ranks per replica. accumulates: a step has more
    than one micro-batch. activation_offload: the inputs of blocks are in host memory, with full
    recomputation. keep_gathered: weights stay gathered until the end of a step. masked: attention
    takes a mask, as it does for packed documents without a varlen kernel. documents: the largest
    number of documents in a sample if a varlen kernel computes their attention, else 0. chunked:
    the output layer computes the loss. on_gpu: False on a CPU, which computes some operations in
    smaller pieces. compiled: the blocks are compiled; a trace itself runs uncompiled code. context:
    ranks that share each sample. context_method: the value of --context-parallel-method.
    """

    ranks: int
    shard_size: int
    batch: int
    seq_length: int
    precision: str
    recompute: str
    accumulates: bool = False
    offload: bool = False
    activation_offload: bool = False
    keep_gathered: bool = False
    masked: bool = False
    documents: int = 0
    chunked: bool = True
    optimizer: Choice = field(default_factory=Choice)
    on_gpu: bool = True
    compiled: bool = False
    context: int = 1
    context_method: str = AUTO

    @property
    def size(self) -> Pass:
        """Return the size of a forward and backward pass."""
        return Pass(self.batch, self.seq_length, self.context)

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a device."""
        return self.size.tokens_per_device


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step, in bytes by kind.

    largest: the maximum of each kind during the step. moments: the bytes of all kinds at the peak
    of each phase. offload: sharded kinds are in host memory.
    """

    largest: Bytes
    moments: tuple[Bytes, ...]
    offload: bool

    @property
    def peak(self) -> Bytes:
        """Return the bytes on the device by kind, at the time when their sum is largest."""
        kinds = KINDS[len(SHARDED) :] if self.offload else KINDS
        return max(
            ({kind: moment[kind] for kind in kinds} for moment in self.moments),
            key=lambda moment: sum(moment.values()),
        )

    @property
    def total(self) -> int:
        """Return the largest number of bytes on the device."""
        return sum(self.peak.values())

    def with_more_blocks(self, longer: StepMemory, count: int) -> StepMemory:
        """Return the memory of a step with `count` more blocks. longer: with one more block.

        This is exact if blocks are alike. Then at any moment, counted from the beginning or the end
        of the forward or backward pass, each block adds the same bytes to each kind.
        """

        def extrapolate(one: Bytes, other: Bytes) -> Bytes:
            return {kind: size + count * (other[kind] - size) for kind, size in one.items()}

        return StepMemory(
            extrapolate(self.largest, longer.largest),
            tuple(map(extrapolate, self.moments, longer.moments)),
            self.offload,
        )

    def with_shards(self, factors: Mapping[str, float]) -> StepMemory:
        """Return the step with shards of another size. The gathered weights do not change.

        factors: the ratio of the sizes of a rank's shards, for each sharded kind.
        """

        def scale(sizes: Bytes) -> Bytes:
            return {kind: round(size * factors.get(kind, 1.0)) for kind, size in sizes.items()}

        return self._map(scale)

    def with_compiled_blocks(self, share: float, blocks: int) -> StepMemory:
        """Return the step with compiled blocks, which keep `share` of their activations.

        One block counts in full: in its backward pass it has recomputed the activations that it did
        not keep.
        """
        recomputed = (1 - share) * self.largest["activations"] / blocks

        def shrink(sizes: Bytes) -> Bytes:
            activations = sizes["activations"]
            return sizes | {
                "activations": round(min(activations, share * activations + recomputed))
            }

        return self._map(shrink)

    def with_gathered_weights(self, size: int) -> StepMemory:
        """Return an upper bound of the step if `size` bytes of weights stay gathered throughout."""

        def add(sizes: Bytes) -> Bytes:
            return sizes | {"gathered": sizes["gathered"] + size}

        return self._map(add)

    def _map(self, change: Callable[[Bytes], Bytes]) -> StepMemory:
        return StepMemory(change(self.largest), tuple(map(change, self.moments)), self.offload)


def gathers_keys(model: PreTrainedModel, case: StepConfig) -> bool:
    """Return whether ranks that share samples gather the keys of all tokens.

    Raises UsageError if they cannot share the attention heads as `case` says.
    """
    if case.context == 1:
        return False
    return context.choose_method(case.context_method, case.context, model.config) == ALLGATHER


@contextlib.contextmanager
def fake_mesh(ranks: int, shard_size: int) -> Iterator[DeviceMesh]:
    """Join a fake process group of `ranks`, of which this process is the only member."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield make_mesh("cpu", ranks, ranks // shard_size)
    finally:
        dist.destroy_process_group()


def trace_step(model: PreTrainedModel, case: StepConfig, mesh: DeviceMesh) -> StepMemory:
    """Return the memory of a step. model: on the meta device; it is not changed.

    Raises UsageError if ranks cannot share samples as `case` says.
    """
    model = copy.deepcopy(model)
    if _needs_kernel(model, case):
        case = replace(case, documents=1)
    tracker = Tracker(SHARDED if case.offload else ())
    parallelize.parallelize(
        model,
        mesh,
        case.precision,
        case.recompute,
        offload=case.offload,
        keep_gathered=case.keep_gathered,
        activation_offload=_TracedOffload(tracker) if case.activation_offload else None,
    )
    if case.chunked:
        head = model.get_output_embeddings()
        head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cuda" if case.on_gpu else "cpu"])
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _patch_attention(model, case),
        registry.as_on_gpu(case.optimizer.name),
        tracker,
    ):
        parallelize.materialise_model(model, torch.device("cpu"), offload=False)
        return record_step(model, case, tracker)


class _TracedOffload(ActivationOffload):
    """Counts the host memory of activations, which is fake memory of the same device."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(torch.device("cpu"))
        self._tracker = tracker

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor that does not count as memory of the device."""
        tracker = self._tracker
        kind = tracker.new_kind
        tracker.new_kind = OFFLOADED
        memory = torch.empty(shape, dtype=dtype)
        tracker.new_kind = kind
        return memory


def record_step(model: PreTrainedModel, case: StepConfig, tracker: Tracker) -> StepMemory:
    """Run a step of a sharded model, on fake or real tensors, and return its memory."""
    optimizer = registry.build_optimizer(case.optimizer.name, model, 1e-5, case.optimizer.options)
    _add_hooks(model, tracker)
    batch = _make_batch(case).divide(_make_context(model, case))
    for is_last in (False, True) if case.accumulates else (True,):
        parallelize.begin_pass(model, is_last, case.keep_gathered)
        tracker.restart("activations")
        loss_sum = loss.token_loss_sum(model, batch)
        forward_phases = len(tracker.phases)
        tracker.begin_phase("workspace")
        loss_sum.backward()
        del loss_sum
    pass_phases = tracker.phases
    tracker.restart("workspace")
    # The guard of fp16 would read the norm, and fake tensors contain no numbers.
    guard = StepGuard("fp32", 0.0, torch.device("cpu"))
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    tracker.new_kind = "optimizer"
    registry.named_states(model, optimizer)
    tracker.new_kind = "workspace"
    if not case.optimizer.spec.is_joint:  # else update.py traces it
        optimizer.step()
    for moment in pass_phases:  # later steps have states from their beginning
        moment["optimizer"] = tracker.largest["optimizer"]
    forward = pass_phases[:forward_phases]
    backward = pass_phases[forward_phases:]
    # The output layer and the loss come last in the forward pass and first in the backward pass.
    # The phases between them are left out: identical blocks run there, so memory changes steadily.
    moments = (*forward[:2], *forward[-3:], *backward[:3], *backward[-2:], *tracker.phases)
    return StepMemory(tracker.largest, moments, case.offload)


def shorten_model(model: PreTrainedModel, layers: int) -> PreTrainedModel | None:
    """Return a copy with the first `layers` blocks, or None if blocks are not all alike."""
    blocks = decoder_layers(model)
    parents = {name.rpartition(".")[0] for name in blocks}
    kinds = {
        (type(block), *((name, p.shape) for name, p in block.named_parameters()))
        for block in blocks.values()
    }
    attention_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    path = parents.pop()
    parent = model.get_submodule(path)
    if (
        parents
        or len(kinds) > 1
        or len(set(attention_types)) > 1
        or len(blocks) <= layers
        or not isinstance(parent, nn.ModuleList)
        or len(parent) != len(blocks)
    ):
        return None
    shorter = copy.deepcopy(model)
    del shorter.get_submodule(path)[layers:]
    return shorter


def estimate_kept_share(model: PreTrainedModel, case: StepConfig) -> float:
    """Estimate the share of their activations that blocks keep when compiled; 1.0 for fp8.

    The partitioner cannot trace the casts of fp8. model: on the meta device; it is not changed.
    """
    if case.precision in FLOAT8_RECIPES:
        return 1.0
    from lib.planning import compiled  # imports torch's compiler, which most starts do not need

    model = copy.deepcopy(model).to(COMPUTE_DTYPES[case.precision])
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _patch_attention(model, replace(case, documents=0)),
    ):
        model.to_empty(device="cpu")
        return compiled.estimate_kept_share(
            model, torch.zeros(1, case.seq_length, dtype=torch.int64)
        )


def returns_head_result(model: PreTrainedModel) -> bool:
    """Return whether a model returns the result of its output layer unchanged.

    In that case the output layer can compute the loss.
    """
    model = copy.deepcopy(model).to(torch.bfloat16)  # the only dtype of grouped matrix products
    case = StepConfig(1, 1, 1, 16, "bf16", "none")
    head = model.get_output_embeddings()
    results = []
    head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cpu"])
    head.register_forward_hook(lambda _, __, out: results.append(out))
    with FakeTensorMode(allow_non_fake_inputs=True), _patch_attention(model, case):
        model.to_empty(device="cpu")
        try:
            return loss.token_loss_sum(model, _make_batch(case)) is results[0]
        except (RuntimeError, TypeError, IndexError):  # code after the layer needs logits
            return False


@contextlib.contextmanager
def _patch_attention(model: PreTrainedModel, case: StepConfig) -> Iterator[None]:
    """Let attention on fake tensors take the same code path as on real ones.

    Otherwise transformers would mistake fake positions for the positions of packed documents, and
    build a mask.
    """
    if model.config._attn_implementation != "eager":
        model.config._attn_implementation = varlen.VARLEN if case.documents else "sdpa"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(varlen, "attend_by_document", _allocate_like_kernel))
        stack.enter_context(mock.patch.object(context, "wait", lambda result: result))  # no copy
        if not case.masked:
            stack.enter_context(
                mock.patch(
                    "transformers.masking_utils.find_packed_sequence_indices", lambda _: None
                )
            )
        yield


def _allocate_like_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest: int,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Allocate as the kernel for packed documents does. query, key, value: [tokens, H, D].

    The kernel keeps the same tensors as sdpa without a mask, and only sdpa runs on fake tensors.
    Its backward pass sums the gradient of the queries in float32, with 128 more rows for each
    document (mha_varlen_bwd in torch's flash_api.cpp).
    """
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
    gradients = [(part.shape, part.dtype) for part in (query, key, value)]
    summed_queries = len(query) + _ROWS_PER_DOCUMENT * (len(query_ends) - 1), *query.shape[1:]

    def backward(_: Tensor) -> None:
        """Allocate the tensors that the kernel holds at the same time, before those of sdpa."""
        [
            torch.empty(shape, dtype=dtype)
            for shape, dtype in (*gradients, (summed_queries, torch.float32))
        ]

    if out.requires_grad:
        out.register_hook(backward)
    return out[0].transpose(0, 1)


def _needs_kernel(model: PreTrainedModel, case: StepConfig) -> bool:
    """Return whether a GPU uses the kernel for packed documents because ranks gather keys."""
    return (
        gathers_keys(model, case)
        and case.on_gpu
        and not (case.masked or case.documents)
        and not attention.varlen_problem(case.precision, model.config, any_gpu=True)
    )


def _make_context(model: PreTrainedModel, case: StepConfig) -> context.Context | None:
    """Return the first ranks, which share rows with this one; None if it has whole rows."""
    if case.context == 1:
        return None
    group = dist.new_group(list(range(case.context)))
    method = ALLGATHER if gathers_keys(model, case) else ULYSSES
    return context.Context(dist.get_rank(), case.context, method, group)


def _make_batch(case: StepConfig) -> MicroBatch:
    # Without padding, which would need the numbers of positions.
    length = case.size.length_per_device * case.context
    tokens = torch.zeros(case.batch, length, dtype=torch.int64)
    is_packed = case.masked or case.documents
    ends = (
        torch.zeros(case.batch * case.documents + 1, dtype=torch.int32) if case.documents else None
    )
    return MicroBatch(tokens, tokens.clone(), torch.zeros_like(tokens) if is_packed else None, ends)


def _add_hooks(model: nn.Module, tracker: Tracker) -> None:
    """Let the tracker know where blocks end, what the loss creates and what FSDP gathers."""

    def end_block(_: nn.Module, __: Any, out: Any) -> None:
        tracker.begin_phase()
        hidden = list_tensors(out)[0]
        if hidden.requires_grad:  # false before the first adapter, where all weights are frozen
            hidden.register_hook(lambda _: tracker.begin_phase())

    def count_gathered(module: nn.Module, _: Any) -> None:
        tracker.assign_kind(
            [p for p in module.parameters() if not isinstance(p, DTensor)], "gathered"
        )

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(count_gathered)
    for block in decoder_layers(model).values():
        block.register_forward_hook(end_block)
    model.get_output_embeddings().register_forward_pre_hook(
        lambda *_: setattr(tracker, "new_kind", "loss")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:  # FSDP calls this hook
            parameter.register_post_accumulate_grad_hook(
                lambda p: tracker.assign_kind(p.grad, "gradients")
            )
