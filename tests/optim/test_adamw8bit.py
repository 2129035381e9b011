# covers: lib/optim/adamw8bit.py, lib/optim/registry.py, lib/optim/guard.py
"""8-bit moments train as well as float32 ones, in a quarter of the memory and on any shards."""

from __future__ import annotations

import copy
import functools
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from lib.optim import adamw8bit, registry
from lib.optim.adamw8bit import AdamW8bit, step_scalars
from lib.optim.guard import StepGuard
from lib.parallel import compiling

BETAS = (0.9, 0.95)


def model_of(*shapes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList(torch.randn(shape) for shape in shapes)


def build_optimizer(
    model: nn.Module, kind: str = "adamw8bit", lr: float = 1e-2
) -> torch.optim.Optimizer:
    return registry.build_optimizer(kind, model, lr)


def fill_gradients(model: nn.Module, seed: int) -> None:
    """Draw gradients whose size differs a thousandfold between numbers of a row."""
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 10 ** torch.linspace(-4, -1, p.numel()).reshape(p.shape)


def copy_tensors(model: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all parameters and optimizer states by name."""
    tensors = registry.named_states(model, adamw) | dict(model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_states_of_matrices_take_a_quarter_of_the_memory() -> None:
    model = model_of((64, 1024), (10, 300), (6, 4, 64), (1024,))
    sizes = {
        kind: {
            name: tensor.nbytes
            for name, tensor in registry.named_states(model, build_optimizer(model, kind)).items()
        }
        for kind in ("adamw", "adamw8bit")
    }
    for i, ratio in ((0, 1 / 4), (1, 1 / 4), (2, 1 / 4), (3, 1)):
        old, new = (
            sum(size for name, size in sizes[kind].items() if name.endswith(f".{i}"))
            for kind in sizes
        )
        assert new == pytest.approx(ratio * old, rel=0.03)


def test_the_first_step_equals_that_of_adamw() -> None:
    """The update uses the new moments before they are rounded."""
    model = model_of((16, 256), (3, 2, 7), (5, 300), (9,))
    reference = copy.deepcopy(model)
    for m, kind in ((model, "adamw8bit"), (reference, "adamw")):
        fill_gradients(m, 1)
        build_optimizer(m, kind).step()
    torch.testing.assert_close(list(model), list(reference), rtol=1e-5, atol=1e-7)


def test_it_reaches_the_loss_of_adamw() -> None:
    """A network of two layers fits noise with similar losses."""
    torch.manual_seed(0)
    inputs = torch.randn(128, 64)
    targets = torch.randn(128, 8)
    start = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 8))
    losses: dict[str, list[float]] = {"adamw": [], "adamw8bit": []}
    for kind, curve in losses.items():
        model = copy.deepcopy(start)
        adamw = build_optimizer(model, kind, lr=1e-3)
        for _ in range(80):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            curve.append(loss.item())
    assert losses["adamw"][-1] < 0.2 * losses["adamw"][0]
    assert losses["adamw8bit"] == pytest.approx(losses["adamw"], rel=0.05)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(steps: int, value: float) -> None:
    model = model_of((4, 300), (7,))
    adamw = build_optimizer(model)
    for seed in range(steps):
        fill_gradients(model, seed)
        adamw.step()
    before = copy_tensors(model, adamw)
    count = registry.count_steps(adamw)
    fill_gradients(model, 9)
    model[0].grad[1, 2] = model[1].grad[3] = value
    guard = StepGuard("fp32", 0.0, torch.device("cpu"))
    guard.clip(adamw, 1.0, guard.scale_for(1))
    adamw.step()
    torch.testing.assert_close(copy_tensors(model, adamw), before, rtol=0, atol=0)
    assert registry.count_steps(adamw) == count == steps
    fill_gradients(model, 9)
    guard.clip(adamw, 1.0, guard.scale_for(1))
    adamw.step()
    after = copy_tensors(model, adamw)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not torch.equal(after["0"], before["0"])


def test_an_update_does_not_depend_on_how_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one tensor and in three shards, updated in slices, get the same bits."""
    unsplit = model_of((7, 600))
    parts = model_of((7, 600))
    monkeypatch.setitem(adamw8bit.SLICE_NUMBERS, "cpu", 1300)  # two rows
    shards = nn.ParameterList(
        [
            parts[0][:3].detach().clone(),
            parts[0][3:].detach().clone(),
            parts[0][7:].detach().clone(),
        ]
    )  # the last rank has no row
    whole_optimizer = build_optimizer(unsplit)
    shard_optimizer = build_optimizer(shards)
    for seed in range(5):
        fill_gradients(unsplit, seed)
        for shard, gradient in zip(shards, unsplit[0].grad.split((3, 4, 0)), strict=True):
            shard.grad = gradient.clone()
        whole_optimizer.step()
        shard_optimizer.step()
    assert torch.equal(unsplit[0], torch.cat(list(shards)))
    for moment in ("exp_avg", "exp_avg_scale", "exp_avg_root", "exp_avg_root_scale"):
        joined = torch.cat([shard_optimizer.state[shard][moment] for shard in shards])
        assert torch.equal(whole_optimizer.state[unsplit[0]][moment], joined)


def test_small_changes_are_not_lost_in_rounding() -> None:
    """A root decays by 2.5 % per step although neighbouring codes are 6 to 12 % apart.

    The first number of the block stays large, so that the scale hardly changes.
    """
    model = nn.ParameterList([torch.ones(1, 256)])
    adamw = build_optimizer(model, lr=0.0)
    first = torch.linspace(0.3, 0.6, 256)[None]
    for step in range(101):
        model[0].grad = first.clone() if step == 0 else torch.zeros_like(first)
        model[0].grad[0, 0] = 1.0
        adamw.step()
    state = adamw.state[model[0]]
    root = adamw8bit._decode_moment([state["exp_avg_root"], state["exp_avg_root_scale"]])[0]
    assert root[0].item() == pytest.approx((1 - 0.95**101) ** 0.5, rel=0.1)
    ratios = root[1:] / (first[0, 1:] * (0.05 * 0.95**100) ** 0.5)
    assert ratios.median().item() == pytest.approx(1, rel=0.2)
    assert ratios.min() > 0.5 and ratios.max() < 2


def test_tiny_and_huge_gradients_leave_finite_states() -> None:
    model = model_of((2, 256))
    adamw: AdamW8bit = build_optimizer(model)
    for scale in (1e-25, 1e15, 0.0, 1.0):
        model[0].grad = torch.randn(2, 256) * scale
        adamw.step()
        assert all(
            t.isfinite().all() for t in copy_tensors(model, adamw).values() if t.is_floating_point()
        )
        assert adamw8bit._decode_moment(list(adamw.state[model[0]].values())[1:3]).isfinite().all()


def test_scalars_are_computed_once_per_group_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count_calls(group: dict, counts: Tensor) -> Tensor:
        calls.append(len(counts))
        return step_scalars(group, counts)

    monkeypatch.setattr(adamw8bit, "step_scalars", count_calls)
    model = model_of((4, 300), (8, 256), (3, 2, 7), (9,), (7,))
    adamw = build_optimizer(model)
    for seed in range(3):
        fill_gradients(model, seed)
        adamw.step()
    assert calls == [3, 2] * 3


def test_scalars_in_a_batch_equal_those_of_one_parameter() -> None:
    """A processor computes many powers at once in another way than a single one."""
    counts = torch.arange(1, 3001, 7).float()
    for group in (
        {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        {"lr": 1e-3, "betas": (0.8, 0.999), "weight_decay": 0.0},
    ):
        one_by_one = torch.cat([step_scalars(group, count[None]) for count in counts])
        assert torch.equal(step_scalars(group, counts), one_by_one)
    rows = step_scalars(group, counts)
    assert rows.data_ptr() % 16 == rows[1].data_ptr() % 16 == 0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bias_correction_uses_the_step_count_of_each_parameter(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter without a gradient in the first steps has taken fewer steps."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    wrap = compiling.make_compiler(True, torch.device("cpu")).wrap if compiled else None
    both = model_of((4, 256), (8, 256))
    late = model_of((4, 256), (8, 256))[1:]
    ours, theirs = (registry.build_optimizer("adamw8bit", m, 1e-2, wrap=wrap) for m in (both, late))
    for seed in range(5):
        fill_gradients(both, seed)
        if seed < 3:
            both[1].grad = None
        else:
            late[0].grad = both[1].grad.clone()
            theirs.step()
        ours.step()
    assert [ours.state[p]["step"].item() for p in both] == [5, 2]
    assert torch.equal(both[1], late[0])


@functools.cache
def trace_update(settings: adamw8bit._Settings) -> list[tuple[str, Tensor]]:
    """Return the operations of a matrix update as the compiler sees them, and their results."""
    nodes: list[torch.fx.Node] = []

    def keep(graph: torch.fx.GraphModule, _: object):
        nodes.extend(graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    scalars = step_scalars({"lr": 1e-2, "betas": BETAS, "weight_decay": 0.1}, torch.ones(1))[0]
    numbers = [torch.ones(8, 256), torch.ones(8, 256)]
    moments = [torch.zeros(8, 256, dtype=torch.uint8), torch.ones(8, 1)] * 2
    torch.compile(adamw8bit._apply_step, backend=aot_autograd(fw_compiler=keep), dynamic=False)(
        settings, scalars, torch.tensor(False), None, *numbers, *(t.clone() for t in moments)
    )
    return [
        (str(node.target), node.meta["val"])
        for node in nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    ]


def test_compiled_updates_compute_no_powers() -> None:
    """The kernel would repeat them, and other float64 operations, for each number."""
    settings = adamw8bit._Settings(*BETAS, 1e-8, use_integers=False)
    operations = trace_update(settings)
    assert len(operations) > 20
    assert not [name for name, result in operations if "pow" in name and result.ndim == 0]
    assert not [name for name, result in operations if result.dtype == torch.float64]


def test_old_gpus_get_kernels_without_8bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton casts to e4m3 from compute capability 8.9 on."""
    group = {"betas": BETAS, "eps": 1e-8}
    for capability, use_integers in (
        ((8, 0), True),
        ((8, 6), True),
        ((8, 9), False),
        ((9, 0), False),
        ((12, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        settings = adamw8bit._Settings.from_group(group, torch.device("cuda", 0))
        assert settings.use_integers == use_integers, capability
        kinds = {result.dtype for _, result in trace_update(settings)}
        assert (torch.float8_e4m3fn in kinds) != use_integers, capability
    assert not adamw8bit._Settings.from_group(group, torch.device("cpu")).use_integers


@pytest.mark.slow
def test_the_lowered_update_has_no_float64() -> None:
    settings = adamw8bit._Settings(*BETAS, 1e-8, use_integers=False)
    scalars = step_scalars({"lr": 1e-2, "betas": BETAS, "weight_decay": 0.1}, torch.ones(1))[0]
    tensors = [
        torch.ones(64, 256),
        torch.ones(64, 256),
        *(
            t
            for _ in range(2)
            for t in (torch.zeros(64, 256, dtype=torch.uint8), torch.ones(64, 1))
        ),
    ]
    torch._dynamo.reset()
    _, (code, *_) = run_and_get_code(
        torch.compile(adamw8bit._apply_step, dynamic=False),
        settings,
        scalars,
        torch.tensor(False),
        None,
        *tensors,
    )
    assert "sqrt" in code and "pow(" not in code
    assert "double" not in code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "use_integers"),
    [("aot_eager", False), ("aot_eager", True), ("inductor", False), ("inductor", True)],
)
def test_two_graphs_update_all_parameters_alike(
    backend: str, use_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph serves matrices and one vectors, while the learning rate changes in each step."""
    monkeypatch.setattr(
        adamw8bit._Settings,
        "from_group",
        classmethod(lambda cls, group, _: cls(*group["betas"], group["eps"], use_integers)),
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shapes = (96, 256), (8, 1024), (40, 300), (3, 4, 64), (7,), (256,), (2, 256), (0, 256)
    models = model_of(*shapes), model_of(*shapes)
    compiler = compiling.make_compiler(True, torch.device("cpu"))
    optimizers = [
        registry.build_optimizer("adamw8bit", model, 0.0, wrap=wrap)
        for model, wrap in zip(models, (None, compiler.wrap), strict=True)
    ]
    for seed in range(4):
        for model, adamw in zip(models, optimizers, strict=True):
            fill_gradients(model, seed)
            registry.set_learning_rate(adamw, 1e-2 / (1 + seed))
            adamw.found_inf = torch.tensor(float(seed == 2))
            adamw.step()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    expected, actual = (
        copy_tensors(model, adamw) for model, adamw in zip(models, optimizers, strict=True)
    )
    for name, tensor in expected.items():
        if backend == "aot_eager":
            assert torch.equal(tensor, actual[name]), name
        elif tensor.dtype == torch.uint8:
            assert (tensor == actual[name]).float().mean() > 0.99 or not tensor.numel(), name
        else:
            torch.testing.assert_close(tensor, actual[name], rtol=1e-4, atol=1e-5)


def test_an_update_that_is_compiled_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def compile_wrongly(function, **_):
        return lambda settings, scalars, skip, *rest: function(settings, scalars, ~skip, *rest)

    models = model_of((8, 256), (9,)), model_of((8, 256), (9,))
    monkeypatch.setattr(torch, "compile", compile_wrongly)
    for model, wrap in zip(
        models, (None, compiling.make_compiler(True, torch.device("cpu")).wrap), strict=True
    ):
        fill_gradients(model, 1)
        registry.build_optimizer("adamw8bit", model, 1e-2, wrap=wrap).step()
    assert all(map(torch.equal, *models))
    assert "adamw8bit runs uncompiled" in caplog.text


@pytest.mark.slow
def test_a_first_step_that_overflows_leaves_the_update_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    models = model_of((8, 256), (9,)), model_of((8, 256), (9,))
    compiled_wrap = compiling.make_compiler(True, torch.device("cpu")).wrap
    optimizers = [
        registry.build_optimizer("adamw8bit", model, 1e-2, wrap=wrap)
        for model, wrap in zip(models, (None, compiled_wrap), strict=True)
    ]
    for seed in range(2):
        for model, adamw in zip(models, optimizers, strict=True):
            fill_gradients(model, seed)
            for parameter in model.parameters():
                parameter.grad.view(-1)[seed::5] = torch.inf if seed == 0 else 0.0
            adamw.found_inf = torch.tensor(float(seed == 0))
            adamw.grad_scale = torch.tensor(torch.inf if seed == 0 else 2.0)
            adamw.step()
    assert all(map(torch.equal, *models)) and all(optimizers[1]._update._is_correct.values())
    assert "uncompiled" not in caplog.text
