"""Count the all-gathers of each micro-batch of a tiny model; each rank runs this.

argv: a file for the results of rank 0, {"<case> <kept>": {"passes": for each micro-batch of the
last step the groups gathered in forward and in backward, "losses": of each step, "weights": a
digest}}.

"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.models.lora import Lora
from lib.models.sharded import Placement, is_frozen
from lib.models.weights import initialise_model
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import loss, parallelize
from lib.parallel.fsdp_groups import find_groups
from lib.parallel.layout import ParallelLayout, make_mesh
from lib.parallel.trial import eval_mode
from lib.tokens.batches import MicroBatch
from tests.models.families import make_tiny_llama

STEPS = 2
CASES: dict[str, dict[str, Any]] = {
    "one pass": {"passes": 1},
    "three passes": {},
    "tied": {"tied": True},
    "adapters": {"lora": 2},
    "recomputed": {"recompute": "full"},
    "bf16": {"precision": "bf16"},
    "offload": {"offload": True},
}


def make_model(tied: bool, lora: int, precision: str) -> PreTrainedModel:
    """Return a model of three blocks on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_tiny_llama(num_hidden_layers=3, tie_word_embeddings=tied),
            dtype=torch.float32,
        ).train()
    if lora:
        Lora(lora, 2.0 * lora, precision=precision).convert(model, Placement())
    return model


def train_case(
    layout: ParallelLayout,
    shard_size: int,
    keep_gathered: bool,
    passes: int = 3,
    tied: bool = False,
    lora: int = 0,
    recompute: str = "none",
    precision: str = "fp32",
    offload: bool = False,
    separate: bool = False,
) -> dict[str, Any]:
    """Return the gathered groups and the results of `STEPS` steps. All ranks must call this."""
    model = make_model(tied, lora, precision)
    mesh = make_mesh("cpu", layout.ranks, layout.ranks // shard_size)
    parallelize.parallelize(
        model, mesh, precision, recompute, offload=offload, keep_gathered=keep_gathered
    )
    parallelize.materialise_model(model, torch.device("cpu"), offload)
    if separate:
        parallelize.separate_reductions(model)
    initialise_model(model, 0)
    if is_frozen(model):  # adapters begin as nothing, and train nothing then
        for number, parameter in enumerate(model.parameters()):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            with torch.no_grad():
                local.copy_(0.1 * torch.sin(torch.arange(local.numel()) + number).view_as(local))
    loss.chunk_loss(model, layout)
    adamw = registry.build_optimizer("adamw", model, 1e-2)
    guard = StepGuard(precision, 30.0, torch.device("cpu"), layout.ranks)
    tokens = torch.randint(
        0, 96, (STEPS, passes, layout.ranks, 17), generator=torch.Generator().manual_seed(1)
    )[:, :, layout.rank]
    gathered: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def noted(params: list[Any], *more: Any) -> Any:
        gathered.append(name_group(params[0]._param_fqn))
        return gather(params, *more)

    losses = []
    seen = []
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", noted):
        for step in range(STEPS):
            seen = []
            total = 0.0
            scaled = guard.scale_for(16 * passes * layout.ranks)
            for number in range(passes):
                parallelize.begin_pass(model, number == passes - 1, keep_gathered)
                row = tokens[step, number][None]
                loss_sum = loss.token_loss_sum(
                    model, MicroBatch(row[:, :-1], row[:, 1:]), scaled.loss
                )
                forward = list(gathered)
                loss_sum.backward()
                seen.append([forward, gathered[len(forward) :]])
                gathered.clear()
                total += loss_sum.item()
            losses.append(layout.sum_over_ranks([total])[0])
            assert all(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
            guard.clip(adamw, 1.0, scaled)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
        validated = validate_row(model, tokens[0, 0][None])
    weights = b"".join(
        p.full_tensor().detach().numpy().tobytes()
        for p in model.parameters()
        if isinstance(p, DTensor) and p.requires_grad
    )
    return {
        "passes": seen,
        "losses": losses,
        "validated": validated,
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def validate_row(model: PreTrainedModel, row: torch.Tensor) -> float:
    """Return a loss without gradients, and require that everything is sharded afterwards."""
    with torch.no_grad(), eval_mode(model):
        loss_sum = loss.token_loss_sum(model, MicroBatch(row[:, :-1], row[:, 1:])).item()
    groups = find_groups(model)
    assert groups and all(group.is_sharded for group in groups)
    return loss_sum


def name_group(name: str) -> str:
    """Return the group of a weight: the number of its block, `embedding` or `head`."""
    parts = name.split(".")
    if "layers" in parts:
        return parts[2]
    return "embedding" if "embed_tokens" in parts else "head"


def main() -> None:
    """Train every case with and without weights that stay gathered."""
    layout = ParallelLayout.start()
    results = {}
    cases = {name: {"shard_size": layout.ranks, **case} for name, case in CASES.items()}
    if layout.ranks == 4:
        cases = {"replicas": {"shard_size": 2}, "separate": {"shard_size": 2, "separate": True}}
    for name, case in cases.items():
        for keep_gathered in (False,) if case.get("offload") else (False, True):
            results[f"{name} {keep_gathered}"] = train_case(
                layout, keep_gathered=keep_gathered, **case
            )
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
