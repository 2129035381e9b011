"""The loss: a sum over label tokens, so that any division of the batch gives the same mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.tokens.loader import MicroBatch
from lib.tokens.samples import IGNORED
from lib.train import attention, distributed, sharding
from lib.train.distributed import World

_LOGITS_AT_ONCE = 1 << 26  # numbers: half a gigabyte with their copies; more is no faster
_FEWEST_ROWS = 256  # smaller matrix products waste the device
_NOISE = 0.02  # nats per token between two ways of rounding in half precision


def token_loss_sum(model: nn.Module, batch: MicroBatch, scale: float = 1.0) -> Tensor:
    """Return the cross entropy summed over the label tokens of a micro-batch, float32 scalar.

    Its gradients are those of the sum times `scale`, a power of two. That is applied before they
    are rounded to half precision: afterwards, small ones would have vanished in float16. A
    micro-batch whose labels are all ignored gives a zero that is still part of the graph.
    """
    inputs = attention.inputs(model, batch)
    head = model.get_output_embeddings()
    if isinstance(head.__dict__.get("forward"), LossHead):
        return head.forward.loss_sum(model, inputs, batch.labels, scale)
    return _ScaledGradient.apply(_sum(model(**inputs).logits, batch.labels), scale)


def _sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED,
                           reduction="sum")


class _ScaledGradient(torch.autograd.Function):
    """Hands a number on; its gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.scale, None


class LossHead:
    """Takes the place of the output layer's `forward`: gives the loss where labels are set.

    There, inside the layer, the sharded weights are gathered; the logits of all tokens never exist.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head, self._logits = head, head.forward
        self._labels, self._scale = None, 1.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [B, T, V], or the loss sum of hidden states [B, T, H]."""
        if self._labels is None:
            return self._logits(hidden)
        head = self._head
        return _ChunkedLoss.apply(hidden.flatten(0, 1), head.weight, head.bias,
                                  self._labels.flatten(), self._scale)

    def loss_sum(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, scale: float,
                 ) -> Tensor:
        """Return the loss sum of a micro-batch, which the model hands on in place of logits."""
        self._labels, self._scale = labels, scale
        try:
            return model(**inputs).logits
        finally:
            self._labels = None


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer, some rows at a time, the gradients made on the way.

    Logits and gradients of a chunk exist only for the while, so the forward does what the backward
    would have to do again; the backward hands them on. Loss and gradient of the weights are summed
    in float32, and the gradients scaled in it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
                scale: float) -> Tensor:
        """hidden: [N, H]; weight: [V, H]; bias: [V]; labels: int64 [N]."""
        rows = max(_FEWEST_ROWS, _LOGITS_AT_ONCE // len(weight))
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with_gradients = any(ctx.needs_input_grad)
        of_hidden = torch.empty_like(hidden) if with_gradients else None
        of_weight = of_bias = None
        for first in range(0, len(labels), rows):
            chunk, target = hidden[first:first + rows], labels[first:first + rows]
            logits = F.linear(chunk, weight, bias).float()
            counts = target != IGNORED
            target = torch.where(counts, target, 0)[:, None]
            normaliser = torch.logsumexp(logits, 1, keepdim=True)
            loss += ((normaliser - logits.gather(1, target))[:, 0] * counts).sum()
            if not with_gradients:
                continue
            # d loss / d logits = softmax - one-hot, nothing where the label is ignored.
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(1, target, torch.full_like(normaliser, -1.0))
            gradient = logits.mul_(counts[:, None] * scale).to(hidden.dtype)
            torch.mm(gradient, weight, out=of_hidden[first:first + rows])
            of_weight = _added(of_weight, gradient.t() @ chunk)
            if bias is not None:
                of_bias = _added(of_bias, logits.sum(0))
        if with_gradients:
            ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype),
                                  None if of_bias is None else of_bias.to(bias.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """upstream: float32 scalar, 1 where the loss is what `backward` is called on."""
        return (*(None if kept is None else kept.mul_(upstream.to(kept.dtype))
                  for kept in ctx.saved_tensors), None, None)


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """Sum chunks in float32; a single one stays as it is."""
    return more if total is None else total.float().add_(more)


def chunk(model: nn.Module, world: World) -> str:
    """Compute the loss within the output layer if that gives the same; return a sentence about it.

    Some families change the logits after that layer (a cap, a factor), so it is tried. All ranks
    must call this: two forward passes over a row of 16 tokens.
    """
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)  # not the state that dropout goes on from
    tokens = torch.randint(0, head.weight.shape[0], (1, 17), generator=generator)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:]).to(world.device)
    with trial(model):
        plain = token_loss_sum(model, batch) / 16
        head.forward = LossHead(head)
        try:
            chunked = token_loss_sum(model, batch) / 16
            same = chunked.ndim == 0 and bool((plain - chunked).abs() < _NOISE)
        except (RuntimeError, TypeError, IndexError):  # what follows the layer needs logits
            same = False
    if same:
        return "in the output layer, chunk by chunk: the logits of all tokens never exist"
    del head.forward
    return f"from the logits, which {model.config.model_type} models change after the output layer"


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for the while, and leave no group of shards gathered."""
    model.eval()
    try:
        yield
    finally:
        sharding.reshard(model)
        model.train()


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Try a model without leaving a trace: no dropout, no gradients, and nothing is compiled.

    A graph compiled for the few tokens of a trial would be compiled again for any number of them,
    and training would go on with that.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), eval_mode(model):
        yield


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[MicroBatch], world: World) -> float:
    """Return the mean loss over all label tokens of all ranks; all ranks must call this."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    tokens = 0
    with eval_mode(model):
        for batch in batches:
            loss_sum += token_loss_sum(model, batch.to(world.device))
            tokens += int((batch.labels != IGNORED).sum())
    loss_total, token_total = distributed.total([loss_sum.item(), tokens], world)
    return loss_total / max(token_total, 1)
