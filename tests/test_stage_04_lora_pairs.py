# covers: 04_train_fsdp.py, lib/models/lora.py, lib/export/adapter_checks.py, lib/export/lora_run.py
"""Combine LoRA with other options, and compare two ranks with a run of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.models.families import make_tiny_llama
from tests.tokens.chat import chats
from tests.training import (
    SEQ_LENGTH,
    list_saved_steps,
    losses,
    prepare_project,
    read_log,
    save_model,
    train_model,
    write_corpus,
)

STEPS = 5
RUN = (
    "-s",
    SEQ_LENGTH,
    "--lr",
    "3e-2",
    "--log-freq",
    1,
    "--max-steps",
    STEPS,
    "--global-batch-size",
    8,
    "--lora-rank",
    4,
)


def offload_on_cpu(_: int) -> None:
    """Shard as with --cpu-offload on a GPU, which keeps shards and states in host memory."""
    from lib.parallel import parallelize

    shard = parallelize.shard

    def offloaded(*arguments: object) -> str:
        return shard(*arguments[:3], True, False)

    parallelize.shard = offloaded


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with text, more text and conversations."""
    root = prepare_project(tmp_path_factory.mktemp("pairs"))
    write_corpus(root / "raw_more", documents=17)
    run_stage(
        "02_build_hf_dataset.py",
        "--data-folder",
        "raw_more",
        "--save-dir",
        "hf_datasets/more",
        cwd=root,
    )
    chats.save_dataset(
        root / "hf_datasets/talks", train=[chats.make_conversation(seed) for seed in range(40)]
    )
    chats.save_tokenizer(root / "chatty")
    save_model(
        root / "chatty",
        make_tiny_llama(vocab_size=320, max_position_embeddings=256),
    )
    return root


def train_adapter(root: Path, name: str, *options: object, ranks: int = 2, before: str = "") -> str:
    defaults = [("-m", "model"), ("-d", "corpus"), ("--precision", "fp32"), ("--compile", "off")]
    missing = (word for option in defaults if option[0] not in options for word in option)
    return train_model(root, name, *RUN, *options, *missing, ranks=ranks, before=before)


def export_adapter(root: Path, name: str) -> None:
    """Export the adapter of a run; stage 05 checks it."""
    done = run_stage("05_export_checkpoint.py", "-e", name, "--adapter", cwd=root)
    assert "as in the checkpoint" in done.stdout


@pytest.fixture(scope="module")
def plain(root: Path) -> dict[int, float]:
    """Return the losses of a run of one process."""
    train_adapter(root, "plain", "-b", 8, ranks=0)
    log = read_log(root, "plain")
    assert " parameters, 4.1K trained" in log
    assert "float32 masters and reductions of the adapters, frozen weights in float32" in log
    measured = losses(root, "plain")
    assert measured[STEPS] < measured[1] - 0.05
    return measured


@pytest.mark.parametrize(
    ("options", "before"),
    [
        pytest.param((), "", id="nothing else", marks=pytest.mark.long),
        pytest.param(
            ("--activation-checkpointing", "selective", "--shard-size", 1),
            "",
            id="selective, replicas, whole frozen weights",
        ),
        pytest.param(
            ("-b", 1, "--activation-checkpointing", "full", "--ckpt-freq", 2),
            "",
            id="full, accumulation, async saves",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (),
            "tests.test_stage_04_lora_pairs:offload_on_cpu",
            id="offload",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--shard-size", 1, "--activation-checkpointing", "full"),
            "tests.test_stage_04_lora_pairs:offload_on_cpu",
            id="offload, replicas",
        ),
        pytest.param(("--compile", "on"), "", id="compile", marks=pytest.mark.long),
        pytest.param(
            ("--compile", "on", "--activation-checkpointing", "selective", "--shard-size", 1),
            "",
            id="compile, selective, replicas",
            marks=pytest.mark.long,
        ),
    ],
)
def test_adapters_on_two_ranks_equal_the_reference(
    root: Path, plain: dict[int, float], tmp_path: Path, options: tuple[object, ...], before: str
) -> None:
    batch = () if "-b" in options else ("-b", 4)
    train_adapter(root, tmp_path.name, *batch, *options, before=before)
    assert losses(root, tmp_path.name) == pytest.approx(plain, rel=1e-6)
    assert ("reductions in host memory" in read_log(root, tmp_path.name)) == bool(before)
    if "--ckpt-freq" in options:
        assert list_saved_steps(root, tmp_path.name) == [2, 4, 5]
    export_adapter(root, tmp_path.name)


@pytest.mark.parametrize(
    ("options", "rel"),
    [
        pytest.param(("--packing", "documents"), 1e-6, id="documents"),
        pytest.param(
            ("-d", "corpus=2", "-d", "more=1"), 1e-6, id="mixture", marks=pytest.mark.long
        ),
        pytest.param(
            ("-d", "talks", "-m", "chatty", "-s", 256), 1e-6, id="chat", marks=pytest.mark.slow
        ),
        pytest.param(("--optimizer", "adamw8bit"), 1e-6, id="adamw8bit", marks=pytest.mark.slow),
        pytest.param(("--precision", "bf16"), 1e-3, id="bf16", marks=pytest.mark.long),
        pytest.param(("--precision", "fp16"), 1e-3, id="fp16", marks=pytest.mark.slow),
    ],
)
def test_adapters_equal_those_of_one_process(
    root: Path, plain: dict[int, float], tmp_path: Path, options: tuple[object, ...], rel: float
) -> None:
    train_adapter(root, tmp_path.name, *options, "-b", 8, ranks=0)
    expected = losses(root, tmp_path.name)
    assert expected != plain and expected[STEPS] < expected[1] - 0.05
    if "--precision" in options:
        assert expected == pytest.approx(plain, rel=3e-3)
    two = f"{tmp_path.name}-two"
    train_adapter(root, two, *options, "-b", 4)
    assert losses(root, two) == pytest.approx(expected, rel=rel)
    export_adapter(root, two)
