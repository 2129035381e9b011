# covers: 05_export_checkpoint.py, lib/export/formats.py, lib/export/companions.py
# covers: lib/export/base_model.py, lib/export/checkpoint_choice.py
"""Stage 05 exports exactly the trained weights, under the names of the Hub."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig

from tests.conftest import run_stage, start_stage
from tests.models.families import FAMILIES
from tests.training import SEQ_LENGTH, SMALL_RUN, VOCABULARY, losses, read_log, save_model

TRAIN = (
    "-d",
    "corpus",
    "-m",
    "model",
    "-s",
    SEQ_LENGTH,
    "--precision",
    "float32",
    "-b",
    4,
    "--ckpt-freq",
    2,
    "--eval-freq",
    2,
    "--eval-batches",
    2,
)


@pytest.fixture(scope="module")
def trained(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with `still` (lr 0, two ranks) and `moved` (a huge lr, so loss rises)."""
    root = tmp_path_factory.mktemp("exported")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "outputs/still/",
        *TRAIN,
        "--max-steps",
        2,
        "--lr",
        0,
        cwd=root,
        ranks=2,
    )
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "moved",
        *TRAIN,
        "--max-steps",
        6,
        "--lr",
        0.05,
        "--lr-scheduler",
        "constant",
        "--ckpt-keep",
        0,
        cwd=root,
    )
    return root


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that project."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model directory."""
    return {
        key: value
        for path in sorted(directory.glob("*.safetensors"))
        for key, value in load_file(path).items()
    }


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert the same names, dtypes and bits."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype and torch.equal(value, right[key]), key


