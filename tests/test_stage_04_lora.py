# covers: 04_train_fsdp.py, lib/models/lora.py
"""Train LoRA adapters with stage 04: base models, resumes, and adapters to start from."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from lib.checkpoints.storage import StrictReader
from tests.conftest import run_stage
from tests.faults import flip_bit
from tests.training import SEQ_LENGTH, losses, prepare_project, read_log, save_model, train_model

RUN = (
    "-d",
    "corpus",
    "-s",
    SEQ_LENGTH,
    "-b",
    2,
    "--lr",
    "3e-2",
    "--log-freq",
    1,
    "--eval-freq",
    0,
    "--ckpt-freq",
    2,
    "--precision",
    "fp32",
    "--compile",
    "off",
    "--lora-rank",
    4,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_project(tmp_path_factory.mktemp("lora"))


def train_adapter(root: Path, name: str, *options: object, **settings: Any) -> str:
    return train_model(root, name, *RUN, *options, **settings)


def copy_to_cache(root: Path, home: Path) -> None:
    """Copy the model into a Hugging Face cache."""
    from lib.core import hashing

    repository = home / "hub/models--org--base"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    for path in (root / "model").iterdir():
        blob = hashing.file_digest(path, "sha256").partition(":")[2]
        shutil.copyfile(path, repository / "blobs" / blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob)


def prepare_model(root: Path, name: str) -> Path:
    """Copy the model to the cache directory with a manifest, as stage 03 writes it."""
    from lib.core import manifest

    target = root / ".cache/models" / name
    shutil.copytree(root / "model", target)
    files = [manifest.file_entry(target, path, "sha256") for path in sorted(target.iterdir())]
    manifest.write_manifest(
        target,
        kind="model/1",
        stage="03_download_model.py",
        identity={},
        options={},
        files=files,
        summary={},
    )
    return target


@pytest.mark.slow
def test_a_base_model_with_other_bytes_or_another_model_is_refused(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "model", root / "base")
    train_adapter(root, "run", "-m", "base", "--max-steps", 4)
    checkpoint = root / "outputs/run/checkpoints/step_00000004"
    digests = json.loads((checkpoint / "train_state.json").read_text())["base"]
    assert digests.keys() == {"model.safetensors"} and "has no digests" not in read_log(root, "run")
    tensors = StrictReader(checkpoint / "dcp").read_metadata().state_dict_metadata
    assert len(tensors) == 3 * 2 * 14 and all(".lora_" in name for name in tensors)

    # The same bytes elsewhere are the same model.
    shutil.move(root / "base", root / "moved")
    gone = train_adapter(root, "run", "--max-steps", 6, expect=3)
    assert "is gone" in gone
    assert "resumed from" in train_adapter(root, "run", "-m", "moved", "--max-steps", 6)

    flip_bit(root / "moved/model.safetensors")
    printed = train_adapter(root, "run", "-m", "moved", "--max-steps", 8, expect=3)
    assert "moved/model.safetensors is not the file" in printed
    assert "copy it again" in printed
    shutil.copytree(root / "model", root / "good")
    train_adapter(root, "kept", "-m", "good", "--max-steps", 2)
    before = (root / "outputs/kept/config.yaml").read_bytes()
    assert "is not the file" in train_adapter(
        root, "kept", "-m", "moved", "--max-steps", 3, expect=3
    )
    assert (root / "outputs/kept/config.yaml").read_bytes() == before
    assert train_adapter(root, "other", "-m", "moved", "--max-steps", 1)  # another run may use it
    printed = train_adapter(
        root,
        "from",
        "-m",
        "moved",
        "--max-steps",
        8,
        "--resume",
        "outputs/run/checkpoints/step_00000006",
        expect=3,
    )
    assert "is not the file" in printed

    flip_bit(root / "moved/model.safetensors")  # as it was
    content = json.loads((root / "moved/config.json").read_text())
    (root / "moved/config.json").write_text(json.dumps(content | {"rms_norm_eps": 1e-3}))
    printed = train_adapter(root, "run", "-m", "moved", "--max-steps", 8, expect=2)
    assert "other settings" in printed and "model" in printed
    assert "--experiment-name run-2" in printed, "the adapters are of another base"
    for rank in (0, 8):
        printed = train_adapter(
            root, "run", "-m", "model", "--max-steps", 8, "--lora-rank", rank, expect=2
        )
        assert "--lora-rank: 4 there" in printed
        printed = train_adapter(
            root,
            "run",
            "-m",
            "model",
            "--max-steps",
            8,
            "--lora-rank",
            rank,
            "--resume-with-changes",
            expect=2,
        )
        assert "contains other trained parameters" in printed


@pytest.mark.parametrize("kind", ["prepared", "cached"])
def test_damage_in_a_base_model_with_digests_is_found_in_each_launch(
    root: Path, tmp_path: Path, kind: str
) -> None:
    env = {"HF_HOME": str(tmp_path / "hf")}
    if kind == "cached":
        copy_to_cache(root, tmp_path / "hf")
        name = "org/base"
        [weights] = (tmp_path / "hf").rglob("model.safetensors")
    else:
        weights = prepare_model(root, "org--own") / "model.safetensors"
        name = "org/own"
    train_adapter(root, kind, "-m", name, "--max-steps", 2, env=env)
    flip_bit(weights)
    printed = train_adapter(root, kind, "-m", name, "--max-steps", 4, env=env, expect=3)
    assert "model.safetensors" in printed and "damaged" in printed
    assert "resumed from" not in printed
    command = "it was made by" if "it was made by" in printed else "03_download_model.py"
    if kind == "cached":
        command = "03_download_model.py --model-name org/base"
    assert command in printed.partition("damaged")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving",
    [
        ("--ckpt-async", "off"),
        ("--ckpt-local-dir", "disk"),
    ],
)
def test_an_adapter_with_dropout_resumes_bit_for_bit(
    root: Path, saving: tuple[object, ...]
) -> None:
    options = ("-m", "model", "--lora-dropout", 0.1, "--max-steps", 6, *saving)
    name = saving[0].strip("-")
    train_adapter(root, name, *options, ranks=2)
    expected = losses(root, name)
    for checkpoint in ("checkpoints/step_00000004", "checkpoints/step_00000006"):
        shutil.rmtree(root / "outputs" / name / checkpoint)
    shutil.rmtree(root / "disk", ignore_errors=True)
    (root / "outputs" / name / "metrics.jsonl").unlink()
    assert "step_00000002" in train_adapter(root, name, *options, ranks=2)
    repeated = losses(root, name)
    assert (
        repeated == {step: loss for step, loss in expected.items() if step > 2}
        and len(repeated) == 4
    )


@pytest.mark.slow
def test_an_adapter_resumes_on_another_number_of_ranks(root: Path) -> None:
    options = ("-m", "model", "--global-batch-size", 4, "-b", 1)
    for steps, ranks in ((2, 2), (4, 0), (8, 2)):
        train_adapter(
            root,
            "many",
            *options,
            "--max-steps",
            steps,
            "--warmup-steps",
            0,
            "--lr-scheduler",
            "constant",
            ranks=ranks,
        )
    train_adapter(
        root,
        "one",
        *options,
        "--max-steps",
        8,
        "--warmup-steps",
        0,
        "--lr-scheduler",
        "constant",
        ranks=2,
    )
    assert losses(root, "many") == pytest.approx(losses(root, "one"), rel=1e-6)
    full = ("--lora-rank", 0, "--max-steps", 1, *options)
    train_adapter(root, "full", *full, ranks=2)
    assert losses(root, "full")[1] == losses(root, "one")[1]  # new adapters add zero


@pytest.mark.slow
def test_a_run_starts_from_an_existing_adapter(root: Path) -> None:
    train_adapter(
        root,
        "first",
        "-m",
        "model",
        "--max-steps",
        3,
        "--lora-targets",
        "attention",
        "--lora-rslora",
        "on",
    )
    run_stage("05_export_checkpoint.py", "-e", "first", "--adapter", "--out", "adapter", cwd=root)
    from_adapter = (
        "04_train_fsdp.py",
        *(option for option in RUN if option not in ("--lora-rank", 4)),
        "-m",
        "model",
        "--lora-from",
        "adapter",
        "-e",
        "second",
    )
    run_stage(*from_adapter, "--max-steps", 4, cwd=root, ranks=2)
    log = read_log(root, "second")
    assert "loaded from adapter" in log
    assert "rsLoRA: rank 4, alpha 8, on 8 linear" in log
    run_stage(*from_adapter[:-1], "same", "--max-steps", 1, "--lr", 0, cwd=root)
    run_stage("05_export_checkpoint.py", "-e", "same", "--adapter", "--out", "round", cwd=root)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (root / "round" / name).read_bytes() == (root / "adapter" / name).read_bytes()
    refused = run_stage(
        *from_adapter, "--max-steps", 6, "--lora-rank", 3, "--lora-alpha", 2, cwd=root, expect=2
    )
    assert refused.stderr.count("not that of adapter") == 2
    flip_bit(root / "adapter/adapter_model.safetensors")
    refused = run_stage(*from_adapter, "--max-steps", 6, cwd=root, expect=2).stderr
    assert "other settings" in refused and "adapter" in refused
    move, again = refused.partition("run:")[2].strip().splitlines()[:2]
    assert shlex.split(move) == ["mv", "adapter", "adapter.aside"]
    assert "--lora-from adapter" in again and "--config" not in again
    shutil.move(root / "adapter", root / "adapter.aside")  # as the command says
    printed = run_stage(*from_adapter, "--max-steps", 6, cwd=root).stdout
    assert "resumed from" in printed and losses(root, "second").keys() == {1, 2, 3, 4, 5, 6}
    gone = run_stage(*from_adapter[:-1], "third", "--max-steps", 6, cwd=root, expect=3).stderr
    assert "adapter contains no adapter" in gone


@pytest.mark.slow
def test_named_experts_get_adapters(root: Path) -> None:
    """Three ranks share four experts, by their rows."""
    shutil.copytree(root / "model", root / "mixture")
    save_model(
        root / "mixture",
        MixtralConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
        ),
    )
    options = (
        "-m",
        "mixture",
        "--lora-targets",
        "gate_up_proj|down_proj|q_proj",
        "--max-steps",
        4,
        "--global-batch-size",
        6,
    )
    printed = train_adapter(root, "alone", *options)
    assert "on 2 linear layers and the experts of 4 parameters" in read_log(root, "alone")
    assert "no adapters" not in printed
    for kind in ("selective", "full"):
        train_adapter(
            root, f"experts_{kind}", *options, "--activation-checkpointing", kind, ranks=3
        )
        assert losses(root, f"experts_{kind}") == pytest.approx(losses(root, "alone"), rel=1e-6)
    export = ("05_export_checkpoint.py", "-e", "experts_full")
    assert "none of them" in run_stage(*export, cwd=root).stdout
    printed = run_stage(*export, "--adapter", cwd=root, expect=2)
    assert "fused experts" in printed.stderr


def test_lora_needs_a_base_model_with_weights(root: Path) -> None:
    for options in (("--from-scratch", "-m", "model"), ("--from-scratch", "--model-size", "1M")):
        printed = train_adapter(root, "none", *options, "--max-steps", 2, expect=2)
        assert "needs a base model" in printed
