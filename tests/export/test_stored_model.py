# covers: lib/export/stored_model.py, lib/models/architecture.py
"""A model computes from its files, with one of its parts in memory at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.export.stored_model import StoredModel, stream_parts
from lib.models.architecture import build_on_meta, decoder_layers
from tests.models.families import FAMILIES, make_checkpoint
from tests.models.two_ranks import TOKENS


def count_in_memory(model: PreTrainedModel) -> int:
    """Return the number of a model's parameters that are not on meta."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_parts_give_the_logits_of_the_full_model(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, FAMILIES[family](num_hidden_layers=3))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=TOKENS).logits
    model = build_on_meta(tmp_path)
    tied = model.all_tied_weights_keys
    most = 0
    with StoredModel(model, tmp_path) as stored:

        def read(name: str) -> Tensor:
            nonlocal most
            most = max(most, count_in_memory(model))
            return stored.read(name)

        with stream_parts(model, read):
            logits = model(input_ids=TOKENS).logits
    assert torch.allclose(logits, expected, atol=1e-6 * float(expected.std()))
    blocks = [
        sum(p.numel() for p in block.parameters()) for block in decoder_layers(model).values()
    ]
    assert 0 < most < 1.5 * max(blocks) and count_in_memory(model) == 0 and model.training
    assert all(
        model.get_parameter(name) is model.get_parameter(source) for name, source in tied.items()
    )


def test_a_part_that_fails_leaves_nothing_in_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["gpt2"]())
    model = build_on_meta(tmp_path)
    with StoredModel(model, tmp_path) as stored:

        def fail(name: str) -> Tensor:
            if "h.1.mlp" in name:
                raise OSError(5, "Input/output error")
            return stored.read(name)

        with pytest.raises(OSError, match="Input"), stream_parts(model, fail):
            model(input_ids=TOKENS)
        assert count_in_memory(model) == 0
        with stream_parts(model, stored.read):
            assert model(input_ids=TOKENS).logits.isfinite().all()
    assert count_in_memory(model) == 0
