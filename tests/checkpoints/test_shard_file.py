# covers: lib/checkpoints/storage.py
"""Parts of shards, read into tensors of any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from lib.checkpoints.storage import HashingWriter, ShardFile, StrictReader
from lib.core.errors import ArtifactError

SAVED = {
    "matrix": torch.arange(60.0).view(6, 10),
    "half": torch.randn(8, 3).bfloat16(),
    "alike": torch.randn(6, 10),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "turned": torch.arange(20.0).view(4, 5).T,
    "some": torch.arange(40.0).view(8, 5)[2:4],
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, _StorageInfo]:
    """Write the tensors into one file and return where each one is."""
    dcp.save(dict(SAVED), storage_writer=HashingWriter(tmp_path), no_dist=True)
    storage = StrictReader(tmp_path).read_metadata().storage_data
    return {name: storage[MetadataIndex(name, (0,) * t.dim())] for name, t in SAVED.items()}


def test_complete_shards_are_read(tmp_path: Path, places: dict[str, _StorageInfo]):
    with ShardFile(tmp_path / "__0_0.distcp") as file:
        for name, tensor in SAVED.items():
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            file.read(places[name], target, [0] * tensor.dim())
            assert torch.equal(target, tensor), name


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("matrix", slice(2, 5), slice(0, 10)),
        ("matrix", slice(0, 6), slice(3, 4)),
        ("matrix", slice(5, 6), slice(2, 9)),
        ("half", slice(1, 8), slice(0, 3)),
        ("turned", slice(2, 4), slice(0, 4)),
        ("some", slice(1, 2), slice(0, 5)),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_parts_of_shards_are_read(
    tmp_path: Path,
    places: dict[str, _StorageInfo],
    name: str,
    rows: slice,
    columns: slice,
    layout: str,
):
    expected: Tensor = SAVED[name][rows, columns]
    target = (
        torch.zeros(expected.shape, dtype=expected.dtype)
        if layout == "contiguous"
        else torch.zeros(expected.shape[::-1], dtype=expected.dtype).T
    )
    with ShardFile(tmp_path / "__0_0.distcp") as file:
        file.read(places[name], target, [rows.start, columns.start])
    assert torch.equal(target, expected)


def test_a_truncated_file_is_an_error(tmp_path: Path, places: dict[str, _StorageInfo]):
    file = ShardFile(tmp_path / "__0_0.distcp")
    file.read(places["matrix"], torch.empty(6, 10), [0, 0])
    (tmp_path / "__0_0.distcp").open("r+b").truncate(places["matrix"].offset + 300)
    with pytest.raises((ArtifactError, RuntimeError)):
        file.read(places["matrix"], torch.empty(6, 10), [0, 0])
    file.close()
