"""Read the LoRA adapter of a run from its checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lib.checkpoints import commit, contents
from lib.checkpoints.commit import Checkpoint
from lib.core import units
from lib.core.errors import ArtifactError
from lib.export.base_model import BaseModel
from lib.export.tensor_reader import FullTensorReader
from lib.models import model_changes
from lib.models.lora import Lora

_SHOWN = 8


@dataclass(frozen=True)
class LoraRun:
    """A LoRA run and its adapter.

    lora: settings of the adapter. plain: the model without the adapter, on meta. options: the
    options of the run, as the checkpoint records them. shapes: the shapes of the matrices A [rank,
    in] and B [out, rank], by name. tensors: A and B by name, unsharded, in float32; empty until
    `load`.
    """

    checkpoint: Checkpoint
    lora: Lora
    plain: PreTrainedModel
    base: BaseModel
    options: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, plain: PreTrainedModel, base: BaseModel
    ) -> LoraRun:
        """Return the run of a checkpoint, which need not be verified yet.

        plain: the model without the adapter, on meta.
        """
        options = checkpoint.commit()["identity"]["options"]
        changes = model_changes.build_changes(model_changes.select_settings(options))
        lora = next(change for change in changes if isinstance(change, Lora))
        model = copy.deepcopy(plain)
        shapes = {
            name: tuple(model.get_parameter(name).shape) for name in sorted(lora.attach(model))
        }
        return cls(checkpoint, lora, plain, base, options, shapes)

    def load(self, show_progress: bool) -> None:
        """Verify the weights of the base model, and read the adapter from a verified checkpoint.

        Raises ArtifactError if the weights differ from those that the run read, or if names or
        shapes of the adapter do not match the run's options.
        """
        self.base.require_same_weights(self.checkpoint, show_progress)
        with closing(FullTensorReader(self.checkpoint.path / commit.TENSORS, False)) as reader:
            saved = {
                name.removeprefix(contents.MODEL): shape
                for name, (shape, _) in reader.described.items()
                if name.startswith(contents.MODEL)
            }
            if differences := [
                f"{name}: expected {self.shapes.get(name)}, found {saved.get(name)}"
                for name in sorted(self.shapes.keys() | saved.keys())
                if self.shapes.get(name) != saved.get(name)
            ]:
                raise ArtifactError(
                    f"the adapter in checkpoint {self.checkpoint.path} does not match the options "
                    "of its run",
                    found=units.join_lines(differences, _SHOWN),
                )
            self.tensors.update(
                (name, reader.read([contents.MODEL + name])[0].clone()) for name in self.shapes
            )

    def describe(self) -> str:
        """Return a text with the size of the adapter and its base model."""
        return (
            f"{units.counted(len(self.shapes) // 2, 'adapter')} of rank {self.lora.rank}, "
            f"{units.count(sum(map(math.prod, self.shapes.values())))} parameters, for the base "
            f"model {self.base.directory}"
        )
