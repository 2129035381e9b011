# covers: lib/optim/registry.py, lib/optim/optimizers.py, lib/optim/guard.py
"""Weight decay, gradient clipping as by torch, skipped steps, and the loss scale of fp16."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lib.optim.guard import StepGuard
from lib.optim.optimizers import OPTIMIZERS, Choice, MomentOptions
from lib.optim.registry import build_optimizer, named_states, set_learning_rate
from lib.train.output.rows import LossWindow
from tests.conftest import ROOT


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def fill_gradients(model: nn.Module, scale: float = 1.0) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale


def build_guard(model: nn.Module, precision: str) -> tuple[StepGuard, torch.optim.Optimizer]:
    """Return a guard and an AdamW for the model."""
    guard = StepGuard(precision, 30.0, torch.device("cpu"))
    return guard, build_optimizer("adamw", model, 1e-2)


def copy_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the gradients that exist."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_matrices_decay_and_vectors_do_not(model: nn.Module) -> None:
    model[3].weight.requires_grad_(False)
    decayed, plain = build_optimizer("adamw", model, 1e-3).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[1].weight)}
    assert {id(p) for p in plain["params"]} == {
        id(model[1].bias),
        id(model[2].weight),
        id(model[2].bias),
        id(model[3].bias),
    }


def test_no_other_room_names_an_optimizer() -> None:
    """`OptimizerSpec` contains all that differs between optimizers."""
    names = re.compile(rf"\b({'|'.join(OPTIMIZERS)})\b")
    files = [*ROOT.glob("0*.py"), *(ROOT / "lib").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
    assert not [
        path
        for path in files
        if path.parent.name != "optim" and names.search(path.read_text("utf-8"))
    ]


@pytest.mark.parametrize(
    "chosen",
    [*map(Choice, OPTIMIZERS), Choice("adamw", MomentOptions(optimizer_states="bf16"))],
    ids=str,
)
def test_state_bytes_are_those_of_the_states(chosen: Choice) -> None:
    shapes = (64, 1024), (10, 300), (6, 4, 64), (1024,), (7,)
    model = nn.ParameterList(torch.randn(shape) for shape in shapes)
    states = named_states(model, build_optimizer(chosen.name, model, 1e-3, chosen.options))
    for name, parameter in model.named_parameters():
        size = sum(tensor.nbytes for key, tensor in states.items() if key.endswith(f".{name}"))
        assert size == chosen.state_bytes(name, parameter.shape)


def test_tied_weights_are_updated_once(model: nn.Module) -> None:
    tied = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    tied[1].weight = tied[0].weight
    groups = build_optimizer("adamw", tied, 1e-3).param_groups
    assert len(groups) == 1 and len(groups[0]["params"]) == 1


def test_a_step_follows_the_formula_of_adamw(model: nn.Module) -> None:
    """One AdamW step from zero moments is lr·sign(g), beside lr·decay·w for matrices."""
    optimizer = build_optimizer("adamw", model, 1.0)
    set_learning_rate(optimizer, 1e-2)
    before = copy.deepcopy(model)
    fill_gradients(model)
    optimizer.step()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        decay = 0.1 if old.ndim >= 2 else 0.0
        expected = old * (1 - 1e-2 * decay) - 1e-2 * new.grad.sign()
        torch.testing.assert_close(new, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_clipping_equals_that_of_torch(model: nn.Module, max_norm: float, precision: str) -> None:
    reference = copy.deepcopy(model)
    fill_gradients(reference)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    guard, optimizer = build_guard(model, precision)
    fill_gradients(model, guard.scale)
    norm = guard.clip(optimizer, max_norm, guard.scale_for(1))
    assert guard.count_skipped().tolist() == [0, 0, 0]
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(copy_gradients(model), copy_gradients(reference))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_without_a_limit_gradients_stay_unchanged(model: nn.Module, precision: str) -> None:
    fill_gradients(model)
    expected = copy_gradients(model)
    guard, optimizer = build_guard(model, precision)
    fill_gradients(model, guard.scale)
    norm = guard.clip(optimizer, 0, guard.scale_for(1))
    assert norm.item() == pytest.approx(torch.cat([g.ravel() for g in expected]).norm().item())
    torch.testing.assert_close(copy_gradients(model), expected)


@pytest.mark.parametrize("max_norm", [0, 0.5, 1e6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_the_optimizer_may_scale_the_gradients(
    model: nn.Module, kind: str, precision: str, max_norm: float
) -> None:
    """The weights are the same as when `clip` scales them, with a skipped step in between."""
    model[3].weight.requires_grad_(False)
    models = model, copy.deepcopy(model)
    guards = [StepGuard(precision, 30.0, torch.device("cpu"), fold=fold) for fold in (False, True)]
    optimizers = [build_optimizer(kind, m, 1e-2) for m in models]
    for step in range(5):
        norms = []
        for m, guard, optimizer in zip(models, guards, optimizers, strict=True):
            scaled = guard.scale_for(1000)
            fill_gradients(m, scaled.loss * (step + 1) * 100)
            m[3].weight.grad = None
            if step == 2:
                m[1].bias.grad[0] = float("inf")
            before = copy_gradients(m)
            norms.append(guard.clip(optimizer, max_norm, scaled))
            if guard is guards[1]:
                torch.testing.assert_close(copy_gradients(m), before, rtol=0, atol=0)
            optimizer.step()
        assert torch.equal(*norms) and torch.isfinite(norms[0]) == (step != 2)
    assert guards[0].state() == guards[1].state() and guards[1].count_skipped().tolist() == [
        1,
        0,
        0,
    ]
    assert optimizers[0].grad_scale is None and optimizers[1].grad_scale is not None
    actual, expected = (torch.cat([p.detach().ravel() for p in m.parameters()]) for m in models)
    if kind == "adamw":
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:  # another rounding of a gradient may move an 8-bit moment by a whole code
        assert (actual - expected).abs().mean() < 1e-5


def test_all_threads_compute_the_norm_of_large_gradients() -> None:
    """With one thread, torch also loses digits: the sum of squares is a single float32."""
    guard = StepGuard("fp32", 0.0, torch.device("cpu"), fold=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(5_000_001)) for _ in range(2)])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 1e-3)
    expected = 1e-3 * 10_000_002**0.5
    norm = guard.clip(optimizer, 0.0, guard.scale_for(1))
    assert norm.item() == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_that_cannot_scale_gets_scaled_gradients(model: nn.Module) -> None:
    """An optimizer that ignores `grad_scale` would take unclipped steps."""
    guard = StepGuard("fp32", 0.0, torch.device("cpu"), fold=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    fill_gradients(model, 100.0)
    guard.clip(optimizer, 0.5, guard.scale_for(1))
    assert optimizer.grad_scale is None
    assert nn.utils.get_total_norm(copy_gradients(model)).item() == pytest.approx(0.5, rel=1e-4)


def test_gradients_that_need_no_scaling_get_none(model: nn.Module) -> None:
    guard = StepGuard("fp32", 0.0, torch.device("cpu"), fold=True)
    optimizer = build_optimizer("adamw", model, 1e-2)
    fill_gradients(model)
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    assert optimizer.grad_scale is not None
    guard.clip(optimizer, 0, guard.scale_for(1))
    assert optimizer.grad_scale is None


def test_parameters_without_a_gradient_are_not_updated(model: nn.Module) -> None:
    fill_gradients(model)
    model[3].weight.grad = None
    guard, optimizer = build_guard(model, "fp32")
    norm = guard.clip(optimizer, 1.0, guard.scale_for(1))
    assert torch.isfinite(norm) and model[3].weight.grad is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_with_nan_or_infinite_gradients_changes_nothing(
    model: nn.Module, precision: str, value: float
) -> None:
    guard, optimizer = build_guard(model, precision)
    fill_gradients(model, guard.scale)
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    optimizer.step()
    weights = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    for _ in range(2):
        fill_gradients(model)
        model[1].bias.grad[0] = value
        assert not torch.isfinite(guard.clip(optimizer, 1.0, guard.scale_for(1)))
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    assert guard.count_skipped().tolist() == [2, 0, 2]
    fill_gradients(model, guard.scale)
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    optimizer.step()
    assert guard.count_skipped().tolist() == [0, 0, 0] and torch.isfinite(model[1].bias).all()
    assert not torch.equal(model[1].bias, weights["1.bias"])


def test_an_overflow_halves_the_scale(model: nn.Module) -> None:
    guard, optimizer = build_guard(model, "fp16")
    assert guard.scale == 2**16
    for expected in (2**15, 2**14):
        fill_gradients(model)
        model[1].bias.grad[0] = float("inf")
        guard.clip(optimizer, 1.0, guard.scale_for(1))
        assert (guard.scale, guard.good_steps) == (expected, 0)
    guard.scale = 1.0
    guard.clip(optimizer, 1.0, guard.scale_for(1))
    assert guard.scale == 1.0


def test_the_scale_grows_after_enough_good_steps_in_a_row(model: nn.Module) -> None:
    guard, optimizer = build_guard(model, "fp16")
    guard.grow_every = 3
    scales = []
    for step in range(9):
        fill_gradients(model, guard.scale)
        if step == 1:
            model[1].bias.grad[0] = float("inf")
        norm = guard.clip(optimizer, 1.0, guard.scale_for(1))
        scales.append(guard.scale / 2**16)
    assert scales == [1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 2]
    reference = copy.deepcopy(model)
    fill_gradients(reference)
    assert norm.item() == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    )


def test_a_resumed_run_restores_the_loss_scale(model: nn.Module) -> None:
    (guard, _) = build_guard(model, "fp16")
    (resumed, _) = build_guard(model, "fp16")
    guard.scale = 512.0
    guard.good_steps = 7
    resumed.restore(guard.state())
    assert (resumed.scale, resumed.good_steps) == (512.0, 7)
    assert build_guard(model, "bf16")[0].scale == build_guard(model, "fp32")[0].scale == 1.0


def test_more_ranks_scale_the_loss_up_in_narrow_precisions(model: nn.Module) -> None:
    """The factor is a power of two, which cancels in the update."""
    for precision, lifted in (("fp16", 4), ("fp8", 4), ("bf16", 1), ("fp32", 1)):
        alone, many = (StepGuard(precision, 30.0, torch.device("cpu"), ranks) for ranks in (1, 6))
        scales = [guard.scale_for(1000) for guard in (alone, many)]
        assert scales[1].loss == lifted * scales[0].loss
        norms = []
        for guard, scaled in zip((alone, many), scales, strict=True):
            fill_gradients(model, scaled.loss)
            optimizer = build_optimizer("adamw", model, 1e-2)
            norms.append(guard.clip(optimizer, 1.0, scaled).item())
        assert norms[0] == norms[1] and alone.state() == many.state()


def test_a_step_without_trained_tokens_produces_no_nan(model: nn.Module) -> None:
    """A sample cut from conversations may contain no trained token."""
    guard, optimizer = build_guard(model, "fp32")
    assert guard.scale_for(0) == guard.scale_for(1)
    fill_gradients(model, 0.0)
    assert guard.clip(optimizer, 1.0, guard.scale_for(1)) == 0
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    here = SimpleNamespace(device=torch.device("cpu"), ranks=1, dp_size=1)
    window = LossWindow(here)
    window.add(torch.zeros(()))
    window.end_step(0, 0)
    captured = window.capture()
    assert captured.means(*captured.sums.tolist()) == (0, 0) and captured.tokens_per_step == 0
