# covers: lib/models/sharded.py, lib/models/float8.py, lib/models/weights.py
# covers: lib/models/architecture.py
"""Linear layers compute in emulated 8-bit floats with similar losses and the same names."""

from __future__ import annotations

import copy
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from lib.core.errors import UsageError
from lib.models import float8
from lib.models.architecture import decoder_layers
from lib.models.float8 import Float8
from lib.models.sharded import Placement, is_gathered_in_8_bits, local_tensor, plain
from lib.models.weights import initialise_model
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import compiling, parallelize
from tests.models.families import FAMILIES, make_tiny_llama

SMALL = make_tiny_llama(vocab_size=64, num_attention_heads=2)
CPU = torch.device("cpu")


def on_meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).train()


def sharded(
    config: PretrainedConfig, recipe: str = "", compiled: bool = False, shard_size: int = 2
) -> nn.Module:
    """Return a model with weights. recipe: of fp8, or "" for bf16.

    shard_size: the number of ranks that the layers are converted for; this process is one rank.
    """
    model = on_meta(config)
    if recipe:
        Float8(recipe).convert(model, Placement(shard_size))
    parallelize.parallelize(
        model,
        init_device_mesh("cpu", (1,)),
        "fp8" if recipe else "bf16",
        compiler=compiling.make_compiler(compiled, CPU),
    )
    parallelize.materialise_model(model, CPU, offload=False)
    initialise_model(model, 0)
    return model


def train_steps(model: nn.Module, steps: int) -> list[float]:
    """Return the losses of some steps on sentences of a small artificial language."""
    adamw = registry.build_optimizer("adamw", model, 1e-2)
    float8.update_scales_with(adamw, model)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        first = torch.randint(0, 64, (8, 1), generator=generator)
        noise = torch.randint(0, 3, (8, 15), generator=generator)
        tokens = torch.cat([first, first + torch.cumsum(5 + noise, 1)], 1) % 64
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        guard = StepGuard("fp8", 0.0, CPU)
        guard.clip(adamw, 1.0, guard.scale_for(1))
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def test_scales_are_updated_after_each_step(group: dist.ProcessGroup) -> None:
    model = sharded(SMALL, "tensorwise")
    weight = model.model.layers[1].mlp.up_proj.weight
    assert type(local_tensor(weight)) is torch.Tensor
    assert not local_tensor(weight).is_meta
    for steps in (0, 1):
        train_steps(model, steps)
        scale = 448 / local_tensor(weight).abs().max()
        assert weight._local_tensor._precomputed_scale.item() == pytest.approx(scale.item())
    masters = plain(weight)
    assert isinstance(masters, DTensor) and type(masters._local_tensor) is torch.Tensor
    masters._local_tensor.fill_(3.0)
    assert (weight._local_tensor._tensor == 3.0).all()


@pytest.mark.slow
def test_losses_are_within_a_percent_of_those_in_bf16(group: dist.ProcessGroup) -> None:
    expected = train_steps(sharded(SMALL), 100)
    assert expected[-1] < 0.5 * expected[0]
    for recipe in ("tensorwise", "rowwise"):
        losses_of_fp8 = train_steps(sharded(SMALL, recipe), 100)
        assert losses_of_fp8[0] != expected[0]
        for at in range(0, 100, 10):
            of_bf16, mine = (
                math.fsum(losses[at : at + 10]) for losses in (expected, losses_of_fp8)
            )
            assert mine == pytest.approx(of_bf16, rel=0.01), (recipe, at)


@pytest.mark.slow
def test_one_graph_serves_all_blocks(group: dist.ProcessGroup, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = train_steps(sharded(SMALL, "tensorwise"), 3)
    losses = train_steps(sharded(SMALL, "tensorwise", compiled=True), 3)
    assert losses == pytest.approx(expected, rel=1e-3)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_rank_with_all_weights_casts_them_in_its_blocks(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP passes bf16 on and runs no operation on 8-bit floats, and the losses agree."""
    alone, gathered = (sharded(SMALL, "tensorwise", shard_size=size) for size in (1, 2))
    assert not [p for p in alone.parameters() if is_gathered_in_8_bits(p)]
    assert len([p for p in gathered.parameters() if is_gathered_in_8_bits(p)]) == 14
    calls: list[str] = []
    fsdp_utils = sys.modules["torchao.float8.fsdp_utils"]  # hidden until a model was converted
    cast = fsdp_utils.hp_tensor_and_scale_to_float8

    def note_and_cast(*rest: Any) -> Any:
        calls.append("cast")
        return cast(*rest)

    monkeypatch.setattr(fsdp_utils, "hp_tensor_and_scale_to_float8", note_and_cast)
    expected = train_steps(gathered, 3)
    assert calls
    calls.clear()
    assert train_steps(alone, 3) == pytest.approx(expected, rel=0.01)
    assert not calls


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_of_each_family_stay(name: str, group: dist.ProcessGroup) -> None:
    config = FAMILIES[name]()
    model = on_meta(config)
    before = on_meta(config)
    if name == "gpt2":
        with pytest.raises(UsageError, match="changes nothing"):
            Float8("tensorwise").convert(model, Placement())
        return
    added, description = Float8("tensorwise").convert(model, Placement())
    assert not added
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in before.named_parameters()
    }
    assert model.state_dict().keys() == before.state_dict().keys()
    converted = [n for n, m in model.named_modules() if type(m).__name__ == "Float8Linear"]
    assert description.startswith(f"fp8: {len(converted)} linear layers")
    assert all(n.startswith(tuple(decoder_layers(model))) for n in converted)
    assert not [n for n in converted if "experts" in n or n.endswith(".gate")]
    assert ("weights of experts in bf16" in description) == ("moe" in name or name == "mixtral")
    assert ("1 linear layer" in description or "2 linear layers with sizes" in description) == (
        name == "qwen2_moe"
    ), description


def test_weights_that_cannot_be_gathered_in_8_bits_are_gathered_in_bf16(
    group: dist.ProcessGroup,
) -> None:
    for recipe, shard_size, offload, says, wrapped in (
        ("tensorwise", 1, False, "scaled tensorwise; the rest in bf16", 0),
        ("tensorwise", 1, True, "scaled tensorwise; the rest in bf16", 0),
        ("tensorwise", 2, False, "scaled tensorwise; the rest in bf16", 14),
        ("tensorwise", 2, True, "tensorwise (gathered in bf16)", 0),
        ("tensorwise", 48, False, "scaled tensorwise (gathered in bf16)", 0),
        ("tensorwise", 64, False, "(10 of them gathered in bf16)", 4),
        ("rowwise", 1, False, "scaled rowwise; the rest in bf16", 0),
        ("rowwise", 2, False, "scaled rowwise (gathered in bf16)", 0),
    ):
        model = on_meta(SMALL)
        assert says in Float8(recipe).convert(model, Placement(shard_size, offload))[1]
        assert sum(hasattr(p, "fsdp_pre_all_gather") for p in model.parameters()) == wrapped
