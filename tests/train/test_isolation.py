"""Packed documents must not see each other, family by family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib.core.errors import UsageError
from lib.train import isolation
from tests.models.families import FAMILIES

CPU = SimpleNamespace(device=torch.device("cpu"))
LEAKS = {"falcon_7b", "falcon_40b"}  # passes no positions to its mask (transformers 5.17 to 5.23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_documents_apart_or_is_refused(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    before = torch.get_rng_state()
    if family in LEAKS:
        with pytest.raises(UsageError, match="see each other"):
            isolation.require(model, CPU)
    else:
        isolation.require(model, CPU)
    assert torch.equal(before, torch.get_rng_state()) and model.training


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LEAKS))
def test_a_packed_document_is_read_as_if_alone(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    ids = torch.randint(3, 97, (1, 24))
    positions = torch.cat([torch.arange(10), torch.arange(9), torch.arange(5)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 10:19]
        alone = model(input_ids=ids[:, 10:19], use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-5)
