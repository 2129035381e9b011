"""Stage 04 on two ranks against a plain loop of transformers and torch on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig

from lib.optim.schedule import Schedule
from lib.tokens import order, packing, store
from lib.tokens.samples import IGNORED, Samples, Windows
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, VOCABULARY, metrics, save_model

STEPS, BATCH = 20, 8
MIXTRAL = MixtralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
                        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128)


def reference(model_dir: Path, samples: Samples) -> list[dict[str, float]]:
    """Return loss and gradient norm of each step of a loop that a person would write."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                               {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    schedule, found = Schedule("cosine", 1e-2, 1e-3, 1, STEPS), []
    for step in range(STEPS):
        numbers = order.sample_numbers(step * BATCH, BATCH, len(samples), seed=0)
        inputs, labels, positions = (part if part is None else torch.from_numpy(part.copy())
                                     for part in samples.rows(numbers))
        logits = model(inputs, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = schedule.lr(step)
        adamw.step()
        adamw.zero_grad()
        found.append({"train/loss": loss.item(), "train/grad_norm": norm.item()})
    return found


@pytest.mark.parametrize(("config", "packing_"), [
    pytest.param(None, "concat", id="llama"),
    pytest.param(None, "documents", id="llama, documents", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "concat", id="mixtral", marks=pytest.mark.slow),
    pytest.param(MIXTRAL, "documents", id="mixtral, documents")])
def test_twenty_steps(project: Path, config: PretrainedConfig | None, packing_: str) -> None:
    if config:
        for file in (project / "model").glob("*.safetensors"):
            file.unlink()
        save_model(project / "model", config)
    length = SEQ_LENGTH if packing_ == "concat" else 3 * SEQ_LENGTH
    run_stage("04_train_fsdp.py", "-e", "run", "-d", "corpus", "-m", "model", "-s", length,
              "-b", 2, "--grad-accum-steps", 2, "--max-steps", STEPS, "--lr", "1e-2",
              "--precision", "fp32", "--log-freq", 1, "--packing", packing_, cwd=project, ranks=2)
    [directory] = (path for path in (project / ".cache" / "tokens").iterdir()
                   if ".packs-" not in path.name)
    tokens = store.open_store(directory)
    samples = Windows(tokens.splits["train"].tokens, length) if packing_ == "concat" \
        else packing.prepare(tokens, length)["train"]
    expected = reference(project / "model", samples)
    rows = metrics(project, "run")
    assert len(rows) == STEPS and expected[-1]["train/loss"] < expected[0]["train/loss"] - 0.5
    for key, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-3)):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected],
                                                           rel=tolerance)
