"""Compute the experts of a layer: dispatch tokens to them, compute, and combine the results.

`experts_forward` is registered in transformers' experts interface as `NAME`. It multiplies the same
matrices as transformers' own functions, but gathers rows by a permutation whose inverse it keeps.
So every gradient is a gather too: the backward pass needs no sort and no atomic addition, and
always gives the same bits. The three steps are separate, so that expert parallelism can exchange
tokens between ranks before and after `compute_experts`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

NAME = "permuted_mm"


class Routing(NamedTuple):
    """The (token, choice) pairs sorted by expert: S = N · k pairs for N tokens with k experts each.

    order: int64 [S], the pairs sorted by expert, stably. inverse: int64 [S], the position of each
    pair in that order. tokens: int64 [S], the token index of each sorted pair. experts: int64
    [S], the expert index of each sorted pair; pairs of experts on other ranks come last. ends:
    int32 [E], the position after the last pair of each expert.
    """

    order: Tensor
    inverse: Tensor
    tokens: Tensor
    experts: Tensor
    ends: Tensor


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the results of each token's experts, [N, H].

    module: an experts module of transformers. hidden_states: [N, H]. top_k_index: int64 [N, k]; an
    index of `num_experts` stands for an expert of another rank, which adds nothing. top_k_weights:
    [N, k].
    """
    routing = route_tokens(top_k_index, module.num_experts)
    rows = compute_experts(module, dispatch_rows(hidden_states, routing), routing)
    return combine_rows(rows, top_k_weights, routing).to(hidden_states.dtype)


