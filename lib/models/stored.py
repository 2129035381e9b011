"""Reads full tensors of a model, by module name, out of the files that it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor
from transformers import PreTrainedModel

from lib.models import keys, weights
from lib.models.tensors import HubTensors


class StoredModel:
    """Reads one tensor at a time; a tied one under any of its names.

    model: what the files are of, on meta; what adapters have added to it is not in them.
    """

    def __init__(self, model: PreTrainedModel, model_dir: Path) -> None:
        """Raise ArtifactError when the files do not fit the model."""
        self._model = model
        self._files = HubTensors(model_dir)
        self._recipes = weights.plan_reading(model, self._files, model_dir).recipes
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
        }
        for names in keys.group_tied(model).values():
            recipe = next((self._recipes[name] for name in names if name in self._recipes), None)
            if recipe is not None:  # a buffer may be missing, where the constructor computes it
                self._recipes |= dict.fromkeys(names, recipe)

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, value, trace)

    def read_all(self, names: Sequence[str]) -> list[Tensor]:
        """Return several tensors."""
        return [self.read(name) for name in names]

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype that it is stored in, or a buffer as it is constructed."""
        if name not in self._recipes:
            return weights.build_twin(self._model).get_buffer(name)
        whole = tuple(slice(0, size) for size in self._shapes[name])
        return self._recipes[name].read(self._files, whole)
