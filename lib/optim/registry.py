"""The optimizers there are, over sharded parameters, and the states that each keeps.

A further one is a row of OPTIMIZERS. Nothing here imports torch before an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Groups = list[dict[str, Any]]
Betas = tuple[float, float]
# Returns the first function compiled, or `instead` where it cannot be.
Wrap = Callable[..., Callable[..., None]]


class OptimizerSpec(NamedTuple):
    """Describes an optimizer.

    state_bytes: of its states, per parameter. build: (groups, lr, betas, wrap) → the optimizer,
    which has `new_state(parameter)`, sharded like the parameter but for `step`; where its
    `found_inf` is set, `step()` changes no weight, state or count, and no one waits for the device.
    One with `_step_supports_amp_scaling` divides the gradients by `grad_scale` where that is set.
    block: numbers of a row that have to lie on one rank.
    """

    state_bytes: float
    build: Callable[[Groups, float, Betas, Wrap | None], Optimizer]
    block: int = 1


def _adamw(groups: Groups, lr: float, betas: Betas, wrap: Wrap | None) -> Optimizer:
    from lib.optim.adamw import AdamW

    return AdamW(groups, lr, betas)


def _adamw8bit(groups: Groups, lr: float, betas: Betas, wrap: Wrap | None) -> Optimizer:
    from lib.optim.adamw8bit import AdamW8bit

    return AdamW8bit(groups, lr, betas, wrap)


OPTIMIZERS = {
    "adamw": OptimizerSpec(8.0, _adamw),
    "adamw8bit": OptimizerSpec(2 * (1 + 4 / 256), _adamw8bit, block=256),
}


def build(
    kind: str,
    model: nn.Module,
    lr: float,
    betas: Betas,
    weight_decay: float,
    wrap: Wrap | None = None,
) -> Optimizer:
    """Return an optimizer over the trainable parameters of a sharded model.

    kind: a key of OPTIMIZERS, else KeyError. wrap: compiles what torch has no kernel for; None: it
    runs as it is. Norms and biases (all tensors of one dimension) are not decayed, as in the
    Hugging Face Trainer.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[kind].build([group for group in groups if group["params"]], lr, betas, wrap)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all states but the counts as `<state>.<parameter>`, sharded as the parameters are.

    Frozen parameters have none.

    They are made (zeros) where no step was taken yet.
    """
    from lib.models.sharded import without_padding

    tensors: dict[str, Tensor] = {}
    trained = [named for named in model.named_parameters() if named[1].requires_grad]
    for name, parameter in trained:
        states = optimizer.state[parameter]
        if not states:
            states.update(optimizer.new_state(parameter))
        tensors |= {
            f"{kind}.{name}": without_padding(value, parameter)
            for kind, value in states.items()
            if kind != "step"
        }
    return tensors


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps the optimizer took (fewer than the run's, where some were skipped)."""
    return max((int(states["step"]) for states in optimizer.state.values()), default=0)


def set_steps_taken(optimizer: Optimizer, steps: int) -> None:
    """Let the optimizer's bias correction go on from `steps`."""
    for states in optimizer.state.values():
        states["step"].fill_(steps)
