"""Write the model card of an export: what the weights are and how they were trained."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib.checkpoints import best
from lib.checkpoints.commit import Checkpoint
from lib.runs import row_files

FILE = "README.md"
_OPTIONS = {
    "seq_length": "sequence length (tokens)",
    "global_batch_size": "global batch (samples)",
    "optimizer": "optimizer",
    "lr": "peak learning rate",
    "min_lr": "last learning rate",
    "lr_scheduler": "schedule",
    "weight_decay": "weight decay",
    "precision": "computed in",
    "packing": "packing",
    "seed": "seed",
    "lora_rank": "adapters: rank",
    "lora_alpha": "adapters: alpha",
    "lora_targets": "adapters: on",
    "rope_theta": "RoPE: base",
    "rope_scaling": "RoPE: scaling",
}

ROPE_LABELS = {_OPTIONS["rope_theta"], _OPTIONS["rope_scaling"]}
_FOREIGN = "a checkpoint of another trainer"
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("<this directory>")"""
_LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}"{settings})
model = PeftModel.from_pretrained(base, "<this directory>")"""
_BASE_BY_PATH = """
`AutoPeftModelForCausalLM` finds the base model only where `base_model_name_or_path` in
`adapter_config.json` is its path, or a name on the Hub; here it is `{base}`.
"""
_BASE_SETTINGS = """
The adapters were trained with other RoPE settings than those in the config of the base model. Every
program must load the base model with the settings above, also vLLM (`--hf-overrides`).
"""
_LOAD_TOKENIZER = 'tokenizer = AutoTokenizer.from_pretrained("<this directory>")'
_NO_TOKENIZER = "# There is no tokenizer: the model was trained on synthetic tokens."
_CHAT = """
chat = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt",
                                       return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=500)[0]))
"""


def read_metric(metrics: Path, key: str) -> dict[int, float]:
    """Return a metric of metrics.jsonl by step; torn lines and non-finite values are omitted."""
    return {
        row["step"]: row[key]
        for row in row_files.read_rows(metrics)
        if type(row.get(key)) in (int, float) and math.isfinite(row[key])
    }


def read_scores(
    checkpoints: Collection[Checkpoint], metrics: Path, key: str
) -> dict[int, float | None]:
    """Return a figure of an evaluation by step, for checkpoints at whose step it was measured.

    key: the figure's key in metrics.jsonl.
    """
    logged: dict[int, float | None] = {**read_metric(metrics, key)}
    for checkpoint in checkpoints:
        # For a damaged checkpoint, only metrics.jsonl can have the figure.
        with suppress(OSError, ValueError, AttributeError):
            score = best.read_score(checkpoint.commit(), key)
            if score is not None:
                logged[checkpoint.step] = score
    steps = {checkpoint.step for checkpoint in checkpoints}
    return {step: score for step, score in logged.items() if step in steps}


def find_score_key(checkpoints: Collection[Checkpoint]) -> str:
    """Return the key of the figure by which the newest readable checkpoint was to be judged."""
    commits = {}
    for checkpoint in checkpoints:
        with suppress(OSError, ValueError, AttributeError):
            commits[checkpoint.step] = checkpoint.commit()
    return best.find_score_key(commits)


def collect_facts(
    checkpoint: Checkpoint, metrics: Path, run_options: dict[str, Any]
) -> dict[str, Any]:
    """Return the facts about a checkpoint's training, by label.

    run_options: as in config.yaml; only the last part of a path is shown. The losses are those of
    the checkpoint, or of the last logged step before it.
    """
    commit = checkpoint.commit()
    identity = commit.get("identity", {})
    facts: dict[str, Any] = {"steps": checkpoint.step, "tokens seen": commit.get("tokens")}
    for label, field, key in (
        ("final training loss", "loss", "train/loss"),
        ("validation loss", "eval_loss", "eval/loss"),
    ):
        logged = {
            step: loss
            for step, loss in read_metric(metrics, key).items()
            if step <= checkpoint.step
        }
        if commit.get(field) is not None:
            facts[label] = f"{commit[field]:.4f}"
        elif logged:
            facts[label] = f"{logged[max(logged)]:.4f} (at step {max(logged):,})"
    for label, key in (
        ("trained from", "model_name"),
        ("data", "dataset_name"),
    ):
        if value := run_options.get(key):
            values = value if isinstance(value, list) else [value]
            facts[label] = ", ".join(Path(str(path)).name for path in values)
    facts |= {f"digest of {name}": digest for name, digest in identity.get("inputs", {}).items()}
    options = identity.get("options", {})
    return facts | {label: options[key] for key, label in _OPTIONS.items() if key in options}


def render_card(
    title: str,
    architecture: str,
    dtype: str,
    parameters: int,
    facts: dict[str, Any],
    chats: bool,
    adapter_of: str = "",
    base_settings: Mapping[str, Any] = MappingProxyType({}),
    has_tokenizer: bool = True,
) -> str:
    """Return the card as Markdown, with the front matter that the Hub reads.

    parameters: number of parameters of the full model. chats: whether it has a chat template.
    has_tokenizer: False for a model that was trained on token IDs alone. adapter_of: the name of
    the base model if the export is an adapter, else "". base_settings: what the config of the base
    model must contain instead of its own values.
    """
    rows = {"architecture": architecture, "parameters": parameters, "dtype": dtype, **facts}
    if adapter_of:
        rows = {"base model": adapter_of, "architecture": architecture, "dtype": dtype, **facts}
    table = "\n".join(
        f"| {label} | {_format_value(value)} |"
        for label, value in rows.items()
        if value is not None
    )
    # The Hub rejects a card whose base_model is not the name of a repository.
    is_of_hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", adapter_of))
    base = f"base_model: {adapter_of}\n" if is_of_hub else ""
    where = adapter_of if is_of_hub else f"<directory of {adapter_of}>"
    settings = "".join(f",\n    {name}={value!r}" for name, value in base_settings.items())
    return f"""---
library_name: {"peft" if adapter_of else "transformers"}
{base}pipeline_tag: text-generation
---

# {title}

{"LoRA adapters of a" if adapter_of else "A"} causal language model, exported from \
{f"step {facts['steps']:,} of a training run" if "steps" in facts else _FOREIGN}.

| | |
|---|---|
{table}

```python
{_LOAD_ADAPTER.format(base=where, settings=settings) if adapter_of else _LOAD_MODEL}
{_LOAD_TOKENIZER if has_tokenizer else _NO_TOKENIZER}
{_CHAT if chats else ""}```
{_BASE_BY_PATH.format(base=adapter_of) if adapter_of and not is_of_hub else ""}\
{_BASE_SETTINGS if base_settings else ""}
Nothing was measured here but the losses above. `manifest.json` holds the SHA-256 of every file.
"""


def _format_value(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
