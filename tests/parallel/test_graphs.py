# covers: lib/parallel/compiling.py, lib/parallel/loss.py, lib/parallel/trial.py
# covers: lib/parallel/attention.py, lib/parallel/parallelize.py
"""One graph serves all kinds of packed documents, and the limit of graphs causes one warning."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import varlen as torch_varlen
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.parallel import compiling, loss, parallelize, varlen
from lib.parallel.trial import SingleDevice, eval_mode
from lib.tokens import batches as tokens
from lib.tokens.batches import MicroBatch, bound_document_length, make_micro_batch
from lib.tokens.samples import SampleArrays
from tests.models.families import make_tiny_llama

CPU = torch.device("cpu")
LENGTH = 64


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Return a list of the graphs that are compiled during a test, and restore torch afterwards."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    monkeypatch.setattr(compiling._limit_report, "is_done", False)
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=8),
        torch.compiler.config.patch(dynamic_sources=""),
    ):
        yield graphs
    torch._dynamo.reset()


def compute_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float
) -> list[Tensor]:
    """Return heads, each [H, tokens, D], and weights; tokens beyond `longest` are ignored."""
    groups = query.shape[1] // key.shape[1]
    parts = [
        part.transpose(0, 1)
        for part in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    ]
    at = torch.arange(len(query))
    of = torch.bucketize(at, ends[1:], right=True)
    sees = (of[:, None] == of) & (at[:, None] >= at) & (at - ends[of] < longest)[:, None]
    scores = parts[0] @ parts[1].mT * scale
    return [*parts, scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num()]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's operator for packed documents run on a CPU, which has no kernel for it."""

    @torch_varlen._varlen_attn.register_kernel("cpu")
    def forward(query, key, value, ends, _, longest, *others):
        *_, values, weights = compute_attention(query, key, value, ends, longest, others[2])
        return (
            (weights @ values).transpose(0, 1).contiguous(),
            torch.zeros(query.shape[1], len(query)),
            torch.zeros(2, dtype=torch.uint64),
        )

    @torch_varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(gradient, query, key, value, out, _, ends, __, longest, *others):
        scale = others[3]
        gradients = gradient.transpose(0, 1)
        queries, keys, values, weights = compute_attention(query, key, value, ends, longest, scale)
        of_weights = gradients @ values.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, True)) * scale
        results = [
            part.transpose(0, 1).contiguous()
            for part in (of_scores @ keys, of_scores.mT @ queries, weights.mT @ gradients)
        ]
        return results[0], *(part.unflatten(1, (key.shape[1], -1)).sum(2) for part in results[1:])

    monkeypatch.setattr(tokens, "_TILE", LENGTH // 4)
    monkeypatch.setattr(varlen, "attend_by_document", varlen.attend_by_kernel)


def batch(documents: int, longest: int, generator: np.random.Generator) -> MicroBatch:
    """Return two rows with a number of documents, the longest of which has `longest` tokens."""
    room = 2 * LENGTH - longest
    cuts = np.sort(generator.choice(room - 1, documents - 2, replace=False) + 1)
    lengths = [longest, *np.diff([0, *cuts, room])]
    positions = np.concatenate([np.arange(length) for length in lengths]).reshape(2, LENGTH)
    ids = generator.integers(0, 64, (2, LENGTH + 1))
    micro_batch = make_micro_batch(SampleArrays(ids[:, :-1], ids[:, 1:], positions), pin=False)
    assert documents <= len(micro_batch.boundaries) - 1 <= documents + 1
    return micro_batch


def batches() -> list[MicroBatch]:
    """Return batches with many numbers of documents and all lengths that a kernel gets."""
    generator = np.random.default_rng(0)
    batch_list = [
        batch(*kind, generator)
        for kind in ((17, 60), (3, 60), (40, 60), (60, 12), (24, 16), (7, 17), (2, 64))
    ]
    assert {one.longest for one in batch_list} == {16, 32, 64}
    return batch_list


def models(recompute: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a small model with compiled blocks, and the same model uncompiled."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        make_tiny_llama(),
        attn_implementation="varlen",
        dtype=torch.float32,
    )
    model = copy.deepcopy(plain)
    parallelize.wrap_blocks(model, recompute, compiling.make_compiler(True, CPU))
    return model, plain


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_graph_serves_packed_documents_of_any_number_and_length(
    compiled: list[torch.fx.GraphModule], kernel: None, recompute: str
) -> None:
    """Losses and gradients equal those of the uncompiled model."""
    model, plain = models(recompute)
    for one in batches():
        sums = [
            loss.token_loss_sum(variant, one.to(SingleDevice(CPU))) for variant in (model, plain)
        ]
        torch.testing.assert_close(*sums)
        for total in sums:
            total.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert len(compiled) == 1


@pytest.mark.slow
def test_a_sharded_model_has_one_graph_for_training_and_one_for_evaluation(
    compiled: list[torch.fx.GraphModule], kernel: None, group: dist.ProcessGroup
) -> None:
    """The hooks of FSDP see the batch before the blocks do."""
    model, plain = models("none")
    parallelize.shard(model, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), "fp32")
    for one in batches():
        loss.token_loss_sum(model, one.to(SingleDevice(CPU))).backward()
    assert len(compiled) == 1
    with torch.no_grad(), eval_mode(model):
        for one in batches():
            torch.testing.assert_close(
                loss.token_loss_sum(model, one), loss.token_loss_sum(plain, one)
            )
    assert len(compiled) == 2


