"""Count the load of the experts in a mixture-of-experts model, and keep it even.

A router chooses the experts of each token. A hook on each router counts its choices, and adds the
gradient of the load-balancing loss if the run trains with one. A custom operator counts only in the
forward pass of a training step, so recomputation, compilation and validation add no counts.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.models.architecture import ROUTER_BIASES
from lib.models.sharded import own_class
from lib.parallel.context import sum_over_group
from lib.tokens.batches import MicroBatch, Step

LOSS = "loss"  # the load-balancing loss of the family in transformers
BIAS = "bias"  # added to the scores that decide the choice, and changed after each step
_FORMULA = "load_balancing_loss_func"  # in the modules of transformers whose families have the loss
_STARVED = 0.1  # experts with less than this share of the mean load count as starved
_pauses = 0


class Router(NamedTuple):
    """A router whose outputs are (logits, weights, chosen experts).

    layer: the index of its decoder layer. experts: the number of experts. bias: the module and
    name of the buffer that is added to the scores that decide the choice, if there is one.
    """

    layer: int
    module: nn.Module
    experts: int
    bias: tuple[nn.Module, str] | None


def find_routers(model: PreTrainedModel) -> list[Router]:
    """Return the routers of a model on the meta device, in the order of their layers.

    They are the modules whose logits transformers can record (`_can_record_outputs`). The list is
    empty if one of them does not return (logits, weights, chosen experts).
    """
    classes = tuple(
        getattr(recorder, "target_class", recorder)
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for recorder in _as_list(getattr(part, "_can_record_outputs", None) or {})
    )
    modules = dict(model.named_modules())
    routers: list[Router] = []
    for name, module in modules.items():
        if not isinstance(module, tuple(kind for kind in classes if isinstance(kind, type))):
            continue
        experts = _count_experts(module)
        if not experts:
            return []
        owners = (module, modules[name.rpartition(".")[0]])
        biases = [
            (owner, bias)
            for owner in owners
            for bias, _ in owner.named_buffers(recurse=False)
            if bias in ROUTER_BIASES
        ]
        number = re.search(r"\.(\d+)\.", name)
        layer = int(number[1]) if number else len(routers)
        routers.append(Router(layer, module, experts, next(iter(biases), None)))
    return routers


def _as_list(recorded: dict[str, Any]) -> list[Any]:
    recorders = recorded.get("router_logits", [])
    return list(recorders) if isinstance(recorders, list | tuple) else [recorders]


def _count_experts(module: nn.Module) -> int:
    """Return the number of experts of a router on the meta device; 0 for other modules."""
    weight = next((p for p in module.parameters() if p.ndim == 2), None)
    if weight is None or not weight.is_meta:
        return 0
    experts = weight.shape[0]
    trial = copy.deepcopy(module).to(device="meta")
    hidden = torch.empty(4, weight.shape[1], dtype=weight.dtype, device="meta")
    bias = torch.empty(experts, device="meta")  # some families pass it to the router
    for arguments in ((hidden,), (hidden, bias), (hidden[None], bias)):
        try:
            with torch.no_grad():
                output = trial(*arguments)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
            continue
        is_known = (
            isinstance(output, tuple)
            and len(output) >= 3
            and output[0].shape == (4, experts)
            and output[1].shape == output[2].shape
            and not output[2].is_floating_point()
        )
        return experts if is_known else 0
    return 0


def find_method(model: PreTrainedModel, routers: list[Router]) -> str:
    """Return the method by which a family balances its experts: LOSS, BIAS, or "" for neither.

    A family with both, such as MiniMax-M2, gets LOSS, which its config turns on and off.
    """
    if routers and hasattr(sys.modules[own_class(model).__module__], _FORMULA):
        return LOSS
    return BIAS if routers and all(router.bias is not None for router in routers) else ""


def find_coefficient(model: PreTrainedModel) -> float:
    """Return the coefficient of the load-balancing loss in a model's config; 0 without one."""
    return float(getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0)


def is_loss_in_config(model: PreTrainedModel) -> bool:
    """Return whether the config lets transformers add the loss (`output_router_logits`)."""
    return any(
        getattr(config, "output_router_logits", False)
        for config in (model.config, model.config.get_text_config())
    )


