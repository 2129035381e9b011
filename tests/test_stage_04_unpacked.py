# covers: 04_train_fsdp.py, lib/tokens/packing.py, lib/train/data.py, lib/parallel/trial.py
"""`--packing none`: one conversation or document in each row, also for models with a state."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lib.optim.schedule import Schedule
from lib.tokens import order, store
from lib.tokens.samples import IGNORED
from tests.conftest import run_stage
from tests.tokens.chat import chats
from tests.training import metrics, read_log, save_model

LENGTH = 288
STEPS = 4
BATCH = 6  # conversations in a step
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
_DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}
# They cannot keep packed conversations apart.
MIXING = ("lfm2", "qwen3_5_text", "qwen3_next", "mamba2", "opt", "bloom")
TRAIN = (
    "04_train_fsdp.py",
    *("-m", "model", "-s", LENGTH, "--lr", "1e-2", "--precision", "fp32", "--log-freq", 1),
    *("--num-workers", 2, "--packing", "none"),
)
RUN = (
    *TRAIN,
    *("-e", "run", "-d", "talks", "--global-batch-size", BATCH, "--max-steps", STEPS),
    *("--eval-freq", STEPS, "--ckpt-freq", STEPS // 2),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with a chat dataset, one of text, and a tokenizer."""
    import datasets

    root = tmp_path_factory.mktemp("unpacked")
    talks = [chats.make_conversation(seed) for seed in range(60)]
    chats.save_dataset(root / "hf_datasets/talks", train=talks[:50], validation=talks[50:])
    text = [" ".join(message["content"] for message in talk.messages) for talk in talks]
    datasets.Dataset.from_dict({"text": text}).save_to_disk(str(root / "hf_datasets/text"))
    chats.save_tokenizer(root / "model")
    return root


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Path:
    """Return a copy of that project, which a test may change."""
    return Path(shutil.copytree(prepared, tmp_path / "project"))


def save_tiny(root: Path, kind: str) -> None:
    torch.manual_seed(0)
    sizes = _SIZES | MODELS[kind]
    if kind in ("mamba2", "opt", "bloom"):  # they would save unknown fields
        sizes.pop("num_key_value_heads")
    save_model(root / "model", AutoConfig.for_model(kind, **sizes))


def read_documents(
    root: Path, dataset: str, split: str = "train"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and labels of each document of a dataset, without padding."""
    [directory] = (
        path for path in (root / ".cache/tokens").glob(f"{dataset}-*") if ".packs-" not in path.name
    )
    opened = store.open_store(directory).splits[split]
    documents = []
    for start, end in zip([0, *opened.ends[:-1].tolist()], opened.ends.tolist(), strict=True):
        tokens = opened.tokens[start:end].astype(np.int64)
        labels = tokens[1:]
        if opened.labels is not None:
            labels = np.where(opened.labels[start + 1 : end], labels, IGNORED)
        documents.append((torch.from_numpy(tokens[:-1].copy()), torch.from_numpy(labels.copy())))
    return documents


def measure_loss(
    model: torch.nn.Module, documents: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Return the mean loss over the labels, with a forward pass for each document."""
    total = torch.zeros(())
    for tokens, labels in documents:
        logits = model(tokens[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / sum(int((labels != IGNORED).sum()) for _, labels in documents)


def reference(root: Path, dataset: str = "talks") -> tuple[list[float], float]:
    """Return the loss of each step of a plain training loop, and of the validation split."""
    documents = read_documents(root, dataset)
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = Schedule("cosine", 1e-2, 1e-3, 0, STEPS)
    losses_of_steps = []
    for step in range(STEPS):
        numbers = order.sample_numbers(step * BATCH, BATCH, len(documents), seed=0)
        loss = measure_loss(model, [documents[number] for number in numbers])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = schedule.lr(step)
        adamw.step()
        adamw.zero_grad()
        losses_of_steps.append(loss.item())
    with torch.no_grad():
        held_out = measure_loss(model, read_documents(root, dataset, "validation"))
    return losses_of_steps, held_out.item()


def losses(root: Path, run: str = "run") -> list[float]:
    return [row["train/loss"] for row in metrics(root, run)]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.slow if kind in ("qwen3_5_text", "bloom") else pytest.mark.long
        )
        for kind in MODELS
    ],
)
def test_losses_equal_one_forward_pass_for_each_conversation(project: Path, kind: str) -> None:
    """The rows of a batch have padding of different lengths. The run has two ranks."""
    save_tiny(project, kind)
    if kind in MIXING:
        done = run_stage(*RUN, "--packing", "documents", cwd=project, expect=2)
        assert "--packing none" in done.stderr.partition("run:")[2], done.stderr
    run_stage(*RUN, "-b", 3, "--overwrite", cwd=project, ranks=2)
    expected, held_out = reference(project)
    assert losses(project) == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0]
    rows = metrics(project, "run")
    assert rows[-1]["eval/loss"] == pytest.approx(held_out, rel=1e-5)


