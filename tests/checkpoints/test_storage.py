# covers: lib/checkpoints/storage.py
"""Files read from disk are verified, and cannot run code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from lib.checkpoints.storage import HashingWriter, StrictReader, unwrap_dcp_errors
from lib.core import hashing
from lib.core.errors import ArtifactError


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a directory with two tensors written through HashingWriter."""
    tensors = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5)}
    writer = HashingWriter(tmp_path / "dcp")
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    entries = writer.entries("dcp")
    assert {e["path"] for e in entries} == {"dcp/.metadata", "dcp/__0_0.distcp"}
    for entry in entries:
        path = tmp_path / entry["path"]
        assert path.stat().st_size == entry["bytes"] and hashing.has_digest(path, entry["digest"])
    assert next(e["digest"] for e in entries if "metadata" in e["path"]).startswith("sha256:")
    return tmp_path / "dcp"


def load_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    with unwrap_dcp_errors():
        dcp.load(tensors, storage_reader=StrictReader(directory), no_dist=True)


def test_saved_tensors_are_loaded(saved: Path):
    tensors = {"model.a": torch.zeros(3, 4), "model.b": torch.zeros(5)}
    load_tensors(saved, tensors)
    assert torch.equal(tensors["model.a"], torch.arange(12.0).view(3, 4))


def test_reader_threads_record_no_gradients(saved: Path) -> None:
    """Otherwise threads that fill parts of one parameter disturb each other."""
    records = []

    class Planner(DefaultLoadPlanner):
        """Notes whether the calling thread records gradients."""

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            records.append(torch.is_grad_enabled())
            return super().resolve_tensor(read_item)

    tensors = {"model.a": torch.zeros(3, 4), "model.b": torch.zeros(5)}
    reader = StrictReader(saved)
    with torch.no_grad():
        dcp.load(tensors, storage_reader=reader, planner=Planner(), no_dist=True)
    assert records == [False, False]


def test_malicious_metadata_runs_nothing(saved: Path, tmp_path: Path):
    (saved / ".metadata").write_bytes(pickle.dumps(Malicious(f"touch {tmp_path / 'ran'}")))
    with pytest.raises(ArtifactError, match="system"):
        StrictReader(saved).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_pickled_objects_are_refused(tmp_path: Path):
    dcp.save({"thing": {"a", "set"}}, storage_writer=HashingWriter(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(ArtifactError, match="BytesStorageMetadata"):
        StrictReader(tmp_path / "dcp").read_metadata()


def test_a_second_save_into_a_directory_is_refused(saved: Path):
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save({"model.a": torch.zeros(1)}, storage_writer=HashingWriter(saved), no_dist=True)
