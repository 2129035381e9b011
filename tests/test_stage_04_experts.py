# covers: 04_train_fsdp.py, lib/parallel/experts.py, lib/parallel/routers.py, lib/train/settle.py
# covers: lib/train/model.py
"""Train mixture-of-experts models with stage 04: the load of the experts and its balancing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lib.checkpoints import commit
from lib.optim.schedule import Schedule
from lib.tokens import order, packing, store
from lib.tokens.samples import IGNORED, Samples, Windows
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, VOCABULARY, metrics, read_log, save_model, train_model

STEPS = 4
BATCH = 6
COEFFICIENT = 0.5
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTRAL = MixtralConfig(**_SIZES, num_local_experts=4)
MODELS: dict[str, PretrainedConfig] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": Qwen2MoeConfig(
        **_SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "gpt_oss": GptOssConfig(
        **_SIZES, num_local_experts=4, head_dim=8, rope_parameters={"rope_theta": 1e4}
    ),
}
DEEPSEEK = DeepseekV3Config(
    **{**_SIZES, "num_key_value_heads": 4},
    n_routed_experts=8,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
ONE_LAYER = MixtralConfig(
    **{**_SIZES, "num_hidden_layers": 1},
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
)


_BEHIND_ROUTERS = r".*layers\.1\.mlp\.shared_expert\.up_proj"


def replace_model(project: Path, config: PretrainedConfig) -> None:
    """Replace the model of the project."""
    for file in (project / "model").glob("*.safetensors"):
        file.unlink()
    save_model(project / "model", config)


def train_experts(project: Path, name: str, *options: object, **settings: Any) -> str:
    """Run stage 04 in float32 on a few steps; return what it printed."""
    return train_model(
        project,
        name,
        *("-d", "corpus", "-m", "model", "-s", SEQ_LENGTH, "--lr", "1e-3", "--log-freq", 1),
        *("--precision", "fp32", "--warmup-steps", 0, "--eval-freq", 2, "--eval-batches", 1),
        *options,
        **settings,
    )


def read_samples(project: Path, packing_: str) -> Samples:
    [directory] = (
        path for path in (project / ".cache" / "tokens").iterdir() if ".packs-" not in path.name
    )
    tokens = store.open_store(directory)
    if packing_ == "concat":
        return Windows(tokens.splits["train"].tokens, SEQ_LENGTH)
    return packing.prepare_packs(tokens, SEQ_LENGTH, packing_ == "none")["train"]


def compute_balance(
    model: PreTrainedModel, logits: tuple[torch.Tensor, ...], rows: Any
) -> torch.Tensor:
    """Return transformers' load-balancing loss of each layer and row, weighted by tokens."""
    experts = logits[0].shape[-1]
    lengths = [SEQ_LENGTH] * len(rows.inputs) if rows.lengths is None else rows.lengths.tolist()
    losses = [
        length
        * load_balancing_loss_func((row[:length],), experts, model.config.num_experts_per_tok)
        for layer in logits
        for row, length in zip(layer.view(len(lengths), -1, experts), lengths, strict=True)
    ]
    return torch.stack(losses).sum() / (sum(lengths) * len(logits))


