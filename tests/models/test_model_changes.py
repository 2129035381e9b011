# covers: lib/models/model_changes.py, lib/models/sharded.py, lib/models/architecture.py
"""A model change keeps all names, an export folds it, and unknown names are errors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.core.errors import UsageError
from lib.models import model_changes
from lib.models.architecture import decoder_layers
from lib.models.sharded import Placement
from tests.models.families import FAMILIES
from tests.models.two_ranks import TOKENS

FACTOR = ".factor"


class ScaledLinear(nn.Linear):
    """A linear layer with a trained factor for each of its outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.factor


@dataclass(frozen=True)
class Scaled:
    """Scales the linear layers whose names end in `ends`."""

    ends: str
    changes_memory_plan = True

    def convert(self, model: PreTrainedModel, _: Placement) -> tuple[set[str], str]:
        added = set()
        for block_name, block in decoder_layers(model).items():
            for name, linear in block.named_modules(prefix=block_name):
                if name.endswith(self.ends):
                    linear.__class__ = ScaledLinear
                    linear.factor = nn.Parameter(linear.weight.new_empty(linear.out_features))
                    added.add(name + FACTOR)
        return added, f"{len(added)} linear layers scaled"

    def fold(
        self, _: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        layer, _, kind = name.rpartition(".")
        factor = added.get(layer + FACTOR)
        if factor is None:
            return tensor
        return tensor * (factor if kind == "bias" else factor[:, None])


@pytest.mark.parametrize(("family", "ends", "count"), [("llama", "_proj", 14), ("phi", ".fc1", 2)])
def test_added_parameters_are_folded_away(
    monkeypatch: pytest.MonkeyPatch, family: str, ends: str, count: int
) -> None:
    monkeypatch.setitem(model_changes.MODEL_CHANGES, "scaled", Scaled)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    plain = copy.deepcopy(model)
    changes = model_changes.build_changes(
        {"scaled": {"ends": ends}, "float8": {"recipe": "tensorwise"}}
    )
    added, descriptions = model_changes.apply_changes(model, changes[:1], Placement())
    assert descriptions == [f"{count} linear layers scaled"] and len(added) == count
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in plain.named_parameters()
    } | added

    torch.manual_seed(0)
    for module in (model, plain):
        module.to_empty(device="cpu").init_weights()  # buffers too
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    tensors = model.state_dict()
    factors = {name: tensors.pop(name) for name in added}
    plain.load_state_dict(
        {
            name: model_changes.fold_tensor(changes, plain, name, tensor, factors)
            for name, tensor in tensors.items()
        }
    )
    expected = model(input_ids=TOKENS).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, expected)


def test_the_last_change_is_folded_first() -> None:
    class Order:
        def __init__(self, power: int) -> None:
            self.power = power

        def fold(self, _: None, name: str, tensor: Tensor, added: Mapping[str, Tensor]) -> Tensor:
            return tensor * 2 + self.power

    changes = [Order(1), Order(10)]
    assert (
        model_changes.fold_tensor(changes, None, "x", torch.tensor(1), {}) == (1 * 2 + 10) * 2 + 1
    )


def test_an_unknown_change_is_an_error() -> None:
    with pytest.raises(UsageError, match="dora") as error:
        model_changes.build_changes({"dora": {}})
    assert "float8" in error.value.render()
    assert model_changes.build_changes({}) == []
    assert model_changes.apply_changes(None, [], Placement()) == (set(), [])
