"""What changes the modules of a model before it is sharded: a row of ADAPTERS each.

An adapter keeps the names of all parameters and may add some. At export it folds those it added
into the others, so an export is a model of the class that was trained, without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from lib.core.errors import UsageError
from lib.models import lora
from lib.models.float8 import Float8
from lib.models.lora import Lora
from lib.models.sharded import Placement


class ModelAdapter(Protocol):
    """Changes a model before training and undoes that at export; made of settings by name.

    before_plans: the memory of a run is planned for the model as it is afterwards.
    """

    before_plans: bool

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Change a meta-device model; return the names that were added, and a sentence that says
        what has changed.

        All names that there were stay. Raises UsageError for a model that it cannot change.
        """

    def owns(self, name: str) -> bool:
        """Tell whether a name is one that `convert` adds."""

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return what a model without the adapter holds under a name, of the same shape.

        model: without adapters, on meta. tensor: full, what the checkpoint or the model that the
        run began with holds under the name. added: all that `convert` added, full.
        """


class Adapted(NamedTuple):
    """Says what adapters have changed.

    added: names that the model did not have. said: a sentence of each adapter.
    """

    added: set[str]
    said: list[str]


ADAPTERS: dict[str, Callable[..., ModelAdapter]] = {"lora": Lora, "float8": Float8}


def asked_by(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of the adapters of a run, by name. options: those of its identity."""
    asked = {}
    if options.get("lora_rank"):
        asked["lora"] = lora.settings(options)
    if options.get("precision") == "fp8":
        asked["float8"] = {"recipe": options.get("fp8_recipe", "tensorwise")}
    return asked


def make(asked: Mapping[str, Mapping[str, Any]]) -> list[ModelAdapter]:
    """Return adapters in the order asked for; UsageError for a name that is no row.

    asked: settings by name.
    """
    if unknown := [name for name in asked if name not in ADAPTERS]:
        raise UsageError(
            f"there is no adapter {', '.join(unknown)}", expected=", ".join(sorted(ADAPTERS))
        )
    return [ADAPTERS[name](**settings) for name, settings in asked.items()]


def adapt(
    model: PreTrainedModel, adapters: Sequence[ModelAdapter], placement: Placement
) -> Adapted:
    """Change a meta-device model by each adapter in turn; must come before sharding."""
    adapted = Adapted(set(), [])
    for adapter in adapters:
        added, said = adapter.convert(model, placement)
        adapted.added.update(added)
        adapted.said.append(said)
    return adapted


def fold(
    adapters: Sequence[ModelAdapter],
    model: PreTrainedModel,
    name: str,
    tensor: Tensor,
    added: Mapping[str, Tensor],
) -> Tensor:
    """Return what a model without adapters holds under a name; undoes the last adapter first."""
    for adapter in reversed(adapters):
        tensor = adapter.fold(model, name, tensor, added)
    return tensor
