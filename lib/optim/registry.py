"""Build an optimizer over sharded parameters, by its name, and read and set its states."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lib.models.sharded import group_by_mesh, without_padding
from lib.optim.optimizers import OPTIMIZERS, Wrap


def build_optimizer(
    kind: str, model: nn.Module, lr: float, options: Any = None, wrap: Wrap | None = None
) -> Optimizer:
    """Return an optimizer over the trainable parameters of a sharded model.

    kind: a key of OPTIMIZERS, else KeyError. options: see `read_options`; None for the defaults.
    wrap: compiles an update for which torch has no kernel; None runs it uncompiled.
    """
    spec = OPTIMIZERS[kind]
    options = options or spec.options()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {**group, "params": parameters}
        for group in spec.make_groups(trained, options)
        for parameters in group_by_mesh(group["params"]).values()
    ]
    return _load_module(kind).build(groups, lr, options, wrap)


def as_on_gpu(kind: str) -> AbstractContextManager[None]:
    """Return a context in which a step on the CPU allocates as much as one on a GPU."""
    context = getattr(_load_module(kind), "as_on_gpu", nullcontext)
    return context()


def _load_module(kind: str) -> ModuleType:
    """Return the module of an optimizer, which has its name."""
    return importlib.import_module(f"lib.optim.{kind}")


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state, except step counts, as `<state>.<parameter>`.

    The tensors are sharded like the parameters; frozen parameters have none. If no step was taken
    yet, the state is created with zeros.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        states = optimizer.state[parameter]
        if not states:
            states.update(optimizer.new_state(parameter))
        tensors |= {
            f"{kind}.{name}": without_padding(value, parameter)
            for kind, value in states.items()
            if kind != "step"
        }
    return tensors


def count_steps(optimizer: Optimizer) -> int:
    """Return the number of optimizer steps; skipped steps of the run do not count."""
    return max((int(states["step"]) for states in optimizer.state.values()), default=0)


def set_step_count(optimizer: Optimizer, steps: int) -> None:
    """Set the step count that the bias correction continues from."""
    for states in optimizer.state.values():
        states["step"].fill_(steps)
