# covers: lib/parallel/loss.py, lib/parallel/compiling.py, lib/parallel/parallelize.py
# covers: lib/parallel/trial.py, lib/parallel/gloo_reduction.py
"""Recomputation, compilation and sharding do not change the gradients."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from lib.core.errors import UsageError
from lib.parallel import compiling, loss, parallelize
from lib.parallel.compiling import Compiler
from lib.parallel.trial import eval_mode, require_isolation
from lib.tokens.batches import MicroBatch
from tests.conftest import run_stage
from tests.models.families import make_tiny_llama

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        MixtralConfig(**SMALL, **EXPERTS),
        GptOssConfig(**SMALL, **EXPERTS, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)
def test_checkpointing_does_not_change_gradients(config: PretrainedConfig, recompute: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):  # zero at first, and adding zero twice is no mistake
            torch.nn.init.normal_(parameter)
    wrapped = copy.deepcopy(plain)
    parallelize.wrap_blocks(wrapped, recompute, None)
    tokens = torch.randint(0, 96, (2, 24))
    for model in (plain, wrapped):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert any(
        block.forward.__name__ == "forward_with_recomputation" for block in wrapped.model.layers
    )
    for (name, one), other in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_training_runs_one_graph_of_fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials with other sizes run before. Evaluation uses another graph, without gradients."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(
        make_tiny_llama(num_hidden_layers=3),
        attn_implementation="sdpa",
    )
    parallelize.wrap_blocks(model, "none", Compiler(required=True))
    here = SimpleNamespace(device=torch.device("cpu"), context=None)
    loss.chunk_loss(model, here)
    require_isolation(model, here)
    assert not graphs
    tokens = torch.randint(0, 64, (2, 41), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    for _ in range(3):
        loss.token_loss_sum(model, batch).backward()
    assert len(graphs) == 1
    with torch.no_grad(), eval_mode(model):
        loss.token_loss_sum(model, batch)
    loss.token_loss_sum(model, batch).backward()
    assert len(graphs) == 2
    sizes = [
        node
        for graph in graphs
        for node in graph.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta["example_value"], torch.SymInt)
    ]
    assert not sizes


def cannot_compile(*_: object) -> None:
    raise RuntimeError("no compiler is here\nmore")


def cannot_start(*_: object) -> Callable[..., object]:
    return cannot_compile


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("backend", "failing"),
    [
        (cannot_compile, ["decoder", "loss"]),
        (cannot_start, ["decoder", "loss"]),
        (
            aot_autograd(
                fw_compiler=lambda graph, _: make_boxed_func(graph),
                bw_compiler=lambda *_: make_boxed_func(cannot_compile),
            ),
            ["decoder"],
        ),
    ],
    ids=["compiler", "first launch", "first launch backward"],
)
def test_parts_that_cannot_be_compiled_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
    required: bool,
    backend: Callable[..., object],
    failing: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each failing part warns once, and the gradients equal those of the uncompiled model."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model = copy.deepcopy(plain)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    compiler = Compiler(required)
    parallelize.wrap_blocks(model, "full", compiler)
    here = SimpleNamespace(device=torch.device("cpu"), context=None)
    assert "by the output layer" in loss.chunk_loss(model, here, compiler)
    tokens = torch.randint(0, 96, (2, 25))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    if required:
        with pytest.raises(UsageError, match="cannot be compiled") as error:
            loss.token_loss_sum(model, batch)
        assert "no compiler is here" in error.value.render()
        return
    for _ in range(2):
        loss.token_loss_sum(model, batch).backward()
    loss.token_loss_sum(plain, batch, 2.0).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    warnings = [text for text in caplog.messages if text.startswith("compile: off for the ")]
    assert [text.split()[4].strip(",") for text in warnings] == failing
    assert all("no compiler is here" in text and "\n" not in text for text in warnings)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("sizes do not fit"), UsageError("not so"), torch.OutOfMemoryError("full")],
    ids=lambda error: str(error),
)
def test_errors_of_uncompiled_code_are_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(_: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiler = Compiler(required=True)
    with pytest.raises(type(error), match=str(error)):
        compiler.wrap(failing)(torch.ones(2))
    assert compiler._works


def test_a_trial_of_compiled_code_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is tried forward and backward before its use; dropout draws the same numbers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, attention_dropout=0.5)).train()
    model = copy.deepcopy(plain)
    parallelize.wrap_blocks(model, "none", Compiler(required=True))
    tokens = torch.randint(0, 96, (2, 25))
    for one in (plain, model):
        torch.manual_seed(0)
        loss.token_loss_sum(one, MicroBatch(tokens[:, :-1], tokens[:, 1:])).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_torch_does_not_warn_about_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compiled block with selective recomputation, only this warning is missing."""
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._logging.warning_once.cache_clear()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    parallelize.wrap_blocks(model, "selective", Compiler(required=True))
    tokens = torch.randint(0, 96, (2, 25))
    loss.token_loss_sum(model, MicroBatch(tokens[:, :-1], tokens[:, 1:])).backward()
    logger.warning("another")
    assert [record.getMessage() for record in records] == ["another"]


