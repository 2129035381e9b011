"""Packed documents must not see each other, family by family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lib.core.errors import UsageError
from lib.parallel import attention, isolation
from lib.tokens.loader import MicroBatch, boundaries
from tests.models.families import FAMILIES

CPU = SimpleNamespace(device=torch.device("cpu"))
LEAKS = {"falcon_7b", "falcon_40b"}  # passes no positions to its mask (transformers 5.17 to 5.23)

OWN_ATTENTION = {"falcon_7b", "falcon_40b"}  # a table of its own, of what it knows


@pytest.mark.parametrize("how", ["sdpa", "sdpa in bfloat16", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_documents_apart_or_is_refused(family: str, how: str) -> None:
    torch.manual_seed(0)
    implementation, _, half = how.partition(" in ")
    if family in LEAKS and implementation == "varlen":
        with pytest.raises(KeyError):  # it has a table of its own, of what it knows
            built(family, "varlen")
        return
    model = built(family, implementation).to(torch.bfloat16 if half else torch.float32).train()
    before = torch.get_rng_state()
    if family in LEAKS:
        with pytest.raises(UsageError, match="see each other"):
            isolation.require(model, CPU)
    else:
        isolation.require(model, CPU)
    assert torch.equal(before, torch.get_rng_state()) and model.training


@pytest.mark.parametrize("implementation", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LEAKS))
def test_a_packed_document_is_read_as_if_alone(family: str, implementation: str) -> None:
    torch.manual_seed(0)
    model = built(family, implementation).eval()
    ids = torch.randint(3, 97, (1, 24))
    positions = torch.cat([torch.arange(10), torch.arange(9), torch.arange(5)])[None]
    batch = MicroBatch(ids, ids, positions, torch.from_numpy(boundaries(positions.numpy(), 5)))
    with torch.no_grad():
        packed = model(**attention.inputs(model, batch)).logits[:, 10:19]
        alone = model(input_ids=ids[:, 10:19], use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_document_need_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits stay, and nothing asks the device a question in a forward pass."""
    torch.manual_seed(0)
    model, ids = built(family, "sdpa").eval(), torch.randint(3, 97, (2, 24))
    with torch.no_grad():
        masked = model(input_ids=ids, use_cache=False).logits
    isolation.spare_mask(model, 24, CPU)
    spared = model.config._attn_implementation == attention.CAUSAL
    windows = getattr(model.config, "sliding_window", None) or 24
    assert spared == (family not in OWN_ATTENTION and windows >= 24)
    if spared:
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", pytest.fail)
    with torch.no_grad():
        assert torch.equal(masked, model.eval()(input_ids=ids, use_cache=False).logits)


def test_a_family_that_changes_without_its_mask_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = built("llama", "sdpa")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.CAUSAL,
                        lambda *parts, **named: sdpa_attention_forward(
                            *parts, **named | {"is_causal": False}))
    isolation.spare_mask(model, 24, CPU)
    assert model.config._attn_implementation == "sdpa"


def built(family: str, implementation: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32,
                                            attn_implementation=implementation)
