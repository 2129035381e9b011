"""A checkpoint must fit its model in names, shapes and dtypes: DCP itself would not mind."""

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
    ("tensors", "told"),
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
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: dict, told: str):
    dcp.save(SAVED, storage_writer=HashingWriter(tmp_path / "dcp"), no_dist=True)
    require_same_tensors(SAVED, StrictReader(tmp_path / "dcp"), tmp_path)
    with pytest.raises(ArtifactError, match="another model") as caught:
        require_same_tensors(tensors, StrictReader(tmp_path / "dcp"), tmp_path)
    assert told in caught.value.found
