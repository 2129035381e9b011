"""Which function computes a model's experts: the pipeline's own where it gives the same numbers.

It is tried on the model's own weights, beside the function of transformers that would compute them
otherwise, and not looked up by family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from lib.parallel import attention, experts
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import trial
from lib.tokens.batches import MicroBatch

_LENGTH = 16  # tokens of the row that experts are tried on
_NOISE = 0.02  # of the norm: more than two ways of rounding in half precision

_Forward = Callable[..., Tensor]


def pick_function(model: PreTrainedModel, layout: ParallelLayout) -> str:
    """Keep the pipeline's own function if it agrees with transformers'; return which is used, why.

    Empty for a model without experts that transformers' interface knows. All ranks must call this:
    one forward pass over a row of 16 tokens, through each layer's experts both ways, and back to
    what they are given.
    """
    found = experts.experts_modules(model)
    if not found:
        return ""
    theirs = model.get_correct_experts_implementation(None)
    if any(module.config._experts_implementation != experts.NAME for module in found):
        return f"{theirs} of transformers, since the family leaves no choice"
    failure = _try(model, found, moe.ALL_EXPERTS_FUNCTIONS[theirs], layout.device)
    if not failure:
        return f"{experts.NAME}, by grouped products; gradients are gathered, not sorted"
    model.set_experts_implementation(theirs)
    return f"{theirs} of transformers, since {experts.NAME} fails here: {failure}"


def _try(model: PreTrainedModel, found: list[nn.Module], theirs: _Forward, device: torch.device,
         ) -> str:
    """Return what is wrong with the pipeline's own function; empty if nothing is."""
    differences: list[float] = []
    generator = torch.Generator().manual_seed(0)  # not the state that dropout goes on from
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (1, _LENGTH),
                           generator=generator)
    batch = MicroBatch(tokens, tokens).to(device)
    try:
        with trial(model), _compared(found, theirs, differences):
            model(**attention.make_inputs(model, batch))
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        first, *_ = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {first[:200]}"
    worst = max(differences, default=0.0)
    return "" if worst < _NOISE else f"its results differ by {worst:.2g} of their norm"


@contextmanager
def _compared(found: list[nn.Module], theirs: _Forward, differences: list[float],
              ) -> Iterator[None]:
    """Let each module compute both ways for the while, and note by how much they differ."""
    for module in found:
        module.forward = partial(_compare, module, theirs, differences)
    try:
        yield
    finally:
        for module in found:
            del module.forward


def _compare(module: nn.Module, theirs: _Forward, differences: list[float], *given: Tensor,
             ) -> Tensor:
    """Return what transformers' function does, having noted how far the pipeline's own is off."""
    expected, results = (_computed(function, module, *given)
                         for function in (theirs, experts.experts_forward))
    for one, other in zip(results, expected, strict=True):
        difference, norm = (one.float() - other.float()).norm(), other.float().norm()
        # If transformers' numbers are NaN or infinite, the function is not the cause.
        same = difference <= _NOISE * norm or not norm.isfinite()
        differences.append(0.0 if same else (difference / norm).nan_to_num(torch.inf).item())
    return expected[0]


def _computed(function: _Forward, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor,
              top_k_weights: Tensor) -> list[Tensor]:
    """Return what a function makes of a module's input, and the gradients: of that and the biases.

    The gradients of the weights would take the memory of all of a layer's experts.
    """
    inputs = [part.detach().requires_grad_() for part in (hidden_states, top_k_weights)]
    biases = [p for p in module.parameters(recurse=False) if p.ndim == 2 and p.requires_grad]
    with torch.enable_grad():
        out = function(module, inputs[0], top_k_index, inputs[1])
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs + biases)]
