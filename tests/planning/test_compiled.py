# covers: lib/planning/trace.py, lib/planning/memory.py, lib/planning/compiled.py
"""The activations of compiled blocks are estimated as torch's partitioner saves them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from lib.models.lora import Lora
from lib.models.sharded import Placement
from lib.parallel import parallelize
from lib.parallel.compiling import Compiler
from lib.planning import compiled, trace
from lib.planning.memory import Estimates
from lib.planning.trace import StepConfig

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=64),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=32, sliding_window=64),
    "gpt2": GPT2Config(vocab_size=64, n_embd=128, n_head=4, n_layer=8),
    "phi": PhiConfig(**{**SHAPE, "intermediate_size": 512, "num_key_value_heads": 4}),
}
TOKENS = 256


def make_model(config: PretrainedConfig, device: str, lora: int = 0) -> PreTrainedModel:
    with torch.device("meta" if lora else device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if lora:
        Lora(lora, 2.0 * lora, precision="fp32").convert(model, Placement())
    return model.to_empty(device=device) if lora else model


def saved_bytes(model: PreTrainedModel) -> int:
    """Return the bytes, without weights, that autograd saves before the output layer."""
    excluded = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in excluded:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    for _ in range(2):  # the first time, compiled blocks are rehearsed
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model.base_model(input_ids=tokens, use_cache=False)
        del out
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def case(**changes: Any) -> StepConfig:
    return replace(StepConfig(1, 1, 1, TOKENS, "fp32", "none"), **changes)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        pytest.param("llama", 0, marks=pytest.mark.slow),
        pytest.param("llama", 4, marks=pytest.mark.slow),
        *(
            pytest.param(*arguments, marks=pytest.mark.long)
            for arguments in (
                ("phi", 0),
                ("qwen2", 0),
                ("mistral", 0),
                ("gemma3", 0),
                ("gpt2", 0),
            )
        ),
    ],
)
def test_the_estimate_is_no_lower_than_the_real_activations(
    monkeypatch: pytest.MonkeyPatch, family: str, lora: int
) -> None:
    """It is not much higher either. The partitioner alone compiles the blocks."""
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    torch._dynamo.reset()
    estimates = Estimates(make_model(FAMILIES[family], "meta", lora))
    eager, planned = (
        estimates.step(case(compiled=is_compiled)).largest["activations"]
        for is_compiled in (False, True)
    )
    model = make_model(FAMILIES[family], "cpu", lora)
    assert saved_bytes(model) == pytest.approx(eager, rel=0.06)
    parallelize.wrap_blocks(model, "none", Compiler(required=True))
    saved = saved_bytes(model)
    assert saved <= planned <= 1.25 * saved
    assert planned < 0.9 * eager


@pytest.mark.slow
def test_blocks_that_cannot_be_traced_count_as_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(FAMILIES["llama"], "meta")
    assert 0.6 < trace.estimate_kept_share(model, case()) < 0.8
    assert trace.estimate_kept_share(model, case(precision="fp8")) == 1.0
    scan = make_model(MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2), "meta")
    assert trace.estimate_kept_share(scan, case()) == 1.0  # token by token: it would take minutes
    monkeypatch.setattr(compiled, "_count_kept_bytes", lambda *_: 1 / 0)
    assert trace.estimate_kept_share(model, case()) == 1.0


@pytest.mark.slow
def test_only_blocks_that_keep_activations_keep_fewer() -> None:
    estimates = Estimates(make_model(FAMILIES["llama"], "meta"))
    for kind in ("selective", "full"):
        step = estimates.step(case(recompute=kind, compiled=True))
        assert step == estimates.step(case(recompute=kind))
    few, many = (estimates.step(case(compiled=is_compiled)) for is_compiled in (True, False))
    assert few.total < many.total
    for kind in ("parameters", "gradients", "optimizer", "gathered", "loss", "workspace"):
        assert few.largest[kind] == many.largest[kind]
