"""Train a model as other projects do, with FSDP2 or FSDP1 and DCP; torchrun runs this.

argv: a model directory, and the directory in which to write
    offline/    state.json, lr_scheduler.pt and checkpoint/, of an offline pipeline
    trainer/    trainer_state.json and pytorch_model_fsdp_0/, of the Hugging Face Trainer
    wrapped/    a compiled FSDP1 model with checkpointed blocks, under the names of its wrappers
and for each one <name>.safetensors with its full weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, PreTrainedModel

STEPS = 3
STATE = {"epoch": 1, "global_step": 1200, "epoch_step": 200, "running_loss": 3.5}


def load_model(model_dir: Path) -> PreTrainedModel:
    """Return the model with other weights than those in its directory."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def train_model(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Train a few steps on tokens that depend on the rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for step in range(STEPS):
        tokens = torch.arange(32).reshape(2, 16) * 7 % 90 + 3 + step + dist.get_rank()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer, scheduler


def save_expected(path: Path, model: nn.Module) -> None:
    """Write the full weights by the names of the unwrapped model. All ranks must call this."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        tensors: dict[str, Tensor] = {name: value.clone() for name, value in full.items()}
        save_file(tensors, path)


def write_offline(model_dir: Path, root: Path) -> None:
    """Save {"model", "optimizer"} as an offline pipeline does, with its two other files."""
    model = load_model(model_dir)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = train_model(model)
    options = StateDictOptions(cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    states = {"model": weights, "optimizer": moments}
    dcp.save(states, checkpoint_id=root / "offline/checkpoint")
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), root / "offline/lr_scheduler.pt")
        (root / "offline/state.json").write_text(json.dumps(STATE))
    save_expected(root / "offline.safetensors", model)


def write_trainer(model_dir: Path, root: Path) -> None:
    """Save {"model"} of an FSDP1 model as accelerate does, beside a file of the Trainer."""
    model = load_model(model_dir)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    train_model(sharded)
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=root / "trainer/pytorch_model_fsdp_0")
    if dist.get_rank() == 0:
        state = {"global_step": 70, "epoch": 0.5, "log_history": []}
        (root / "trainer/trainer_state.json").write_text(json.dumps(state))
    save_expected(root / "trainer.safetensors", sharded)


def write_wrapped(model_dir: Path, root: Path) -> None:
    """Save the tensors under the names of all wrappers, without a dictionary around them."""
    model = load_model(model_dir)
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_model(model)
    names = [name for name, _ in torch.compile(model).named_parameters()]
    assert any("_checkpoint_wrapped_module" in name for name in names)
    tensors = dict(zip(names, (p.detach() for p in model.parameters()), strict=True))
    dcp.save(tensors, checkpoint_id=root / "wrapped")
    save_expected(root / "wrapped.safetensors", model)


def main() -> None:
    model_dir, root = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    for name in ("offline", "trainer", "wrapped"):
        (root / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for write in (write_offline, write_trainer, write_wrapped):
        write(model_dir, root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
