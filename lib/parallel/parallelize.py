"""Wrap the blocks of a Hugging Face causal LM, shard it with FSDP2, and allocate its memory.

Activation checkpointing and compilation wrap the `forward` of each decoder block, inside the hooks
of FSDP. Neither changes the names of modules, so a checkpoint can be loaded with other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from lib.core import units
from lib.core.errors import UsageError
from lib.models.architecture import decoder_layers
from lib.models.lora import ExpertFactor, Factor
from lib.models.sharded import mark_padded, own_class
from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import experts, placement
from lib.parallel.activation_offload import ActivationOffload
from lib.parallel.compiling import Compiler, compile_parts
from lib.parallel.fsdp_groups import find_groups
from lib.parallel.gloo_reduction import exchange_parts
from lib.parallel.offload import copy_ahead
from lib.parallel.one_rank import cast_into_place, share_buffers
from lib.parallel.placement import ParameterPlacement

_AVERAGED_ON = ("cuda",)  # not on CPUs, whose results would change
# Operations whose results selective checkpointing keeps, because they are expensive to recompute.
# The others (norms, activations, rotations) only cost memory traffic.
_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "experts::group_by_group",
    "aten::_scaled_mm",
    "torch_attn::_varlen_attn",
    "flash_4::attend",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::wait_tensor",
}
# transformers' own functions (5.17 to 5.23) add the biases of experts to the result of this
# operation in place. PyTorch refuses to keep a result that changes, since the biases would be added
# twice.
_BIASED = "aten::_grouped_mm"
# Families whose experts have biases compute attention by matrix products. Their scores grow with
# the square of the sequence length, too large to keep.
_SCORES = "aten::bmm"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: str,
    recompute: str = "none",
    compiler: Compiler | None = None,
    offload: bool = False,
    keep_gathered: bool = False,
    activation_offload: ActivationOffload | None = None,
) -> str:
    """Wrap the blocks of a meta-device model, shard it in place, and describe it for the log.

    For the arguments see `wrap_blocks` and `shard`. All ranks must call this.
    """
    wrap_blocks(model, recompute, compiler, activation_offload)
    description = shard(model, mesh, precision, offload, keep_gathered)
    moved = "; the inputs of blocks move to host memory (--activation-offload)"
    return f"{description}{moved if activation_offload else ''}"


def wrap_blocks(
    model: nn.Module,
    recompute: str,
    compiler: Compiler | None,
    activation_offload: ActivationOffload | None = None,
) -> None:
    """Wrap the forward of every decoder block; call this before sharding.

    recompute: one of RECOMPUTATIONS. compiler: None leaves the blocks uncompiled.
    activation_offload: moves the inputs of all blocks but the last one to the host; only with full
    recomputation.
    """
    assert activation_offload is None or recompute == "full"
    blocks = list(decoder_layers(model).values())
    for block in blocks:
        forward = block.forward
        if recompute != "none":
            forward = _with_recomputation(forward, block if recompute == "selective" else None)
        if compiler is not None and compiler.is_shared:
            compiled = _compile_around_exchanges(block.forward, recompute)
            forward = compiler.wrap_together(compiled, forward)
        elif compiler is not None:
            forward = compiler.wrap(forward)
        if activation_offload is not None and block is not blocks[-1]:
            forward = activation_offload.wrap(forward, is_first=block is blocks[0])
        if forward is not block.forward:
            block.forward = forward


def _compile_around_exchanges(forward: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    """Return a forward whose attention runs uncompiled, between compiled parts.

    torch would not compile any part inside a checkpoint that attention divides. So the checkpoint
    is outside, and recomputes the exchange too. For `selective` there is none: the compiled parts
    themselves recompute cheap operations, and attention keeps its inputs and its output.
    """
    compiled = compile_parts(forward, keep_little=recompute == "selective")
    return _with_recomputation(compiled, None) if recompute == "full" else compiled


def _kept_operations(block: nn.Module) -> Set[str]:
    """Return the operations whose results a block keeps with selective checkpointing."""
    biased = [module for module in block.modules() if getattr(module, "has_bias", False)]
    operations = _KEPT - {_SCORES} if biased else _KEPT
    return operations - {_BIASED} if any(map(experts.adds_in_place, biased)) else operations


def _lora_rank(block: nn.Module) -> int:
    """Return the rank of a block's LoRA adapter, 0 without one."""
    return max(
        (
            min(module.weight.shape[-2:])
            for module in block.modules()
            if isinstance(module, Factor | ExpertFactor)
        ),
        default=0,
    )


def _with_recomputation(forward: Callable[..., Any], block: nn.Module | None) -> Callable[..., Any]:
    """Return a forward that recomputes activations.

    block: the block's module for selective checkpointing, which keeps the results of some
    operations. None for full checkpointing, which keeps only the input.
    """

    def make_contexts() -> Any:
        # Chosen in each forward pass, because the function of the experts is chosen after sharding.
        return create_selective_checkpoint_contexts(
            partial(_checkpoint_policy, _kept_operations(block), rank)
        )

    contexts: dict[str, Any] = {} if block is None else {"context_fn": make_contexts}
    rank = 0 if block is None else _lora_rank(block)

    def forward_with_recomputation(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **contexts, **named)

    return forward_with_recomputation


