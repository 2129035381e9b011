"""Compile the decoder blocks, the loss and the update of an optimizer.

torch compiles a graph for each combination of shapes and constants that a function is called with.
Beyond a limit, it runs calls uncompiled. All decoder blocks share their code and therefore the
limit. So one graph has to serve packed documents of any length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from lib.core import commands, log
from lib.core.errors import StageError, UsageError
from lib.models.nested import list_tensors, map_tensors
from lib.parallel import context, routers
from lib.parallel.layout import ParallelLayout

# With selective activation checkpointing, torch warns that blocks must change nothing in place.
# parallelize.py ensures that.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)

BLOCKS = "the decoder blocks"
# Enough for 64 layers that all differ, with and without gradients. The default of torch is 8.
_GRAPH_LIMIT = 128
# The arguments of a block that contain the length of the longest document. Only the attention
# kernel reads these numbers, so the graphs for all of them would be the same.
_LENGTHS = r".*max_length_[qk].*"
_LIMIT_REACHED = "hit config."  # in the warning of torch (2.11 to 2.13) about its limit
# Compile the backward pass together with the forward pass: a later failure would come in the middle
# of a step.
_AT_ONCE = {"force_non_lazy_backward_lowering": True}
# Keep no result that other kept results give by cheap operations alone.
_KEEP_LITTLE = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}

_is_paused = False


class Compiler:
    """Compiles functions for the shapes of their calls.

    After the first failure (no C compiler, an unknown operation, a kernel that does not start), all
    functions of this compiler run uncompiled; those of other compilers stay compiled. A failure of
    `wrap` affects this rank alone. Other ranks need not know, since its functions do not wait for
    them. Functions that exchange with other ranks need `wrap_together`.
    """

    def __init__(
        self,
        required: bool,
        part: str = BLOCKS,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """required: whether a failure raises UsageError. part: names the functions in messages.

        agree: returns whether a value is true on all ranks; None if the decoder blocks do not
        exchange with other ranks.
        """
        self._required = required
        self._part = part
        self._agree = agree
        self._works = True

    @property
    def is_shared(self) -> bool:
        """Return whether decoder blocks exchange with other ranks, and need `wrap_together`."""
        return self._agree is not None

    def for_part(self, part: str) -> Compiler:
        """Return a compiler for another part of the step; that part may run uncompiled."""
        return Compiler(required=False, part=part)

    def wrap(
        self, function: Callable[..., Any], instead: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a function that is compiled at its first call; after a failure, call `instead`."""
        compiled = compile_parts(function)
        instead = instead or function
        is_rehearsed = False

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal is_rehearsed
            if not self._works:
                return instead(*arguments, **named)
            is_training = torch.is_grad_enabled()
            try:
                if is_training and not is_rehearsed:
                    _rehearse_call(compiled, arguments, named)
                    is_rehearsed = True
                return compiled(*arguments, **named)
            except (StageError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # Triton, a compiler or CUDA may raise anything
                cause = error
            if is_training:  # an error that also occurs uncompiled is raised unchanged
                _rehearse_call(instead, arguments, named)
            result = instead(*arguments, **named)
            self._give_up(cause)
            return result

        return call

    def wrap_together(
        self, compiled: Callable[..., Any], instead: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that calls `compiled` on all ranks, or `instead` on all ranks.

        compiled, instead: variants of a function that exchanges with other ranks; all ranks must
        call it in the same order. The first call with or without gradients, and with other sizes of
        the first tensor, is tried without exchanges, and the ranks agree on the outcome. If a
        compiled function fails later, the error is raised, since other ranks may wait for it.
        """
        tried: set[tuple[bool, torch.Size]] = set()

        def call(*arguments: Any, **named: Any) -> Any:
            # Not the sizes of all tensors: masks and boundaries differ between ranks.
            kind = (torch.is_grad_enabled(), list_tensors((arguments, named))[0].shape)
            if self._works and not _is_paused and kind not in tried:
                self._try_together(compiled, instead, arguments, named)
                tried.add(kind)
            return (compiled if self._works else instead)(*arguments, **named)

        return call

    def _try_together(
        self,
        compiled: Callable[..., Any],
        instead: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        """Try a compiled function; give up if it fails on any rank. All ranks must call this."""
        assert self._agree is not None
        cause = None
        with context.rehearsal():
            try:
                _rehearse_call(compiled, arguments, named)
            except (StageError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # Triton, a compiler or CUDA may raise anything
                cause = error
            if cause:  # an error that also occurs uncompiled is raised unchanged
                _rehearse_call(instead, arguments, named)
        if not self._agree(cause is None):
            self._give_up(cause)

    def _give_up(self, error: Exception | None) -> None:
        """Run uncompiled from now on. error: None if only other ranks have one."""
        self._works = False
        reason = "an error on another rank"
        if error:
            cause = getattr(error, "inner_exception", error)
            reason, *_ = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()
        if self._required:
            raise UsageError(
                "the model cannot be compiled here",
                found=reason[:300],
                run=commands.as_typed("--compile", "off"),
            ) from error
        memory = ""
        if self._part == BLOCKS:
            memory = (
                "; uncompiled blocks keep more activations: should memory run out, "
                "--compile off plans for that"
            )
        log.warn(
            f"compile: off for {self._part}, which is slower: compiling failed with "
            f"{reason[:300]}{memory}"
        )


def compile_parts(function: Callable[..., Any], keep_little: bool = False) -> Callable[..., Any]:
    """Return a function that torch compiles for the shapes of its calls.

    What torch.compiler.disable marks in it runs uncompiled; the parts around it are graphs of their
    own. keep_little: recompute all cheap operations in the backward pass.
    """
    options = torch._functorch.config.patch(_AT_ONCE | (_KEEP_LITTLE if keep_little else {}))
    return options(torch.compile(function, dynamic=False))


@contextmanager
def pause_compiling() -> Iterator[None]:
    """Call compiled functions uncompiled inside the context, and try none of them."""
    global _is_paused
    was_paused = _is_paused
    _is_paused = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _is_paused = was_paused


def _rehearse_call(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Run a function forward and backward without changing gradients or random states.

    This finds a backward kernel that does not start. In the backward pass of a step it would be too
    late to fall back, because other layers already have their gradients.
    """
    inputs: list[Tensor] = []

    def detach(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor  # the same object, since the compiler guards on identity
        inputs.append(tensor.detach().requires_grad_())
        return inputs[-1]

    arguments, named = map_tensors(detach, (arguments, named))
    with (
        routers.pause_counting(),
        torch.random.fork_rng({part.device for part in inputs if part.is_cuda}),
    ):
        results = [
            part for part in list_tensors(function(*arguments, **named)) if part.requires_grad
        ]
        if results and inputs:
            torch.autograd.grad(
                results, inputs, [torch.ones_like(part) for part in results], allow_unused=True
            )


def is_compile_on(option: bool | None, device: torch.device) -> bool:
    """Return whether --compile compiles on a device. option: None for auto: only on a GPU."""
    return device.type == "cuda" if option is None else option


def make_compiler(
    option: bool | None,
    device: torch.device,
    layout: ParallelLayout | None = None,
) -> Compiler | None:
    """Return the compiler of the decoder blocks; None if --compile turns compilation off.

    layout: of ranks that may share rows. The compiler's method `for_part` returns the compilers of
    the other parts of a step.
    """
    if not is_compile_on(option, device):
        return None
    _prepare_graphs()
    agree = layout.all_true if layout is not None and layout.context else None
    return Compiler(required=bool(option), agree=agree)


class _LimitReport(logging.Filter):
    """Replaces torch's many warnings about its limit of graphs by one."""

    is_done = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether torch may print a record: False for its warnings about the limit."""
        text = record.getMessage()
        if _LIMIT_REACHED not in text:
            return True
        if not self.is_done:
            self.is_done = True
            limit, function, *_ = [line.strip() for line in text.splitlines()] + [""]
            log.warn(
                "compile: torch reached its limit of graphs for one function, so further "
                f"shapes run uncompiled, which is slower ({limit}, {function})"
            )
        return False


_limit_report = _LimitReport()


def _prepare_graphs() -> None:
    """Raise torch's limit of graphs, and let one graph serve documents of any length.

    When a function reaches the limit, this process logs one warning.
    """
    config = torch.compiler.config
    config.recompile_limit = max(_GRAPH_LIMIT, config.recompile_limit)
    sources = config.dynamic_sources
    if _LENGTHS not in sources.split(","):
        config.dynamic_sources = ",".join(filter(None, (sources, _LENGTHS)))
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(_limit_report)  # later calls add nothing