@pytest.mark.slow
def test_without_dynamic_lengths_each_length_has_a_graph(
    compiled: list[torch.fx.GraphModule], kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the lengths had another name in torch, three graphs would be compiled, and not seven."""
    monkeypatch.setattr(compiling, "_LENGTHS", "nothing")
    model, _ = models("none")
    for number, one in enumerate(batches()):
        loss.token_loss_sum(model, one).backward()
        assert number > 2 or len(compiled) == 1  # 17, 3 and 40 documents, the longest alike
    assert len(compiled) == 3


def test_the_fake_kernel_ignores_tokens_beyond_the_longest_document(kernel: None) -> None:
    """So the fake kernel of these tests ignores the same tokens as the kernel of a GPU."""
    _, plain = models("none")
    one = batch(17, 60, np.random.default_rng(0))
    losses = [
        loss.token_loss_sum(plain, one._replace(longest=longest)) for longest in (None, 64, 60, 59)
    ]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    assert bound_document_length(one.boundaries.numpy(), LENGTH) == one.longest == 64


def layers(count: int) -> list[nn.Module]:
    """Return layers of one class with different shapes."""
    return [nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4)) for size in range(3, 3 + count)]


def run_blocks(blocks: list[nn.Module]) -> None:
    """Run wrapped layers forward and backward, and compare them with the plain layers."""
    compiler = compiling.make_compiler(True, CPU)
    inputs = torch.randn(2, 4, requires_grad=True)
    outputs = inputs
    expected = inputs
    for block in blocks:
        outputs = compiler.wrap(block.forward)(outputs)
        expected = block(expected)
    torch.testing.assert_close(outputs, expected)
    outputs.sum().backward()


@pytest.mark.slow
def test_all_layers_are_compiled_even_if_all_differ(
    compiled: list[torch.fx.GraphModule], caplog
) -> None:
    run_blocks(layers(20))
    assert len(compiled) == 20 and not caplog.records


@pytest.mark.slow
def test_the_limit_of_graphs_is_reported_once(
    compiled: list[torch.fx.GraphModule],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One warning covers all functions; further calls give the same results without a graph."""
    monkeypatch.setattr(compiling, "_GRAPH_LIMIT", 8)
    run_blocks(layers(12))
    assert len(compiled) == 8

    def other(value: Tensor) -> Tensor:
        return value * value.shape[0]

    wrapped = compiling.make_compiler(True, CPU).wrap(other)
    for size in range(2, 14):
        assert torch.equal(wrapped(torch.ones(size)), torch.full((size,), float(size)))
    assert len(compiled) == 16
    [message] = caplog.messages
    assert "limit of graphs" in message and "recompile_limit (8)" in message
    assert "function: 'inner'" in message and "\n" not in message
    assert "torch._dynamo hit" not in capfd.readouterr().err
