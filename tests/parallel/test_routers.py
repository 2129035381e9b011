# covers: lib/parallel/routers.py, lib/parallel/loss.py, lib/parallel/parallelize.py
# covers: lib/parallel/compiling.py, lib/parallel/trial.py
"""The load of experts is counted once, and balanced by the loss or by biases."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    JambaConfig,
    LlamaConfig,
    MiniMaxConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lib.models.lora import Lora
from lib.models.sharded import Placement
from lib.parallel import loss, parallelize, routers
from lib.parallel.compiling import make_compiler
from lib.parallel.routers import BIAS, LOSS, RouterLoad, find_method, find_routers
from lib.parallel.trial import eval_mode
from lib.tokens.batches import BEGINNING, MicroBatch, Step

CPU = torch.device("cpu")
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **_SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "gpt_oss": GptOssConfig(**_SIZES, num_local_experts=4, head_dim=8),
    "olmoe": OlmoeConfig(**_SIZES, num_experts=4),
    "phimoe": PhimoeConfig(**_SIZES, num_local_experts=4),
    "granitemoe": GraniteMoeConfig(**_SIZES, num_local_experts=4),
    "minimax": MiniMaxConfig(**_SIZES, num_local_experts=4, head_dim=8),
    "jamba": JambaConfig(
        **_SIZES,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=1,
        expert_layer_offset=0,
    ),
    "deepseek_v3": DeepseekV3Config(**{**_SIZES, "num_key_value_heads": 4}, **_DEEPSEEK, **_LATENT),
    "glm4_moe": Glm4MoeConfig(**_SIZES, **_DEEPSEEK, head_dim=8),
    "llama": LlamaConfig(**{key: _SIZES[key] for key in _SIZES if "experts" not in key}),
}
WITH_LOSS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
OTHERS_WITH_LOSS = ["olmoe", "granitemoe", "minimax", "jamba"]
COEFFICIENT = 0.5
RECOMPUTE = ("none", "selective", "full")


def build_model(
    family: str, lora: Lora | None = None
) -> tuple[PreTrainedModel, list[routers.Router]]:
    """Return a model with weights, and its routers, found on the meta device."""
    config = CONFIGS[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if lora:
        lora.convert(model, Placement())
    router_list = find_routers(model)
    torch.manual_seed(0)
    full = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.normal_(0.0, 0.3)
    model.to_empty(device="cpu")
    model.load_state_dict(full.state_dict(), strict=lora is None)
    with torch.no_grad():
        for parameter in model.parameters() if lora else ():
            parameter.normal_(0.0, 0.3)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(full.get_buffer(name))
    return model.train(), router_list


def make_batch(lengths: list[int], length: int = 12) -> MicroBatch:
    """Return rows of random tokens. lengths: tokens of each row before the padding."""
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = torch.randint(3, 97, (len(lengths), length + 1), generator=generator)
    places = torch.arange(length)[None]
    is_token = places < torch.tensor(lengths)[:, None]
    labels = tokens[:, 1:].masked_fill(~is_token, -100)
    return MicroBatch(tokens[:, :-1], labels, lengths=torch.tensor(lengths))


def plain_loss(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Return the load-balancing loss of a micro-batch by transformers' own formula.

    It is computed for each layer and row separately and weighted by tokens.
    """
    config = model.config
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    recorded: list[torch.Tensor] = []
    hooks = [
        router.module.register_forward_hook(lambda _, __, output: recorded.append(output[0]))
        for router in find_routers_again(model)
    ]
    model(batch.input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    assert batch.lengths is not None
    for logits in recorded:
        rows = logits.view(*batch.input_ids.shape, experts)
        for row, length in zip(rows, batch.lengths.tolist(), strict=True):
            total = total + length * load_balancing_loss_func(
                (row[:length],), experts, config.num_experts_per_tok
            )
    return total / len(recorded)


def find_routers_again(model: PreTrainedModel) -> list[Any]:
    """Return the routers of a model that has weights."""
    kinds = ("TopKRouter", "TopkRouter")
    return [
        SimpleNamespace(module=module)
        for module in model.modules()
        if type(module).__name__.endswith(kinds)
    ]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return by_name


def step_of(*batches: MicroBatch) -> Step:
    tokens = sum(int(batch.lengths.sum()) for batch in batches if batch.lengths is not None)
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    return Step(list(batches), labels, tokens, BEGINNING)


def run_step(model: PreTrainedModel, load: RouterLoad, *batches: MicroBatch) -> None:
    """Run the micro-batches of a training step, whose gradients are those of the mean loss."""
    step = step_of(*batches)
    scale = 2.0 ** -math.floor(math.log2(step.label_tokens))
    load.begin_step(step, scale)
    for batch in batches:
        load.begin_pass(batch)
        loss.token_loss_sum(model, batch, scale).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= scale * step.label_tokens


def expected_gradients(model: PreTrainedModel, *batches: MicroBatch) -> tuple[float, Any]:
    """Return the load-balancing loss of a step and the gradients by a plain loop."""
    step = step_of(*batches)
    value = 0.0
    for batch in batches:
        logits = model(batch.input_ids, use_cache=False).logits.flatten(0, 1)
        cross_entropy = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        balance = plain_loss(model, batch) / step.tokens
        (cross_entropy / step.label_tokens + COEFFICIENT * balance).backward()
        value += balance.item()
    return value, gradients(model)


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        worst = (gradient - expected[name]).abs().max()
        assert worst <= 1e-6 * max(1.0, expected[name].abs().max().item()), (name, worst)


@pytest.mark.parametrize("family", WITH_LOSS + OTHERS_WITH_LOSS)
def test_gradients_and_the_loss_are_those_of_the_formula(group: object, family: str) -> None:
    model, router_list = build_model(family)
    batch = make_batch([12, 7, 1])
    value, expected = expected_gradients(model, batch)
    assert find_method(model, router_list) == LOSS
    load = RouterLoad(router_list, CPU, LOSS, COEFFICIENT)
    run_step(model, load, batch)
    assert_same(gradients(model), expected)
    load.end_step(torch.zeros(()))
    assert load.capture().compute_figures()["train/router_aux_loss"] == pytest.approx(
        value, rel=1e-6
    )


def test_counts_are_those_of_the_experts_that_were_chosen(group: object) -> None:
    """PhiMoE draws experts at random in training, so they need not have the highest logits."""
    model, router_list = build_model("phimoe")
    batch = make_batch([12, 7, 1])
    load = RouterLoad(router_list, CPU, LOSS, COEFFICIENT)
    chosen: list[torch.Tensor] = []
    for router in router_list:
        router.module.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    run_step(model, load, batch)
    load.end_step(torch.zeros(()))
    is_token = (torch.arange(12)[None] < batch.lengths[:, None]).flatten()
    counts = torch.stack(
        [torch.bincount(choices[is_token].flatten(), minlength=4) for choices in chosen]
    )
    assert load.capture().sums[:, :4].tolist() == counts.tolist()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("family", WITH_LOSS)
def test_a_step_does_not_depend_on_how_it_is_divided(group: object, family: str) -> None:
    """It is run as one micro-batch, as three of different sizes, and row by row."""
    model, router_list = build_model(family)
    full_batch = make_batch([12, 3, 12, 7, 1, 9])
    _, expected = expected_gradients(model, full_batch)
    load = RouterLoad(router_list, CPU, LOSS, COEFFICIENT)
    values = []
    for sizes in ((6,), (3, 1, 2), (1,) * 6):
        parts = [
            part.split(sizes)
            for part in (full_batch.input_ids, full_batch.labels, full_batch.lengths)
        ]
        run_step(
            model,
            load,
            *(
                MicroBatch(ids, labels, lengths=lengths)
                for ids, labels, lengths in zip(*parts, strict=True)
            ),
        )
        assert_same(gradients(model), expected)
        load.end_step(torch.zeros(()))
        values.append(load.capture())
    for other in values[1:]:
        assert other.sums[:, :-1].tolist() == values[0].sums[:, :-1].tolist()
        assert other.compute_figures() == pytest.approx(values[0].compute_figures(), rel=1e-6)


@pytest.mark.parametrize(
    ("family", "backend", "recompute"),
    [
        *((family, "", kind) for family in ("mixtral", "deepseek_v3") for kind in RECOMPUTE),
        *(
            pytest.param(family, "aot_eager_decomp_partition", "selective", marks=pytest.mark.slow)
            for family in ("mixtral", "deepseek_v3")
        ),
        *(
            pytest.param(family, "aot_eager_decomp_partition", kind, marks=pytest.mark.long)
            for family in ("mixtral", "deepseek_v3")
            for kind in ("none", "full")
        ),
        *(pytest.param("mixtral", "inductor", kind, marks=pytest.mark.long) for kind in RECOMPUTE),
    ],
)
def test_recomputed_and_compiled_passes_count_once(
    group: object, monkeypatch: pytest.MonkeyPatch, family: str, backend: str, recompute: str
) -> None:
    """backend: of torch.compile, or "" to compile nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, router_list = build_model(family)
    method = find_method(model, router_list)
    batch = make_batch([12, 7, 1])
    load = RouterLoad(router_list, CPU, method, COEFFICIENT)
    run_step(model, load, batch)
    expected = gradients(model)
    load.end_step(torch.ones(()))
    counts = load.capture().sums
    parallelize.wrap_blocks(model, recompute, make_compiler(bool(backend), CPU))
    for _ in range(2):  # the first pass of a compiled block is rehearsed
        run_step(model, load, batch)
        assert_same(gradients(model), expected)
        load.end_step(torch.ones(()))
        found_now = load.capture().sums
        assert found_now[:, :-1].tolist() == counts[:, :-1].tolist()
        assert found_now[:, -1].tolist() == pytest.approx(counts[:, -1].tolist(), rel=1e-6)
    assert counts[0, :4].sum() == 20 * 2
    if backend and family == "mixtral":  # all layers share a graph, which counting does not break
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]


def test_only_training_steps_count(group: object) -> None:
    model, router_list = build_model("mixtral")
    batch = make_batch([12, 7, 1])
    load = RouterLoad(router_list, CPU, LOSS, COEFFICIENT)
    load.begin_step(step_of(batch), 1.0)
    load.begin_pass(batch)
    with eval_mode(model), torch.no_grad():
        loss.token_loss_sum(model, batch)
    with routers.pause_counting():
        loss.token_loss_sum(model, batch).backward()
    load.end_step(torch.zeros(()))
    loss.token_loss_sum(model, batch).backward()  # between steps
    assert not load.capture().sums.any()


def test_a_new_window_discards_the_steps_since_the_last_row(group: object) -> None:
    model, router_list = build_model("mixtral")
    load = RouterLoad(router_list, CPU, "", 0.0)
    run_step(model, load, make_batch([12]))
    load.end_step(torch.zeros(()))
    load.begin_window()
    run_step(model, load, make_batch([7]))
    load.end_step(torch.zeros(()))
    assert load.capture().sums[:, :4].sum(1).tolist() == [7 * 2, 7 * 2]


def test_biases_move_against_the_load_and_keep_their_sum(group: object) -> None:
    model, router_list = build_model("deepseek_v3")
    assert find_method(model, router_list) == BIAS
    batches = make_batch([12, 7, 1]), make_batch([5, 12])
    load = RouterLoad(router_list, CPU, BIAS, 1e-3)
    [router] = router_list
    bias = router.module.e_score_correction_bias
    before = bias.clone()
    run_step(model, load, *batches)
    counts = load._running[0, :-1].clone()
    load.end_step(torch.zeros(()))
    signs = (counts.mean() - counts).sign()
    assert counts.sum() == 37 * 2 and signs.any()
    moved = before + 1e-3 * (signs - signs.mean()).float()
    assert bias is router.module.e_score_correction_bias and bias.dtype == torch.float32
    assert bias.tolist() == pytest.approx(moved.tolist(), rel=1e-6)
    run_step(model, load, *batches)
    load.end_step(torch.ones(()))  # the guard has skipped the step
    assert bias.tolist() == pytest.approx(moved.tolist(), rel=1e-6)


@pytest.mark.slow
def test_biases_balance_the_load(group: object) -> None:
    """After 60 steps with biases, each of four experts gets about a quarter of the choices."""
    model, router_list = build_model("glm4_moe")
    batch = make_batch([12] * 6)
    load = RouterLoad(router_list, CPU, BIAS, 1e-2)
    highest = []
    for _ in range(60):
        run_step(model, load, batch)
        model.zero_grad()
        load.end_step(torch.zeros(()))
        highest.append(load.capture().compute_figures()["experts/max_load"])
    assert highest[0] > 1.3 and sum(highest[-20:]) / 20 < 1.15


def test_models_without_loss_or_biases_have_no_method() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    assert find_routers(model) == [] and find_method(model, []) == ""


def test_figures_are_computed_from_the_load() -> None:
    sums = torch.tensor([[10.0, 0.0, 30.0, 0.0, 8.0], [10.0, 10.0, 10.0, 10.0, 4.0]])
    figures = routers.LoadFigures([1, 3], [4, 4], sums.double(), 4, True).compute_figures()
    assert figures == {
        "train/router_aux_loss": 1.5,
        "experts/max_load": 3.0,
        "experts/starved": 0.25,
        "experts/layer_01/max_load": 3.0,
        "experts/layer_01/starved": 0.5,
        "experts/layer_03/max_load": 1.0,
        "experts/layer_03/starved": 0.0,
    }


def test_adapters_before_a_frozen_router_learn_from_the_loss(group: object) -> None:
    model, router_list = build_model("mixtral", Lora(4, 8.0, 0.0, "attention"))
    assert not router_list[0].module.weight.requires_grad
    assert routers.has_trained_inputs(model, router_list)
    batch = make_batch([12, 7, 1])
    value, expected = expected_gradients(model, batch)
    load = RouterLoad(router_list, CPU, LOSS, COEFFICIENT)
    run_step(model, load, batch)
    found_now = gradients(model)
    assert_same(found_now, expected)
    without = RouterLoad([], CPU, "", 0.0)
    load.end_step(torch.zeros(()))
    run_step(model, without, batch)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert (gradients(model)[name] - found_now[name]).abs().max() > 1e-4
    assert load.capture().compute_figures()["train/router_aux_loss"] == pytest.approx(
        value, rel=1e-6
    )
