"""What torch compiles: the decoder blocks, and the gradient of the output layer's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from lib.core import commands, log
from lib.core.errors import UsageError


class Compiler:
    """Compiles functions for the sizes that they are called with.

    The first failure (no C compiler, an operation that is unknown) is the last: from then on all
    run as they are. It is this rank's alone: the others need not know, since what is compiled waits
    for no other rank. required: raise UsageError instead.
    """

    def __init__(self, required: bool) -> None:
        self._required, self._works = required, True

    def wrap(self, function: Callable[..., Any], instead: Callable[..., Any] | None = None,
             ) -> Callable[..., Any]:
        """Return a function that is compiled when it is first called. instead: if that fails."""
        # Together with the forward pass: one that failed later would have begun already.
        options = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        compiled, instead = options(torch.compile(function, dynamic=False)), instead or function

        def call(*arguments: Any, **named: Any) -> Any:
            if self._works:
                try:
                    return compiled(*arguments, **named)
                except TorchDynamoException as error:
                    self._give_up(error)
            return instead(*arguments, **named)
        return call

    def _give_up(self, error: TorchDynamoException) -> None:
        self._works = False
        cause = getattr(error, "inner_exception", error)
        first, *_ = f"{type(cause).__name__}: {str(cause).strip()}".splitlines()
        if self._required:
            raise UsageError("the model cannot be compiled here", found=first[:300],
                             run=commands.again("--compile", "off")) from error
        log.warn(f"compile: off, which is slower, since the model cannot be compiled here: "
                 f"{first[:300]}")


def is_wanted(option: bool | None, device: torch.device) -> bool:
    """Tell what --compile means on a device; None is auto: on a GPU alone."""
    return device.type == "cuda" if option is None else option


def compiler(option: bool | None, device: torch.device) -> Compiler | None:
    """Return what compiles as --compile asks for it; None to compile nothing."""
    return Compiler(required=bool(option)) if is_wanted(option, device) else None