@pytest.mark.slow
def test_a_resume_on_another_number_of_ranks_keeps_the_losses(project: Path) -> None:
    """The run has adapters, and its dry run knows the padding once the samples are prepared."""
    save_tiny(project, "lfm2")
    done = run_stage(*RUN, "--dry-run", cwd=project)
    assert "50 samples" in done.stdout and not (project / ".cache/tokens").exists()
    done = run_stage(*RUN, "--prepare-only", cwd=project)
    assert "training samples" in done.stdout
    done = run_stage(*RUN, "--dry-run", cwd=project)
    assert "50 samples" in done.stdout and "% of each row is padding" in done.stdout
    lora = ("--lora-rank", 4, "-b", 2)
    run_stage(*RUN, *lora, cwd=project, ranks=3)
    expected = losses(project)
    shutil.rmtree(project / f"outputs/run/checkpoints/step_{STEPS:08d}")
    done = run_stage(*RUN, *lora, cwd=project)
    assert f"step_{STEPS // 2:08d}" in done.stdout and "resumed from" in done.stdout
    assert losses(project) == pytest.approx(expected, rel=1e-5)
    documents = read_documents(project, "talks")
    numbers = order.sample_numbers(0, STEPS * BATCH, len(documents), seed=0)
    tokens = sum(len(documents[number][0]) + 1 for number in numbers)
    assert metrics(project, "run")[-1]["train/tokens_seen"] == tokens
    done = run_stage(*RUN, *lora, "--packing", "concat", cwd=project, expect=2)
    assert "--packing" in done.stderr and "other settings" in done.stderr


@pytest.mark.slow
def test_streaming_refuses_rows_and_prints_a_command_that_works(project: Path) -> None:
    save_tiny(project, "llama")
    (project / "raw.jsonl").write_text('{"text": "some words to train on"}\n' * 200)
    stream = ("-e", "raw", "-d", "raw.jsonl", "--streaming", "--max-steps", 1, "-b", 1)
    refused = run_stage(*TRAIN, *stream, cwd=project, expect=2)
    assert "with --packing none" in refused.stderr
    command = shlex.split(refused.stderr.partition("run:")[2].splitlines()[0])
    run_stage(TRAIN[0], *command[2:], cwd=project)
    assert len(losses(project, "raw")) == 1


@pytest.mark.slow
def test_a_mixture_of_conversations_and_long_text(project: Path) -> None:
    """Conversations that are too long are divided, and text is cut into rows."""
    save_tiny(project, "mamba2")
    more = ("-d", "text", "-s", 64, "--too-long", "split", "-b", 3, "--eval-freq", 0)
    run_stage(*RUN, *more, cwd=project, ranks=2)
    rows = metrics(project, "run")
    assert len(rows) == STEPS and rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[-1]["train/tokens_seen"] < STEPS * BATCH * 64
    log = read_log(project, "run")
    assert "none in this family" in log and "eager" not in log
    assert "documents cut, one per pack" in log
