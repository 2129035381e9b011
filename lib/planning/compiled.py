"""Estimate the activations that compiled decoder blocks keep, with torch's own partitioner.

In eager mode autograd keeps each tensor that an operation saves. The compiler splits the graph
of a block into forward and backward so that it keeps little, and recomputes cheap operations: a
block of Llama keeps 34 instead of 49 bytes per token and feature. This module runs the compiler's
partitioner on fake tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lib.core import log
from lib.models.architecture import decoder_layers
from lib.models.nested import list_tensors, map_tensors

_KINDS = 4  # a model with more kinds of blocks is estimated as if it were not compiled
_MARGIN = 1.03
_OPERATIONS = 600  # in a block; Mamba's scan has so many that the partitioner would take minutes


def estimate_kept_share(model: PreTrainedModel, tokens: Tensor) -> float:
    """Estimate the share of their activations that blocks keep when compiled, at most 1.0.

    This is the share that the partitioner keeps, times a margin. It is 1.0 for a model family whose
    blocks cannot be traced or have too many operations.

    model: fake, not sharded, in its compute dtype. tokens: a batch [B, T] of the same fake mode,
    which must be active.
    """
    try:
        kinds = _find_kinds(model, tokens)
        if len(kinds) > _KINDS:
            return 1.0
        sizes = [(count, *_count_kept_bytes(*call)) for count, *call in kinds.values()]
    except Exception as error:  # whatever torch raises, the eager count stands
        log.detail(
            f"the activations of compiled blocks could not be estimated: {type(error).__name__}"
        )
        return 1.0
    eager = sum(count * size for count, size, _ in sizes)
    return min(1.0, _MARGIN * sum(count * size for count, _, size in sizes) / eager)


def _find_kinds(model: PreTrainedModel, tokens: Tensor) -> dict[Any, list[Any]]:
    """Return for each kind of block the number of blocks, one of them, and its arguments.

    Blocks are of one kind if their parameters and the shapes of their arguments are alike.
    """
    kinds: dict[Any, list[Any]] = {}

    def add_block(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        shapes = [(part.shape, part.dtype) for part in list_tensors((arguments, named))]
        kind = (
            type(block),
            *((name, p.shape, p.requires_grad) for name, p in block.named_parameters()),
            *shapes,
            getattr(block, "attention_type", None),
        )
        kinds.setdefault(kind, [0, block, arguments, named])[0] += 1

    with contextlib.ExitStack() as stack:
        for block in decoder_layers(model).values():
            stack.callback(block.register_forward_pre_hook(add_block, with_kwargs=True).remove)
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
    return kinds


def _count_kept_bytes(
    block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[int, int]:
    """Return the bytes that a block keeps for its backward pass, in eager mode and compiled.

    Weights do not count, nor do arguments that all blocks share, such as rotary tables.
    """
    hidden, *shared = (tensor.detach() for tensor in list_tensors((arguments, named)))
    names, weights = zip(*block.named_parameters(), strict=True)
    inputs = [hidden.requires_grad_(), *shared]

    def run(inputs: list[Tensor], weights: list[Tensor]) -> Any:
        remaining = iter(inputs)
        args, kwargs = map_tensors(lambda _: next(remaining), (arguments, named))
        return torch.func.functional_call(
            block, dict(zip(names, weights, strict=True)), args, kwargs
        )

    # Imported here because it takes half a second.
    from torch._inductor.decomposition import select_decomp_table

    compiled = aot_function(
        run,
        fw_compiler=_leave_unchanged,
        bw_compiler=_leave_unchanged,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    with torch.no_grad(), _OperationLimit():
        run(inputs, list(weights))
    excluded = {id(tensor.untyped_storage()): tensor for tensor in (*weights, *shared)}
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        eager, partitioned = (
            _count_saved_bytes(partial(function, inputs, list(weights)), excluded)
            for function in (run, compiled)
        )
    return eager, partitioned


class _OperationLimit(TorchDispatchMode):
    """Raises RecursionError when a block runs too many operations."""

    left = _OPERATIONS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if not self.left:
            raise RecursionError(f"a block of more than {_OPERATIONS} operations")
        return func(*args, **(kwargs or {}))


def _leave_unchanged(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph)


def _count_saved_bytes(function: Callable[[], Any], excluded: dict[int, Tensor]) -> int:
    """Return the bytes of storages that autograd saves while a function runs."""
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor.untyped_storage()) not in excluded:
            seen[id(tensor.untyped_storage())] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
