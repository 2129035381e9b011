"""Compute the loss as a sum over label tokens, so that any division of a batch gives the same mean.

The output layer computes the loss chunk by chunk, if a trial shows that the loss stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

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

# Number of logits in a chunk, by device. With their copies they take 2 GiB on a GPU, where smaller
# products leave compute units idle, and half a GiB on a CPU, where larger chunks are no faster.
CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 26}
_MIN_ROWS = 256  # of a chunk; a device computes smaller matrix products inefficiently
_TOLERANCE = 0.02  # nats per token; different ways of rounding to half precision differ by less

# (logits, target, counts, factor) -> (loss, gradient), see `_gradient`.
GradientFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class ZLoss:
    """Adds X · (log-sum-exp of the logits)² of each label token to what is trained.

    It keeps the log-sum-exp near 0, as in PaLM (arXiv 2204.02311, section 5). Only the gradients of
    a loss contain it: the value of the loss remains the cross entropy.
    """

    def __init__(self, coefficient: float, device: torch.device) -> None:
        """coefficient: X, above 0."""
        self._coefficient = coefficient
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add_to(self, gradient_of: Callable[..., tuple[Tensor, ...]]) -> GradientFunction:
        """Return `gradient_of`, such as `_gradient`, with the z-loss, whose value is summed."""

        def compute(
            logits: Tensor, target: Tensor, counts: Tensor, factor: Tensor
        ) -> tuple[Tensor, ...]:
            loss, gradient, squares = gradient_of(logits, target, counts, factor, self._coefficient)
            self._sum += self._coefficient * squares
            return loss, gradient

        return compute

    def take_sum(self) -> Tensor:
        """Return the z-loss of this rank's label tokens since the last call, float64 scalar."""
        taken = self._sum
        self._sum = torch.zeros_like(taken)
        return taken


class LossFunction(Protocol):
    """Computes the loss of a micro-batch, see `token_loss_sum`."""

    def __call__(
        self, batch: MicroBatch, scale: float, token_losses: list[Tensor] | None = None
    ) -> Tensor: ...


def build_loss(
    model: nn.Module,
    layout: ParallelLayout,
    packing: str,
    compiler: Compiler | None = None,
    z_loss: ZLoss | None = None,
) -> LossFunction:
    """Return the function that computes the loss of a model, see `token_loss_sum`.

    All ranks must call this, because it runs forward passes with the current weights. Raises
    UsageError if packed documents attend to each other.

    z_loss: added to the gradients of the loss; None for the cross entropy alone.
    """
    if packing == "documents":
        require_isolation(model, layout)
    with lora.warn_about_unused_adapters(model):
        description = chunk_loss(model, layout, compiler)
    log.detail(f"loss: {description}")
    return partial(token_loss_sum, model, z_loss=z_loss)


def token_loss_sum(
    model: nn.Module,
    batch: MicroBatch,
    scale: float = 1.0,
    token_losses: list[Tensor] | None = None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Return the cross entropy summed over the label tokens of a micro-batch, float32 scalar.

    Its gradients are multiplied by `scale`, a power of two, before they are rounded to half
    precision, because small gradients would vanish in float16. If all labels of a micro-batch are
    ignored, the result is a zero that is still part of the graph.

    token_losses: a list to which the loss of each token is appended, float32 [n] in one or more
    parts, 0 for an ignored label; only without gradients.
    z_loss: added to the gradients; without gradients it has no effect.
    """
    inputs = attention.make_inputs(model, batch)
    head = model.get_output_embeddings()
    if isinstance(head.__dict__.get("forward"), LossHead):
        return head.forward.chunked_loss_sum(
            model, inputs, batch.labels, scale, token_losses, z_loss
        )
    logits = model(**inputs).logits.flatten(0, 1).float()
    if z_loss is not None and torch.is_grad_enabled():
        return _LogitsLoss.apply(logits, batch.labels.flatten(), scale, z_loss)
    if token_losses is not None:
        token_losses.append(
            F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="none")
        )
    total = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return _ScaledGradient.apply(total, scale)


@torch.no_grad()
def measure_token_losses(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the cross entropy of each token of a micro-batch, float32 [B, T].

    Ignored labels have the loss 0. The output layer works chunk by chunk, as for the sum.
    """
    parts: list[Tensor] = []
    token_loss_sum(model, batch, token_losses=parts)
    return torch.cat(parts).view(batch.labels.shape)


class _ScaledGradient(torch.autograd.Function):
    """Returns its input unchanged and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream * ctx.scale, None


class _LogitsLoss(torch.autograd.Function):
    """Computes the cross entropy of logits, and the gradients of its sum with the z-loss.

    The forward pass computes both from one log-sum-exp. Autograd would keep the logits for a second
    one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, scale: float, z_loss: ZLoss) -> Tensor:
        """Return the cross entropy summed; logits: float32 [N, V]; labels: int64 [N]."""
        counts = (labels != IGNORED).float()
        # `_gradient` computes in place, and the model may keep its logits for the backward pass.
        arguments = (logits.clone(), labels.clamp(min=0), counts, counts * scale)
        loss, gradient = z_loss.add_to(_gradient)(*arguments)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradient times `upstream`, a float32 scalar."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(upstream), None, None, None