def turn_off_family_loss(model: PreTrainedModel) -> None:
    """Keep transformers from computing its own load-balancing loss, which nobody would use."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def has_trained_inputs(model: PreTrainedModel, routers: list[Router]) -> bool:
    """Return whether training changes the input of a router, or the router itself.

    This assumes that modules are registered in the order in which they compute.
    """
    is_trained = False
    last = routers[-1].module if routers else None
    for module in model.modules():
        is_trained |= any(p.requires_grad for p in module.parameters(recurse=False))
        if module is last:
            return is_trained
    return False


@contextmanager
def pause_counting() -> Iterator[None]:
    """Count nothing inside the context, whose forward passes are not part of a training step."""
    global _pauses
    _pauses += 1
    try:
        yield
    finally:
        _pauses -= 1


# The schema does not declare that `into` changes. Otherwise a compiled block that recomputes would
# keep it for the backward pass, where torch (2.13) finds another version and raises. The returned
# copy of `chosen` keeps the compiler from removing the operator.
@torch.library.custom_op(
    "experts::tally",
    mutates_args=(),
    schema="(Tensor logits, Tensor chosen, Tensor valid, Tensor into, bool with_loss, str group)"
    " -> (Tensor, Tensor)",
)
def _tally(
    logits: Tensor, chosen: Tensor, valid: Tensor, into: Tensor, with_loss: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Add the load to `into`; return a copy of `chosen`, and each row's choices per token.

    logits: [N, E]; chosen: int64 [N, k]; valid: float32 [B, T], 0 for padding, N = B · T. into:
    float64 [at least E + 1], how often each expert was chosen, and last the load-balancing loss
    times tokens. with_loss: compute that loss too. group: name of the ranks that share the rows, ""
    for whole rows. The second result is float32 [B, E]: choices of an expert in the whole row,
    divided by its tokens. Nothing is added inside `pause_counting`, or when a backward pass
    recomputes the block.
    """
    tokens = valid.sum(1, keepdim=True)
    choices = torch.zeros(logits.shape, device=logits.device).scatter_(1, chosen, 1.0)
    counts = row_counts = (choices.view(*valid.shape, -1) * valid[..., None]).sum(1)
    if group:
        row_counts, tokens = sum_over_group(torch.cat([counts, tokens], 1), group).split(
            [counts.shape[1], 1], dim=1
        )
    rows = tokens.clamp(min=1.0)
    shares = row_counts / rows
    if not _pauses and torch._C._current_graph_task_id() == -1:
        experts = logits.shape[1]
        total = into.data
        total[:experts] += counts.double().sum(0)
        if with_loss:
            probabilities = F.softmax(logits, -1, dtype=torch.float32)
            mean = (probabilities.view(*valid.shape, -1) * valid[..., None]).sum(1) / rows
            losses = (shares * mean).sum(1, keepdim=True) * tokens
            total[-1] += losses.double().sum() * experts
    return chosen.clone(), shares


@_tally.register_fake
def _(
    logits: Tensor, chosen: Tensor, valid: Tensor, into: Tensor, with_loss: bool, group: str
) -> tuple[Tensor, Tensor]:
    shares = logits.new_empty((valid.shape[0], logits.shape[1]), dtype=torch.float32)
    return torch.empty_like(chosen), shares