def test_models_are_compiled_on_gpus_by_default() -> None:
    gpu = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    assert [
        compiling.is_compile_on(option, device)
        for option in (None, True, False)
        for device in (gpu, cpu)
    ] == [True, False, True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [2, 3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 4))]
)
def test_summed_gradients_train_like_averaged_ones(tmp_path: Path, ranks: int) -> None:
    """With up to two ranks per replica, every bit is the same, in each precision.

    More ranks add up in another order than gloo, and three cannot average exactly.
    """
    run_stage("tests/parallel/summing.py", tmp_path / "found.json", cwd=tmp_path, ranks=ranks)
    results = json.loads((tmp_path / "found.json").read_text())
    assert len(results) == (9 if ranks == 4 else 3)
    for case, (summed, averaged) in results.items():
        assert case[-1] in "34" or summed == averaged, case
        for one, other in zip(summed["steps"], averaged["steps"], strict=True):
            assert one == pytest.approx(other, rel=2e-7 if "fp32" in case else 1e-3), case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_of_one_gpu_average_and_train_as_one_rank(tmp_path: Path, ranks: int) -> None:
    """FSDP2 gets no factor, and the guard multiplies by the number of ranks."""
    results = {}
    for count in (ranks, 1):
        run_stage("tests/parallel/replicas.py", tmp_path / "found.json", cwd=tmp_path, ranks=count)
        results[count] = json.loads((tmp_path / "found.json").read_text())
    for precision, (summed, averaged) in results[ranks].items():
        assert (summed["sum_calls"], averaged["sum_calls"]) == (1, 0)
        close = 1e-6 if precision == "fp32" else 1e-3
        for alone, one, other in zip(
            results[1][precision][0]["steps"], summed["steps"], averaged["steps"], strict=True
        ):
            assert other == pytest.approx(one, rel=close)
            assert other == pytest.approx(alone, rel=close)


@pytest.mark.parametrize(
    ("device", "replicas", "shard_size", "divisor"),
    [("cuda", 4, 1, 4), ("cuda", 2, 2, 1), ("cuda", 1, 1, 1), ("cuda", 1, 4, 1), ("cpu", 4, 1, 1)],
)
def test_only_replicas_of_one_gpu_average(
    device: str, replicas: int, shard_size: int, divisor: int
) -> None:
    mesh = SimpleNamespace(
        device_type=device,
        size=lambda dim=None: replicas * shard_size if dim is None else shard_size,
    )
    assert parallelize.gradient_divisor(mesh) == divisor


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_optimizers_scale_sharded_gradients(tmp_path: Path, ranks: int) -> None:
    """The result is that of `clip`, with replicas, offload and the loss scale of fp16.

    Rounding a gradient in another way may move an 8-bit moment by a whole code.
    """
    run_stage("tests/parallel/folding.py", tmp_path / "found.json", cwd=tmp_path, ranks=ranks)
    results = json.loads((tmp_path / "found.json").read_text())
    assert len(results) == (4 if ranks == 1 else 8)
    for case, (apart, folded) in results.items():
        assert apart["scale"] == folded["scale"] and apart["skipped"] == folded["skipped"] == 0
        assert apart["weights"] != folded["weights"], case
        for one, other in zip(apart["steps"], folded["steps"], strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-3 if "fp16" in case else 1e-6), case
            assert one[1] == pytest.approx(other[1], rel=1e-6 if "w fp32" in case else 1e-3), case
