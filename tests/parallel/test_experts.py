# covers: lib/parallel/experts.py, lib/parallel/parallelize.py, lib/parallel/experts_trial.py
# covers: lib/parallel/loss.py, lib/parallel/compiling.py
"""Our function for experts gives the same numbers as transformers, without a sort in backward."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations import moe

from lib.models.lora import Lora
from lib.parallel import compiling, experts, experts_trial, loss, parallelize
from lib.planning.memory import Estimates
from lib.planning.trace import StepConfig
from lib.tokens.batches import MicroBatch
from tests.conftest import run_stage
from tests.models.families import FAMILIES
from tests.training import SMALL_RUN, VOCABULARY, losses, read_log, save_model

HIDDEN = 24
COUNT = 5
CHOICES = 3
TOKENS = 40
GPT_OSS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "sliding_window": 16,
}
MODELS = {name: FAMILIES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe")} | {
    "gpt_oss": lambda vocabulary=97: GptOssConfig(**GPT_OSS, vocab_size=vocabulary)
}
# Families whose experts differ (by layout, activation, biases, norms or names in the config), and
# those that people train most.
MODULES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe",
    "olmoe",
    "phimoe",
    "nemotron_h",
    "ernie4_5_moe",
    "jamba",
    "granitemoe",
    "lfm2_moe",
    "minimax_m2",
    "dots1",
    "hunyuan_v1_moe",
    "flex_olmo",
    "aria",
    "muse_spark",
)
SIZES = dict.fromkeys(
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), COUNT
) | {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "moe_hidden_size": HIDDEN,
    "moe_latent_size": None,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SORTED = {
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::index_add",
    "aten::index_add_",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add",
    "aten::scatter_add_",
    "aten::sort",
    "aten::argsort",
    "aten::index_reduce",
    "aten::scatter_reduce",
    "aten::embedding_dense_backward",
}


class Recorder(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.counts[function._schema.name] += 1
        return function(*arguments, **(named or {}))


def make_module(family: str, implementation: str = experts.NAME) -> nn.Module:
    """Return the experts of a family with random weights; skips one that transformers lacks."""
    try:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    kind = next(
        value
        for name, value in vars(modeling).items()
        if name.endswith("Experts") and value.__module__ == modeling.__name__
    )
    if not hasattr(kind, "_apply_gate"):
        pytest.skip(f"the interface of this transformers has no experts of {family}")
    names = [
        name
        for name, value in vars(modeling).items()
        if name.endswith("Config")
        and issubclass(value, PretrainedConfig)
        and value is not PretrainedConfig
    ]
    config_class = getattr(modeling, min(names, key=lambda name: ("Text" not in name, name)))
    default = config_class()
    config = config_class(**{name: size for name, size in SIZES.items() if hasattr(default, name)})
    torch.manual_seed(0)
    module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    module.config._experts_implementation_internal = implementation
    return module


def make_inputs(
    count: int = COUNT, choices: int = CHOICES, used: int = COUNT
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the experts that each chooses (only the first `used`), and their weights."""
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(TOKENS, used, generator=generator).argsort(1)[:, :choices]
    return (
        torch.randn(TOKENS, HIDDEN, generator=generator),
        index,
        torch.rand(TOKENS, choices, generator=generator),
    )


