# covers: lib/optim/adamw.py
"""Moments in bf16: their rounding, skipped steps, and what a GPU's kernel gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lib.optim import adamw
from lib.optim.optimizers import MomentOptions
from lib.optim.registry import build_optimizer, count_steps, named_states

STEPS = 4


def build(model: nn.Module, precision: str) -> torch.optim.Optimizer:
    return build_optimizer("adamw", model, 1e-2, MomentOptions(optimizer_states=precision))


def gradient(step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def test_moments_are_rounded_after_each_step() -> None:
    """A step equals that of float32 on moments that were rounded to bf16."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 6, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build(models[0], "bf16"), build(models[1], "fp32")]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad = gradient(step)
            optimizer.step()
        assert torch.equal(models[0].weight, models[1].weight)
        for moment in ("exp_avg", "exp_avg_sq"):
            exact = optimizers[1].state[models[1].weight][moment]
            exact.copy_(exact.bfloat16())
            rounded = optimizers[0].state[models[0].weight][moment]
            assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.float(), exact)
    assert count_steps(optimizers[0]) == STEPS


def test_a_skipped_step_changes_nothing() -> None:
    model = nn.Linear(8, 6, bias=False)
    optimizer = build(model, "bf16")
    for step in range(STEPS):
        model.weight.grad = gradient(step)
        optimizer.step()
    before = [model.weight.clone(), *(t.clone() for t in named_states(model, optimizer).values())]
    optimizer.found_inf = torch.ones(())
    model.weight.grad = torch.full((6, 8), torch.inf)
    optimizer.step()
    after = [model.weight, *named_states(model, optimizer).values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert count_steps(optimizer) == STEPS


def test_a_gpu_casts_no_moments() -> None:
    """Its kernel gets them in bf16; here, a CPU's kernel refuses them."""
    model = nn.Linear(8, 6, bias=False)
    optimizer = build(model, "bf16")
    model.weight.grad = gradient(0)
    with adamw.as_on_gpu(), pytest.raises(RuntimeError, match="BFloat16"):
        optimizer.step()
    optimizer.step()
