# covers: 05_export_checkpoint.py, lib/checkpoints/foreign_weights.py, lib/export/foreign_source.py
"""Take over the weights of runs of other trainers, by an export."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, prepare_project, train_model

RUN = ("-d", "corpus", "-s", SEQ_LENGTH, "--max-steps", 1, "--compile", "off", "--eval-freq", 0)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with runs of other trainers in old/."""
    root = prepare_project(tmp_path_factory.mktemp("foreign"))
    run_stage("tests/foreign_trainer.py", "model", "old", cwd=root, ranks=2)
    return root


def export_foreign(root: Path, kind: str, model: str) -> str:
    words = ("--from-dcp", f"old/{kind}", "-m", model, "--out", f"new-{kind}", "--dtype", "fp32")
    result = run_stage("05_export_checkpoint.py", *words, cwd=root)
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offline", "trainer", "wrapped"])
def test_weights_of_two_ranks_are_exported_to_the_bit(project: Path, kind: str) -> None:
    """The kinds are FSDP2, FSDP1 of accelerate, and FSDP1 under the names of its wrappers."""
    printed = export_foreign(project, kind, "model")
    assert ("step 1,200 of epoch 1" in printed) == (kind == "offline")
    exported = AutoModelForCausalLM.from_pretrained(project / f"new-{kind}").state_dict()
    expected = load_file(project / f"old/{kind}.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_run_of_another_trainer_names_the_commands_that_take_it_over(project: Path) -> None:
    printed = train_model(project, "offline", *RUN, "-m", "model", "--save-dir", "old", expect=2)
    assert "run of another trainer" in printed
    export, train = printed.partition("run: ")[2].splitlines()[:2]
    run_stage(*shlex.split(export)[1:], cwd=project)
    assert (project / "old/offline-model/model.safetensors").exists()
    assert "-e offline-2" in train and "-m old/offline-model" in train


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named_before_the_export(project: Path) -> None:
    wider = project / "wider"
    wider.mkdir()
    config = json.loads((project / "model/config.json").read_text())
    (wider / "config.json").write_text(
        json.dumps(config | {"intermediate_size": 96, "num_hidden_layers": 3})
    )
    words = ("--from-dcp", "old/offline", "-m", "wider", "--out", "never")
    result = run_stage("05_export_checkpoint.py", *words, cwd=project, expect=2)
    printed = result.stderr
    assert "gate_proj.weight: expected shape (96, 32), found (64, 32)" in printed
    assert "missing: model.layers.2.mlp.up_proj.weight" in printed
    assert not (project / "never").exists()
