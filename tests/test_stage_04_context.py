# covers: 04_train_fsdp.py, lib/parallel/context.py, lib/train/settle.py, lib/train/output/rows.py
# covers: lib/evaluate/scoring.py, lib/train/batch_division.py
"""Rows that several ranks share train, evaluate and resume like whole rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import start_stage
from tests.models.families import make_tiny_llama
from tests.tokens.chat import chats
from tests.training import (
    SMALL_RUN,
    assert_refused,
    list_saved_steps,
    metrics,
    read_events,
    read_log,
    save_model,
    train_model,
    wait_for_save,
)

STEPS = 6
COMMON = ("--max-steps", STEPS, "--lr", "1e-3", "--eval-freq", 3, "--global-batch-size", 4)
TRAIN = (*SMALL_RUN, *COMMON, "--ckpt-freq", 2)
SAME = ("train/loss", "train/grad_norm", "eval/")
COUNTED = ("step", "epoch", "train/tokens_seen")
EXACT = ("train/loss", "train/grad_norm", "eval/loss", "train/tokens_seen")
SAMPLES = ("--sample-prompts", "prompts.txt")
# Options of runs, each on one rank with whole rows, and on two or three that share rows.
WAYS: dict[str, tuple[Any, ...]] = {
    "documents": ("--packing", "documents", "-s", 33, "--eval-suite", "small:2"),
    "windows": ("--packing", "concat", "--eval-suite", "small:4", *SAMPLES, "-s", 100),
    "one document in a row": ("--packing", "none"),
    "LoRA": ("--lora-rank", 4, "--packing", "documents"),
    "8-bit states": ("--optimizer", "adamw8bit", "--packing", "documents"),
    "mixture": ("-d", "corpus=2", "-d", "hf_datasets/copy=1", "--packing", "documents"),
    "accumulated": ("--packing", "documents", "--global-batch-size", 12),
    "recomputed": ("--activation-checkpointing", "selective", "--attention", "varlen"),
}
COMPILED = ("--compile", "on", "--activation-checkpointing", "full", "--packing", "documents")


def check_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare the rows of two runs."""
    assert [[row.get(key) for key in COUNTED] for row in rows] == [
        [row.get(key) for key in COUNTED] for row in expected
    ]
    for row, other in zip(rows, expected, strict=True):
        figures, others = (
            {key: value for key, value in one.items() if key.startswith(SAME)}
            for one in (row, other)
        )
        assert figures == pytest.approx(others, rel=2e-6)
        per_token, expected_per_token = (
            one["perf/tflops"] / one["perf/tokens_per_sec_per_device"] for one in (row, other)
        )
        assert per_token == pytest.approx(expected_per_token, rel=1e-6)


def check_way(root: Path, options: tuple[Any, ...], **more: Any) -> None:
    """Train with whole rows on one rank, and with rows divided over two and three ranks."""
    train_model(root, "whole", *options, "-b", 4, **more)
    expected = metrics(root, "whole")
    for ranks, batch in ((2, 4), (3, 2)):
        name = f"over {ranks}".replace(" ", "_")
        words = ("--context-parallel", ranks, "-b", batch)
        train_model(root, name, *options, *words, ranks=ranks, **more)
        check_same(metrics(root, name), expected)
        if set(SAMPLES) <= set(options):
            texts, others = (
                (root / "outputs" / run / "samples.jsonl").read_text() for run in (name, "whole")
            )
            assert texts == others


def test_packed_documents_train_alike(project: Path) -> None:
    check_way(project, (*TRAIN, *WAYS["documents"]))
    log = read_log(project, "over_3")
    assert "context_parallel_method allgather" in log.replace("=", " ") or "allgather" in log


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "documents"])
def test_every_way_of_training_is_divided(project: Path, way: str) -> None:
    shutil.copytree(project / "hf_datasets/corpus", project / "hf_datasets/copy")
    (project / "prompts.txt").write_text("The\nA\n")
    options = (*TRAIN, *WAYS[way])
    if way == "mixture":
        options = tuple(options[2:])  # without the dataset of SMALL_RUN
    check_way(project, options)


@pytest.mark.long
def test_compiled_blocks_are_divided(project: Path) -> None:
    check_way(project, (*TRAIN, *COMPILED))


@pytest.mark.slow
def test_conversations_are_divided(tmp_path: Path) -> None:
    talks = [chats.make_conversation(seed) for seed in range(60)]
    chats.save_dataset(tmp_path / "hf_datasets/corpus", train=talks[:50], validation=talks[50:])
    chats.save_tokenizer(tmp_path / "model")
    save_model(tmp_path / "model", make_tiny_llama(vocab_size=320))
    check_way(tmp_path, (*TRAIN, "-s", 128, "--packing", "documents"))


@pytest.mark.slow
def test_a_stream_is_divided(project: Path) -> None:
    """All ranks that share a row read the same shards."""
    (project / "shards").mkdir()
    texts = [path.read_text() for path in sorted((project / "raw_text").rglob("*.txt"))]
    for number in range(2):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::2]]
        (project / f"shards/{number}.jsonl").write_text("".join(lines))
    options = (*TRAIN, *("-d", "shards", "--streaming", "--packing", "concat"))
    check_way(project, options[2:])


def test_a_run_goes_on_with_another_division(project: Path) -> None:
    """Whole rows on one rank, then halves, then quarters in two replicas."""
    train_model(project, "whole", *TRAIN, "-b", 4)
    expected = metrics(project, "whole")
    checkpoints = project / "outputs/whole/checkpoints"
    for ranks, batch, kept in ((2, 4, 2), (4, 2, 4)):
        for step in list_saved_steps(project, "whole"):
            if step > kept:
                shutil.rmtree(checkpoints / f"step_{step:08d}")
        words = ("-b", batch, "--context-parallel", 2)
        train_model(project, "whole", *TRAIN, *words, ranks=ranks)
        check_same(metrics(project, "whole"), expected)
        assert [row["step"] for row in read_events(project, "resume", experiment="whole")][
            -1
        ] == kept


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_run_resumes_bit_for_bit(project: Path, ranks: int) -> None:
    words = (*TRAIN, "--context-parallel", ranks, "-b", 2, "--packing", "documents")
    train_model(project, "whole", *words, ranks=ranks)
    launch = start_stage("04_train_fsdp.py", "-e", "run", *words, cwd=project, ranks=ranks)
    wait_for_save(launch, project, "run", rows=4)
    launch.kill()
    assert "resumed from" in train_model(project, "run", *words, ranks=ranks)
    exact = [
        [{key: row.get(key) for key in ("step", *EXACT)} for row in metrics(project, name)]
        for name in ("run", "whole")
    ]
    assert exact[0] == exact[1]


def test_ranks_that_cannot_share_rows_are_refused(project: Path) -> None:
    words = ("-e", "x", *TRAIN, "-b", 4, "--context-parallel")
    assert_refused(project, *words, 2, code=2, says="does not divide the 1 rank")
    ulysses = ("--context-parallel-method", "ulysses")
    assert_refused(project, *words, 3, *ulysses, code=1, says="2, 4", ranks=3)
