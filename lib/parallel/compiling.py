"""What torch compiles: the decoder blocks, the loss, and the update of an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lib.core import commands, log
from lib.core.errors import StageError, UsageError
from lib.parallel import graphs, routers

# Where blocks recompute selectively, torch asks that they change nothing in place, which
# parallelize.py sees to.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)

BLOCKS = "the decoder blocks"


class Compiler:
    """Compiles functions for the sizes that they are called with.

    After the first failure (no C compiler, an operation that is unknown, a kernel that does not
    start), all functions of this compiler run uncompiled, and those of other compilers stay
    compiled. The failure concerns this rank alone: the others need not know, since no compiled
    function waits for another rank.
    """

    def __init__(self, required: bool, part: str = BLOCKS) -> None:
        """required: raise UsageError at a failure. part: names the functions in messages."""
        self._required = required
        self._part = part
        self._works = True

    def for_part(self, part: str) -> Compiler:
        """Return a compiler for another part of the step, which may also run uncompiled."""
        return Compiler(required=False, part=part)

    def wrap(
        self, function: Callable[..., Any], instead: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a function that is compiled when it is first called. instead: if that fails."""
        # Together with the forward pass: one that failed later would have begun already.
        options = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        compiled = options(torch.compile(function, dynamic=False))
        instead = instead or function
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
            raise UsageError(
                "the model cannot be compiled here",
                found=first[:300],
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
            f"{first[:300]}{memory}"
        )


def _rehearse(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
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
    with routers.paused(), torch.random.fork_rng({part.device for part in inputs if part.is_cuda}):
        results = [
            part
            for part in tree_leaves(function(*arguments, **named))
            if isinstance(part, Tensor) and part.requires_grad
        ]
        if results and inputs:
            torch.autograd.grad(
                results, inputs, [torch.ones_like(part) for part in results], allow_unused=True
            )


def is_wanted(option: bool | None, device: torch.device) -> bool:
    """Tell what --compile means on a device; None is auto: on a GPU alone."""
    return device.type == "cuda" if option is None else option


def make_compiler(option: bool | None, device: torch.device) -> Compiler | None:
    """Return the compiler of the decoder blocks as --compile asks for it; None: compile nothing.

    The other parts of a step get compilers of their own from it, by `for_part`.
    """
    if not is_wanted(option, device):
        return None
    graphs.prepare()
    return Compiler(required=bool(option))
