"""An adapter changes modules, keeps their names, and is folded away; unknown ones are errors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.core.errors import UsageError
from lib.models import adapters
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
    """Multiplies what some linear layers return."""

    ends: str
    before_plans = True

    def convert(self, model: PreTrainedModel, _: Placement) -> tuple[set[str], str]:
        added = set()
        for block_name, block in decoder_layers(model).items():
            for name, linear in block.named_modules(prefix=block_name):
                if name.endswith(self.ends):
                    linear.__class__ = ScaledLinear
                    linear.factor = nn.Parameter(linear.weight.new_empty(linear.out_features))
                    added.add(name + FACTOR)
        return added, f"{len(added)} linears scaled"

    def fold(
        self, _: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        layer, _, kind = name.rpartition(".")
        factor = added.get(layer + FACTOR)
        if factor is None:
            return tensor
        return tensor * (factor if kind == "bias" else factor[:, None])


@pytest.mark.parametrize(("family", "ends", "count"), [("llama", "_proj", 14), ("phi", ".fc1", 2)])
def test_what_is_added_is_folded_away(
    monkeypatch: pytest.MonkeyPatch, family: str, ends: str, count: int
) -> None:
    monkeypatch.setitem(adapters.ADAPTERS, "scaled", Scaled)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    plain = copy.deepcopy(model)
    asked = adapters.make({"scaled": {"ends": ends}, "float8": {"recipe": "tensorwise"}})
    added, said = adapters.adapt(model, asked[:1], Placement())
    assert said == [f"{count} linears scaled"] and len(added) == count
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in plain.named_parameters()
    } | added

    torch.manual_seed(0)
    for each in (model, plain):
        each.to_empty(device="cpu").init_weights()  # buffers too
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    held = model.state_dict()
    extra = {name: held.pop(name) for name in added}
    plain.load_state_dict(
        {name: adapters.fold(asked, plain, name, tensor, extra) for name, tensor in held.items()}
    )
    expected = model(input_ids=TOKENS).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, expected)


def test_the_last_to_change_a_model_is_folded_first() -> None:
    class Order:
        def __init__(self, power: int) -> None:
            self.power = power

        def fold(self, _: None, name: str, tensor: Tensor, added: Mapping[str, Tensor]) -> Tensor:
            return tensor * 2 + self.power

    asked = [Order(1), Order(10)]
    assert adapters.fold(asked, None, "x", torch.tensor(1), {}) == (1 * 2 + 10) * 2 + 1


def test_an_unknown_adapter_is_an_error() -> None:
    with pytest.raises(UsageError, match="there is no adapter dora") as error:
        adapters.make({"dora": {}})
    assert "float8" in error.value.render()
    assert adapters.make({}) == [] and adapters.adapt(None, [], Placement()) == (set(), [])
