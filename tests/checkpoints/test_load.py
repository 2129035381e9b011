# covers: lib/checkpoints/storage.py, lib/checkpoints/snapshot.py
"""Names, shapes and dtypes of a checkpoint must match the model; DCP does not check this."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lib.checkpoints.snapshot import require_same_tensors
from lib.checkpoints.storage import HashingWriter, StrictReader
from lib.core.errors import ArtifactError

SAVED = {"model.a": torch.zeros(3, 4), "model.b": torch.zeros(5)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**SAVED, "model.c": torch.zeros(1)}, "model.c is missing"),
        ({"model.a": SAVED["model.a"]}, "model.b is not in the model"),
        (
            {**SAVED, "model.b": torch.zeros(6)},
            "model.b is torch.float32 [5], the model has torch.float32 [6]",
        ),
        ({**SAVED, "model.b": torch.zeros(5, dtype=torch.int64)}, "the model has torch.int64 [5]"),
    ],
)
def test_every_mismatch_is_named(tmp_path: Path, tensors: dict, message: str):
    dcp.save(SAVED, storage_writer=HashingWriter(tmp_path / "dcp"), no_dist=True)
    require_same_tensors(SAVED, StrictReader(tmp_path / "dcp"), tmp_path)
    with pytest.raises(ArtifactError, match="another model") as caught:
        require_same_tensors(tensors, StrictReader(tmp_path / "dcp"), tmp_path)
    assert message in caught.value.found
