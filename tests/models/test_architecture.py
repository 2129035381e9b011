# covers: lib/models/architecture.py
"""Configs are read and checked, and models are built without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.core.errors import ArtifactError, UsageError
from lib.models.architecture import build_on_meta, decoder_layers, read_config
from tests.models.families import FAMILIES

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


def _directory(tmp_path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        {},
        {"hidden_size": 32},
        {**_LLAMA, "hidden_size": "many"},
        {**_LLAMA, "hidden_size": 33},
    ],
)
def test_a_damaged_config_is_an_artifact_error(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ArtifactError, match="config"):
        read_config(_directory(tmp_path, content))


def test_a_missing_config_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no config"):
        read_config(tmp_path)


def test_unknown_type_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="brand_new"):
        read_config(_directory(tmp_path, {"model_type": "brand_new"}))


def test_the_code_of_a_known_type_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    model = build_on_meta(_directory(tmp_path, {**_LLAMA, "auto_map": auto_map}))
    assert type(model).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [{"model_type": "bert"}, {"model_type": "t5"}, {"model_type": "bart"}, {"model_type": "vit"}],
)
def test_a_model_of_another_kind_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UsageError, match="no causal language model"):
        build_on_meta(_directory(tmp_path, content))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    content = {**_LLAMA, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UsageError, match="quantised"):
        build_on_meta(_directory(tmp_path, content))


def test_unknown_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="attention 'telepathy'"):
        build_on_meta(_directory(tmp_path, _LLAMA), attention="telepathy")


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_family_without_sdpa_gets_eager_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("lib.core.log.warn", warnings.append)
    model = build_on_meta(_directory(tmp_path, {"model_type": "bloom"}), attention)
    assert model.config._attn_implementation == "eager"
    assert len(warnings) == 1 and attention in warnings[0] and "eager" in warnings[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_built_in_float32_on_meta(tmp_path: Path, name: str) -> None:
    config = FAMILIES[name](dtype="bfloat16")
    config.save_pretrained(tmp_path)
    model = build_on_meta(tmp_path)
    parameters = list(model.parameters())
    assert all(p.dtype == torch.float32 and p.is_meta for p in parameters)
    assert model.training and not model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    assert (embedding.weight is head.weight) == model.config.tie_word_embeddings
    assert len(decoder_layers(model)) == 2


def test_seventy_billion_parameters_take_no_memory(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    model = build_on_meta(_directory(tmp_path, {**_LLAMA, **sizes}))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(70.6e9, rel=0.01)
    assert all(p.is_meta for p in model.parameters())
    assert list(decoder_layers(model))[-1] == "model.layers.79"
