"""Change the modules of a model before it is sharded. MODEL_CHANGES lists the changes.

A change keeps the names of all parameters and may add some. An export folds the added parameters
into the others, so the result has the class of the original model and no added parameters.
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
from lib.models.options import FLOAT8_RECIPES
from lib.models.sharded import Placement


class ModelChange(Protocol):
    """Changes a model before training, and undoes the change in an export.

    changes_memory_plan: whether the memory estimate includes this change.
    """

    changes_memory_plan: bool

    def convert(self, model: PreTrainedModel, placement: Placement) -> tuple[set[str], str]:
        """Change a model on the meta device.

        Returns the names of the added parameters and a description of the change for the log. All
        existing names stay. Raises UsageError for a model that this change does not support.
        """

    def owns(self, name: str) -> bool:
        """Return whether `convert` adds a parameter of this name."""

    def fold(
        self, model: PreTrainedModel, name: str, tensor: Tensor, added: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the tensor of this name as the unchanged model needs it, in the same shape.

        model: the unchanged model, on meta. tensor: the full tensor of this name, from the
        checkpoint or the base model. added: all added parameters, full, by name.
        """


class AppliedChanges(NamedTuple):
    """The names of the parameters that changes added, and a description of each change."""

    added: set[str]
    descriptions: list[str]


MODEL_CHANGES: dict[str, Callable[..., ModelChange]] = {"lora": Lora, "float8": Float8}


def select_settings(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each change that a run uses, by name in MODEL_CHANGES.

    options: from the identity of the run.
    """
    settings = {}
    if options.get("lora_rank"):
        settings["lora"] = lora.select_settings(options)
    if recipe := FLOAT8_RECIPES.get(options.get("precision", "")):
        settings["float8"] = {"recipe": recipe}
    return settings


def build_changes(settings: Mapping[str, Mapping[str, Any]]) -> list[ModelChange]:
    """Return a change for each entry of `settings`, in order; UsageError for an unknown name."""
    if unknown := [name for name in settings if name not in MODEL_CHANGES]:
        raise UsageError(
            f"there is no model change {', '.join(unknown)}",
            expected=", ".join(sorted(MODEL_CHANGES)),
        )
    return [MODEL_CHANGES[name](**values) for name, values in settings.items()]


def apply_changes(
    model: PreTrainedModel, changes: Sequence[ModelChange], placement: Placement
) -> AppliedChanges:
    """Apply changes in order to a model on the meta device. The model must not be sharded yet."""
    applied = AppliedChanges(set(), [])
    for change in changes:
        added, description = change.convert(model, placement)
        applied.added.update(added)
        applied.descriptions.append(description)
    return applied


def fold_tensor(
    changes: Sequence[ModelChange],
    model: PreTrainedModel,
    name: str,
    tensor: Tensor,
    added: Mapping[str, Tensor],
) -> Tensor:
    """Return a tensor as the unchanged model needs it, by undoing the last change first.

    See `ModelChange.fold`.
    """
    for change in reversed(changes):
        tensor = change.fold(model, name, tensor, added)
    return tensor
