"""Copies that are made while training goes on: whole, of one moment, and never late."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from lib.checkpoints import staging
from lib.checkpoints.staging import HostCopies

SLOWNESS = 0.5  # seconds for a copy


@pytest.fixture
def trained() -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Return tensors with an optimizer that changes one of them, and gradients to do it with."""
    weight = nn.Parameter(torch.arange(12.0).view(3, 4))
    weight.grad = torch.ones_like(weight)
    tensors = {"model.weight": weight, "buffer.seen": torch.zeros(3, dtype=torch.int64),
               "optimizer.exp_avg.weight": torch.full((3, 4), 0.5, dtype=torch.bfloat16)}
    return tensors, torch.optim.SGD([weight], lr=1.0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies in the background take a while."""
    copy = staging._copy

    def late(pairs: list[tuple[Tensor, Tensor]]) -> None:
        time.sleep(SLOWNESS)
        copy(pairs)
    monkeypatch.setattr(staging, "_copy", late)


def test_a_step_waits_until_its_tensors_are_copied(trained, slow):
    tensors, optimizer = trained
    copies, expected = HostCopies(), {name: t.detach().clone() for name, t in tensors.items()}
    for _ in range(2):  # in fresh memory, and in memory that is used again
        began = time.monotonic()
        taken = copies.take(tensors, optimizer)
        assert time.monotonic() - began < SLOWNESS / 2, "the copy was not made in the background"
        tensors["buffer.seen"] += 1  # as a forward pass may do
        optimizer.step()
        assert time.monotonic() - began >= SLOWNESS
        copies.wait()
        assert all(torch.equal(taken[name], t) for name, t in expected.items())
        expected = {name: t.detach().clone() for name, t in tensors.items()}
        assert not torch.equal(expected["model.weight"], taken["model.weight"])
    assert copies.bytes == sum(t.nbytes for t in tensors.values())


def test_who_writes_waits_too(trained, slow):
    tensors, optimizer = trained
    copies = HostCopies()
    taken = copies.take(tensors, optimizer)
    copies.wait()
    assert all(torch.equal(taken[name], t) for name, t in tensors.items())
    began = time.monotonic()
    optimizer.step()
    copies.wait()
    assert time.monotonic() - began < SLOWNESS / 2, "waited for copies that were there"


def test_a_copy_that_fails_is_told_before_anything_changes(trained, monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError("no memory")
    tensors, optimizer = trained
    monkeypatch.setattr(staging, "_copy", broken)
    copies, before = HostCopies(), tensors["model.weight"].detach().clone()
    copies.take(tensors, optimizer)
    for waiting in (optimizer.step, copies.wait):
        with pytest.raises(RuntimeError, match="no memory"):
            waiting()
    assert torch.equal(tensors["model.weight"], before)
