# covers: 05_export_checkpoint.py, lib/export/foreign_model.py, lib/export/foreign_source.py
"""Checkpoints of other trainers become model directories, or one error says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lib.core.errors import ArtifactError, UsageError
from lib.export.foreign_source import ForeignSource
from tests.conftest import run_stage
from tests.export.exports import run_stage_05
from tests.models.families import FAMILIES, make_checkpoint


def save_dcp(directory: Path) -> LlamaForCausalLM:
    """Write the checkpoint of a Llama, with states that are not exported."""
    model = LlamaForCausalLM(FAMILIES["llama"]())
    states: dict[str, object] = {"model": model.state_dict()}
    states["optimizer"] = {"state.model.norm.weight.exp_avg": torch.ones(32)}
    states["train_state"] = {"step": torch.tensor(7)}
    dcp.save(states, checkpoint_id=directory, no_dist=True)
    return model


def write_model(directory: Path, **changes: object) -> None:
    """Write the config of the Llama, without weights."""
    config = FAMILIES["llama"](**changes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(b"\0\1 any bytes")


def test_the_export_contains_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    model = save_dcp(tmp_path / "step-7")
    write_model(tmp_path / "base")
    command = ("--from-dcp", tmp_path / "step-7", "-m", tmp_path / "base", "--dtype", "fp32")
    run_stage_05(*command, "--dry-run")
    assert not (tmp_path / "step-7-export").exists()
    run_stage_05(*command)
    out = tmp_path / "step-7-export"
    exported = AutoModelForCausalLM.from_pretrained(out)
    for name, value in model.named_parameters():
        assert torch.equal(value, exported.get_parameter(name)), name
    assert (out / "tokenizer.model").read_bytes() == (
        tmp_path / "base/tokenizer.model"
    ).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["rope_theta"] == 1e4
    assert "of another trainer" in (out / "README.md").read_text()
    before = (out / "manifest.json").read_bytes()
    run_stage_05(*command)  # already done
    assert (out / "manifest.json").read_bytes() == before


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """The other trainer may still run, and save over it."""
    save_dcp(tmp_path / "step-7")
    write_model(tmp_path / "base")
    source = ForeignSource.find(tmp_path / "step-7", str(tmp_path / "base"), tmp_path)
    source.require_unchanged()
    save_dcp(tmp_path / "step-7")
    with pytest.raises(UsageError, match="was replaced or changed"):
        source.require_unchanged()


def test_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
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
    with pytest.raises(ArtifactError, match=r"--from-dcp: .*not a checkpoint"):
        run_stage_05("--from-dcp", tmp_path / "base", "-m", tmp_path / "base")


def test_a_checkpoint_of_this_project_is_left_to_the_usual_export(tmp_path: Path) -> None:
    step = tmp_path / "outputs/exp/checkpoints/step_00000010"
    step.mkdir(parents=True)
    (step / "COMMIT.json").touch()
    with pytest.raises(UsageError, match="checkpoint of this project") as error:
        run_stage_05("--from-dcp", step, "-m", "any")
    assert error.value.run.endswith(f"-e {tmp_path / 'outputs/exp'} --step 10")
