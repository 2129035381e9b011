# covers: lib/parallel/parallelize.py, lib/parallel/compiling.py, lib/parallel/loss.py
"""The compiler fuses the sums of adapters with other operations, and the results stay the same."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM, LlamaConfig

from lib.models.lora import Factor, Lora
from lib.parallel import loss, parallelize
from lib.parallel.compiling import Compiler
from lib.tokens.batches import MicroBatch

RANK = 4
LINEARS = 7
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
Graphs = dict[str, list[torch.fx.GraphModule]]


@pytest.fixture
def model() -> nn.Module:
    """Return a model with adapters whose B is not zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).train()
    Lora(RANK, 8.0).attach(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    for module in model.modules():
        if isinstance(module, Factor):
            module.weight = nn.Parameter(torch.randn(module.weight.shape) * 0.05)
    return model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Store the graphs that the compiler gets, split into forward and backward as for Inductor."""
    graphs_by_way: Graphs = {"forward": [], "backward": []}

    def keep(way: str) -> Callable[..., object]:
        def kept(graph: torch.fx.GraphModule, _: object) -> object:
            graphs_by_way[way].append(graph)
            return make_boxed_func(graph)

        return kept

    monkeypatch.setattr(
        torch,
        "compile",
        functools.partial(
            torch.compile,
            backend=aot_autograd(
                fw_compiler=keep("forward"),
                bw_compiler=keep("backward"),
                partition_fn=min_cut_rematerialization_partition,
            ),
        ),
    )
    torch._dynamo.reset()
    return graphs_by_way


def batch() -> MicroBatch:
    tokens = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(1))
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def find_products_over_rank(graph: torch.fx.GraphModule, wide: bool = True) -> int:
    """Return the matrix products in a graph that sum over the LoRA rank and have a wide result."""
    sizes = [
        [argument.meta["val"].shape for argument in node.args[:2]]
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.mm.default
    ]
    return sum(
        one[1] == RANK and one[0] == 64 and (other[1] > RANK) == wide for one, other in sizes
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_graphs_add_the_products_of_adapters(
    model: nn.Module, graphs: Graphs, recompute: str
) -> None:
    """No product reads or writes the output of a linear layer; the gradients are the same."""
    plain = copy.deepcopy(model)
    parallelize.wrap_blocks(model, recompute, Compiler(required=True))
    for one in (plain, model):
        one.loss = loss.token_loss_sum(one, batch())
        one.loss.backward()
    assert model.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    forward, backward = (graph_list[-1] for graph_list in graphs.values())
    every = [*forward.graph.nodes, *backward.graph.nodes]
    assert not [node for node in every if node.target is torch.ops.aten.addmm.default]
    assert find_products_over_rank(forward) == LINEARS


@pytest.mark.slow
def test_selective_checkpointing_keeps_no_sum(model: nn.Module, graphs: Graphs) -> None:
    """The product of an adapter is recomputed, and the output of its linear layer is kept."""
    products = {}
    for recompute in ("none", "selective"):
        torch._dynamo.reset()
        again = copy.deepcopy(model)
        parallelize.wrap_blocks(again, recompute, Compiler(required=True))
        loss.token_loss_sum(again, batch()).backward()
        forward, backward = (graph_list[-1] for graph_list in graphs.values())
        products[recompute] = find_products_over_rank(backward)
        sums = [
            node
            for node in forward.graph.output_node().args[0]
            if isinstance(node, torch.fx.Node)
            and node.target is torch.ops.aten.add.Tensor
            and node.meta["val"].shape[-1] == CONFIG.intermediate_size
        ]
        assert len(sums) == (2 if recompute == "none" else 0)
    # Nothing in the backward pass needs the result of the last linear.
    assert products["selective"] == products["none"] + LINEARS - 1


def test_uncompiled_adapters_add_within_the_product(model: nn.Module) -> None:
    linear = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 5, 64)
    expected = torch.addmm(
        nn.functional.linear(x, linear.weight).flatten(0, 1),
        linear.lora_A(x).flatten(0, 1),
        linear.lora_B.weight.t(),
    )
    assert torch.equal(linear(x).flatten(0, 1), expected)


@pytest.mark.slow
def test_the_sum_is_part_of_other_kernels(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Inductor's code the sums need no kernel, and no `addmm` copies an output."""
    kernels = []
    added = []
    for add_to in (
        Factor.add_to,
        lambda factor, output, low: torch.addmm(
            output.flatten(0, -2), low.flatten(0, -2), factor.weight.t()
        ).view_as(output),
    ):
        monkeypatch.setattr(Factor, "add_to", add_to)
        torch._dynamo.reset()
        again = copy.deepcopy(model)
        parallelize.wrap_blocks(again, "none", Compiler(required=True))
        _, (code, *_) = run_and_get_code(
            lambda m: loss.token_loss_sum(m, batch()).backward(), again
        )
        call = code[code.rindex("def call") :]
        kernels.append(len(re.findall(r"\bcpp_fused\w*\(", call)))
        added.append(call.count("extern_kernels.addmm("))
    assert kernels[0] == kernels[1] > 0
    assert added == [0, LINEARS]
