# covers: lib/parallel/parallelize.py, lib/parallel/offload.py
"""Offloaded parameters are copied ahead of their use on one rank, with the same results."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lib.models.architecture import decoder_layers
from lib.models.float8 import Float8
from lib.models.lora import Lora
from lib.models.sharded import Placement, local_tensor
from lib.models.weights import restore_buffers
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import fsdp_groups, offload, parallelize
from lib.parallel.activation_offload import ActivationOffload
from tests.models.families import make_tiny_llama

CPU = torch.device("cpu")
LAYERS = 3
PASSES = 2
STEPS = 2
CONFIG = make_tiny_llama(vocab_size=64, num_attention_heads=2, num_hidden_layers=LAYERS)
FORWARD = ["embedding", *map(str, range(LAYERS)), "last"]


def shard_model(
    precision: str = "bf16",
    rank: int = 0,
    offloaded: bool = True,
    recompute: str = "none",
    activation_offload: ActivationOffload | None = None,
) -> nn.Module:
    """Return a sharded model with weights. rank: of its adapters, 0 for none."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.float32)
    placement = Placement(1, offloaded)
    if precision == "fp8":
        Float8("tensorwise").convert(model, placement)
    if rank:
        Lora(rank, 8.0, precision=precision).convert(model, placement)
    parallelize.parallelize(
        model.train(),
        init_device_mesh("cpu", (1,)),
        precision,
        recompute,
        offload=offloaded,
        activation_offload=activation_offload,
    )
    parallelize.materialise_model(model, CPU, offload=offloaded)
    restore_buffers(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).normal_(0.0, 0.1, generator=generator)
    return model


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def train_steps(model: nn.Module) -> list[float]:
    """Return the losses and norms of a few steps with accumulation, and an evaluation in each."""
    adamw = registry.build_optimizer("adamw", model, 1e-2)
    guard = StepGuard("fp32", 0.0, CPU)
    figures = []
    for step in range(STEPS):
        for number in range(PASSES):
            loss = loss_of(model, tokens(step * PASSES + number))
            loss.backward()
            figures.append(loss.item())
        figures.append(guard.clip(adamw, 1.0, guard.scale_for(1)).item())
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            figures.append(loss_of(model, tokens(99)).item())
        parallelize.reshard_model(model)
    return figures


@pytest.mark.parametrize(
    ("precision", "rank", "recompute"),
    [
        ("fp32", 0, "none"),
        ("bf16", 0, "full"),
        ("fp32", 2, "selective"),
        ("bf16", 2, "none"),
        ("fp8", 0, "none"),
    ],
)
def test_losses_are_the_same_to_the_bit(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    rank: int,
    recompute: str,
) -> None:
    ahead = shard_model(precision, rank, recompute=recompute)
    on_device = shard_model(precision, rank, offloaded=precision == "fp8", recompute=recompute)
    for name in ("copy_ahead", "share_buffers"):
        monkeypatch.setattr(parallelize, name, lambda model: None)
    by_fsdp = shard_model(precision, rank, recompute=recompute)
    figures = [train_steps(model) for model in (ahead, by_fsdp, on_device)]
    assert figures[0] == figures[1] == figures[2] and len(set(figures[0])) > 5
    for one, other in zip(ahead.parameters(), by_fsdp.parameters(), strict=True):
        assert torch.equal(local_tensor(one), local_tensor(other))