def _checkpoint_policy(
    operations: Set[str], rank: int, _: Any, operation: Any, *arguments: Any, **__: Any
) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    # The output of a LoRA adapter is as large as that of its linear layer, but cheap: a product
    # over the rank. It is `addmm` uncompiled, `mm` compiled, and `bmm` for experts.
    is_lora = (
        (name == "aten::addmm" and arguments[1].shape[1] <= rank)
        or (name == "aten::mm" and arguments[0].shape[1] <= rank)
        or (name == "aten::bmm" and arguments[0].shape[2] <= rank)
    )
    keep = name in operations and not is_lora
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: str,
    offload: bool = False,
    keep_gathered: bool = False,
) -> str:
    """Shard a meta-device model in place and return a sentence for the log that describes it.

    mesh: (shard), or (replicate, shard) for HSDP. offload: shards, gradients and optimizer states
    are in host memory, and a block is copied to the device while it computes. keep_gathered: all
    blocks stay gathered from forward to backward, and between the micro-batches of a step (see
    `begin_pass`). Without offloading, the last block always stays gathered until backward: backward
    begins with it, so nothing would hide the second all-gather.

    FSDP groups, bottom-up: modules on other meshes (`lib/parallel/placement.py`); each block of
    `_no_split_modules`; the input embedding; the final norm with the output layer; the root with
    the rest. With tied weights, the embedding is in the group of the output layer, since a shared
    parameter belongs to one group. Master weights and reductions are float32; compute and frozen
    weights are in `precision`. Gradients are summed over all ranks and divided by
    `gradient_divisor`. A LoRA adapter is gathered with its block, because a group of its own would
    need a second all-gather. FSDP2 (torch 2.11 to 2.13) allows this: only the trained parameters of
    a group must share one dtype. With one rank per replica and without offloading, FSDP ignores
    frozen weights, because gathering would copy them.

    All ranks must call this, even if there is only one, because FSDP applies the mixed-precision
    policy. Raises UsageError for a model without blocks: sharding just the root would gather the
    whole model at once.
    """
    blocks = list(decoder_layers(model).values())
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no blocks to shard",
            expected="classes in _no_split_modules, or a ModuleList",
        )
    compute = COMPUTE_DTYPES[precision]
    ranks = mesh.size(-1)
    placements = _place_parameters(model, ranks)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        "shard_placement_fn": lambda p: Shard(placements[p].dim),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    elif ranks == 1:
        frozen = (p for p in model.parameters() if not p.requires_grad)
        options["ignored_params"] = {p for p in frozen if placements[p].ranks == 1}
    _shard_on_other_meshes(model, mesh, placements, options, keep_gathered and not offload)
    for block in blocks:
        is_kept = not offload and (keep_gathered or block is blocks[-1])
        fully_shard(block, reshard_after_forward=not is_kept, **options)
    _shard_around_blocks(model, blocks, options)
    dtypes = {(p.dtype, p.requires_grad) for p in model.parameters()}
    assert dtypes <= {(torch.float32, True), (compute, False)}, f"wrong dtypes: {dtypes}"
    if ranks == 1:
        share_buffers(model)
        copy_ahead(model) if offload else cast_into_place(model)
    _set_reductions(model, mesh)
    replicas = f", {mesh.size(0)} replicas" if mesh.ndim == 2 else ""
    return (
        f"{len(blocks)} × {own_class(blocks[0]).__name__}, embedding, output and root over "
        f"{units.counted(ranks, 'rank')}{replicas}; float32 masters and reductions"
        f"{' in host memory' if offload else ''}{describe_frozen(model)}, {precision} compute; "
        f"{describe_gathered(offload, keep_gathered)}"
    )


def _place_parameters(model: nn.Module, ranks: int) -> dict[nn.Parameter, ParameterPlacement]:
    """Pad the parameters if necessary and return how ranks share each.

    ranks: number of ranks of the default mesh that share a parameter.
    """
    sizes = placement.shard_sizes(ranks)
    placement.pad_parameters(model, sizes)
    return {
        p: placement.place_parameter(name, p.shape, sizes) for name, p in model.named_parameters()
    }


