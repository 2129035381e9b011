# covers: lib/parallel/attention.py, lib/parallel/loss.py, lib/optim/guard.py
"""Between two rows the host reads no number from the device, so it never waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, masking_utils

from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import attention, loss, parallelize, varlen
from lib.parallel.layout import ParallelLayout
from lib.tokens.batches import MicroBatch, find_boundaries
from tests.models.families import make_tiny_llama

CPU = torch.device("cpu")
# Operations that return a number, or a size that depends on numbers, to the host.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::equal",
}


class WaitForbidden(TorchDispatchMode):
    """Fails if an operation makes the host wait."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        assert function._schema.name not in WAITING, function
        return function(*arguments, **(named or {}))


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attention over documents one operation, as on a GPU, but without boundaries."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
        return query + (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)

    monkeypatch.setattr(varlen, "attend_by_document", attend)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
@pytest.mark.parametrize("packed", [False, True], ids=["windows", "documents"])
def test_steps_between_two_rows_never_wait_for_the_device(
    group: dist.ProcessGroup,
    by_kernel: None,
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    kind: str,
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        make_tiny_llama(),
        attn_implementation="varlen" if packed else "sdpa",
    )
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    parallelize.shard(model, mesh, "bf16")
    layout = ParallelLayout(0, 1, 0, 1, CPU, mesh, group, group)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    attention.avoid_device_reads(model, "documents" if packed else "concat", 24)
    loss.chunk_loss(model, layout)
    steps = registry.build_optimizer(kind, model, 1e-3)
    guard = StepGuard("bf16", 30.0, CPU)
    total = torch.zeros((), dtype=torch.float64)
    tokens = torch.randint(0, 96, (2, 25))
    positions = torch.arange(24).remainder(9).repeat(2, 1)
    documents = (positions, torch.from_numpy(find_boundaries(positions.numpy()))) if packed else ()
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], *documents)
    for number in range(4):
        with (
            WaitForbidden() if number else torch.enable_grad()
        ):  # the first step creates the states
            scaled = guard.scale_for(48)
            registry.set_learning_rate(steps, 1e-3 / (number + 1))
            value = loss.token_loss_sum(model, batch.to(layout), scaled.loss)
            value.backward()
            total += value.detach()
            guard.clip(steps, 1.0, scaled)
            steps.step()
            steps.zero_grad(set_to_none=True)
    assert guard.count_skipped()[0] == 0 and total.isfinite()
