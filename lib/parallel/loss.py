"""The loss: a sum over label tokens, so that any division of the batch gives the same mean.

How it is computed, and whether packed documents see each other, is tried on the model itself and
not looked up by family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core import log, units
from lib.models import lora
from lib.parallel import attention
from lib.parallel.compiling import Compiler
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import LENGTH, require_isolation, trial_batch, trial_mode, trial_tokens
from lib.tokens.batches import MicroBatch
from lib.tokens.samples import IGNORED

# Logits that exist at a time, by device. With their copies they take 2 GiB on a GPU, where small
# products leave units idle, and half a GiB on a CPU, where more is no faster.
AT_ONCE = {"cuda": 1 << 28, "cpu": 1 << 26}
_FEWEST_ROWS = 256  # smaller matrix products waste the device
_NOISE = 0.02  # nats per token between two ways of rounding in half precision


# Returns the loss of a micro-batch, summed over its label tokens; its gradients are scaled.
LossSum = Callable[[MicroBatch, float], Tensor]


def build_loss(
    model: nn.Module, layout: ParallelLayout, packing: str, compiler: Compiler | None = None
) -> LossSum:
    """Return what computes the loss of a model, see token_loss_sum; all ranks must call this.

    Tried on the weights that are there. Raises UsageError where packed documents see each other.
    """
    if packing == "documents":
        require_isolation(model, layout)
    with lora.warn_about_unused_adapters(model):
        said = chunk(model, layout, compiler)
    log.info(f"loss: {said}")
    return partial(token_loss_sum, model)


def token_loss_sum(model: nn.Module, batch: MicroBatch, scale: float = 1.0) -> Tensor:
    """Return the cross entropy summed over the label tokens of a micro-batch, float32 scalar.

    Its gradients are those of the sum times `scale`, a power of two. That is applied before they
    are rounded to half precision: afterwards, small ones would have vanished in float16. A
    micro-batch whose labels are all ignored gives a zero that is still part of the graph.
    """
    inputs = attention.make_inputs(model, batch)
    head = model.get_output_embeddings()
    if isinstance(head.__dict__.get("forward"), LossHead):
        return head.forward.loss_sum(model, inputs, batch.labels, scale)
    logits = model(**inputs).logits.flatten(0, 1).float()
    total = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return _ScaledGradient.apply(total, scale)


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

    def __init__(self, head: nn.Module, at_once: int, compiler: Compiler | None = None) -> None:
        """at_once: logits that may exist at a time. compiler: of the decoder blocks."""
        self._head = head
        self._logits = head.forward
        self._at_once = at_once
        self._gradient = (
            _gradient if compiler is None else compiler.for_part("the loss").wrap(_fused, _gradient)
        )
        self._labels: Tensor | None = None
        self._scale = 1.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [B, T, V], or the loss sum of hidden states [B, T, H]."""
        if self._labels is None:
            return self._logits(hidden)
        head = self._head
        # Decided here: within a Function the weight says that it requires a gradient all the same.
        gradient = self._gradient if torch.is_grad_enabled() else None
        return _ChunkedLoss.apply(
            hidden.flatten(0, 1),
            head.weight,
            head.bias,
            self._labels.flatten(),
            self._scale,
            self._at_once,
            gradient,
        )

    def loss_sum(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, scale: float
    ) -> Tensor:
        """Return the loss sum of a micro-batch, which the model hands on in place of logits."""
        self._labels = labels
        self._scale = scale
        try:
            return model(**inputs).logits
        finally:
            self._labels = None


