"""Read full tensors from a model's files, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from lib.models import keys, weights
from lib.models.tensors import HubTensors, StoredTensors


class OpenTensors(StoredTensors, Protocol):
    """Stored tensors in open files."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close the files."""


class StoredModel:
    """Reads one tensor of a model at a time, by module name. Tied tensors have several names.

    model: on meta. The files do not contain parameters that a model change has added.
    """

    def __init__(
        self, model: PreTrainedModel, model_dir: Path, files: OpenTensors | None = None
    ) -> None:
        """Open the files. Raises ArtifactError if they do not fit the model.

        files: the tensors to read instead of the safetensors files in the directory.
        """
        self._model = model
        self._files: OpenTensors = files or HubTensors(model_dir)
        self._recipes = weights.plan_reading(model, self._files, model_dir).recipes
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()
        }
        for names in keys.group_tied(model).values():
            recipe = next((self._recipes[name] for name in names if name in self._recipes), None)
            if recipe is not None:  # buffers that the constructor computes may be missing
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
        """Return several tensors, each as `read` returns it."""
        return [self.read(name) for name in names]

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype, or a missing buffer as the constructor sets it."""
        if name not in self._recipes:
            return weights.build_twin(self._model).get_buffer(name)
        full = tuple(slice(0, size) for size in self._shapes[name])
        return self._recipes[name].read(self._files, full)
