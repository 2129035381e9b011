"""What a checkpoint holds: tensors under names that say what they are, and random states.

    model.<parameter>               float32 masters
    buffer.<name>                   persistent buffers
    optimizer.exp_avg.<parameter>   first and second moments of AdamW
    optimizer.exp_avg_sq.<parameter>

or what else the optimizer's states are, if they are tensors sharded like the parameter.
Learning rate and betas are functions of the options and the step, so they are not saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from lib.models.sharded import plain
from lib.optim import registry

MODEL, BUFFER, OPTIMIZER = "model.", "buffer.", "optimizer."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters (sharded as they are; tied ones once) and persistent buffers."""
    tensors = {MODEL + name: plain(p) for name, p in model.named_parameters()}
    persistent = model.state_dict().keys()
    tensors |= {BUFFER + name: b for name, b in model.named_buffers() if name in persistent}
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the states of every parameter, making them (zeros) where no step was taken yet."""
    return {OPTIMIZER + name: value
            for name, value in registry.named_states(model, optimizer).items()}


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this rank's random states by kind, uint8 [bytes] each."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def gather_rng(states: dict[str, torch.Tensor], group: dist.ProcessGroup,
               ) -> dict[str, torch.Tensor]:
    """Return the random states of all ranks, uint8 [ranks, bytes] per kind; empty but on rank 0.

    All ranks must call this.
    """
    if dist.get_rank(group) != 0:
        dist.gather_object(states, None, group=group)
        return {}
    rows: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.gather_object(states, rows, group=group)
    return {kind: torch.stack([row[kind] for row in rows]) for kind in states}


def restore_rng(path: Path, device: torch.device, rank: int, ranks: int) -> bool:
    """Take up this rank's random states; False when they are of other ranks or devices."""
    states = load_file(path)
    if len(states["cpu"]) != ranks or (device.type == "cuda") != ("cuda" in states):
        return False
    set_random_states({kind: rows[rank] for kind, rows in states.items()}, device)
    return True


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Take up random states, as random_states returned them."""
    # Copies: torch 2.13 crashes on a state that is a row of a mapped file.
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)
