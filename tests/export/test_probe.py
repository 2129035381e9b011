# covers: lib/export/probe.py
"""Probe logits are recorded without any effect on training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lib.export import probe
from lib.models.lora import Lora
from lib.models.sharded import local_tensor
from tests.export.lora_runs import LAYOUT, build_lora_model
from tests.models.families import FAMILIES, make_checkpoint
from tests.models.two_ranks import TOKENS

pytestmark = pytest.mark.usefixtures("group")


def trained(model_dir: Path, is_probed: bool) -> tuple[list[float], Tensor]:
    """Return losses of a few steps with dropout, and a random number after them."""
    model = build_lora_model(model_dir, Lora(4, 8.0, dropout=0.3, precision="bf16"))
    torch.manual_seed(0)
    losses = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for _ in range(3):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                local_tensor(parameter).sub_(local_tensor(parameter.grad))
                parameter.grad = None
        losses.append(loss.item())
        if is_probed:
            probe.measure_logits(model, LAYOUT)
    return losses, torch.rand(3)


def test_recording_logits_does_not_change_training(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["llama"]())
    (expected, after), (losses, after_probes) = (trained(tmp_path, on) for on in (False, True))
    assert losses == expected and torch.equal(after, after_probes)


def test_logits_are_rounded_and_dropped_if_one_is_not_finite(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["gpt2"](1000))
    model = build_lora_model(tmp_path, Lora(4, 8.0))
    logits = probe.measure_logits(model, LAYOUT)
    assert (len(logits), len(logits[0])) == (16, 256) and model.training
    with torch.no_grad():
        expected = probe.compute_logits(model.eval(), LAYOUT)
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-6, atol=1e-6)
    local_tensor(model.get_parameter("transformer.h.1.mlp.c_fc.lora_B.weight")).fill_(math.nan)
    assert probe.measure_logits(model, LAYOUT) == []
