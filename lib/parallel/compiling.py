"""What torch compiles: the decoder blocks, and the gradient of the output layer's logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lib.core import commands, log
from lib.core.errors import StageError, UsageError

# Where blocks recompute selectively, torch asks that they change nothing in place, which
# parallelize.py sees to.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage())


class Compiler:
    """Compiles functions for the sizes that they are called with.

    The first failure (no C compiler, an operation that is unknown, a kernel that does not start) is
    the last: from then on all run as they are. It is this rank's alone: the others need not know,
    since what is compiled waits for no other rank. required: raise UsageError instead.
    """

    def __init__(self, required: bool) -> None:
        self._required, self._works = required, True

    def wrap(self, function: Callable[..., Any], instead: Callable[..., Any] | None = None,
             ) -> Callable[..., Any]:
        """Return a function that is compiled when it is first called. instead: if that fails."""
        # Together with the forward pass: one that failed later would have begun already.
        options = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        compiled, instead = options(torch.compile(function, dynamic=False)), instead or function
        rehearsed = False

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal rehearsed
            if not self._works:
                return instead(*arguments, **named)
            trained = torch.is_grad_enabled()
            try:
                if trained and not rehearsed:
                    _rehearse(compiled, arguments, named)
                    rehearsed = True
                return compiled(*arguments, **named)
            except (StageError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever triton, a compiler or CUDA raises
                cause = error
            if trained:  # what fails without the compiler too is raised as it is
                _rehearse(instead, arguments, named)
            result = instead(*arguments, **named)
            self._give_up(cause)
            return result
        return call

    def _give_up(self, error: Exception) -> None:
        self._works = False
        cause = getattr(error, "inner_exception", error)
        first, *_ = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()
        if self._required:
            raise UsageError("the model cannot be compiled here", found=first[:300],
                             run=commands.as_typed("--compile", "off")) from error
        log.warn("compile: off, which is slower and keeps more activations, since the model cannot "
                 f"be compiled here: {first[:300]}; should memory run out, --compile off plans for "
                 "that")


def _rehearse(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any],
              ) -> None:
    """Go through a function forward and backward, without a trace in gradients or random states.

    A kernel of the backward pass that does not start would otherwise show when it is too late to do
    without: other layers have their gradients by then.
    """
    inputs: list[Tensor] = []

    def apart(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value  # the same object, by which the compiler knows what it has seen
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    arguments, named = tree_map(apart, (arguments, named))
    with torch.random.fork_rng({part.device for part in inputs if part.is_cuda}):
        results = [part for part in tree_leaves(function(*arguments, **named))
                   if isinstance(part, Tensor) and part.requires_grad]
        if results and inputs:
            torch.autograd.grad(results, inputs, [torch.ones_like(part) for part in results],
                                allow_unused=True)


def is_wanted(option: bool | None, device: torch.device) -> bool:
    """Tell what --compile means on a device; None is auto: on a GPU alone."""
    return device.type == "cuda" if option is None else option


def make_compiler(option: bool | None, device: torch.device) -> Compiler | None:
    """Return what compiles as --compile asks for it; None to compile nothing."""
    return Compiler(required=bool(option)) if is_wanted(option, device) else None
