"""Train a tiny mixture of experts in a copy of the code; each rank runs this.

argv: a file for the results of rank 0, and the names of optimizers. For each optimizer the results
are the losses and gradient norms of each step, the meshes of the parameter groups, and digests of
the weights and of the optimizer states.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig

sys.path.insert(0, str(Path.cwd()))

from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import token_loss_sum
from lib.tokens.batches import MicroBatch

STEPS = 3


def sum_of(tensor: torch.Tensor) -> float:
    """Return a number that depends on all elements of a sharded tensor."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()
    return (full.flatten() * torch.linspace(1, 2, full.numel(), dtype=torch.float64)).sum().item()


def train(layout: ParallelLayout, optimizer_name: str) -> dict[str, Any]:
    """Train a model with one batch per rank and step, and return the results."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    parallelize.parallelize(model, layout.fsdp, "fp32")
    optimizer = registry.build_optimizer(optimizer_name, model, 1e-2)
    guard = StepGuard("fp32", 30.0, layout.device, layout.ranks)
    tokens = torch.randint(0, 96, (STEPS, 2, 17), generator=torch.Generator().manual_seed(1))
    seen = []
    for step in range(STEPS):
        scaled = guard.scale_for(tokens[0, :, 1:].numel())
        rows = tokens[step].tensor_split(layout.ranks)[layout.rank]
        loss = token_loss_sum(model, MicroBatch(rows[:, :-1], rows[:, 1:]), scaled.loss)
        loss.backward()
        norm = guard.clip(optimizer, 1.0, scaled).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append([layout.sum_over_ranks([loss.item()])[0], norm])
    states = registry.named_states(model, optimizer)
    return {
        "steps": seen,
        "groups": [list(group["params"][0].device_mesh.shape) for group in optimizer.param_groups],
        "weights": {name: sum_of(p) for name, p in model.named_parameters()},
        "states": {name: sum_of(t) for name, t in states.items() if t.dtype == torch.float32},
    }


def main() -> None:
    """Train one model with each optimizer."""
    layout = ParallelLayout.start()
    results = {name: train(layout, name) for name in sys.argv[2:]}
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