def test_unchanged_weights_are_exported_bit_for_bit(project: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_stage(
        "05_export_checkpoint.py",
        "-e",
        "outputs/still",
        "--dtype",
        "fp32",
        "--out",
        "out",
        cwd=project,
    )
    assert_equal(tensors(project / "out"), tensors(project / "model"))
    exported = AutoModelForCausalLM.from_pretrained(project / "out")
    assert exported.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(project / "out").eos_token == "</s>"
    config = json.loads((project / "out" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["architectures"] == ["LlamaForCausalLM"]
    for lost, says in (
        ("model.safetensors", "model.safetensors is missing"),
        ("manifest.json", "has no weights"),
    ):  # as after an incomplete copy
        (project / "out" / lost).unlink()
        done = run_stage(
            "04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "out", cwd=project, expect=3
        )
        assert says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_weights_are_bfloat16_and_sharded_by_default(project: Path):
    from transformers import AutoModelForCausalLM

    run_stage(
        "05_export_checkpoint.py",
        "-e",
        "still",
        "--max-shard-size",
        "20KB",
        cwd=project,
        fresh=True,
    )
    out = project / "outputs" / "still" / "export" / "step_00000002"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert all(
        p.stat().st_size < 22_000 or len(load_file(p)) == 1 for p in out.glob("*.safetensors")
    )
    expected = {k: v.bfloat16() for k, v in tensors(project / "model").items()}
    assert_equal(tensors(out), expected)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_step_selects_a_checkpoint(project: Path):
    rows = [
        json.loads(line)
        for line in (project / "outputs" / "moved" / "metrics.jsonl").read_text().splitlines()
    ]
    held_out = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    best = min(held_out, key=held_out.__getitem__)
    for step, expected in (("latest", 6), ("best", best), ("2", 2)):
        done = run_stage(
            "05_export_checkpoint.py", "-e", "moved", "--step", step, "--dry-run", cwd=project
        )
        assert f"step_{expected:08d}" in done.stdout
    assert not (project / "outputs" / "moved" / "export").exists()


def test_a_moved_experiment_needs_no_other_directory(
    project: Path, tmp_path_factory: pytest.TempPathFactory
):
    far = tmp_path_factory.mktemp("far")
    shutil.move(project / "outputs", far / "elsewhere")
    for name in ("model", ".cache", "hf_datasets"):
        shutil.rmtree(project / name)
    run_stage("05_export_checkpoint.py", "-e", "still", "--save-dir", far / "elsewhere", cwd=far)
    assert (far / "elsewhere" / "still" / "export" / "step_00000002" / "config.json").exists()


def test_an_existing_export_is_kept_or_replaced(project: Path):
    arguments = ("-e", "still", "--out", "out")
    run_stage("05_export_checkpoint.py", *arguments, cwd=project)
    before = (project / "out" / "manifest.json").read_bytes()
    done = run_stage("05_export_checkpoint.py", *arguments, cwd=project)
    assert "already done" in done.stdout
    done = run_stage(
        "05_export_checkpoint.py", *arguments, "--dtype", "float16", cwd=project, expect=2
    )
    assert "--dtype: bfloat16 there, float16 now" in done.stderr
    assert (project / "out" / "manifest.json").read_bytes() == before
    run_stage(
        "05_export_checkpoint.py", *arguments, "--dtype", "float16", "--overwrite", cwd=project
    )
    assert tensors(project / "out")["model.norm.weight"].dtype == torch.float16
    assert not list(project.glob("out.*"))


def test_bad_input_is_an_error_without_a_traceback(project: Path):
    def refused(*arguments: object, code: int, says: str) -> None:
        done = run_stage("05_export_checkpoint.py", *arguments, cwd=project, expect=code)
        assert says in done.stderr and "Traceback" not in done.stderr

    refused(code=2, says="-e is required")
    refused("-e", "nowhere", code=3, says="moved, still")
    refused("-e", "moved", "--step", 3, code=3, says="steps 6, 4, 2")
    refused("-e", "moved", "--step", "first", code=2, says="latest or best")
    refused("-e", "moved", "--step", "²", code=2, says="latest or best")
    refused("-e", "moved", "--max-shard-size", "big", code=2, says="5GB")
    tensors = project / "outputs" / "moved" / "checkpoints" / "step_00000006" / "dcp"
    payload = next(path for path in tensors.glob("*.distcp") if "optimizer" not in path.name)
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    refused("-e", "moved", code=3, says="other content")
    (project / "outputs" / "moved" / "model" / "tokenizer.json").write_text("{}")
    refused("-e", "moved", code=3, says="missing or changed: tokenizer.json")
    (link := project / "outputs" / "moved" / "model" / "chat_template.jinja").symlink_to(
        project / "raw_text" / "document_000.txt"
    )
    refused("-e", "moved", code=3, says="contains links")
    link.unlink()
    payload.write_bytes(content[:-1])
    refused("-e", "moved", code=3, says="-e moved --step 4")
    payload.unlink()
    refused("-e", "moved", code=3, says="is missing")
    assert not (project / "outputs" / "moved" / "export").exists()


def test_an_export_generates_the_same_tokens(project: Path):
    """The tokenizer and the generation config are those of the export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_stage(
        "05_export_checkpoint.py", "-e", "still", "--out", "out", "--dtype", "float32", cwd=project
    )
    texts = []
    for directory in ("out", "model"):
        tokenizer = AutoTokenizer.from_pretrained(project / directory)
        model = AutoModelForCausalLM.from_pretrained(project / directory)
        ids = model.generate(
            **tokenizer("kan lo", return_tensors="pt"), max_new_tokens=12, do_sample=False
        )
        assert ids.shape[1] > 12
        texts.append(tokenizer.decode(ids[0]))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_export_during_training_is_of_a_committed_step(project: Path):
    """The running training is not disturbed."""
    arguments = (
        "-e",
        "busy",
        *TRAIN,
        "--max-steps",
        100000,
        "--ckpt-freq",
        20,
        "--eval-freq",
        0,
        "--ckpt-keep",
        0,
    )
    launch = start_stage("04_train_fsdp.py", *arguments, cwd=project)
    try:
        folder = project / "outputs" / "busy" / "checkpoints"
        steps = []
        for number in range(2):
            while len(list(folder.glob("step_????????/COMMIT.json"))) <= 2 * number:
                assert not launch.poll()
                time.sleep(0.05)
            run_stage("05_export_checkpoint.py", "-e", "busy", "--out", f"out{number}", cwd=project)
            summary = json.loads((project / f"out{number}" / "manifest.json").read_text())
            steps.append(summary["summary"]["step"])
        assert not launch.poll() and 0 < steps[0] < steps[1]
    finally:
        launch.kill()
    assert not list(project.glob("out*.partial-*"))


# Families that differ in kinds of layers; make test-long trains and exports the others.
UNLIKE_FAMILIES = ("llama", "mixtral", "falcon_7b", "gemma3", "gpt2")


def train_and_export_unchanged(
    project: Path, name: str, config: PretrainedConfig, ranks: int
) -> None:
    """Train a model at learning rate 0, export it, and compare the weights."""
    (project / "model" / "model.safetensors").unlink()
    save_model(project / "model", config, torch.bfloat16)
    run_stage(
        "04_train_fsdp.py",
        "-e",
        name,
        *TRAIN,
        "--max-steps",
        2,
        "--lr",
        0,
        cwd=project,
        ranks=ranks,
    )
    rows = [
        json.loads(line)
        for line in (project / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[0]["train/loss"] == pytest.approx(6.2, abs=0.6)  # about ln 512
    run_stage("05_export_checkpoint.py", "-e", name, "--out", "out", cwd=project)
    assert_equal(tensors(project / "out"), tensors(project / "model"))
    run_stage(
        "05_export_checkpoint.py", "-e", name, "--out", "full", "--dtype", "float32", cwd=project
    )
    assert_equal(
        tensors(project / "full"),
        {key: value.float() for key, value in tensors(project / "model").items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        name if name in UNLIKE_FAMILIES else pytest.param(name, marks=pytest.mark.long)
        for name in FAMILIES
    ],
)
def test_every_family_is_trained_and_exported_unchanged(
    prepared_once: Path, tmp_path: Path, family: str
):
    """At learning rate 0 on two ranks, the export has the names and bits of `save_pretrained`."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(prepared_once, tmp_path, dirs_exist_ok=True)
    train_and_export_unchanged(tmp_path, family, FAMILIES[family](VOCABULARY), ranks=2)
    log = read_log(tmp_path, family)
    assert re.search(r"sharded: 2 × \w+(Layer|Block),", log)  # each of the two layers
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_without_an_expert_export_all_experts(
    prepared_once: Path, tmp_path: Path, ranks: int
):
    """Mixtral with two experts on more ranks trains and exports the right weights."""
    shutil.copytree(prepared_once, tmp_path, dirs_exist_ok=True)
    config = FAMILIES["mixtral"](VOCABULARY, num_local_experts=2)
    train_and_export_unchanged(tmp_path, "experts", config, ranks)
    train = (*SMALL_RUN, "-b", 1, "--lr", "1e-2", "--max-steps", 4)
    run_stage("04_train_fsdp.py", "-e", "many", *train, cwd=tmp_path, ranks=ranks)
    run_stage("04_train_fsdp.py", "-e", "one", *train, "--global-batch-size", ranks, cwd=tmp_path)
    assert losses(tmp_path, "many") == pytest.approx(losses(tmp_path, "one"), rel=1e-4)