class Recorder(TorchDispatchMode):
    """Records when parameters in host memory are read, and when blocks compute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.streams: list[Any] = []
        self._groups = {}
        for name, parameter in model.named_parameters():
            first = name.removeprefix("model.").split(".")
            group = {"embed_tokens": "embedding", "layers": first[1]}.get(first[0], "last")
            self._groups[local_tensor(parameter).untyped_storage().data_ptr()] = group
        for name, block in enumerate(decoder_layers(model).values()):
            block.forward = self._recorded(str(name), block.forward)

    def note(self, kind: str, name: str) -> None:
        if not self.events or self.events[-1] != (kind, name):
            self.events.append((kind, name))

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and function._schema.name in (
                "aten::copy_",
                "aten::_to_copy",
            ):
                name = self._groups.get(tensor.untyped_storage().data_ptr())
                if name is not None:
                    self.note("copy", name)
        return function(*arguments, **(named or {}))

    def _recorded(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self

        class Computing(torch.autograd.Function):
            @staticmethod
            def forward(_: Any, output: torch.Tensor) -> torch.Tensor:
                return output.clone()

            @staticmethod
            def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
                recorder.note("backward", name)
                return gradient

        def recorded(*arguments: Any, **named: Any) -> Any:
            recorder.note("forward", name)
            return Computing.apply(forward(*arguments, **named))

        return recorded


def test_a_group_is_copied_while_the_previous_group_computes(group: dist.ProcessGroup) -> None:
    """This holds forward and backward. Only one group is copied ahead, to save memory."""
    model = shard_model()
    loss_of(model, tokens(0)).backward()
    recorder = Recorder(model)
    with recorder:
        loss_of(model, tokens(0)).backward()
    events = recorder.events
    assert [name for kind, name in events if kind == "copy"] == [
        *FORWARD,
        *map(str, reversed(range(LAYERS))),
    ], events  # backward needs no embedding
    computed = events[: events.index(("backward", str(LAYERS - 1)))]
    for block in range(LAYERS):
        at = computed.index(("forward", str(block)))
        assert computed[at - 1] == ("copy", FORWARD[block + 2])
    for block in range(1, LAYERS):
        at = events.index(("backward", str(block)))
        assert events[at - 1] == ("copy", str(block - 1))


class StreamLog:
    """Fakes the streams of a device, and logs what they order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, Any]] = []
        log = self

        class Event:
            def record(self, stream: Any = None) -> None:
                log.entries.append(("record", stream or log.current, self))

            def wait(self, stream: Any = None) -> None:
                (stream or log.current).wait_event(self)

            def synchronize(self) -> None:
                pass

        class Stream:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                log.entries.append(("wait", self, event))

            def record_event(self) -> Event:
                event = Event()
                event.record(self)
                return event

            def wait_stream(self, other: Stream) -> None:
                self.wait_event(other.record_event())

        self.Event = Event
        self.Stream = Stream
        self.main = self.current = Stream()

    def is_ordered(self, first: Any, then: Any, begin: int, end: int) -> bool:
        """Return whether `first` up to entry `begin` comes before the work of `then` at `end`."""
        behind = {
            event
            for number, (kind, stream, event) in enumerate(self.entries[:end])
            if (kind, stream) == ("record", first) and number >= begin
        }
        return any(
            (kind, stream) == ("wait", then) and event in behind
            for kind, stream, event in self.entries[begin:end]
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current
        self.current = stream
        yield
        self.current = before


def test_no_stream_reads_what_another_has_not_written(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StreamLog()
    for name in ("Event", "Stream", "stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(log, name))
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None: log.current)
    copies = offload._CopiedGroup._copy
    takes = offload._CopiedGroup.wait_for_unshard

    def copy_noted(copied: Any) -> torch.Tensor:
        with Copying():
            result = copies(copied)
        log.entries.append(("copied", log.current, copied))
        return result

    def take_noted(copied: Any) -> None:
        wait = copied._wait

        def taken() -> None:
            log.entries.append(("take", log.current, copied))
            wait()

        copied._wait = taken
        takes(copied)
        copied._wait = wait

    class Copying(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            if function._schema.name == "aten::copy_":
                log.entries.append(("copy", log.current, None))
            return function(*arguments, **(named or {}))

    monkeypatch.setattr(offload._CopiedGroup, "_copy", copy_noted)
    monkeypatch.setattr(offload._CopiedGroup, "wait_for_unshard", take_noted)
    model = shard_model()
    for number in range(2):
        loss_of(model, tokens(number)).backward()
    side = next(stream for kind, stream, _ in log.entries if kind == "copy")
    assert side is not log.main
    ready: dict[Any, int] = {}  # of each group that is copied: where in the log that ended
    used = 0  # where a copy was last used
    for at, (kind, stream, value) in enumerate(log.entries):
        if kind == "copied":
            ready[value] = at - 1  # its event comes last
        elif kind == "take" and value in ready:
            assert log.is_ordered(side, log.main, ready.pop(value), at), "used before it is copied"
            used = at
        elif kind == "copy":
            # It may be into the memory of any copy that was used before.
            assert stream is side and (not used or log.is_ordered(log.main, side, used, at))
    assert used and not ready


def test_a_copy_that_nothing_uses_is_dropped(group: dist.ProcessGroup) -> None:
    """With adapters, FSDP prefetches the embedding in backward, which needs no weights there."""
    model = shard_model(rank=2)
    loss_of(model, tokens(0)).backward()
    embedding = model.get_input_embeddings()
    [copied] = fsdp_groups.list_groups(embedding)
    with copied.use_training_state(type(copied._training_state).FORWARD):
        copied.unshard()
    reference = weakref.ref(copied._all_gather_result.all_gather_output)
    copied.finalize_backward()
    gc.collect()
    assert copied._all_gather_result is None and reference() is None
    with torch.no_grad():
        local_tensor(embedding.weight).mul_(2.0)
    changed = loss_of(model, tokens(0)).item()
    parallelize.reshard_model(model)
    assert changed == pytest.approx(loss_of(shard_copy(model), tokens(0)).item(), abs=0)


def shard_copy(model: nn.Module) -> nn.Module:
    """Return an untrained model with the same weights."""
    other = shard_model(rank=2)
    with torch.no_grad():
        for one, parameter in zip(model.parameters(), other.parameters(), strict=True):
            local_tensor(parameter).copy_(local_tensor(one))
    return other
