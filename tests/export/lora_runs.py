"""Write checkpoints of LoRA runs in this process, without training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from lib.checkpoints import contents
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.snapshot import capture_snapshot, write_snapshot
from lib.core.paths import Experiment
from lib.models import directory
from lib.models.architecture import build_on_meta
from lib.models.lora import Lora
from lib.models.sharded import Placement, local_tensor
from lib.models.weights import draw_added, load_pretrained
from lib.optim import registry
from lib.parallel import attention, parallelize

LAYOUT = SimpleNamespace(device=torch.device("cpu"))


def build_lora_model(model_dir: Path, lora: Lora, strength: float = 0.05) -> PreTrainedModel:
    """Return a model as the trainer builds it, with random values in B as if it was trained."""
    model = build_on_meta(model_dir)
    lora.convert(model, Placement())
    parallelize.parallelize(model, init_device_mesh("cpu", [1]), lora.precision, "none", None)
    parallelize.materialise_model(model, LAYOUT.device, False)
    load_pretrained(model, model_dir)
    draw_added(model, 0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_B.weight"):
            local_tensor(parameter).normal_(0.0, strength)
    return model


def save_lora_run(
    root: Path,
    model_dir: Path,
    lora: Lora,
    *,
    optimizer: str = "adamw",
    strength: float = 0.05,
    record: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **options: Any,
) -> Checkpoint:
    """Write under `root/exp` the files of a LoRA run that has saved step 1.

    change: of the saved tensors.
    """
    experiment = Experiment(root, "exp")
    experiment.model.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(model_dir / name, experiment.model / name)
    experiment.config.write_text(
        yaml.safe_dump(
            {"model_dir": str(model_dir), "options": {"cache_dir": str(root / ".cache")}}
        )
    )
    model = build_lora_model(model_dir, lora, strength)
    attention.fix_rope_frequencies(model, "concat", options.get("seq_length", 32))
    states = registry.build_optimizer(optimizer, model, 0.0)  # only its moments count
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-3)
    states.step()
    identity = {
        "options": {
            "seq_length": 32,
            "packing": "concat",
            "lr": 1e-3,
            "precision": lora.precision,
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_targets": lora.targets,
            "lora_rslora": lora.rslora,
            "lora_dropout": lora.dropout,
            **options,
        },
        "inputs": {"model": directory.fingerprint_model(model_dir)},
    }
    content = {
        "step": 1,
        "tokens": 640,
        "loss": 1.5,
        "optimizer_steps": 1,
        **(record or {}),
    }
    tensors = contents.name_tensors(model, registry.named_states(model, states))
    change(tensors)
    return write_snapshot(
        experiment.checkpoints,
        capture_snapshot(tensors, content, identity, LAYOUT.device),
        dist.group.WORLD,
    )
