"""Train a tiny model with gradients summed and averaged over the ranks; each rank runs this.

argv: a file for the results of rank 0, {"<precision> <ranks per replica>": [summed, averaged]},
each with loss and gradient norm of each step, the loss scale and a digest of the weights.

"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.optim import registry
from lib.optim.guard import LossScale, StepGuard
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout, make_mesh
from lib.parallel.loss import token_loss_sum
from lib.tokens.batches import MicroBatch
from lib.tokens.samples import IGNORED
from tests.models.families import make_tiny_llama

STEPS = 3
SAMPLES = 24
PASSES = 2


class AveragingGuard(StepGuard):
    """Scales the loss for gradients that are averaged over `ranks`."""

    def __init__(self, precision: str, ranks: int) -> None:
        super().__init__(precision, 30.0, torch.device("cpu"))
        self._ranks = ranks

    def scale_for(self, label_tokens: int) -> LossScale:
        mean = self._ranks / label_tokens
        power = 2.0 ** math.floor(math.log2(mean))
        return LossScale(power * self.scale, mean / power / self.scale)


def train_case(
    layout: ParallelLayout,
    mesh: DeviceMesh,
    precision: str,
    guard: StepGuard,
    optimizer: str = "adamw",
    offload: bool = False,
    wrap: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Any]:
    """Return the results of `STEPS` steps of a sharded model. All ranks must call this.

    wrap: changes the blocks of the model before it is sharded.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_llama())
    wrap(model)
    parallelize.shard(model, mesh, precision, offload)
    adamw = registry.build_optimizer(optimizer, model, 1e-2)
    tokens = torch.randint(0, 96, (STEPS, SAMPLES, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, :, 1:].clone()
    labels[:, ::5, :3] = IGNORED
    rows = []
    for step in range(STEPS):
        count = int((labels[step] != IGNORED).sum())
        scaled = guard.scale_for(count)
        total = 0.0
        numbers = torch.arange(SAMPLES).reshape(PASSES, layout.dp_size, -1)[:, layout.dp_rank]
        for number, part in enumerate(numbers, 1):
            model.set_requires_all_reduce(number == PASSES)
            batch = MicroBatch(tokens[step, part, :-1], labels[step, part])
            loss = token_loss_sum(model, batch, scaled.loss)
            loss.backward()
            total += loss.item()
        norm = guard.clip(adamw, 1.0, scaled).item()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        rows.append([layout.sum_over_ranks([total])[0] / count, norm])
    weights = b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())
    return {
        "steps": rows,
        "scale": guard.scale,
        "skipped": int(guard.count_skipped()[0]),
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def main() -> None:
    """Train every case with summed and with averaged gradients."""
    layout = ParallelLayout.start()
    results = {}
    ranks = layout.ranks
    for precision in ("fp32", "bf16", "fp16"):
        for shard in (4, 2, 1) if ranks == 4 else (ranks,):
            mesh = make_mesh("cpu", ranks, ranks // shard)
            with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
                summed = train_case(
                    layout, mesh, precision, StepGuard(precision, 30.0, layout.device, ranks)
                )
            assert sent.called == (shard > 1), "not reduced by an exchange of parts"
            with mock.patch.object(parallelize, "_sum_gradients"):
                averaged = train_case(layout, mesh, precision, AveragingGuard(precision, ranks))
            results[f"{precision} {shard}"] = summed, averaged
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