def route_tokens(top_k_index: Tensor, num_experts: int) -> Routing:
    """Return the routing of tokens, by sorting their experts once. top_k_index: int64 [N, k]."""
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    inverse = order.scatter(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, device=order.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return Routing(order, inverse, order // top_k_index.shape[-1], experts, ends)


def dispatch_rows(hidden_states: Tensor, routing: Routing) -> Tensor:
    """Return the input rows of the experts, sorted by expert: [S, H]. hidden_states: [N, H]."""
    return _Dispatch.apply(hidden_states, routing.tokens, routing.inverse)


def compute_experts(module: nn.Module, rows: Tensor, routing: Routing) -> Tensor:
    """Return the results of the experts, [S, H]. rows: [S, H], sorted by expert.

    Handles the attributes and hooks by which families differ, as `transformers.integrations.moe`
    does.
    """
    is_remote = None
    if getattr(module, "_is_expert_parallel", False):  # not before transformers 5.23
        # Grouped products leave the rows after the last group, and their gradients, unwritten.
        is_remote = (routing.experts >= module.num_experts)[:, None]
        rows = rows.masked_fill(is_remote, 0.0)
    rows = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, routing)
    if is_remote is not None:
        rows = rows.masked_fill(is_remote, 0.0)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _linear(module, "down_proj", rows, routing)
    if is_remote is not None:
        rows = rows.masked_fill(is_remote, 0.0)
    if getattr(module, "has_post_expert_norm", False):  # not before transformers 5.23
        rows = module.post_expert_norm(rows)
    return rows


def combine_rows(rows: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum of each token's rows, [N, H], added in the order of its choices.

    rows: [S, H], sorted by expert. top_k_weights: [N, k].
    """
    return _Combine.apply(rows, top_k_weights, routing.order, routing.inverse, routing.tokens)


def _linear(module: nn.Module, name: str, rows: Tensor, routing: Routing) -> Tensor:
    """Return the grouped product of rows and weights, plus the biases if there are any."""
    weights = getattr(module, name)
    rows = _product(
        rows, weights if module.is_transposed else weights.transpose(1, 2), routing.ends
    )
    if not module.has_bias:
        return rows
    # Not in place, so that selective checkpointing can keep the product.
    return rows + _Biases.apply(getattr(module, f"{name}_bias"), routing.experts)


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return rows times the weights of their group, [S, O]. rows: [S, I]; weights: [E, I, O]."""
    rows = rows.to(weights.dtype)
    # transformers' condition for torch's operation: not for float32 and float16 in compiled code.
    if moe._can_use_grouped_mm(rows, weights, ends):
        return F.grouped_mm(rows, weights, offs=ends)
    return _group_by_group(rows, weights, ends)


# These two are custom operations, since the compiler must not trace them. The custom operation of
# transformers 5.17 fails in the backward pass.
@torch.library.custom_op(
    "experts::group_by_group",
    mutates_args=(),
    schema="(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
)
def _group_by_group(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the grouped product, one group at a time; the host waits to read `ends`."""
    out = rows.new_zeros(len(rows), weights.shape[2])
    for number, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(rows[first:last], weights[number], out=out[first:last])
    return out


@torch.library.custom_op(
    "experts::gradient_of_weights",
    mutates_args=(),
    schema="(Tensor rows, Tensor upstream, Tensor ends, Tensor weights) -> Tensor",
)
def _gradient_of_weights(rows: Tensor, upstream: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Return the gradients of the weights, in the layout of the weights."""
    out = torch.zeros_like(weights)
    for number, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(rows[first:last].t(), upstream[first:last], out=out[number])
    return out


def _save_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    rows_gradient = None
    weights_gradient = None
    if ctx.needs_input_grad[0]:
        rows_gradient = _group_by_group(upstream, weights.transpose(1, 2), ends)
    if ctx.needs_input_grad[1]:
        weights_gradient = _gradient_of_weights(rows, upstream, ends, weights)
    return rows_gradient, weights_gradient, None


_group_by_group.register_fake(
    lambda rows, weights, ends: rows.new_empty(len(rows), weights.shape[2])
)
_group_by_group.register_autograd(_backward, setup_context=_save_context)
_gradient_of_weights.register_fake(lambda rows, upstream, ends, weights: torch.empty_like(weights))


class _Dispatch(torch.autograd.Function):
    """Copies each token to its rows. The gradient of a token is the sum over its rows."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, tokens: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.count = len(hidden_states)
        return hidden_states.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        unsorted = upstream.index_select(0, inverse)
        return unsorted.view(ctx.count, -1, upstream.shape[-1]).sum(1), None, None


class _Combine(torch.autograd.Function):
    """Multiplies rows by their weights and sums the rows of each token."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, tokens: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse, tokens)
        unsorted = rows.index_select(0, inverse).view(*weights.shape, -1)
        return (unsorted * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows and weights. upstream: [N, H], of the wider dtype."""
        rows, weights, order, inverse, tokens = ctx.saved_tensors
        per_row = upstream.index_select(0, tokens)
        rows_gradient = None
        weights_gradient = None
        if ctx.needs_input_grad[1]:
            products = (rows * per_row).sum(-1).index_select(0, inverse)
            weights_gradient = products.view(weights.shape).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            ordered = weights.reshape(-1).index_select(0, order)
            rows_gradient = (per_row * ordered[:, None]).to(rows.dtype)
        return rows_gradient, weights_gradient, None, None, None


class _Biases(torch.autograd.Function):
    """Returns the bias of each row's expert; backward sums gradients by a one-hot product."""

    @staticmethod
    def forward(ctx: Any, biases: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.count = len(biases)
        return biases.index_select(0, experts.clamp(max=len(biases) - 1))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (experts,) = ctx.saved_tensors
        numbers = torch.arange(ctx.count, device=experts.device)
        return (numbers[:, None] == experts).to(upstream.dtype) @ upstream, None


def list_experts_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that use transformers' experts interface."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "_apply_gate")
        and hasattr(getattr(module, "config", None), "_experts_implementation")
    ]


def use_own_function(model: PreTrainedModel) -> None:
    """Let a model compute its experts with `experts_forward`, if its family allows a choice."""
    if list_experts_modules(model):
        model.set_experts_implementation(NAME)


def adds_in_place(module: nn.Module) -> bool:
    """Return whether a module of experts adds its biases to the products in place."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) != NAME


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