class LossHead:
    """Replaces the output layer's `forward`, and returns the loss while labels are set.

    FSDP gathers the sharded weights of the layer for this call. The logits of all tokens never
    exist at the same time.
    """

    def __init__(self, head: nn.Module, at_once: int, compiler: Compiler | None = None) -> None:
        """at_once: number of logits in a chunk. compiler: the compiler of the decoder blocks."""
        self._head = head
        self._logits = head.forward
        self._at_once = at_once
        self._gradient = (
            _gradient if compiler is None else compiler.for_part("the loss").wrap(_fused, _gradient)
        )
        self._labels: Tensor | None = None
        self._scale = 1.0
        self._token_losses: list[Tensor] | None = None
        self._z_loss: ZLoss | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [B, T, V], or the loss sum of hidden states [B, T, H]."""
        if self._labels is None:
            return self._logits(hidden)
        head = self._head
        # Decided here, because inside a Function the weight requires a gradient even under no_grad.
        gradient = self._gradient if torch.is_grad_enabled() else None
        if gradient is not None and self._z_loss is not None:
            gradient = self._z_loss.add_to(gradient)
        return _ChunkedLoss.apply(
            hidden.flatten(0, 1),
            head.weight,
            head.bias,
            self._labels.flatten(),
            self._scale,
            self._at_once,
            gradient,
            self._token_losses,
        )

    def chunked_loss_sum(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        labels: Tensor,
        scale: float,
        token_losses: list[Tensor] | None = None,
        z_loss: ZLoss | None = None,
    ) -> Tensor:
        """Return the loss sum of a micro-batch, which the model returns in place of logits."""
        self._labels = labels
        self._scale = scale
        self._token_losses = token_losses
        self._z_loss = z_loss
        try:
            return model(**inputs).logits
        finally:
            self._labels = None
            self._token_losses = None
            self._z_loss = None


class _ChunkedLoss(torch.autograd.Function):
    """Computes the cross entropy of a linear layer and its gradients, one chunk of rows at a time.

    The logits of a chunk are freed at once, so the forward pass also computes the gradients, and
    the backward pass returns them. The loss and the gradient of the weights are summed in float32;
    gradients are scaled in float32.
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
        gradient_of: GradientFunction | None,
        token_losses: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the cross entropy summed over the rows with a label, and save the gradients.

        hidden: [N, H]; weight: [V, H]; bias: [V]; labels: int64 [N]. at_once: number of logits in a
        chunk. gradient_of: computes as `_gradient` does; None if no gradient is needed.
        token_losses: see `token_loss_sum`.
        """
        # Chunks have equal sizes, because the gradient is compiled for each size.
        chunks = units.ceil_div(len(labels) * len(weight), at_once)
        rows = max(_MIN_ROWS, units.ceil_div(len(labels), chunks))
        is_trained = ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if not any(ctx.needs_input_grad):
            gradient_of = None
        hidden_gradient = torch.empty_like(hidden[:0] if gradient_of is None else hidden)
        # A single chunk is the complete product and needs no float32 sum.
        weight_gradient = (
            None
            if gradient_of is None or not is_trained or rows >= len(labels)
            else torch.zeros_like(weight, dtype=torch.float32)
        )
        bias_gradient = None
        for first in range(0, len(labels), rows):
            chunk = hidden[first : first + rows]
            target = labels[first : first + rows]
            logits = F.linear(chunk, weight, bias)
            counts = (target != IGNORED).float()
            target = target.clamp(min=0)
            if gradient_of is None:
                losses = F.cross_entropy(logits.float(), target, reduction="none") * counts
                if token_losses is not None:
                    token_losses.append(losses)
                loss += losses.sum()
                continue
            chunk_loss, gradient = gradient_of(logits, target, counts, counts * scale)
            loss += chunk_loss
            del logits
            torch.mm(gradient, weight, out=hidden_gradient[first : first + rows])
            if not is_trained:
                continue
            weight_gradient = _add_product(weight_gradient, gradient, chunk)
            if bias is not None:
                chunk_sum = gradient.sum(0, dtype=torch.float32)
                bias_gradient = (
                    chunk_sum if bias_gradient is None else bias_gradient.add_(chunk_sum)
                )
        if gradient_of is not None:
            ctx.save_for_backward(
                hidden_gradient,
                *(
                    None if total is None or parameter is None else total.to(parameter.dtype)
                    for total, parameter in ((weight_gradient, weight), (bias_gradient, bias))
                ),
            )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients times `upstream`, a float32 scalar."""
        return (
            *(
                None if gradient is None else gradient.mul_(upstream.to(gradient.dtype))
                for gradient in ctx.saved_tensors
            ),
            None,
            None,
            None,
            None,
            None,
        )


