# covers: lib/checkpoints/host_copies.py, lib/checkpoints/checkpointer.py, lib/checkpoints/commit.py
# covers: lib/parallel/host_memory.py
"""Copies made during training are complete, consistent, and ready in time."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.checkpoints import checkpointer, commit, host_copies
from lib.checkpoints.checkpointer import Checkpointer
from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.place import SavedRun
from lib.checkpoints.run_directory import RunDirectory
from lib.parallel.host_memory import HostMemory


@pytest.fixture
def trained() -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Return tensors and an optimizer that changes one of them; gradients are set."""
    weight = nn.Parameter(torch.arange(12.0).view(3, 4))
    weight.grad = torch.ones_like(weight)
    tensors = {
        "model.weight": weight,
        "buffer.seen": torch.zeros(3, dtype=torch.int64),
        "optimizer.exp_avg.weight": torch.full((3, 4), 0.5, dtype=torch.bfloat16),
    }
    return tensors, torch.optim.SGD([weight], lr=1.0)


class Gate:
    """Holds copies back until `open_soon` lets them through, and counts them."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self.copies = 0

    def hold(self, copy: Callable[..., None], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy once the gate is open, and close it again."""
        assert self._is_open.wait(60)
        self._is_open.clear()
        copy(pairs)
        self.copies += 1

    def open_soon(self) -> None:
        """Open the gate for one copy while the caller already waits for that copy."""
        threading.Timer(0.1, self._is_open.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return the gate that copies in the background have to pass."""
    gate = Gate()
    monkeypatch.setattr(host_copies, "_copy_tensors", partial(gate.hold, host_copies._copy_tensors))
    return gate


def test_a_step_waits_until_its_tensors_are_copied(trained, gate: Gate):
    tensors, optimizer = trained
    copies = HostCopies(optimizer)
    expected = {name: t.detach().clone() for name, t in tensors.items()}
    for number in range(2):  # in fresh memory, and in memory that is used again
        taken = copies.copy_tensors(tensors)
        assert gate.copies == number, "the copy was not made in the background"
        tensors["buffer.seen"] += 1  # as a forward pass may do
        gate.open_soon()
        optimizer.step()
        assert gate.copies == number + 1
        copies.wait()
        assert all(torch.equal(taken[name], t) for name, t in expected.items())
        expected = {name: t.detach().clone() for name, t in tensors.items()}
        assert not torch.equal(expected["model.weight"], taken["model.weight"])
    assert copies.bytes == sum(t.nbytes for t in tensors.values())


def test_the_writer_waits_for_the_copies(trained, gate: Gate):
    tensors, optimizer = trained
    copies = HostCopies(optimizer)
    taken = copies.copy_tensors(tensors)
    gate.open_soon()
    copies.wait()
    assert all(torch.equal(taken[name], t) for name, t in tensors.items())
    optimizer.step()
    copies.wait()
    assert gate.copies == 1, "waited for copies that were there"


def test_a_failed_copy_raises_before_the_weights_change(trained, monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError("no memory")

    tensors, optimizer = trained
    monkeypatch.setattr(host_copies, "_copy_tensors", broken)
    copies = HostCopies(optimizer)
    before = tensors["model.weight"].detach().clone()
    copies.copy_tensors(tensors)
    for waiting in (optimizer.step, copies.wait):
        with pytest.raises(RuntimeError, match="no memory"):
            waiting()
    assert torch.equal(tensors["model.weight"], before)


def test_host_memory_has_the_exact_size_and_is_locked_at_once(monkeypatch: pytest.MonkeyPatch):
    """torch's own allocator would take the next power of two for each tensor."""
    locked: list[int] = []

    def lock(_: int, size: int, __: int) -> int:
        locked.append(size)
        return 0

    driver = SimpleNamespace(cudaHostRegister=lock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    shapes = {
        "a": (torch.Size([1000, 9]), torch.float32),
        "b": (torch.Size([]), torch.int64),
        "c": (torch.Size([0, 4]), torch.float32),
        "d": (torch.Size([77]), torch.uint8),
    }
    memory = HostMemory(shapes, locked=True)
    exact = sum(t.nbytes for t in memory.tensors.values())
    assert exact == 36_000 + 8 + 77 and len(locked) == 1 and exact <= locked[0] < exact + 4 * 512
    for name, (shape, dtype) in shapes.items():
        tensor = memory.tensors[name].fill_(ord(name))
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.untyped_storage().size() == tensor.nbytes  # or DCP would copy it once more
    assert all(bool((t == ord(name)).all()) for name, t in memory.tensors.items())


@pytest.mark.parametrize(
    ("code", "room", "why"),
    [(2, 1e9, "cannot page-lock"), (0, 100.0, "needs 0.1 KiB of host memory")],
)
def test_without_memory_for_copies_a_save_blocks_training(
    trained,
    group: dist.ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    room: float,
    why: str,
):
    tensors, optimizer = trained
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: code)
    )
    monkeypatch.setattr(host_copies, "HostMemory", lambda shapes, _: HostMemory(shapes, code != 0))
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"), control=group, saving=group)
    run = SavedRun("exp", "1", {}, layout)
    places = [RunDirectory(run, tmp_path, every=1)]
    saving = Checkpointer(run, places, total_steps=3, free_memory=lambda: room)
    for step in (1, 2):
        saving.save(
            SimpleNamespace(
                step=step,
                optimizer=optimizer,
                tensors=lambda: tensors,
                state_dict=lambda step=step: {"step": step},
            )
        )
        assert (
            next(c.step for c in commit.list_checkpoints(tmp_path)) == step
        )  # without another `poll`
    warnings = caplog.text
    assert re.search(why, warnings) and warnings.count("before the next step") == 1


def test_copies_are_freed_if_another_rank_lacks_memory(
    trained, group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tensors, optimizer = trained
    memories: list[weakref.ref[HostMemory]] = []

    class Seen(HostMemory):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            memories.append(weakref.ref(self))

    monkeypatch.setattr(host_copies, "HostMemory", Seen)
    monkeypatch.setattr(checkpointer, "gather", lambda mine, _: [mine, "rank 1 has no room"])
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"), control=group, saving=group)
    run = SavedRun("exp", "1", {}, layout)
    places = [RunDirectory(run, tmp_path, every=1)]
    saving = Checkpointer(run, places, total_steps=3, free_memory=lambda: 1e9)
    saving.save(
        SimpleNamespace(
            step=1, optimizer=optimizer, tensors=lambda: tensors, state_dict=lambda: {"step": 1}
        )
    )
    gc.collect()
    assert len(memories) == 1 and memories[0]() is None