def run_experts(
    module: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the output of experts and all gradients."""
    module = copy.deepcopy(module).to(dtype)
    inputs = [part.to(dtype).detach().requires_grad_() for part in (hidden, weights)]
    out = module(inputs[0], index, inputs[1])
    torch.manual_seed(2)
    upstream = torch.randn(out.shape).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *module.parameters()], upstream)]


def difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, as a share of their norms."""
    return max(
        ((one.double() - other.double()).norm() / other.double().norm()).item()
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("family", MODULES)
def test_results_equal_a_loop_over_experts_in_double_precision(family: str) -> None:
    module = make_module(family)
    inputs = make_inputs()
    ours = run_experts(module, *inputs)
    module.config._experts_implementation_internal = "grouped_mm"
    theirs = run_experts(module, *inputs)
    module.config._experts_implementation_internal = "eager"
    exact = run_experts(module, *inputs, torch.float64)
    assert torch.equal(ours[0], theirs[0])
    assert difference(ours, theirs) < 1e-6
    assert difference(ours, exact) < 2e-6
    assert difference(ours, exact) < 1.5 * difference(theirs, exact)


def test_no_family_has_an_unknown_flag() -> None:
    """If transformers adds a flag to its experts interface, `compute_experts` must support it."""
    assert set(inspect.signature(moe.use_experts_implementation).parameters) <= {
        "experts_class",
        "experts_interface",
        "is_concatenated",
        "is_transposed",
        "has_bias",
        "has_gate",
        "has_post_expert_norm",
    }


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_no_gradient_is_sorted_or_added_by_index(family: str) -> None:
    """Only the forward pass sorts, and only integers without a gradient."""
    operations = {}
    for name in (experts.NAME, "grouped_mm"):
        module = make_module(family, name)
        (hidden, index, weights) = make_inputs()
        out = module(hidden.requires_grad_(), index, weights.requires_grad_())
        with Recorder() as recorder:
            out.backward(torch.ones_like(out))
        operations[name] = SORTED & set(recorder.counts)
    assert operations[experts.NAME] == set()
    assert operations["grouped_mm"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("choices", "used"), [(1, COUNT), (3, 3), (1, 1), (5, COUNT)])
def test_experts_may_have_no_tokens_and_tokens_any_number_of_experts(
    family: str, choices: int, used: int
) -> None:
    module = make_module(family)
    inputs = make_inputs(choices=choices, used=used)
    ours = run_experts(module, *inputs)
    module.config._experts_implementation_internal = "eager"
    exact = run_experts(module, *inputs, torch.float64)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    for gradient in ours[3:]:
        assert gradient[used:].abs().sum() == 0


@pytest.fixture
def fill_with_nan() -> Iterator[None]:
    """Let torch fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_experts_of_another_rank_add_nothing(family: str, fill_with_nan: None) -> None:
    """Grouped products leave the rows of such experts unwritten, forward and backward."""
    module = make_module(family)
    (hidden, index, weights) = make_inputs()
    elsewhere = index == 1
    expected = run_experts(module, hidden, index, weights.masked_fill(elsewhere, 0.0))
    module._is_expert_parallel = True
    results = run_experts(module, hidden, index.masked_fill(elsewhere, COUNT), weights)
    expected[2].masked_fill_(elsewhere, 0.0)
    assert difference(results, expected) < 1e-6


def test_results_are_the_same_bits_each_time(fill_with_nan: None) -> None:
    """They do not depend on the other tokens either, if the groups have the same sizes."""
    module = make_module("gpt_oss")
    (hidden, index, weights) = make_inputs()
    once, again = (run_experts(module, hidden, index, weights) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    order = torch.randperm(TOKENS)
    moved = module(hidden[order], index[order], weights[order])
    torch.testing.assert_close(moved, once[0][order], rtol=1e-6, atol=1e-6)


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def gradients(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch and all gradients, by name."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (2, 25), generator=generator)
    total = loss.token_loss_sum(model, MicroBatch(tokens[:, :-1], tokens[:, 1:]))
    total.backward()
    return total.item(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("targets", ["", "gate_up_proj|down_proj"], ids=["weights", "adapters"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_trains_as_with_transformers(family: str, recompute: str, targets: str) -> None:
    model = make_model(family)
    if targets:
        added = Lora(3, 6.0, targets=targets).attach(model)
        for name in added:
            model.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu")
            nn.init.normal_(model.get_parameter(name), 0.0, 0.1)
    other = copy.deepcopy(model)
    other.set_experts_implementation("eager")
    experts.use_own_function(model)
    parallelize.wrap_blocks(model, recompute, None)
    (ours, gradients_of_ours) = gradients(model)
    (theirs, expected) = gradients(other)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert gradients_of_ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients_of_ours[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def count_products(model: PreTrainedModel) -> int:
    """Count the grouped products per block and step of a model with selective checkpointing."""
    parallelize.wrap_blocks(model, "selective", None)
    with Recorder() as recorder:
        gradients(model)
    return recorder.counts["aten::_grouped_mm"] // 2


@pytest.mark.parametrize(("family", "theirs"), [("mixtral", 6), ("gpt_oss", 8)])
def test_selective_checkpointing_recomputes_no_product(family: str, theirs: int) -> None:
    """This includes biases. As transformers adds them in place, it cannot keep these products."""
    model = make_model(family)
    assert count_products(copy.deepcopy(model)) == theirs
    experts.use_own_function(model)
    assert count_products(model) == 6


@pytest.mark.parametrize("is_transposed", [True, False])
def test_the_product_for_compiled_code_equals_that_of_torch(is_transposed: bool) -> None:
    """Some groups are empty, and some rows come after the last group."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 8, generator=generator, requires_grad=True)
    weights = torch.randn(5, *((8, 12) if is_transposed else (12, 8)), generator=generator)
    weights = (weights if is_transposed else weights.transpose(1, 2)).requires_grad_()
    ends = torch.tensor([0, 7, 7, 18, 18], dtype=torch.int32)
    results, expected = (
        (
            out := function(rows, weights, ends)[:18],
            *torch.autograd.grad(out.square().sum(), (rows, weights)),
        )
        for function in (
            experts._group_by_group,
            lambda *arguments: F.grouped_mm(*arguments[:2], offs=arguments[2]),
        )
    )
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one[:18], other[:18])
    torch.library.opcheck(experts._group_by_group, (rows, weights, ends))


@pytest.mark.parametrize(
    ("family", "backend", "recompute"),
    [
        *(
            (family, "aot_eager", recompute)
            for family in ("mixtral", "gpt_oss")
            for recompute in ("none", "selective")
        ),
        pytest.param("mixtral", "inductor", "selective", marks=pytest.mark.slow),
        *(
            pytest.param(family, "inductor", recompute, marks=pytest.mark.long)
            for family in MODELS
            for recompute in ("none", "selective")
            if (family, recompute) != ("mixtral", "selective")
        ),
    ],
)
def test_compiled_blocks_have_no_break(
    monkeypatch: pytest.MonkeyPatch, family: str, backend: str, recompute: str
) -> None:
    plain = make_model(family)
    experts.use_own_function(plain)
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True)
    )
    parallelize.wrap_blocks(compiled, recompute, compiling.Compiler(required=True))
    (ours, compiled_gradients) = gradients(compiled)
    (theirs, expected) = gradients(plain)
    assert ours == pytest.approx(theirs, rel=1e-6)
    for name, gradient in expected.items():
        assert (compiled_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.fixture
def layout_of_one_rank() -> Iterator[SimpleNamespace]:
    """Return the layout of one rank. The memory estimate creates a process group itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(device=torch.device("cpu"), control=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", MODELS)
def test_our_function_is_used_after_a_trial(
    family: str, layout_of_one_rank: SimpleNamespace
) -> None:
    model = make_model(family)
    experts.use_own_function(model)
    line = experts_trial.choose_experts_function(model, layout_of_one_rank)
    assert line.startswith(f"{experts.NAME}, by grouped products")
    assert model.config._experts_implementation == experts.NAME
    assert not any("forward" in module.__dict__ for module in experts.list_experts_modules(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_a_model_without_experts_logs_nothing(layout_of_one_rank: SimpleNamespace) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    before = model.config._experts_implementation
    experts.use_own_function(model)
    assert model.config._experts_implementation == before
    assert experts_trial.choose_experts_function(model, layout_of_one_rank) == ""


def double_result(rows: Tensor, weights: Tensor, routing: experts.Routing) -> Tensor:
    return 2 * (
        rows.index_select(0, routing.inverse).view(*weights.shape, -1) * weights[..., None]
    ).sum(1)


def wrong_gradient(rows: Tensor, weights: Tensor, routing: experts.Routing) -> Tensor:
    right = double_result(rows, weights, routing) / 2
    return right + (right - right.detach())


def not_a_number(rows: Tensor, weights: Tensor, routing: experts.Routing) -> Tensor:
    return double_result(rows, weights, routing) * torch.nan


def failing(*_: Tensor) -> Tensor:
    raise RuntimeError("no such kernel\nmore")


@pytest.mark.parametrize(
    ("combine", "reason"),
    [
        (double_result, "differ by"),
        (wrong_gradient, "differ by"),
        (not_a_number, "differ by inf"),
        (failing, "RuntimeError: no such kernel"),
    ],
)
def test_transformers_computes_experts_if_our_results_differ(
    monkeypatch: pytest.MonkeyPatch, combine: Any, reason: str, layout_of_one_rank: SimpleNamespace
) -> None:
    """This includes blocks that are already wrapped for selective checkpointing."""
    model = make_model("gpt_oss")
    plain = copy.deepcopy(model)
    experts.use_own_function(model)
    parallelize.wrap_blocks(model, "selective", None)
    monkeypatch.setattr(experts, "combine_rows", combine)
    line = experts_trial.choose_experts_function(model, layout_of_one_rank)
    assert line.startswith(f"grouped_mm of transformers, since {experts.NAME} fails here: ")
    assert reason in line and "\n" not in line
    (ours, model_gradients) = gradients(model)
    (theirs, expected) = gradients(plain)
    assert ours == theirs
    for name, gradient in expected.items():
        torch.testing.assert_close(model_gradients[name], gradient, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_failure_on_one_rank_decides_for_all(tmp_path: Path, ranks: int) -> None:
    """The other ranks wait for the failing rank in the forward pass, which it must not leave."""
    run_stage(
        "tests/parallel/failing_experts.py", tmp_path / "lines.json", cwd=tmp_path, ranks=ranks
    )
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert len({*lines}) == 1 and "RuntimeError: no such kernel" in lines[0]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_memory_estimates_trace_our_function(family: str) -> None:
    """Without recomputation, it keeps no more than transformers' own function."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32).train()
    case = StepConfig(2, 2, 2, 64, "bf16", "none")
    theirs = Estimates(model).step(case).total
    experts.use_own_function(model)
    assert Estimates(model).step(case).total <= 1.01 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_any_number_of_ranks_trains_mixtures_alike(project: Path, family: str) -> None:
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    save_model(project / "model", MODELS[family](VOCABULARY))
    common = (*SMALL_RUN, "--max-steps", 4, "--lr", "1e-2", "--eval-freq", 0)
    expected = {}
    for ranks, batch, kind, compiled in (
        (0, 6, "none", "off"),
        (2, 3, "none", "off"),
        (3, 2, "none", "off"),
        (0, 6, "selective", "off"),
        (2, 3, "selective", "on"),
        (3, 2, "full", "off"),
    ):
        name = f"{ranks}_{kind}_{compiled}"
        run_stage(
            "04_train_fsdp.py",
            "-e",
            name,
            "-b",
            batch,
            *common,
            "--compile",
            compiled,
            "--activation-checkpointing",
            kind,
            cwd=project,
            **({"ranks": ranks} if ranks else {}),
        )
        assert f"experts: {experts.NAME}, by grouped products" in read_log(project, name)
        run_losses = losses(project, name)
        expected = expected or run_losses
        assert run_losses == pytest.approx(expected, rel=1e-5 if compiled == "on" else 2e-6)
