"""Write checkpoints in this process, without training, and run stage 05 on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import contents
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.snapshot import capture_snapshot, write_snapshot
from lib.core.paths import Experiment
from lib.models.architecture import build_on_meta
from lib.models.weights import load_pretrained
from lib.optim import registry
from tests.models.families import FAMILIES
from tests.models.two_ranks import shard_model
from tests.scripts import load_script

# These families differ from another one only in their position embeddings or the width of a head,
# which no export changes, so only `make test-long` exports them.
_VARIANTS = {"llama3", "llama3_tied", "codellama", "mathstral", "pythia"}
EXPORTED = [
    pytest.param(family, marks=pytest.mark.long) if family in _VARIANTS else family
    for family in FAMILIES
]


def save_run(
    root: Path,
    model_dir: Path,
    *,
    step: int = 1,
    world_size: int = 1,
    facts: dict[str, Any] | None = None,
    added: dict[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """Write under `root/exp` the files of a run that has not changed the weights of a model.

    added: parameters of an adapter.
    """
    experiment = Experiment(root, "exp")
    experiment.model.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (model_dir / name).exists():
            shutil.copyfile(model_dir / name, experiment.model / name)
    model = build_on_meta(model_dir)
    shard_model(model, None, [world_size])
    model.to_empty(device="cpu")
    load_pretrained(model, model_dir)
    adamw = registry.build_optimizer("adamw", model, 1e-3)
    record = {"step": step, "tokens": 640 * step, "loss": 1.5, **(facts or {})}
    identity = {"options": {"seq_length": 32, "seed": 7}, "inputs": {"dataset": "d1e5"}}
    tensors = contents.name_tensors(model, registry.named_states(model, adamw))
    tensors |= {contents.MODEL + name: tensor for name, tensor in (added or {}).items()}
    return write_snapshot(
        experiment.checkpoints,
        capture_snapshot(tensors, record, identity, torch.device("cpu")),
        dist.group.WORLD,
    )


def run_stage_05(*arguments: object) -> None:
    """Run stage 05's main in this process."""
    load_script("05_export_checkpoint.py").main([str(argument) for argument in arguments])


def change_json(path: Path, drop: str = "", **values: Any) -> None:
    """Change and drop keys of a JSON file."""
    content = json.loads(path.read_text()) | values
    content.pop(drop, None)
    path.write_text(json.dumps(content))
