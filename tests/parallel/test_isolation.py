# covers: lib/parallel/attention.py, lib/parallel/trial.py
"""Packed documents do not see each other, for each family."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lib.core.errors import UsageError
from lib.models.float8 import Float8
from lib.models.sharded import Placement
from lib.parallel import attention
from lib.parallel.trial import require_isolation, trial_batch
from lib.tokens.batches import MicroBatch, find_boundaries
from tests.models.families import FAMILIES, SIZES
from tests.parallel.test_attention import FakeModel
from tests.train.test_no_waiting import WaitForbidden

CPU = SimpleNamespace(device=torch.device("cpu"), context=None)
LEAKS = {"falcon_7b", "falcon_40b"}  # passes no positions to its mask (transformers 5.17 to 5.23)


@pytest.mark.parametrize("way", ["sdpa", "sdpa in bfloat16", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_documents_apart_or_is_refused(family: str, way: str) -> None:
    torch.manual_seed(0)
    implementation, _, half = way.partition(" in ")
    if attention._has_own_table(FAMILIES[family]()):  # on a GPU, `auto` is sdpa for such a family
        implementation = "sdpa"
    model = (
        build_model(family, implementation).to(torch.bfloat16 if half else torch.float32).train()
    )
    before = torch.get_rng_state()
    if family in LEAKS:
        with pytest.raises(UsageError, match="see each other"):
            require_isolation(model, CPU)
    else:
        require_isolation(model, CPU)
    assert torch.equal(before, torch.get_rng_state()) and model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("lfm2", {**SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_a_small_leak_of_random_weights_is_noticed(
    kind: str, fields: dict, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=97, **fields)
    with pytest.raises(UsageError, match="see each other"):
        require_isolation(AutoModelForCausalLM.from_config(config, dtype=dtype), CPU)


@pytest.mark.parametrize("leak", [False, True], ids=["isolated", "leaking"])
@pytest.mark.parametrize("scaling", ["stand-in", pytest.param("float8", marks=pytest.mark.slow)])
def test_a_scale_of_the_whole_tensor_is_no_leak_and_hides_none(scaling: str, leak: bool) -> None:
    """It rounds each token by the largest value of all tokens, so it changes all logits."""
    torch.manual_seed(0)
    model = build_model("llama", "varlen")
    if leak:
        model.model.norm.register_forward_hook(lambda _, inputs, out: out + 0.1 * out.mean(1, True))
        leaked = measure_change(model)
    if scaling == "stand-in":
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda _, inputs: (round_by_largest(*inputs),))
    else:
        Float8("tensorwise").convert(model, Placement())
    rounded = measure_change(model)
    assert rounded > 0.05
    if not leak:
        require_isolation(model, CPU)
        return
    assert leaked < rounded
    with pytest.raises(UsageError, match="see each other"):
        require_isolation(model, CPU)


def round_by_largest(values: torch.Tensor) -> torch.Tensor:
    """Round values to a few multiples of the largest one, as a scale of the whole tensor does."""
    scale = values.abs().max() / 3
    return (values / scale).round() * scale


def measure_change(model: PreTrainedModel) -> float:
    """Return how much the logits of a document depend on the one before it, in deviations."""
    tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    tokens[1, 9:] = tokens[0, 9:]
    with torch.no_grad():
        one, other = (
            model(**attention.make_inputs(model, trial_batch(row[None], CPU, (9, 15)))).logits[
                0, 9:
            ]
            for row in tokens
        )
    return ((one - other).abs().max() / one.std()).item()


@pytest.mark.parametrize("implementation", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LEAKS))
def test_a_packed_document_has_the_logits_of_the_document_alone(
    family: str, implementation: str
) -> None:
    torch.manual_seed(0)
    model = build_model(family, implementation).eval()
    ids = torch.randint(3, 97, (1, 24))
    positions = torch.cat([torch.arange(10), torch.arange(9), torch.arange(5)])[None]
    batch = MicroBatch(ids, ids, positions, torch.from_numpy(find_boundaries(positions.numpy())))
    with torch.no_grad():
        packed = model(**attention.make_inputs(model, batch)).logits[:, 10:19]
        alone = model(input_ids=ids[:, 10:19], use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_reads_nothing_from_the_device(family: str) -> None:
    """The logits stay the same, with sliding windows too."""
    torch.manual_seed(0)
    model = build_model(family, "sdpa").eval()
    ids = torch.randint(3, 97, (2, 24))
    with torch.no_grad():
        logits_with_reads = model(input_ids=ids, use_cache=False).logits
        attention.avoid_device_reads(model, "concat", 24)
        with WaitForbidden():
            logits = model(**attention.make_inputs(model, MicroBatch(ids, ids))).logits
    assert torch.equal(logits_with_reads, logits)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1, 1.2],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "packing, parameters, asks",
    [
        ("concat", LONG, False),
        ("documents", LONG, True),
        ("documents", LONG | {"original_max_position_embeddings": 24}, False),
        ("documents", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, False),
    ],
)
def test_rope_reads_the_largest_position_only_if_that_matters(
    packing: str, parameters: dict, asks: bool
) -> None:
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=32,
        rope_parameters=parameters,
    )
    plain_rope = LlamaRotaryEmbedding(config)
    rope = LlamaRotaryEmbedding(config)
    positions = torch.arange(24)[None]
    expected = plain_rope(torch.ones(1), positions)
    attention.fix_rope_frequencies(rope, packing, 24)
    with nullcontext() if asks else WaitForbidden():
        tables = rope(torch.ones(1), positions)
    assert torch.equal(torch.stack(tables), torch.stack(expected))
    assert (rope.rope_type == "default") != asks


@pytest.mark.parametrize(
    "implementation, asks", [("sdpa", True), ("varlen", False), ("flash_attention_2", False)]
)
def test_only_masks_of_packed_documents_read_from_the_device(
    monkeypatch: pytest.MonkeyPatch, implementation: str, asks: bool
) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", pytest.fail)
    model = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=implementation), modules=list
    )
    attention.avoid_device_reads(model, "documents", 24)
    assert (masking_utils.find_packed_sequence_indices is pytest.fail) == asks


def test_flash_attention_gets_the_boundaries_of_rows() -> None:
    """Without them, transformers reads them from the device in each layer."""
    model = FakeModel("flash_attention_2")
    ids = torch.zeros(3, 8, dtype=torch.int64)
    inputs = attention.make_inputs(model, MicroBatch(ids, ids))
    assert inputs["cu_seq_lens_q"].tolist() == [0, 8, 16, 24] and inputs["max_length_q"] == 8
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["position_ids"].tolist() == [[*range(8)]]


def build_model(family: str, implementation: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        FAMILIES[family](), dtype=torch.float32, attn_implementation=implementation
    )
