# covers: 04_train_fsdp.py, lib/tokens/synthetic.py, lib/train/new_model.py
# covers: lib/train/sources/synthetic.py, lib/train/sources/table.py
# covers: lib/train/inputs.py, 05_export_checkpoint.py, lib/export/card.py
"""Train on synthetic tokens: without data, tokenizer or weights, on one to three ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import run_stage, start_stage
from tests.test_stage_04_experts import MIXTRAL
from tests.training import losses, read_log, save_model, train_model, wait_for_save

STAGE = "04_train_fsdp.py"
RUN = (
    *("-d", "synthetic:100K", "--model-size", "1M", "-s", 64, "--precision", "fp32"),
    *("--global-batch-size", 6, "--max-steps", 8, "--log-freq", 1, "--ckpt-freq", 3),
)


def train_synthetic(root: Path, name: str, *options: object, **settings: Any) -> str:
    return train_model(root, name, *RUN, *options, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing",
    [
        pytest.param("concat", marks=pytest.mark.long),
        "documents",
        pytest.param("none", marks=pytest.mark.long),
    ],
)
def test_the_number_of_ranks_does_not_matter(tmp_path: Path, packing: str) -> None:
    for ranks in (1, 2, 3):
        train_synthetic(tmp_path, f"on-{ranks}", "--packing", packing, ranks=ranks)
    expected = losses(tmp_path, "on-1")
    assert len(expected) == 8 and expected[8] < expected[1]
    for ranks in (2, 3):
        assert losses(tmp_path, f"on-{ranks}") == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / ".cache" / "tokens").exists()


@pytest.mark.slow
def test_a_killed_run_continues_exactly_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    train_synthetic(tmp_path, "whole", ranks=2)
    expected = losses(tmp_path, "whole")
    launch = start_stage(STAGE, "-e", "killed", *RUN, cwd=tmp_path, ranks=2)
    wait_for_save(launch, tmp_path, "killed")
    launch.kill()
    assert "resumed from" in train_synthetic(tmp_path, "killed", ranks=2)
    assert losses(tmp_path, "killed") == expected

    shutil.copytree(tmp_path / "outputs/whole", tmp_path / "outputs/other")
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"outputs/other/checkpoints/step_{step:08d}")
    assert "resumed from" in train_synthetic(tmp_path, "other", ranks=3)
    assert losses(tmp_path, "other") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_without_tokenizer_can_be_exported_and_trained_further(tmp_path: Path) -> None:
    printed = train_synthetic(tmp_path, "one")
    assert "1M from scratch" in printed and "no validation" in printed
    assert "already done" in train_synthetic(tmp_path, "one")
    other = train_synthetic(tmp_path, "one", "--seed", 5, expect=2)
    assert "seed: 0 there, 5 now" in other
    other = train_synthetic(tmp_path, "one", "-d", "synthetic:200K", "--overwrite", expect=2)
    assert "cannot be mixed" in other

    done = run_stage("05_export_checkpoint.py", "-e", "one", "--out", "exported", cwd=tmp_path)
    assert "exported contains no tokenizer" in done.stdout
    exported = tmp_path / "exported"
    assert "There is no tokenizer" in (exported / "README.md").read_text()
    assert not (exported / "tokenizer.json").exists()
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 1024

    options = ("-d", "synthetic:100K", "-m", "exported", "-s", 64, "--max-steps", 2)
    run_stage(STAGE, "-e", "two", *options, "--log-freq", 1, cwd=tmp_path)
    assert "read from exported" in read_log(tmp_path, "two")
    assert losses(tmp_path, "two")[1] < losses(tmp_path, "one")[1]
    run_stage(STAGE, "-e", "three", *options, "--lora-rank", 4, cwd=tmp_path)
    assert "LoRA: adapter initialised" in read_log(tmp_path, "three")


def test_a_model_directory_needs_only_its_config(tmp_path: Path) -> None:
    save_model(tmp_path / "model", MIXTRAL)
    (tmp_path / "model/model.safetensors").unlink()
    options = ("-d", "synthetic:10K", "-m", "model", "-s", 32, "--max-steps", 2)
    run_stage(STAGE, "-e", "bare", *options, cwd=tmp_path)
    log = read_log(tmp_path, "bare")
    assert "initialised from --seed 0" in log
    assert "load-balancing loss" in log  # as from scratch
    again = run_stage(STAGE, "-e", "bare", *options, cwd=tmp_path).stdout
    assert "already done" in again
    refused = run_stage(STAGE, "-e", "x", *options, "--lora-rank", 4, cwd=tmp_path, expect=2)
    assert "needs a base model" in refused.stderr


@pytest.mark.slow
def test_a_config_of_stage_03_also_works_with_data_and_a_tokenizer(project: Path) -> None:
    config = json.loads((project / "model/config.json").read_text())
    (project / "any.json").write_text(json.dumps(config))
    options = ("--config-json", "any.json", "--tokenizer", "model", "--model-name", "any")
    run_stage("03_download_model.py", "--from-scratch", *options, cwd=project)
    options = ("-d", "corpus", "-m", "any", "-s", 32, "--max-steps", 2)
    run_stage(STAGE, "-e", "any", *options, cwd=project)
    assert "initialised from seed 0" in read_log(project, "any")
    assert (project / "outputs/any/model/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-d", "synthetic:0"), "'0' is not"),
        (("-d", "synthetic:abc"), "'abc' is not"),
        (("-d", "synthetic:10"), "too small"),
        (("-d", "synthetic", "-d", "corpus"), "cannot be mixed"),
        (("-d", "synthetic", "--streaming", "--max-steps", 2), "where the samples come from"),
        (("-d", "synthetic", "--chat-template", "chatml"), "belongs to chat datasets"),
        (("-d", "synthetic", "-m", "x"), "not both"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, options: tuple[object, ...], says: str
) -> None:
    done = run_stage(
        STAGE, "-e", "x", "--model-size", "1M", "-s", 64, *options, cwd=tmp_path, expect=2
    )
    assert says in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_plans_and_preparation_need_no_data(tmp_path: Path) -> None:
    options = ("-e", "x", "-d", "synthetic", "--model-size", "tiny")
    plan = ("--dry-run", "--plan-gpus", "8,64", "--packing", "documents")
    printed = run_stage(
        STAGE, *options, *plan, cwd=tmp_path, before="tests.training:plan_one_batch"
    ).stdout
    assert "synthetic:100M" in printed and "100,000,000" not in printed
    assert "on 8 GPUs" in printed and "on 64 GPUs" in printed
    assert not list(tmp_path.iterdir())
    printed = run_stage(STAGE, *options, "--prepare-only", cwd=tmp_path).stdout
    assert "next:" in printed and not (tmp_path / "outputs").exists()
