# covers: lib/parallel/activation_offload.py, lib/parallel/host_memory.py
# covers: lib/parallel/parallelize.py
"""The inputs of recomputed blocks move to the host and back, with the same results."""

from __future__ import annotations

import copy
import functools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lib.core.errors import UsageError
from lib.models.sharded import local_tensor
from lib.parallel import activation_offload, parallelize
from lib.parallel.activation_offload import ActivationOffload, make_activation_offload
from lib.parallel.compiling import Compiler
from lib.parallel.host_memory import NoHostMemoryError
from tests.conftest import run_stage
from tests.models.families import FAMILIES, SIZES
from tests.parallel.test_offload import (
    CONFIG,
    CPU,
    LAYERS,
    StreamLog,
    loss_of,
    shard_model,
    train_steps,
)
from tests.parallel.test_offload import tokens as make_tokens

BLOCKS = 4
FEATURES = SIZES["hidden_size"]
_QUICK = ("llama", "gemma3", "gpt2")  # the last one draws dropout


class LateCopies(ActivationOffload):
    """Copies as late as the streams of a GPU may: just before something waits for the copy.

    sizes: the bytes of host memory by allocation. events: one for each copy back to the device.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sizes: list[int] = []
        self.events: list[str] = []
        self._queue: list[tuple[object, weakref.ref[Tensor], weakref.ref[Tensor]]] = []

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        memory = super().allocate(shape, dtype)
        self.sizes.append(memory.nbytes)
        return memory

    def copy_to_device(self, memory: Tensor) -> tuple[Tensor, object]:
        self.events.append("copy")
        return super().copy_to_device(memory)

    def copy(self, target: Tensor, source: Tensor) -> object:
        event = object()
        target.fill_(torch.nan)
        self._queue.append((event, weakref.ref(target), weakref.ref(source)))
        return event

    def wait_for(self, event: object) -> None:
        events = [queued for queued, *_ in self._queue]
        count = events.index(event) + 1 if event in events else 0
        for _, target, source in self._queue[:count]:
            read = source()
            written = target()
            assert read is not None and written is not None, "freed before it was copied"
            written.copy_(read)
        del self._queue[:count]


def make_blocks(family: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    config = FAMILIES[family](num_hidden_layers=BLOCKS)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def compute_gradients(model: nn.Module, tokens: Tensor) -> list[Tensor | None]:
    """Return the loss and the gradients of two passes, between which a pass is abandoned."""
    torch.manual_seed(0)
    model.zero_grad()
    loss_of(model, tokens).backward()
    loss_of(model, tokens + 1)
    with torch.no_grad():
        loss_of(model, tokens)
    loss = loss_of(model, tokens + 2)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def are_equal(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        one is other is None or torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(
    "family",
    [
        family if family in _QUICK else pytest.param(family, marks=pytest.mark.long)
        for family in FAMILIES
    ],
)
def test_gradients_are_the_same_to_the_bit(family: str) -> None:
    """Only the hidden states of all blocks but the last one move, also if copies are late."""
    plain = make_blocks(family)
    model = copy.deepcopy(plain)
    offload = LateCopies()
    parallelize.wrap_blocks(plain, "full", None)
    parallelize.wrap_blocks(model, "full", None, offload)
    tokens = torch.randint(0, 90, (2, 24))
    assert are_equal(compute_gradients(plain, tokens), compute_gradients(model, tokens))
    assert offload.sizes == [2 * 24 * FEATURES * 4] * (BLOCKS - 1)


def test_compiled_blocks_move_only_their_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their saved tensors contain weights too; the first call of each is rehearsed."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    plain = make_blocks()
    model = copy.deepcopy(plain)
    offload = LateCopies()
    parallelize.wrap_blocks(plain, "full", Compiler(required=True))
    parallelize.wrap_blocks(model, "full", Compiler(required=True), offload)
    tokens = torch.randint(0, 90, (2, 24))
    assert are_equal(compute_gradients(plain, tokens), compute_gradients(model, tokens))
    assert offload.sizes == [2 * 24 * FEATURES * 4] * (BLOCKS - 1)
    assert offload.events == 2 * (BLOCKS - 2) * ["copy"]  # none in a rehearsal


def test_an_input_is_copied_back_while_the_block_after_it_computes() -> None:
    """The inputs of the last two blocks are still on the device."""
    model = make_blocks()
    offload = LateCopies()
    for number, block in enumerate(model.model.layers):
        forward = block.forward

        def compute(*arguments: Any, number: int = number, forward: Any = forward, **named: Any):
            offload.events.append(f"block {number}")
            return forward(*arguments, **named)

        block.forward = compute
    parallelize.wrap_blocks(model, "full", None, offload)
    loss = loss_of(model, make_tokens(0))
    offload.events.clear()
    loss.backward()
    assert offload.events == ["block 3", "copy", "block 2", "copy", "block 1", "block 0"]


@pytest.mark.parametrize(
    ("precision", "rank", "offloaded"),
    [("fp32", 0, False), ("bf16", 0, True), ("bf16", 2, False), ("fp32", 2, True)],
)
def test_a_sharded_model_trains_to_the_same_bits(
    group: dist.ProcessGroup, precision: str, rank: int, offloaded: bool
) -> None:
    """This holds with accumulation, evaluation, adapters, and weights in host memory."""
    offload = LateCopies()
    model = shard_model(precision, rank, offloaded, "full", offload)
    plain = shard_model(precision, rank, offloaded, "full")
    figures = [train_steps(one) for one in (model, plain)]
    assert figures[0] == figures[1] and len(set(figures[0])) > 5
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_tensor(one), local_tensor(other))
    size = 2 if precision == "bf16" else 4
    assert offload.sizes == [2 * 9 * CONFIG.hidden_size * size] * (LAYERS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_share_a_model_or_its_replicas(tmp_path: Path, ranks: int) -> None:
    """Compiled blocks save gathered weights as well, which stay on the device."""
    run_stage("tests/parallel/offloading.py", tmp_path / "found.json", cwd=tmp_path, ranks=ranks)
    results = json.loads((tmp_path / "found.json").read_text())
    assert len(results) == 2 * (3 if ranks == 4 else 2)
    for case, (on_host, on_device, sizes) in results.items():
        assert on_host == on_device, case
        assert sizes == [24 // 2 // ranks * 16 * FEATURES * 2], case  # of the first of two blocks


def test_a_second_backward_pass_copies_again() -> None:
    model = make_blocks()
    parallelize.wrap_blocks(model, "full", None, LateCopies())
    loss = loss_of(model, make_tokens(0))
    first, second = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
    ]
    assert are_equal(list(first), list(second))


def test_copies_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy waits for the work before it, and its user waits for the copy."""
    log = StreamLog()
    for name in ("Event", "Stream", "stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(log, name))
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None: log.current)
    offload = ActivationOffload(CPU)
    source = torch.arange(3.0)
    copied, event = offload.copy_to_device(source)
    offload.wait_for(event)
    assert torch.equal(copied, source)
    (_, copying, begun) = log.entries[1]
    assert copying is not log.main
    assert log.entries == [
        ("record", log.main, begun),
        ("wait", copying, begun),
        ("record", copying, event),
        ("wait", log.main, event),
    ]


def test_without_host_memory_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NoHostMemoryError("the driver cannot page-lock 9 GiB")

    monkeypatch.setattr(activation_offload, "HostMemory", refuse)
    model = make_blocks()
    parallelize.wrap_blocks(model, "full", None, ActivationOffload(CPU))
    with pytest.raises(UsageError, match="page-lock"):
        loss_of(model, make_tokens(0))


def test_only_a_gpu_needs_it() -> None:
    assert make_activation_offload(True, CPU) is None
    assert make_activation_offload(False, torch.device("cuda")) is None