class _ChunkedLoss(torch.autograd.Function):
    """Computes the cross entropy of a linear layer by rows, and its gradients on the way.

    Logits and gradients of a chunk exist only for the while, so the forward does what the backward
    would have to do again; the backward hands them on. Loss and gradient of the weights are summed
    in float32, and the gradients scaled in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        at_once: int,
        gradient_of: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """hidden: [N, H]; weight: [V, H]; bias: [V]; labels: int64 [N].

        gradient_of: None where no gradient is wanted.
        """
        # Chunks as alike as can be: for another size the gradient would be compiled once more.
        chunks = units.ceil_div(len(labels) * len(weight), at_once)
        rows = max(_FEWEST_ROWS, units.ceil_div(len(labels), chunks))
        is_trained = ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if not any(ctx.needs_input_grad):
            gradient_of = None
        of_hidden = torch.empty_like(hidden[:0] if gradient_of is None else hidden)
        # One chunk is the whole product, which needs no sum.
        of_weight = (
            None
            if gradient_of is None or not is_trained or rows >= len(labels)
            else torch.zeros_like(weight, dtype=torch.float32)
        )
        of_bias = None
        for first in range(0, len(labels), rows):
            chunk = hidden[first : first + rows]
            target = labels[first : first + rows]
            logits = F.linear(chunk, weight, bias)
            counts = (target != IGNORED).float()
            target = target.clamp(min=0)
            if gradient_of is None:
                loss += (F.cross_entropy(logits.float(), target, reduction="none") * counts).sum()
                continue
            chunk_loss, gradient = gradient_of(logits, target, counts, counts * scale)
            loss += chunk_loss
            del logits
            torch.mm(gradient, weight, out=of_hidden[first : first + rows])
            if not is_trained:
                continue
            of_weight = _added(of_weight, gradient, chunk)
            if bias is not None:
                of_chunk = gradient.sum(0, dtype=torch.float32)
                of_bias = of_chunk if of_bias is None else of_bias.add_(of_chunk)
        if gradient_of is not None:
            ctx.save_for_backward(
                of_hidden,
                *(
                    None if summed is None or of is None else summed.to(of.dtype)
                    for summed, of in ((of_weight, weight), (of_bias, bias))
                ),
            )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """upstream: float32 scalar, 1 where the loss is what `backward` is called on."""
        return (
            *(
                None if kept is None else kept.mul_(upstream.to(kept.dtype))
                for kept in ctx.saved_tensors
            ),
            None,
            None,
            None,
            None,
        )


def _gradient(
    logits: Tensor, target: Tensor, counts: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over rows that count, and its gradient by the logits.

    logits: [n, V]; target: int64 [n]; counts: 1 or 0 of each row, float32 [n]; factor: what its
    gradient is multiplied by, float32 [n]. The gradient, softmax less one-hot, has the logits'
    dtype.
    """
    dtype = logits.dtype
    logits = logits.float()
    normaliser = torch.logsumexp(logits, 1)
    at = torch.arange(len(target), device=target.device), target
    loss = ((normaliser - logits[at]) * counts).sum()
    logits.sub_(normaliser[:, None]).exp_()
    # Not scatter_add_, which is done in any order on a GPU; each row has one target.
    logits[at] -= 1.0
    return loss, logits.mul_(factor[:, None]).to(dtype)


def _fused(logits: Tensor, target: Tensor, counts: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `_gradient`, in operations that a compiler makes two passes of."""
    numbers = logits.float()
    normaliser = torch.logsumexp(numbers, 1)
    picked = numbers.gather(1, target[:, None])[:, 0]
    is_target = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    softmax = (numbers - normaliser[:, None]).exp()
    gradient = (softmax - is_target.float()) * factor[:, None]
    return ((normaliser - picked) * counts).sum(), gradient.to(logits.dtype)


def _added(total: Tensor | None, gradient: Tensor, chunk: Tensor) -> Tensor:
    """Add gradientᵀ · chunk to a sum in float32; None: the product is all there is.

    gradient: [n, V]; chunk: [n, H].
    """
    if total is None:
        return gradient.t() @ chunk
    if chunk.is_cuda and _adds_in_place(chunk.device, chunk.dtype):
        return torch.addmm(total, gradient.t(), chunk, out_dtype=torch.float32, out=total)
    return total.add_(gradient.t() @ chunk)


@cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether products of half precision can be summed in float32 where the sum lies.

    Tried, for torch knows it on GPUs alone, and not each (2.11 to 2.13).
    """
    ones, total = (torch.ones(16, 16, device=device, dtype=kind) for kind in (dtype, torch.float32))
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def chunk(model: nn.Module, layout: ParallelLayout, compiler: Compiler | None = None) -> str:
    """Compute the loss within the output layer if that gives the same; return a sentence about it.

    Some families change the logits after that layer (a cap, a factor), so it is tried. All ranks
    must call this: two forward passes over a row of 16 tokens.
    """
    head = model.get_output_embeddings()
    batch = trial_batch(trial_tokens(model), layout)
    with trial_mode(model):
        plain = token_loss_sum(model, batch) / LENGTH
        head.forward = LossHead(head, AT_ONCE[layout.device.type], compiler)
        try:
            chunked = token_loss_sum(model, batch) / LENGTH
            same = chunked.ndim == 0 and bool((plain - chunked).abs() < _NOISE)
        except (RuntimeError, TypeError, IndexError):  # what follows the layer needs logits
            same = False
    if same:
        return "in the output layer, chunk by chunk: the logits of all tokens never exist"
    del head.forward
    return f"from the logits, which {model.config.model_type} models change after the output layer"
