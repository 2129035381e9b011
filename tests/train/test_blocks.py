"""Activations that are computed again give the gradients of those that are kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from lib.tokens.loader import MicroBatch
from lib.train import blocks, isolation, loss

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("config", [
    LlamaConfig(**SMALL), MixtralConfig(**SMALL, **EXPERTS),
    GptOssConfig(**SMALL, **EXPERTS, sliding_window=8)], ids=lambda config: config.model_type)
def test_gradients_stay(config: PretrainedConfig, recompute: str) -> None:
    torch.manual_seed(0)
    kept = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, parameter in kept.named_parameters():
        if name.endswith("bias"):  # zero at first, and adding zero twice is no mistake
            torch.nn.init.normal_(parameter)
    again = copy.deepcopy(kept)
    blocks.prepare(again, recompute, compiled=False)
    tokens = torch.randint(0, 96, (2, 24))
    for model in (kept, again):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert any(block.forward.__name__ == "recomputed" for block in again.model.layers)
    for (name, one), other in zip(kept.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_training_runs_one_graph_of_fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other sizes came first; evaluation has a graph of its own, without gradients."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2), attn_implementation="sdpa")
    blocks.prepare(model, "none", compiled=True)
    here = SimpleNamespace(device=torch.device("cpu"))
    loss.chunk(model, here)
    isolation.require(model, here)
    assert not graphs
    tokens = torch.randint(0, 64, (2, 41), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    for _ in range(3):
        loss.token_loss_sum(model, batch).backward()
    assert len(graphs) == 1
    with torch.no_grad(), loss.eval_mode(model):
        loss.token_loss_sum(model, batch)
    loss.token_loss_sum(model, batch).backward()
    assert len(graphs) == 2
    sizes = [node for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"
             and isinstance(node.meta["example_value"], torch.SymInt)]
    assert not sizes
