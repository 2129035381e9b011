"""The adapters of a run as its checkpoint holds them, beside the model that stayed frozen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lib.checkpoints import commit, contents
from lib.checkpoints.commit import Checkpoint
from lib.checkpoints.export import PieceReader
from lib.core import units
from lib.core.errors import ArtifactError
from lib.models import adapters
from lib.models.lora import Lora

_SHOWN = 8


@dataclass(frozen=True)
class AdaptedRun:
    """What a run with adapters trains.

    lora: their settings. plain, model: without and with adapters, on meta. base: the directory of
    the frozen model. options: of the run's identity. shapes: of A [rank, in] and B [out, rank] by
    name. tensors: those, full and float32; empty until `load`.
    """

    checkpoint: Checkpoint
    lora: Lora
    plain: PreTrainedModel
    model: PreTrainedModel
    base: Path
    options: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, plain: PreTrainedModel, base: Path) -> AdaptedRun:
        """Return it for a checkpoint that need not have been verified. plain: see above."""
        options = checkpoint.commit()["identity"]["options"]
        made = adapters.make(adapters.asked_by(options))
        lora = next(each for each in made if isinstance(each, Lora))
        model = copy.deepcopy(plain)
        shapes = {
            name: tuple(model.get_parameter(name).shape) for name in sorted(lora.attach(model))
        }
        return cls(checkpoint, lora, plain, model, base, options, shapes)

    def load(self) -> None:
        """Read the tensors of a verified checkpoint.

        Raises ArtifactError when names or shapes are not those of the run's adapters.
        """
        with closing(PieceReader(self.checkpoint.path / commit.TENSORS, False)) as reader:
            held = {
                name.removeprefix(contents.MODEL): shape
                for name, (shape, _) in reader.described.items()
                if name.startswith(contents.MODEL)
            }
            if wrong := [
                f"{name}: expected {self.shapes.get(name)}, found {held.get(name)}"
                for name in sorted(self.shapes.keys() | held.keys())
                if self.shapes.get(name) != held.get(name)
            ]:
                raise ArtifactError(
                    f"checkpoint {self.checkpoint.path} holds other adapters than "
                    "the options of its run ask for",
                    found=units.join_lines(wrong, _SHOWN),
                )
            self.tensors.update(
                (name, reader.read([contents.MODEL + name])[0].clone()) for name in self.shapes
            )

    def said(self) -> str:
        """Return in words what was trained."""
        return (
            f"{units.counted(len(self.shapes) // 2, 'adapter')} of rank {self.lora.rank}, "
            f"{units.count(sum(map(math.prod, self.shapes.values())))} parameters, beside "
            f"{self.base}"
        )


def beside(tensors: Mapping[str, Tensor], base: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return what reads a tensor by name: an adapter's, or one of the frozen model."""
    return lambda name: tensors[name] if name in tensors else base(name)
