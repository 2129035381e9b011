# covers: lib/models/tensor_file.py
"""Files in the safetensors format have the content that the library itself writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save

from lib.core import hashing
from lib.models.tensor_file import Entry, TensorFile, encode_tensors, write_tensors


@pytest.mark.parametrize("count", [0, 1, 5, 1 << 21, (1 << 21) + 3, 5 << 20])
def test_a_file_of_any_length_reads_back(tmp_path: Path, count: int) -> None:
    """Files have none, a part, one or several pieces of 8 MiB, odd sizes and empty tensors."""
    torch.manual_seed(0)
    tensors = {"first": torch.randn(3), "large": torch.randn(count), "scalar": torch.tensor(7.0)}
    entries = [Entry(key, tuple(t.shape), torch.float32) for key, t in tensors.items()]
    with TensorFile(tmp_path / "t.safetensors", entries) as file:
        for key, entry in zip(tensors, entries, strict=True):
            file.add(tensors[key], entry.dtype)
    assert file.reads_back()
    with safe_open(tmp_path / "t.safetensors", "pt") as read:
        assert all(torch.equal(read.get_tensor(key), t) for key, t in tensors.items())
    assert file.manifest_entry() == {
        "path": "t.safetensors",
        "bytes": (tmp_path / "t.safetensors").stat().st_size,
        "digest": hashing.file_digest(tmp_path / "t.safetensors", "sha256"),
    }
    damaged = bytearray((tmp_path / "t.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "t.safetensors").write_bytes(damaged)
    assert not file.reads_back()


def test_a_file_system_without_direct_io_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.models.tensor_file._DIRECT", 0)
    test_a_file_of_any_length_reads_back(tmp_path, (1 << 21) + 3)


def test_tensors_of_any_layout_are_written_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6).view(2, 3).T,
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 5),
    }
    entry = write_tensors(tmp_path / "t", tensors)
    assert hashing.has_digest(tmp_path / "t", entry["digest"])
    for read in (load_file(tmp_path / "t"), load(encode_tensors(tensors))):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name].float(), tensor.detach().float())
    assert (tmp_path / "t").read_bytes() == encode_tensors(tensors)


def test_random_states_are_encoded_as_the_library_does() -> None:
    states = {"cpu": torch.get_rng_state()[None], "cuda": torch.ones(1, 16, dtype=torch.uint8)}
    assert encode_tensors(states, with_format=False) == save(states)
