"""List the optimizers, and build one over sharded parameters.

To add an optimizer, add a row to OPTIMIZERS. This module imports torch only when it builds one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Groups = list[dict[str, Any]]
Betas = tuple[float, float]
# Returns the compiled function, or its argument `instead` if it cannot be compiled.
Wrap = Callable[..., Callable[..., None]]


class OptimizerSpec(NamedTuple):
    """The properties of an optimizer that other rooms need.

    state_bytes: size of its state per parameter. build: (groups, lr, betas, wrap) → the optimizer.
    block: numbers of a row that must be on the same rank.

    An optimizer has a method `new_state(parameter)`, whose tensors (except `step`) are sharded like
    the parameter. If its `found_inf` is set, `step()` changes no weight, state or count, and does
    not wait for the device. If it has `_step_supports_amp_scaling`, it divides the gradients by
    `grad_scale` if that is set.
    """

    state_bytes: float
    build: Callable[[Groups, float, Betas, Wrap | None], Optimizer]
    block: int = 1


def _build_adamw(groups: Groups, lr: float, betas: Betas, wrap: Wrap | None) -> Optimizer:
    from lib.optim.adamw import AdamW

    return AdamW(groups, lr, betas)


def _build_adamw8bit(groups: Groups, lr: float, betas: Betas, wrap: Wrap | None) -> Optimizer:
    from lib.optim.adamw8bit import AdamW8bit

    return AdamW8bit(groups, lr, betas, wrap)


OPTIMIZERS = {
    "adamw": OptimizerSpec(8.0, _build_adamw),
    "adamw8bit": OptimizerSpec(2 * (1 + 4 / 256), _build_adamw8bit, block=256),
}


def build_optimizer(
    kind: str,
    model: nn.Module,
    lr: float,
    betas: Betas,
    weight_decay: float,
    wrap: Wrap | None = None,
) -> Optimizer:
    """Return an optimizer over the trainable parameters of a sharded model.

    kind: a key of OPTIMIZERS, else KeyError. wrap: compiles an update for which torch has no
    kernel; None runs it uncompiled. Norms and biases (all one-dimensional tensors) get no weight
    decay, as in the Hugging Face Trainer.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[kind].build([group for group in groups if group["params"]], lr, betas, wrap)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state, except step counts, as `<state>.<parameter>`.

    The tensors are sharded like the parameters; frozen parameters have none. If no step was taken
    yet, the state is created with zeros.
    """
    from lib.models.sharded import without_padding

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
    """Return the number of optimizer steps, which is below the run's if steps were skipped."""
    return max((int(states["step"]) for states in optimizer.state.values()), default=0)


def set_step_count(optimizer: Optimizer, steps: int) -> None:
    """Set the step count that the bias correction continues from."""
    for states in optimizer.state.values():
        states["step"].fill_(steps)