def reference(
    project: Path, packing_: str = "concat", steps: int = STEPS
) -> list[dict[str, float]]:
    """Return the figures of each step of a plain training loop in one process."""
    samples = read_samples(project, packing_)
    model = AutoModelForCausalLM.from_pretrained(project / "model", dtype=torch.float32).train()
    recorded: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, output: recorded.append(output[0]))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    schedule = Schedule("cosine", 1e-3, 1e-4, 0, steps)
    figures = []
    for step in range(steps):
        rows = samples.read_samples(order.sample_numbers(step * BATCH, BATCH, len(samples), seed=0))
        inputs = torch.from_numpy(rows.inputs.copy())
        labels = torch.from_numpy(rows.labels.copy())
        positions = None if rows.positions is None else torch.from_numpy(rows.positions)
        recorded.clear()
        logits = model(inputs, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        auxiliary = compute_balance(model, tuple(recorded), rows)
        (loss + COEFFICIENT * auxiliary).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = schedule.lr(step)
        adamw.step()
        adamw.zero_grad()
        figures.append(
            {
                "train/loss": loss.item(),
                "train/router_aux_loss": auxiliary.item(),
                "train/grad_norm": norm.item(),
            }
        )
    return figures


def require_figures(project: Path, expected: list[dict[str, float]], name: str = "run") -> None:
    rows = metrics(project, name)
    assert len(rows) == len(expected)
    for key, tolerance in (
        ("train/loss", 1e-6),
        ("train/router_aux_loss", 1e-6),
        ("train/grad_norm", 1e-5),
    ):
        figures = [row[key] for row in rows]
        assert figures == pytest.approx([row[key] for row in expected], rel=tolerance), key


# Six samples a step as (ranks, per process, accumulation).
_DIVISIONS = [(1, 6, 1), (2, 1, 3), (3, 2, 1)]
_FURTHER = [
    pytest.param(
        family,
        division,
        "concat",
        id=f"{family}, {division[0]} ranks",
        marks=pytest.mark.slow if division[0] == 2 else pytest.mark.long,
    )
    for family in MODELS
    for division in _DIVISIONS
    if (family, division[0]) != ("mixtral", 2)
]


@pytest.mark.parametrize(
    ("family", "division", "packing_"),
    [
        pytest.param("mixtral", (2, 1, 3), "documents", id="mixtral, 2 ranks, documents"),
        pytest.param("mixtral", (3, 2, 1), "none", id="mixtral, none", marks=pytest.mark.long),
        *_FURTHER,
    ],
)
def test_steps_with_a_balancing_loss_equal_the_reference(
    project: Path, family: str, division: tuple[int, int, int], packing_: str
) -> None:
    """Compare with a loop in one process; with accumulation, activations are recomputed."""
    replace_model(project, MODELS[family])
    ranks, batch, accumulation = division
    train_experts(
        project,
        "run",
        *("-b", batch, "--grad-accum-steps", accumulation, "--max-steps", STEPS),
        *("--router-aux-loss", COEFFICIENT, "--packing", packing_),
        *("--activation-checkpointing", "full" if accumulation > 1 else "none"),
        ranks=ranks,
    )
    assert "load-balancing loss × 0.5 over 2 routers (as typed)" in read_log(project, "run")
    require_figures(project, reference(project, packing_))
    row = metrics(project, "run")[-1]
    assert 1 <= row["experts/layer_01/max_load"] <= row["experts/max_load"] < 2
    assert 0 <= row["experts/starved"] < 1


def test_the_loss_equals_that_of_transformers_if_the_config_sets_it(project: Path) -> None:
    """One layer and one sample: the loss, and 0.02 times the load-balancing loss."""
    replace_model(project, ONE_LAYER)
    train_experts(project, "run", "--max-steps", 1)
    log = read_log(project, "run")
    assert "load-balancing loss × 0.02 over 1 router (the model's config)" in log
    [row] = metrics(project, "run")
    model = AutoModelForCausalLM.from_pretrained(project / "model", dtype=torch.float32)
    samples = read_samples(project, "concat")
    rows = samples.read_samples(order.sample_numbers(0, 1, len(samples), seed=0))
    # transformers shifts labels itself: the last token has none.
    tokens = torch.from_numpy(rows.inputs.copy())
    output = model(tokens, labels=tokens, output_router_logits=True)
    loss = F.cross_entropy(output.logits[0], torch.from_numpy(rows.labels[0].copy()))
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["train/router_aux_loss"] == pytest.approx(output.aux_loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "options", "expected_text"),
    [
        (MIXTRAL, (), "(fine-tuning, and the model's config"),
        (MIXTRAL, ("--from-scratch",), "× 0.001 over 2 routers"),
        (ONE_LAYER, ("--router-aux-loss", "off"), "balancing (as typed)"),
        (DEEPSEEK, (), "(fine-tuning keeps the biases"),
        (DEEPSEEK, ("--from-scratch",), "move by 0.001 a step"),
        (DEEPSEEK, ("--router-aux-loss", "0.01"), "move by 0.01 a step"),
        (
            MODELS["qwen2_moe"],
            (*("--router-aux-loss", "0.1", "--lora-rank", 4), "--lora-targets", _BEHIND_ROUTERS),
            "no trained weight",
        ),
    ],
)
def test_auto_chooses_a_coefficient_for_each_family(
    project: Path, config: PretrainedConfig, options: tuple[object, ...], expected_text: str
) -> None:
    replace_model(project, config)
    assert expected_text in train_experts(project, "run", "--max-steps", 1, "--dry-run", *options)


@pytest.mark.parametrize(
    ("config", "options", "expected_text"),
    [
        (None, (), "has no meaning"),
        (DEEPSEEK, ("--lora-rank", 4), "adapter cannot contain"),
    ],
)
def test_a_router_loss_without_effect_is_refused(
    project: Path, config: PretrainedConfig | None, options: tuple[object, ...], expected_text: str
) -> None:
    if config:
        replace_model(project, config)
    arguments = ("--max-steps", 1, "--router-aux-loss", "0.01", *options)
    assert expected_text in train_experts(project, "run", *arguments, expect=2)


