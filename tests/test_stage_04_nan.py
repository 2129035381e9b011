"""Steps whose gradient is no number: skipped, counted, and the end when nothing else comes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from lib.tokens import order, store
from lib.tokens.windows import Windows
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, VOCABULARY, metrics, save_model

STEPS, BATCH = 30, 2
COMMON = ("-e", "run", "-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "-b", BATCH, "--precision",
          "fp32", "--max-steps", STEPS, "--log-freq", 1, "--ckpt-freq", 10, "--eval-freq", 0)


def windows(project: Path) -> Windows:
    run_stage("04_train_fsdp.py", *COMMON, "--prepare-only", cwd=project)
    directory = next((project / ".cache" / "tokens").iterdir())
    return Windows(store.open_store(directory).splits["train"].tokens, SEQ_LENGTH)


def inputs_of(samples: Windows, step: int) -> np.ndarray:
    return samples.rows(order.sample_numbers(step * BATCH, BATCH, len(samples), seed=0)).inputs


def poison(project: Path, token: int) -> None:
    """Make the embedding of one token no number: so is every batch that holds it, and no other."""
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    save_model(project / "model", LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128))
    path = project / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, path, {"format": "pt"})


def test_such_steps_change_nothing(project: Path) -> None:
    samples = windows(project)
    held = [set(inputs_of(samples, step).ravel().tolist()) for step in range(STEPS)]
    token = next(t for t in sorted(set.union(*held)) if t not in held[0] | held[1]
                 and 3 <= sum(t in tokens for tokens in held) <= 12)
    bad = {step + 1 for step, tokens in enumerate(held) if token in tokens}
    poison(project, token)
    done = run_stage("04_train_fsdp.py", *COMMON, cwd=project)
    assert "left the weights as they were" in done.stdout
    events = [json.loads(line) for line in
              (project / "outputs/run/events.jsonl").read_text().splitlines()]
    assert {event["step"] for event in events if event["event"] == "skip_step"} == bad
    losses = {row["step"]: row["train/loss"] for row in metrics(project, "run")}
    assert {step for step, loss in losses.items() if loss is None} == bad
    assert losses[max(set(losses) - bad)] < losses[1]
    moments = json.loads((project / "outputs/run/checkpoints/step_00000030/train_state.json"
                          ).read_text())["optimizer_steps"]
    assert moments == STEPS - len(bad)


def test_the_first_step_is_explained(project: Path) -> None:
    token = int(inputs_of(windows(project), 0)[0, 0])
    poison(project, token)
    done = run_stage("04_train_fsdp.py", *COMMON, cwd=project, expect=2)
    assert "the loss of the first step is nan" in done.stderr and "whole weights" in done.stderr
    assert "Traceback" not in done.stderr
