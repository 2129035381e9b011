# covers: lib/models/rope.py, lib/models/options.py
"""Other RoPE settings extend a model's context, in training as in what stage 05 writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTJConfig,
    PretrainedConfig,
)

from lib.core.errors import UsageError
from lib.models import architecture, rope
from lib.models.options import parse_scaling
from lib.models.rope import RopeSettings
from lib.models.weights import load_pretrained
from lib.train import experiment
from tests.conftest import run_stage
from tests.models.families import FAMILIES, LLAMA3, make_checkpoint
from tests.training import SMALL_RUN, assert_refused, metrics, read_log, train_model

_YARN = RopeSettings(None, "yarn:4", 0)
_GIVEN = {"rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 16.0}

# With these, the settings change the logits of a tiny model.
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
}


def _read(place: Path, config: PretrainedConfig, settings: RopeSettings) -> dict[str, Any]:
    """Return the keys that the settings change, in the config of a run."""
    config.save_pretrained(place)
    content = rope.read_config_json(place, settings)
    return {
        key: content.get(key)
        for key in ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    }


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (
            _YARN,
            {"rope_type": "default", "rope_theta": 1e6},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            RopeSettings(None, "yarn:4:64", 0),  # Qwen's config allows more than it was trained on
            {"rope_type": "default", "rope_theta": 1e6},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            _YARN,  # what the family computes beside the factor stays
            {**_GIVEN, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            {**_GIVEN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            RopeSettings(None, "linear:8", 0),
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            RopeSettings(None, "llama3:8:32", 0),
            {"rope_type": "default", "rope_theta": 1e4},
            LLAMA3,
        ),
        (
            RopeSettings(7e5, "linear:2", 4096),
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_a_scaling_replaces_the_settings_of_the_config(
    settings: RopeSettings, given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    kind = "phi" if "partial_rotary_factor" in given else "llama"
    content = _read(tmp_path, FAMILIES[kind](rope_parameters=given), settings)
    theta = expected.get("rope_theta", given["rope_theta"])
    assert content["rope_parameters"] == {**expected, "rope_theta": theta}
    original = expected.get("original_max_position_embeddings", 64 if "factor" in given else 128)
    assert content["max_position_embeddings"] == max(128, original * expected["factor"])
    earlier = content["rope_parameters"].keys() - {"rope_theta", "partial_rotary_factor"}
    assert content["rope_scaling"] == {key: content["rope_parameters"][key] for key in earlier}
    assert content["rope_theta"] == theta  # as transformers 4 reads it


def test_a_base_alone_extends_the_context_to_the_sequence_length(tmp_path: Path) -> None:
    for length, longest in ((0, 128), (64, 128), (512, 512)):
        content = _read(tmp_path, FAMILIES["llama"](), RopeSettings(5e5, "", length))
        assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 5e5
        assert content["max_position_embeddings"] == longest and content["rope_scaling"] is None


@pytest.mark.parametrize(
    "settings", [RopeSettings(None, "llama3:8", 128), RopeSettings(1e4, "", 9)]
)
def test_a_model_that_has_the_settings_keeps_its_config(
    settings: RopeSettings, tmp_path: Path
) -> None:
    """Llama 3.1 reaches more than its factor times the original length."""
    FAMILIES["llama3"](max_position_embeddings=512).save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    assert rope.read_config_json(tmp_path, settings) == before


def test_layers_with_a_window_keep_their_base(tmp_path: Path) -> None:
    FAMILIES["gemma3"]().save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).rope_parameters
    after = rope.read_config(tmp_path, False, RopeSettings(5e6, "linear:8", 0)).rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"] == {"rope_type": "linear", "rope_theta": 5e6, "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (FAMILIES["gpt2"](), _YARN, "gpt2"),
        (GPTJConfig(n_layer=1, n_embd=32, n_head=4, rotary_dim=4), _YARN, "gptj"),
        (FAMILIES["phi3"](), RopeSettings(5e5, "", 0), "longrope"),
        (FAMILIES["phi3"](rope_parameters=None), _YARN, "transformers 4"),
    ],
)
def test_families_without_such_settings_are_refused_by_name(
    config: PretrainedConfig, settings: RopeSettings, says: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=config.model_type) as error:
        rope.read_config(tmp_path, False, settings)
    assert says in error.value.render()


def test_a_model_that_ignores_its_settings_is_refused(tmp_path: Path) -> None:
    """Falcon with ALiBi has a RoPE base in its config."""
    FAMILIES["falcon_7b"](alibi=True).save_pretrained(tmp_path)
    config = rope.read_config(tmp_path, False, _YARN)
    model = architecture.build_on_meta(tmp_path, "eager", config=config)
    with pytest.raises(UsageError, match="falcon"):
        rope.require_used(model, _YARN)


@pytest.mark.parametrize(
    "text", ["yarn", "yarn:1", "dynamic:2", "yarn:4:0", "yarn:x", "yarn:4:8:1"]
)
def test_other_scalings_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="yarn:4"):
        parse_scaling(text)
    assert parse_scaling("yarn:4.0:32768") == "yarn:4:32768" and parse_scaling("") == ""


@pytest.mark.parametrize("scaling", ["yarn:4", "llama3:8:32", "linear:4", ""])
@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox", "gemma3", "qwen2"])
def test_from_pretrained_computes_what_was_trained(name: str, scaling: str, tmp_path: Path) -> None:
    """The logits are the same bits, also at positions that the model did not know before."""
    settings = RopeSettings(None if scaling else 5e5, scaling, 256)
    fields = _FIELDS.get(name, {})
    base = make_checkpoint(tmp_path / "base", FAMILIES[name](max_position_embeddings=64, **fields))
    config = rope.read_config(tmp_path / "base", False, settings)
    trained = architecture.build_on_meta(tmp_path / "base", "eager", config=config)
    trained.to_empty(device="cpu")
    load_pretrained(trained, tmp_path / "base")
    exported = tmp_path / "exported"
    base.save_pretrained(exported)
    experiment._copy_model_files(tmp_path / "base", exported, False, settings)
    tokens = torch.randint(97, (1, 200), generator=torch.Generator().manual_seed(0))
    loaded = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    with torch.no_grad():
        logits = loaded(tokens).logits
        assert torch.equal(trained.eval()(tokens).logits, logits)
        changes = base.eval()(tokens).logits - logits
    assert changes.abs().max() > 1e-3


def test_a_run_evaluates_and_exports_the_model_with_its_settings(project: Path) -> None:
    """A run that begins with the export measures the loss with which the first one ended."""
    options = (*SMALL_RUN, "-s", 256, "-b", 2, "--max-steps", 1)
    extended = (*options, "--rope-scaling", "yarn:4:64", "--lr", 1e-3)
    assert_refused(project, "-e", "run", *options, code=2, says="--rope-scaling")
    plan = train_model(project, "run", *extended, "--dry-run")
    assert "yarn × 4 of 64 tokens" in plan
    train_model(project, "run", *extended)
    assert "yarn × 4 of 64 tokens" in read_log(project, "run")
    config = json.loads((project / "outputs/run/model/config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 4.0

    out = ("--dtype", "fp32", "--out", "export")
    run_stage("05_export_checkpoint.py", "-e", "run", *out, cwd=project)
    exported = json.loads((project / "export/config.json").read_text())
    assert exported["rope_parameters"] == config["rope_parameters"]
    train_model(project, "next", *options, "-m", "export", "--lr", 0)
    loss = metrics(project, "run")[-1]["eval/loss"]
    assert metrics(project, "next")[-1]["eval/loss"] == pytest.approx(loss, abs=1e-6)

    other = (*options, "--lr", 1e-3, "--rope-scaling", "yarn:8:64", "--max-steps", 2)
    assert_refused(project, "-e", "run", *other, code=2, says="--rope-scaling: yarn:4")
    assert_refused(
        project, "-e", "run", *other, "--resume-with-changes", code=2, says="RoPE settings"
    )


def test_an_adapter_names_the_settings_that_its_base_model_needs(project: Path) -> None:
    run = (*SMALL_RUN, "-s", 256, "-b", 2, "--max-steps", 1, "--rope-theta", 5e5)
    train_model(project, "run", *run, "--lora-rank", 2)
    done = run_stage("05_export_checkpoint.py", "-e", "run", "--adapter", cwd=project)
    assert "RoPE settings" in done.stdout
    card = next(project.glob("outputs/run/export/*-adapter/README.md")).read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    call = code[code.index("AutoModel", code.index("base =")) : code.index("\nmodel =")]
    directory = "<directory of model>"
    base = eval(call.replace(directory, str(project / "model")))  # as a reader types it
    assert base.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert base.config.max_position_embeddings == 256
    assert base.model.rotary_emb.inv_freq[1] == pytest.approx(5e5 ** (-2 / 8))
    run_stage("05_export_checkpoint.py", "-e", "run", "--out", "merged", cwd=project)
    merged = AutoConfig.from_pretrained(project / "merged")
    assert merged.rope_parameters == base.config.rope_parameters
