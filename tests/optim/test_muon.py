# covers: lib/optim/muon.py, lib/optim/optimizers.py
"""Muon updates as torch.optim.Muon, on shards as on whole matrices."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lib.optim.muon import COEFFICIENTS, _Matrix, _Orthogonaliser, choose_owners
from lib.optim.optimizers import Choice, is_block_matrix
from lib.optim.registry import build_optimizer, named_states
from tests.conftest import run_stage
from tests.models.families import FAMILIES, make_tiny_llama


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_matrices_move_as_by_torch_to_the_bit_and_all_else_as_by_adamw() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_llama())
    others = copy.deepcopy(model)
    muon = build_optimizer("muon", model, 1e-2)
    chosen = [p for name, p in others.named_parameters() if is_block_matrix(name, p.shape)]
    assert len(chosen) == 14
    rest = [p for name, p in others.named_parameters() if not is_block_matrix(name, p.shape)]
    by_torch = torch.optim.Muon(chosen, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        for each in (model, others):
            fill_gradients(each, step)
        for optimizer in (muon, by_torch, adamw):
            optimizer.step()
        for (name, parameter), other in zip(
            model.named_parameters(), others.parameters(), strict=True
        ):
            assert torch.equal(parameter, other), (step, name)


def test_a_skipped_step_changes_nothing() -> None:
    model = AutoModelForCausalLM.from_config(make_tiny_llama())
    optimizer = build_optimizer("muon", model, 1e-2)
    fill_gradients(model, 0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    before = copy.deepcopy([*model.state_dict().values(), *named_states(model, optimizer).values()])
    fill_gradients(model, 1)
    for parameter in model.parameters():
        parameter.grad[0] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [*model.state_dict().values(), *named_states(model, optimizer).values()]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.parametrize(
    "ranks, shard", [(2, 2), (3, 3), pytest.param(4, 4, marks=pytest.mark.slow), (4, 2)]
)
def test_shards_get_the_update_of_one_rank(tmp_path: Path, ranks: int, shard: int) -> None:
    """Also with fewer rows than ranks, tied weights, replicas, and experts of uneven shards.

    A stack of experts is one operation where ranks have whole experts, and its rounding is another.
    The rows travel twice, in two bytes per number, except those that their owner has.
    """

    def train(count: int, size: int) -> dict[str, tuple[dict[str, Tensor], int]]:
        path = tmp_path / f"{count}.pt"
        run_stage("tests/optim/sharded_muon.py", path, size, cwd=tmp_path, ranks=count)
        return torch.load(path)

    alone = train(1, 1)
    sharded = train(ranks, shard)
    even, sent = sharded["even"]
    numbers = sum(t.numel() for name, t in even.items() if is_block_matrix(name, t.shape))
    numbers //= 2  # without the momentum
    assert sent == ranks // shard * 2 * 2 * numbers * (shard - 1) // shard
    for model, (tensors, _) in sharded.items():
        for name, tensor in tensors.items():
            expected = alone[model][0][name]
            if "experts" in name and not name.startswith("momentum"):
                assert (tensor - expected).norm() < 1e-3 * expected.norm(), (model, name)
            elif is_block_matrix(name, tensor.shape):
                assert torch.equal(tensor, expected), (model, name)
            else:
                torch.testing.assert_close(tensor, expected)  # AdamW rounds the end of a shard


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 16, 48)])
def test_the_result_is_almost_orthogonal(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    result = _Orthogonaliser(kind)(torch.randn(shape).bfloat16()).float()
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_costliest_matrices_have_owners_of_their_own() -> None:
    wide, narrow = (_Matrix(0, 0, (rows,), 64) for rows in (256, 16))
    owned = choose_owners([narrow, wide, narrow, wide, narrow, narrow], 3)
    assert len({matrix.owner for matrix in owned if matrix.rows == (256,)}) == 2
    busy = {rank: sum(matrix.cost for matrix in owned if matrix.owner == rank) for rank in range(3)}
    assert max(busy.values()) == wide.cost


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("transformer.h.0.attn.c_attn.weight", (64, 192), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), True),
        ("model.layers.0.mlp.gate.weight", (4, 64), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 64), False),
        ("backbone.layers.0.mixer.A_log", (64, 16), False),
        ("backbone.layers.0.mixer.conv1d.weight", (64, 1, 4), False),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), False),
        ("model.decoder.embed_tokens.0.weight", (64, 32), False),
        ("lm_heads.0.weight", (64, 32), False),
        ("model.embed_tokens.weight", (64, 32), False),
        ("lm_head.weight", (64, 32), False),
        ("model.layers.0.input_layernorm.weight", (32,), False),
        ("model.layers.0.conv.conv.weight", (32, 1, 4), False),
    ],
)
def test_only_matrices_of_blocks_get_muon(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_block_matrix(name, shape) == expected


def test_the_states_have_the_size_that_plans_count() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["mixtral"]())
    optimizer = build_optimizer("muon", model, 1e-2)
    chosen = Choice("muon")
    total = sum(chosen.state_bytes(name, p.shape) for name, p in model.named_parameters())
    assert total == sum(tensor.nbytes for tensor in named_states(model, optimizer).values())
