# covers: lib/core/workers.py
"""Threads use the GPU of the thread that created them, here with a fake torch.cuda."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from lib.checkpoints.host_copies import HostCopies
from lib.checkpoints.storage import HashingWriter, StrictReader
from lib.core import workers
from lib.tokens.batches import read_ahead

GPU = 3


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Act as if this process used GPU 3; return the GPU that each thread set, by its name."""
    taken: dict[str, int] = {}

    def take(device: int) -> None:
        taken[threading.current_thread().name.rpartition("_")[0]] = device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    return taken


def test_a_thread_uses_the_gpu_of_its_creator(on_gpu: dict[str, int]):
    with workers.thread_pool(name="mine") as pool:
        pool.submit(int).result()
    assert on_gpu == {"mine": GPU}


def test_all_threads_with_tensors_use_the_current_gpu(
    on_gpu: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Host copies, saves, loads and the data loader use threads."""
    weight = torch.nn.Parameter(torch.ones(3))
    copies = HostCopies(torch.optim.SGD([weight], lr=1.0))
    taken = copies.copy_tensors({"model.weight": weight})
    copies.wait()
    list(read_ahead(iter([1, 2])))

    def overlapping(*_: object, **__: object) -> None:
        pytest.fail("torch would copy on a stream of its own")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(filesystem, "_OverlappingCpuLoader", overlapping)
        dcp.save(taken, storage_writer=HashingWriter(tmp_path / "dcp"), no_dist=True)
    dcp.load(taken, storage_reader=StrictReader(tmp_path / "dcp"), no_dist=True)
    assert on_gpu == {"staging": GPU, "loader": GPU, "reader": GPU}


def test_without_a_gpu_no_device_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("no GPU is here"))
    with workers.thread_pool() as pool:
        assert pool.submit(int).result() == 0