class _BalancingGradient(torch.autograd.Function):
    """Returns the weights of the chosen experts; backward adds the gradient of the loss.

    The loss of a row of n tokens is E · Σ_e f_e · P_e, with f_e the choices of expert e per token
    and P_e the mean of its probability. Only the probabilities have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, logits: Tensor, shares: Tensor, valid: Tensor, factor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, shares, valid, factor)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, shares, valid, factor = ctx.saved_tensors
        rows, length = valid.shape
        experts = logits.shape[1]
        probabilities = F.softmax(logits, -1, dtype=torch.float32).view(rows, length, experts)
        deviation = shares[:, None] - (probabilities * shares[:, None]).sum(-1, keepdim=True)
        gradient = probabilities * deviation * (valid[..., None] * (factor * experts))
        return upstream, gradient.view_as(logits).to(logits.dtype), None, None, None


class LoadFigures(NamedTuple):
    """The load on all ranks, for a row of the log; see `RouterLoad.capture`."""

    layers: list[int]
    experts: list[int]
    sums: Tensor
    tokens: int
    has_loss: bool

    def compute_figures(self) -> dict[str, float]:
        """Return the figures of a row by key. The device must have finished the step."""
        figures: dict[str, float] = {}
        if not self.layers:
            return figures
        if self.has_loss:
            losses = self.sums[:, -1] / max(1, self.tokens)
            figures["train/router_aux_loss"] = losses.mean().item()
        loads = []
        for row, experts in zip(self.sums, self.experts, strict=True):
            mean = row[:experts].mean().clamp(min=1e-9)
            starved = (row[:experts] < _STARVED * mean).double().mean()
            loads.append(((row[:experts].max() / mean).item(), starved.item()))
        figures["experts/max_load"] = max(load for load, _ in loads)
        figures["experts/starved"] = sum(starved for _, starved in loads) / len(loads)
        for layer, (load, starved) in zip(self.layers, loads, strict=True):
            figures[f"experts/layer_{layer:02d}/max_load"] = load
            figures[f"experts/layer_{layer:02d}/starved"] = starved
        return figures


class RouterLoad:
    """Counts the tokens that each expert gets, and balances the experts if a method is given.

    method: LOSS, BIAS or "" to count only. coefficient: the factor of the loss, or the change of a
    bias in a step. The loss of a step is the mean over layers and over the rows of the step,
    weighted by their tokens. So it does not depend on how ranks and micro-batches divide the step.
    """

    def __init__(
        self, routers: list[Router], device: torch.device, method: str, coefficient: float
    ) -> None:
        self._device = device
        self._routers = routers
        self._method = method
        self._coefficient = coefficient
        self._tokens = 0
        self._valid: Tensor | None = None
        self._group = ""
        self._factor = torch.zeros((), device=device)
        shape = (len(routers), 1 + max((router.experts for router in routers), default=0))
        # Counts of this step, and of the steps since the last row of the log.
        self._running, self._window = (
            torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2)
        )
        for router, into in zip(routers, self._running, strict=True):
            router.module.register_forward_hook(self._make_hook(into))

    def _make_hook(self, into: Tensor) -> Any:
        adds_loss = self._method == LOSS

        def count(_: nn.Module, arguments: Any, output: tuple[Tensor, ...]) -> Any:
            valid = self._valid
            if valid is None or not torch.is_grad_enabled():
                return output
            logits, weights, chosen, *others = output
            group = self._group if adds_loss else ""
            chosen, shares = _tally(logits.detach(), chosen, valid, into, adds_loss, group)
            if not (adds_loss and logits.requires_grad):
                return (logits, weights, chosen, *others)
            weights = _BalancingGradient.apply(weights, logits, shares, valid, self._factor)
            return (logits, weights, chosen, *others)

        return count

    def begin_window(self) -> None:
        """Discard the load since the last row of the log: a rollback has undone the steps."""
        self._window.zero_()

    def begin_step(self, step: Step, scale: float) -> None:
        """Set the factor of the gradient of the loss. scale: `LossScale.loss`."""
        self._tokens = step.tokens
        label_share = max(1, step.label_tokens) / max(1, step.tokens)
        self._factor.fill_(scale * label_share * self._coefficient / max(1, len(self._routers)))

    def begin_pass(self, batch: MicroBatch) -> None:
        """Record which tokens of a micro-batch are not padding. batch: on the device."""
        if not self._routers:
            return
        rows, length = batch.input_ids.shape
        self._group = batch.context.group.group_name if batch.context else ""
        if batch.lengths is None:
            self._valid = torch.ones(rows, length, device=self._device)
            return
        positions = torch.arange(length, device=self._device)
        self._valid = (positions < batch.lengths[:, None]).float()

    def end_step(self, skipped: Tensor) -> None:
        """Update the biases, and add the load of the step. All ranks must call this.

        skipped: 1 if the guard skipped the step of the optimizer, else 0.
        """
        if not self._routers:
            return
        self._valid = None
        if self._method == BIAS:
            self._update_biases(skipped)
        self._window[:, :-1] += self._running[:, :-1]
        self._window[:, -1] = self._running[:, -1]
        self._running.zero_()

    def _update_biases(self, skipped: Tensor) -> None:
        """Add u · (sign(mean - n) - mean of signs) to each bias, with n the choices of an expert.

        As in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), with the signs centred so that the
        biases of a layer keep their sum.
        """
        counts = self._running[:, :-1].clone()
        dist.all_reduce(counts)
        step = self._coefficient * (1.0 - skipped.to(counts.device, non_blocking=True).double())
        for router, row in zip(self._routers, counts, strict=True):
            assert router.bias is not None, "the method BIAS needs a bias in every router"
            owner, name = router.bias
            row = row[: router.experts]
            signs = (row.mean() - row).sign()
            owner.get_buffer(name).add_(step * (signs - signs.mean()))

    def capture(self) -> LoadFigures:
        """Return the load since the last call, summed over all ranks, without waiting for it.

        The loss covers only the last step. All ranks must call this; they all-reduce one tensor.
        """
        sums = self._window.clone()
        self._window.zero_()
        if self._routers:
            dist.all_reduce(sums)
        return LoadFigures(
            [router.layer for router in self._routers],
            [router.experts for router in self._routers],
            sums.to("cpu", non_blocking=True),
            self._tokens,
            self._method == LOSS,
        )
