# covers: lib/export/stored_model.py, lib/models/architecture.py
"""A model's tensors are read from its files by the names of its modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib.export.stored_model import StoredModel
from lib.models.architecture import build_on_meta
from tests.models.families import FAMILIES, make_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_that_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, FAMILIES[family](num_hidden_layers=2))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    with StoredModel(build_on_meta(tmp_path), tmp_path) as stored:
        for name, tensor in loaded.items():
            assert torch.equal(stored.read(name), tensor), name
