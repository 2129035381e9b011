"""Train a tiny model with Muon on shards; each rank runs this.

argv: a file for the results of rank 0, and the ranks per replica. The gradients are those of the
whole model on each rank, so the weights must be the same for any number of ranks. The results
contain for each model its weights and states, and the bytes that all ranks sent in a step.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.models.sharded import local_slice, local_tensor, plain
from lib.optim import registry
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout, make_mesh
from tests.models.families import FAMILIES, make_tiny_llama

STEPS = 4
# Matrices with fewer rows than ranks, tied weights, and experts that ranks cannot share evenly.
MODELS = {
    "llama": make_tiny_llama(num_key_value_heads=1, head_dim=2, tie_word_embeddings=True),
    "mixtral": FAMILIES["mixtral"](),
    "four experts": FAMILIES["mixtral"](num_local_experts=4),
    "even": make_tiny_llama(hidden_size=24, intermediate_size=48, head_dim=6),
}


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to others. A step may use no other collective."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function.namespace == "c10d":
            assert function._schema.name == "c10d::alltoall_base_", function
            _, sent, group, _, sizes, *_ = args
            kept = sizes[dist.ProcessGroup.unbox(group).rank()]
            self.count += (sent.numel() - kept) * sent.element_size()
        return function(*args, **(kwargs or {}))


def draw_numbers(name: str, shape: torch.Size, step: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(layout: ParallelLayout, shard: int, name: str) -> tuple[dict[str, Tensor], int]:
    """Return the weights and states after some steps of random gradients, and the bytes sent."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    mesh = make_mesh("cpu", layout.ranks, layout.ranks // shard)
    parallelize.shard(model, mesh, "fp32")
    parallelize.materialise_model(model, layout.device, offload=False)
    for key, parameter in model.named_parameters():
        weight = draw_numbers(key, plain(parameter).shape, -1)
        local_tensor(parameter).copy_(weight[local_slice(parameter)])
    optimizer = registry.build_optimizer("muon", model, 1e-2)
    for step in range(STEPS):
        for key, parameter in model.named_parameters():
            shape = plain(parameter).shape
            whole = draw_numbers(key, shape, step)
            if parameter.shape != shape:
                rows = parameter.shape[1] - shape[1]
                whole = torch.nn.functional.pad(whole, (0, 0, 0, rows))
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(whole, mesh, parameter.placements)
        optimizer.found_inf = torch.tensor(float(step == 2))  # a skipped step
        with SentBytes() as sent:
            optimizer.step()
    states = registry.named_states(model, optimizer)
    tensors = {**{key: plain(p) for key, p in model.named_parameters()}, **states}
    of_ranks = torch.tensor(sent.count)
    dist.all_reduce(of_ranks)
    return {key: tensor.full_tensor().detach() for key, tensor in tensors.items()}, int(of_ranks)


def main() -> None:
    layout = ParallelLayout.start()
    results = {name: train(layout, int(sys.argv[2]), name) for name in MODELS}
    if layout.rank == 0:
        torch.save(results, sys.argv[1])
    layout.stop()


if __name__ == "__main__":
    main()
