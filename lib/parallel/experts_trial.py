"""Choose the function that computes a model's experts: ours, if it gives the same results.

A trial on the model's own weights compares our function with transformers' function, which is used
if the results differ. So no table of model families is needed.
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
from lib.parallel.layout import ParallelLayout, gather
from lib.parallel.trial import trial_batch, trial_mode, trial_tokens

_TOLERANCE = 0.02  # of the norm; different ways of rounding to half precision differ by less

_Forward = Callable[..., Tensor]


def choose_experts_function(model: PreTrainedModel, layout: ParallelLayout) -> str:
    """Keep our function if it agrees with transformers' own; return the choice for the log.

    Returns "" for a model without experts that use transformers' interface. All ranks must call
    this: it runs a forward pass over a row of 16 tokens, computes each layer's experts with both
    functions, and compares the results and the gradients of the inputs. If our function fails on
    one rank, all ranks use transformers' function.
    """
    modules = experts.list_experts_modules(model)
    if not modules:
        return ""
    theirs = model.get_correct_experts_implementation(None)
    if any(module.config._experts_implementation != experts.NAME for module in modules):
        return f"{theirs} of transformers, since the family leaves no choice"
    failures = gather(
        _try_function(model, modules, moe.ALL_EXPERTS_FUNCTIONS[theirs], layout), layout.control
    )
    failure = next(filter(None, failures), "")
    if not failure:
        return f"{experts.NAME}, by grouped products; gradients are gathered, not sorted"
    model.set_experts_implementation(theirs)
    return f"{theirs} of transformers, since {experts.NAME} fails here: {failure}"


def _try_function(
    model: PreTrainedModel, modules: list[nn.Module], theirs: _Forward, layout: ParallelLayout
) -> str:
    """Return why our function cannot be used, or "".

    Failures are caught within the experts of a layer, because the forward pass around them
    exchanges weights with the other ranks and has to finish on every rank.
    """
    failures: list[str] = []
    batch = trial_batch(trial_tokens(model), layout)
    with trial_mode(model), _comparison(modules, theirs, failures):
        model(**attention.make_inputs(model, batch))
    return next(filter(None, failures), "")


@contextmanager
def _comparison(modules: list[nn.Module], theirs: _Forward, failures: list[str]) -> Iterator[None]:
    """Let each module compute with both functions within this context, and collect failures."""
    for module in modules:
        module.forward = partial(_compare_results, module, theirs, failures)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _compare_results(
    module: nn.Module, theirs: _Forward, failures: list[str], *inputs: Tensor
) -> Tensor:
    """Return the result of transformers' function; append to `failures` why ours failed, or ""."""
    expected = _run_backward(theirs, module, *inputs)
    try:
        results = _run_backward(experts.experts_forward, module, *inputs)
        largest = max(
            _compute_difference(one, other) for one, other in zip(results, expected, strict=True)
        )
        failures.append(f"its results differ by {largest:.2g} of their norm" if largest else "")
    except (RuntimeError, TypeError, AttributeError, IndexError, ValueError) as error:
        first, *_ = str(error).splitlines() or [""]
        failures.append(f"{type(error).__name__}: {first[:200]}")
    return expected[0]


def _compute_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the difference relative to the norm; 0 if rounding explains it."""
    difference = (actual.float() - expected.float()).norm()
    norm = expected.float().norm()
    # If transformers' numbers are NaN or infinite, the function is not the cause.
    if difference <= _TOLERANCE * norm or not norm.isfinite():
        return 0.0
    return (difference / norm).nan_to_num(torch.inf).item()


def _run_backward(
    function: _Forward,
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> list[Tensor]:
    """Return the result of a function, and the gradients of the module's inputs and biases.

    Gradients of the weights are left out: they would take the memory of all experts of a layer.
    """
    inputs = [part.detach().requires_grad_() for part in (hidden_states, top_k_weights)]
    biases = [p for p in module.parameters(recurse=False) if p.ndim == 2 and p.requires_grad]
    with torch.enable_grad():
        out = function(module, inputs[0], top_k_index, inputs[1])
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs + biases)]