def _shard_around_blocks(
    model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]
) -> None:
    """Shard the embedding, the final norm with the output layer, and the rest; set prefetching."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    last = [m for m in (find_final_norm(model), head) if m is not None]
    if head is not None and head.weight is embedding.weight:
        last.insert(1, embedding)
    else:
        fully_shard(embedding, **options)
        # The gradient of a lookup does not depend on the weights.
        embedding.set_unshard_in_backward(not isinstance(embedding, nn.Embedding))
    if last:
        # Forward ends and backward begins with these, so they stay gathered in between.
        fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    _prefetch_groups(embedding, blocks, last)


def _shard_on_other_meshes(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[nn.Parameter, ParameterPlacement],
    options: dict[str, Any],
    keep_gathered: bool,
) -> None:
    """Shard the modules whose parameters are on a mesh other than the default one."""
    meshes = placement.derive_meshes(mesh)
    for name, module in placement.modules_on_other_meshes(model, placements):
        module_options = {**options, "mesh": meshes[name]}
        fully_shard(module, reshard_after_forward=not keep_gathered, **module_options)


def describe_gathered(offload: bool, keep_gathered: bool) -> str:
    """Return which blocks stay gathered from forward to backward, as part of a sentence."""
    if offload:
        return "parameters are resharded after the forward pass (--cpu-offload)"
    if keep_gathered:
        return "parameters are not resharded after the forward pass"
    return "parameters are resharded after the forward pass, except those of the last block"


def describe_frozen(model: nn.Module) -> str:
    """Return the dtype of frozen weights as part of a sentence; empty if there are none."""
    dtype = next((p.dtype for p in model.parameters() if not p.requires_grad), None)
    return f" of the adapters, frozen weights in {str(dtype).partition('.')[2]}" if dtype else ""


def gradient_divisor(mesh: DeviceMesh) -> int:
    """Return the number by which FSDP divides summed gradients.

    It is the number of replicas if each replica is one GPU, else 1. With one GPU per replica, a
    divisor of 1 would make FSDP2 (torch 2.11 to 2.13) copy each gradient. Instead, NCCL averages
    while it reduces, and `StepGuard` multiplies by the number of replicas.
    """
    is_alone = mesh.size(-1) == 1 and set(placement.shard_sizes(1)) == {placement.FSDP}
    return mesh.size() if is_alone and mesh.device_type in _AVERAGED_ON else 1


def _set_reductions(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let FSDP sum gradients, and with NCCL reduce them in a process group of their own."""
    if mesh.size() > 1 and gradient_divisor(mesh) == 1:
        # Not for a single rank, where torch would copy each gradient.
        _sum_gradients(model, mesh.device_type)
    if mesh.device_type == "cuda" and mesh.size(-1) > 1:
        separate_reductions(model)


def _sum_gradients(model: nn.Module, device_type: str) -> None:
    """Let FSDP sum gradients and not average them: `LossScale` contains the divisor."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    if device_type == "cpu":
        exchange_parts(model)


def separate_reductions(model: nn.Module) -> None:
    """Give reduce-scatters a process group of their own, if torch can do that (from 2.13 on).

    NCCL runs the operations of a communicator one after the other. In one group, an all-gather in
    backward would wait for the reduce-scatter before it. All ranks must call this.
    """
    if not hasattr(model, "set_separate_reduce_scatter_group"):
        return
    model.set_separate_reduce_scatter_group(True)


def find_reduction_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of reduce-scatters; None if they share that of all-gathers.

    All modules share one group, which has the default timeout.
    """
    groups = find_groups(model)
    return getattr(groups[0].mesh_info, "reduce_scatter_process_group", None) if groups else None


def _prefetch_groups(embedding: nn.Module, blocks: list[nn.Module], last: list[nn.Module]) -> None:
    """Gather each group while the one before it computes, in both directions.

    The backward pass of the embedding needs no weights. The group of the output layer, which
    includes a tied embedding, is still gathered when the backward pass begins with it.
    """
    ends = [] if embedding in last else last[:1]
    for before, after in pairwise([embedding, *blocks, *ends]):
        before.set_modules_to_forward_prefetch([after])
    for before, after in pairwise([*blocks, *last[:1]]):
        after.set_modules_to_backward_prefetch([before])


def begin_pass(model: PreTrainedModel, is_last: bool, keep_gathered: bool) -> None:
    """Set how the next micro-batch of a step reduces gradients and which weights stay gathered.

    Gradients are reduced over the shards for each micro-batch, and over the replicas only for the
    last one. With `keep_gathered`, all weights stay gathered until the last one. After it
    everything is sharded, because the optimizer, evaluation and saving need shards.
    """
    model.set_requires_all_reduce(is_last)
    if keep_gathered:
        model.set_reshard_after_backward(is_last)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            # Backward does not need the embedding: it stays gathered only for the next forward.
            embedding.set_reshard_after_forward(is_last, recurse=False)


def materialise_model(model: nn.Module, device: torch.device, offload: bool) -> None:
    """Allocate memory for parameters and buffers, without filling it."""
    model.to_empty(device="cpu" if offload else device)
    mark_padded(model)
    for module in model.modules() if offload else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))  # the offload policy only moves parameters


def reshard_model(model: nn.Module) -> None:
    """Reshard the parameters after a forward pass without a backward pass.

    Otherwise some groups would stay gathered until a backward pass, and `model.parameters()` would
    return their copies in compute precision instead of the master weights.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def find_final_norm(model: nn.Module) -> nn.Module | None:
    """Return the norm between the last block and the output layer; None if it is not a module."""
    children = model.base_model.children()
    norms = [child for child in children if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None