def test_a_value_that_is_no_number_is_refused(project: Path) -> None:
    for value in ("-1", "often", "on"):
        printed = train_experts(project, "run", "--router-aux-loss", value, expect=2)
        assert "--router-aux-loss" in printed


def test_off_in_a_config_file_is_understood(project: Path) -> None:
    """YAML reads it as false."""
    replace_model(project, ONE_LAYER)
    for value in ("off", "0", "0.0"):
        (project / "run.yaml").write_text(f"router_aux_loss: {value}\n")
        printed = train_experts(
            project, "run", "--max-steps", 1, "--dry-run", "--config", "run.yaml"
        )
        assert "no load balancing (as typed)" in printed


@pytest.mark.slow
def test_a_resumed_run_keeps_its_load_balancing(project: Path) -> None:
    replace_model(project, MIXTRAL)
    typed = ("--max-steps", 2, "--router-aux-loss", "0.5")
    train_experts(project, "run", *typed)
    assert "already done" in train_experts(project, "run", *typed)
    assert "already done" in train_experts(project, "run", "--max-steps", 2)
    for other in ("off", "0.25"):
        printed = train_experts(
            project, "run", "--max-steps", 3, "--router-aux-loss", other, expect=2
        )
        assert "--router-aux-loss: 0.5" in printed
    train_experts(project, "run", "--max-steps", 3)
    assert "× 0.5 over 2 routers (earlier launch)" in read_log(project, "run")
    changed = ("--router-aux-loss", "0.25", "--resume-with-changes")
    train_experts(project, "run", "--max-steps", 4, *changed)
    assert "× 0.25 over 2 routers" in read_log(project, "run")


def test_a_run_older_than_the_option_resumes_without_it(project: Path) -> None:
    """A new run from scratch would use the loss; a run that started without it keeps it off."""
    replace_model(project, MIXTRAL)
    typed = ("--from-scratch", "--router-aux-loss", "off")
    train_experts(project, "run", *typed, "--max-steps", 1)
    train_experts(project, "run", "--from-scratch", "--max-steps", 2)
    assert "no load balancing (earlier launch)" in read_log(project, "run")


def read_biases(project: Path, run: str) -> dict[int, torch.Tensor]:
    """Return the router biases in each checkpoint of a run, by step: float32 [experts]."""
    import torch.distributed.checkpoint as dcp

    name = "buffer.model.layers.1.mlp.gate.e_score_correction_bias"
    biases = {}
    for path in sorted((project / "outputs" / run / "checkpoints").glob("step_*")):
        values = {name: torch.zeros(8)}
        dcp.load(values, checkpoint_id=str(path / commit.TENSORS), no_dist=True)
        biases[int(path.name[5:])] = values[name]
    return biases


@pytest.mark.slow
def test_biases_are_kept_resumed_and_exported(project: Path) -> None:
    """Compare three steps with one and two on other ranks and in another division."""
    replace_model(project, DEEPSEEK)
    arguments = ("--from-scratch", "--ckpt-freq", 1, "--activation-checkpointing", "full")
    arguments = (*arguments, "--router-aux-loss", "0.01", "--lr-scheduler", "constant")
    three_passes = ("-b", 1, "--grad-accum-steps", 3)
    train_experts(project, "whole", *arguments, "-b", 6, "--max-steps", 3)
    train_experts(project, "parts", *arguments, *three_passes, "--max-steps", 1, ranks=2)
    train_experts(project, "parts", *arguments, "-b", 2, "--max-steps", 3, ranks=3)
    biases = read_biases(project, "whole")
    parts = read_biases(project, "parts")
    assert biases.keys() == parts.keys() == {1, 2, 3}
    for step, bias in biases.items():
        assert bias.dtype == torch.float32 and bias.sum().abs() < 1e-6
        assert bias.tolist() == parts[step].tolist()
    assert biases[1].abs().max() > 0.005 and biases[3].abs().max() > 0.005
    for one, other in zip(metrics(project, "whole"), metrics(project, "parts"), strict=True):
        assert one["experts/layer_01/max_load"] == other["experts/layer_01/max_load"]
    run_stage("05_export_checkpoint.py", "-e", "whole", cwd=project)
    [file] = (project / "outputs" / "whole" / "export").glob("*/model.safetensors")
    exported = load_file(file)
    stored = exported["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert stored.dtype == torch.float32 and stored.tolist() == biases[3].tolist()
    assert exported["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="auto")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and bias.tolist() == biases[3].tolist()
