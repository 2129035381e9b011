"""AdamW with torch's fused kernel.

With `--optimizer-states bf16`, both moments are stored in bf16. From torch 2.12 on, the
kernel for GPUs reads and writes them in bf16, and computes in float32. Other kernels require
moments of the weight's type, so the moments of one parameter at a time are cast to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lib.optim.optimizers import Groups, MomentOptions, Wrap

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIRST_MIXED = (2, 12)  # version of torch whose kernel for GPUs takes moments in bf16
_CASTING_DEVICES = {"cpu"}  # types of devices whose kernel takes only float32
if torch.torch_version.TorchVersion(torch.__version__) < _FIRST_MIXED:
    _CASTING_DEVICES.add("cuda")


def list_updated(optimizer: Any, group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient, and create states that are missing.

    optimizer: has a method `new_state`.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter].update(optimizer.new_state(parameter))
    return parameters


class AdamW(torch.optim.AdamW):
    """AdamW that can create its state before the first step.

    Build it after sharding, so that `exp_avg` and `exp_avg_sq` are sharded like the weights.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: of the moments."""
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self._dtype = dtype

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter, dtype=self._dtype) for name in _MOMENTS}
        return {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        if self._dtype == torch.float32:
            super().step()
            return
        groups = [(group, list_updated(self, group)) for group in self.param_groups]
        if self.param_groups[0]["params"][0].device.type not in _CASTING_DEVICES:
            super().step()
            return
        for group, parameters in groups:
            for parameter in parameters:
                self._step_cast(parameter, group)

    def _step_cast(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter with float32 copies of its moments."""
        state = self.state[parameter]
        copies = [state[name].float() for name in _MOMENTS]
        beta1, beta2 = group["betas"]
        adamw(
            [parameter],
            [parameter.grad],
            *([copy] for copy in copies),
            [],
            [state["step"]],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, copy in zip(_MOMENTS, copies, strict=True):
            state[name].copy_(copy)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let `AdamW` cast moments on a CPU only if it would on a GPU."""
    if "cuda" not in _CASTING_DEVICES:
        _CASTING_DEVICES.discard("cpu")
    try:
        yield
    finally:
        _CASTING_DEVICES.add("cpu")


def build(groups: Groups, lr: float, options: MomentOptions, wrap: Wrap | None) -> AdamW:
    """Return AdamW over groups of parameters."""
    dtype = torch.bfloat16 if options.optimizer_states == "bf16" else torch.float32
    return AdamW(groups, lr, (options.beta1, options.beta2), dtype)