def _gradient(
    logits: Tensor, target: Tensor, counts: Tensor, factor: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, ...]:
    """Return the cross entropy summed over rows with a label, and its gradient for the logits.

    logits: [n, V]; target: int64 [n]; counts: 1 for a row with a label, else 0, float32 [n];
    factor: multiplies the gradient of each row, float32 [n]. The gradient, softmax minus one-hot,
    has the dtype of the logits. z_loss: if above 0, the gradient is that of the cross entropy plus
    z_loss times the squared log-sum-exp, and the sum of these squares is returned as well.
    """
    dtype = logits.dtype
    logits = logits.float()
    normaliser = torch.logsumexp(logits, 1)
    at = torch.arange(len(target), device=target.device), target
    loss = ((normaliser - logits[at]) * counts).sum()
    logits.sub_(normaliser[:, None]).exp_()
    if z_loss:
        # One product with both factors, so that the z-loss needs no further pass over the logits.
        logits.mul_(_softmax_factor(normaliser, factor, z_loss)[:, None])
        logits[at] -= factor
        return loss, logits.to(dtype), (normaliser.square() * counts).sum()
    # Not scatter_add_, whose order varies on a GPU; here each row has one target.
    logits[at] -= 1.0
    return loss, logits.mul_(factor[:, None]).to(dtype)


def _softmax_factor(normaliser: Tensor, factor: Tensor, z_loss: float) -> Tensor:
    """Return the factor of the softmax [n] in the gradient of the loss with the z-loss.

    The derivative of a log-sum-exp is the softmax, and that of its square 2 · lse · softmax.
    """
    return factor * (1.0 + 2.0 * z_loss * normaliser)


def _fused(
    logits: Tensor, target: Tensor, counts: Tensor, factor: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, ...]:
    """Compute the same as `_gradient`, in operations that a compiler fuses into two kernels."""
    numbers = logits.float()
    normaliser = torch.logsumexp(numbers, 1)
    target_logits = numbers.gather(1, target[:, None])[:, 0]
    is_target = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    softmax = (numbers - normaliser[:, None]).exp()
    loss = ((normaliser - target_logits) * counts).sum()
    if z_loss:
        gradient = softmax * _softmax_factor(normaliser, factor, z_loss)[:, None]
        gradient = gradient - is_target.float() * factor[:, None]
        return loss, gradient.to(logits.dtype), (normaliser.square() * counts).sum()
    gradient = (softmax - is_target.float()) * factor[:, None]
    return loss, gradient.to(logits.dtype)


def _add_product(total: Tensor | None, gradient: Tensor, chunk: Tensor) -> Tensor:
    """Add gradientᵀ · chunk to a sum in float32; without a sum, return the product alone.

    gradient: [n, V]; chunk: [n, H].
    """
    if total is None:
        return gradient.t() @ chunk
    if chunk.is_cuda and _can_add_in_place(chunk.device, chunk.dtype):
        return torch.addmm(total, gradient.t(), chunk, out_dtype=torch.float32, out=total)
    return total.add_(gradient.t() @ chunk)


@cache
def _can_add_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products in half precision can be added to a float32 sum in place.

    A trial answers this, because torch (2.11 to 2.13) supports it on some GPUs only.
    """
    ones, total = (torch.ones(16, 16, device=device, dtype=kind) for kind in (dtype, torch.float32))
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def chunk_loss(model: nn.Module, layout: ParallelLayout, compiler: Compiler | None = None) -> str:
    """Let the output layer compute the loss if that does not change it; return a description.

    Some families change the logits after the output layer, by a cap or a factor. So this runs a
    forward pass in each way over a row of 16 tokens, and compares the losses. All ranks must call
    this.
    """
    head = model.get_output_embeddings()
    batch = trial_batch(trial_tokens(model), layout)
    with trial_mode(model):
        plain = token_loss_sum(model, batch) / LENGTH
        head.forward = LossHead(head, CHUNK_LOGITS[layout.device.type], compiler)
        try:
            chunked = token_loss_sum(model, batch) / LENGTH
            is_same = chunked.ndim == 0 and bool((plain - chunked).abs() < _TOLERANCE)
        except (RuntimeError, TypeError, IndexError):  # code after the layer needs logits
            is_same = False
    if is_same:
        return "logits are computed in chunks, by the output layer"
    del head.forward
    return (
        f"logits are computed at once, since {model.config.model_type} models change them after "
        "the output layer"
    )
