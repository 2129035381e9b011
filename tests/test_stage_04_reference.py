# covers: 04_train_fsdp.py, lib/optim/adamw.py, lib/parallel/loss.py, lib/models/lora.py
"""Compare stage 04 with a plain loop of transformers and torch, or peft, on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lib.models.lora import Lora
from lib.models.lora_targets import ALL, choose_linears
from lib.models.sharded import Placement
from lib.models.weights import draw_added
from lib.optim.schedule import Schedule
from lib.tokens import order, packing, store
from lib.tokens.samples import IGNORED, Samples, Windows
from tests.conftest import run_stage
from tests.models.families import FAMILIES, make_checkpoint
from tests.training import SEQ_LENGTH, VOCABULARY, metrics, save_model

STEPS = 20
BATCH = 8
MIXTRAL = MixtralConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=128,
)


def reference(
    model_dir: Path, samples: Samples, lora: Lora | None = None, z: float = 0.0
) -> list[dict[str, float]]:
    """Return loss and gradient norm, with z also the z-loss, of each step of a plain loop."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    if lora:
        model = by_peft(model, lora)
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    schedule = Schedule("cosine", 1e-2, 1e-3, 1, STEPS)
    rows = []
    for step in range(STEPS):
        numbers = order.sample_numbers(step * BATCH, BATCH, len(samples), seed=0)
        inputs, labels, positions = (
            part if part is None else torch.from_numpy(part.copy())
            for part in samples.read_samples(numbers)[:3]
        )
        logits = model(inputs, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        squares = torch.logsumexp(logits.flatten(0, 1), 1).square()
        z_loss = z * squares[labels.flatten() != IGNORED].mean()
        (loss + z_loss if z else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = schedule.lr(step)
        adamw.step()
        adamw.zero_grad()
        figures = {"train/loss": loss.item(), "train/grad_norm": norm.item()}
        rows.append(figures | ({"train/z_loss": z_loss.item()} if z else {}))
    return rows


def by_peft(model: PreTrainedModel, lora: Lora) -> nn.Module:
    """Return a model with adapters of peft, which are initialised like ours."""
    from peft import LoraConfig, get_peft_model

    names = choose_linears(model, lora.targets)
    with torch.device("meta"):
        ours = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    lora.convert(ours, Placement())
    ours.to_empty(device="cpu")
    draw_added(ours, seed=0)
    peft_model = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            use_rslora=lora.rslora,
            target_modules=names,
            fan_in_fan_out=model.config.model_type == "gpt2",
        ),
    )
    for name in names:
        theirs = peft_model.get_submodule(f"base_model.model.{name}")
        for part in ("lora_A", "lora_B"):
            values = ours.get_parameter(f"{name}.{part}.weight").data
            theirs.get_submodule(f"{part}.default").weight.data.copy_(values)
    return peft_model


@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [
        pytest.param("llama_tied", (), 2, id="llama", marks=pytest.mark.slow),
        pytest.param(
            "llama",
            ("--lora-rslora", "on", "--packing", "documents"),
            0,
            id="llama, rslora, documents, one process",
        ),
        pytest.param(
            "mixtral",
            ("--lora-targets", "attention"),
            2,
            id="mixtral, attention",
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", ("--lora-alpha", 5), 0, id="gpt2, one process"),
        pytest.param("gpt2", ("--lora-alpha", 5), 2, id="gpt2"),
        pytest.param("gpt2", ("--z-loss", 0.01), 2, id="gpt2, z-loss", marks=pytest.mark.slow),
        pytest.param("phi3", ("--lora-targets", "mlp"), 2, id="phi3, mlp", marks=pytest.mark.long),
        pytest.param(
            "falcon_7b",
            ("--lora-targets", "query_key_value|dense"),
            2,
            id="falcon, by name",
            marks=pytest.mark.long,
        ),
    ],
)
def test_twenty_steps_with_adapters_equal_the_reference(
    project: Path, family: str, options: tuple[object, ...], ranks: int
) -> None:
    """The reference is a loop with the adapters of peft."""
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    make_checkpoint(
        project / "model", FAMILIES[family](VOCABULARY, **dropouts if family == "gpt2" else {})
    )
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "run",
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        SEQ_LENGTH,
        "-b",
        2 if ranks else 4,
        "--grad-accum-steps",
        2,
        "--max-steps",
        STEPS,
        "--lr",
        "1e-2",
        "--precision",
        "fp32",
        "--log-freq",
        1,
        "--lora-rank",
        4,
        *options,
        cwd=project,
        ranks=ranks,
    )
    values = dict(zip(options[::2], options[1::2], strict=True))
    lora = Lora(
        4,
        values.get("--lora-alpha", 8),
        0.0,
        values.get("--lora-targets", ALL),
        "--lora-rslora" in values,
    )
    check_rows(
        project,
        reference(
            project / "model",
            samples_of(project, values.get("--packing", "concat"), SEQ_LENGTH),
            lora,
            values.get("--z-loss", 0.0),
        ),
        fall=0.05,
    )


@pytest.mark.parametrize(
    ("config", "packing_", "z"),
    [
        pytest.param(None, "concat", 0.0, id="llama"),
        pytest.param(None, "documents", 0.0, id="llama, documents", marks=pytest.mark.long),
        pytest.param(MIXTRAL, "concat", 0.0, id="mixtral", marks=pytest.mark.long),
        pytest.param(MIXTRAL, "documents", 0.0, id="mixtral, documents", marks=pytest.mark.slow),
        pytest.param(None, "concat", 0.01, id="llama, z-loss", marks=pytest.mark.long),
        pytest.param(
            None, "documents", 0.01, id="llama, z-loss, documents", marks=pytest.mark.slow
        ),
    ],
)
def test_twenty_steps_equal_the_reference(
    project: Path, config: PretrainedConfig | None, packing_: str, z: float
) -> None:
    """The reference is one process, and the run has two ranks that accumulate gradients."""
    if config:
        for file in (project / "model").glob("*.safetensors"):
            file.unlink()
        save_model(project / "model", config)
    length = SEQ_LENGTH if packing_ == "concat" else 3 * SEQ_LENGTH
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "run",
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        length,
        "-b",
        2,
        "--grad-accum-steps",
        2,
        "--max-steps",
        STEPS,
        "--lr",
        "1e-2",
        "--precision",
        "fp32",
        "--log-freq",
        1,
        "--packing",
        packing_,
        *(("--z-loss", z) if z else ()),
        cwd=project,
        ranks=2,
    )
    check_rows(
        project,
        reference(project / "model", samples_of(project, packing_, length), z=z),
        fall=0.5,
    )


def samples_of(root: Path, packing_: str, length: int) -> Samples:
    [directory] = (
        path for path in (root / ".cache" / "tokens").iterdir() if ".packs-" not in path.name
    )
    tokens = store.open_store(directory)
    return (
        Windows(tokens.splits["train"].tokens, length)
        if packing_ == "concat"
        else packing.prepare_packs(tokens, length)["train"]
    )


def check_rows(root: Path, expected: list[dict[str, float]], fall: float) -> None:
    """Compare the rows of a run with the reference. fall: the least decrease of the loss."""
    rows = metrics(root, "run")
    assert len(rows) == STEPS and expected[-1]["train/loss"] < expected[0]["train/loss"] - fall
    assert ("train/z_loss" in rows[0]) == ("train/z_loss" in expected[0])
    for key in expected[0]:
        assert [row[key] for row in rows] == pytest.approx(
            [row[key] for row in expected], rel=1e-3 if key == "train/grad_norm" else 1e-5
        )
