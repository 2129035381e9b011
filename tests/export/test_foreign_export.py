# covers: 05_export_checkpoint.py, lib/export/foreign_model.py, lib/checkpoints/torchtitan_names.py
"""Checkpoints of other trainers become model directories, or one error says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lib.checkpoints.foreign_run import find_foreign_run
from lib.checkpoints.foreign_weights import load_foreign
from lib.core.errors import ArtifactError, UsageError
from tests.conftest import run_stage
from tests.export.exports import run_stage_05
from tests.export.titan_model import Titan
from tests.models.families import FAMILIES, make_checkpoint

TOKENS = torch.arange(60).reshape(2, 30) * 7 % 97
# Names before and after torchtitan renamed them.
NAMES = {
    "earlier": {},
    "later": {"output.weight": "lm_head.weight", ".attention.w": ".attention.qkv_linear.w"},
}


def save_titan(directory: Path, names: dict[str, str]) -> Titan:
    """Write the checkpoint of a Llama as torchtitan does, with its other states."""
    model = Titan()
    states: dict[str, object] = {}
    for name, tensor in model.state_dict().items():
        for before, after in names.items():
            name = name if ".wo." in name else name.replace(before, after)
        states[name] = tensor
    states["optimizer"] = {"state.layers.0.attention.wq.weight.exp_avg": torch.ones(32, 32)}
    states["train_state"] = {"step": torch.tensor(7)}
    dcp.save(states, checkpoint_id=directory, no_dist=True)
    return model


def write_model(directory: Path, **changes: object) -> None:
    """Write the config of the Llama, without weights."""
    config = FAMILIES["llama"](**changes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(b"\0\1 any bytes")


@pytest.mark.parametrize("version", NAMES)
def test_torchtitan_and_the_export_compute_the_same(tmp_path: Path, version: str) -> None:
    titan = save_titan(tmp_path / "step-7", NAMES[version])
    write_model(tmp_path / "base")
    command = ("--from-dcp", tmp_path / "step-7", "-m", tmp_path / "base", "--dtype", "fp32")
    run_stage_05(*command, "--dry-run")
    assert not (tmp_path / "step-7-export").exists()
    run_stage_05(*command)
    out = tmp_path / "step-7-export"
    exported = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = titan(TOKENS)
        logits = exported(TOKENS).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.std()
    assert torch.equal(exported.lm_head.weight, titan.output.weight)
    assert (out / "tokenizer.model").read_bytes() == (
        tmp_path / "base/tokenizer.model"
    ).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["rope_theta"] == 1e4
    assert "of another trainer" in (out / "README.md").read_text()
    before = (out / "manifest.json").read_bytes()
    run_stage_05(*command)  # already done
    assert (out / "manifest.json").read_bytes() == before
    # Stage 04 reads the same weights with --resume-from-foreign.
    model = AutoModelForCausalLM.from_config(exported.config).float()
    load_foreign(model, find_foreign_run(tmp_path / "step-7"), tmp_path / "base")
    for name, value in model.named_parameters():
        assert torch.equal(value, exported.get_parameter(name)), name


def test_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    save_titan(tmp_path / "step-7", {})
    write_model(tmp_path / "base", tie_word_embeddings=True)
    with pytest.raises(UsageError, match="have different values") as error:
        run_stage_05("--from-dcp", tmp_path / "step-7", "-m", tmp_path / "base")
    assert "tie_word_embeddings to false" in error.value.hint
    assert not list(tmp_path.glob("step-7-export*"))


@pytest.mark.slow
def test_a_checkpoint_of_accelerate_on_two_ranks_is_exported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", FAMILIES["mixtral"]())
    expected = load_file(tmp_path / "model/model.safetensors")
    run_stage("tests/export/accelerate_saver.py", "model", "saved", cwd=tmp_path, ranks=2)
    (tmp_path / "model/model.safetensors").unlink()
    out = tmp_path / "out"
    run_stage_05(
        "--from-dcp", tmp_path / "saved", "-m", tmp_path / "model", "--out", out, "--dtype", "fp32"
    )
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_options_that_do_not_apply_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        run_stage_05("--from-dcp", tmp_path, "-e", "exp", "--adapter", "--step", 5)
    text = error.value.render()
    for part in ("-e belongs", "--adapter belongs", "--step belongs", "needs -m NAME|DIR"):
        assert part in text
    write_model(tmp_path / "base")
    with pytest.raises(ArtifactError, match=r"--from-dcp: .* is not a checkpoint"):
        run_stage_05("--from-dcp", tmp_path / "base", "-m", tmp_path / "base")


def test_a_checkpoint_of_this_project_is_left_to_the_usual_export(tmp_path: Path) -> None:
    step = tmp_path / "outputs/exp/checkpoints/step_00000010"
    step.mkdir(parents=True)
    (step / "COMMIT.json").touch()
    with pytest.raises(UsageError, match="is a checkpoint of this project") as error:
        run_stage_05("--from-dcp", step, "-m", "any")
    assert error.value.run.endswith(f"-e {tmp_path / 'outputs/exp'} --step 10")
