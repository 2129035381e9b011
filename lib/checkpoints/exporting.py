"""The ways out of a checkpoint: a whole model, or the adapters of a run alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.checkpoints import adapter_files, export, proofs
from lib.checkpoints.adapted import AdaptedRun
from lib.checkpoints.commit import Checkpoint
from lib.core import log, units
from lib.core.progress import Progress
from lib.models import adapters
from lib.models.stored import StoredModel


class Export(ABC):
    """Writes what a checkpoint holds in the form of others.

    bytes, tensors, files: of the weights. adapter_of: the name of the base, of adapters alone.
    """

    bytes: int
    tensors: int
    files: int
    adapter_of = ""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        adapted: AdaptedRun | None,
        dtype: torch.dtype,
    ) -> None:
        """model: of the run without adapters, on meta. adapted: the adapters of the run, if any."""
        self.model = model
        self.checkpoint = checkpoint
        self.adapted = adapted
        self._dtype = dtype

    @abstractmethod
    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the weights of a verified checkpoint, read them back; return manifest entries.

        advance: called with the bytes of each tensor written. Raises ArtifactError when the
        checkpoint is of another model, or what is on disk is not what was written.
        """

    @abstractmethod
    def verify(self, out: Path) -> None:
        """Raise ArtifactError when names or shapes in the files are not those looked for."""

    def prove(self, out: Path, progress: bool) -> None:
        """Print what is proved of adapters; ArtifactError where something is not so."""
        if self.adapted is None:
            return
        began = time.monotonic()
        numbers = proofs.PASSES * self.model.num_parameters()
        with Progress("proving", numbers, "numbers", progress) as bar:
            for proof in proofs.prove(self.adapted, out, self._dtype, bar.advance):
                log.info(f"proved: {proof}")
        log.info(f"proved in {units.duration(time.monotonic() - began)}")


class ModelExport(Export):
    """A model as `save_pretrained` writes it, with the adapters of the run merged into it."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        adapted: AdaptedRun | None,
        dtype: torch.dtype,
        max_shard_bytes: int,
    ) -> None:
        super().__init__(model, checkpoint, adapted, dtype)
        self._plan = export.plan(model, dtype, max_shard_bytes)
        self.bytes = self._plan.bytes
        self.tensors = len(self._plan.entries)
        self.files = len(self._plan.files)

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the model, tensor by tensor."""
        options = self.checkpoint.commit().get("identity", {}).get("options", {})
        folded = adapters.make(adapters.asked_by(options))
        if self.adapted is None:
            return export.write(self.model, self.checkpoint, self._plan, out, advance, folded)
        with StoredModel(self.model, self.adapted.base) as base:
            return export.write(self.model, self.checkpoint, self._plan, out, advance, folded, base)

    def verify(self, out: Path) -> None:
        """Compare with the names and shapes of the model."""
        export.verify(self.model, out)


class AdapterExport(Export):
    """Adapters as PEFT writes them, see adapter_files."""

    files = 1

    def __init__(self, model: PreTrainedModel, adapted: AdaptedRun, dtype: torch.dtype) -> None:
        super().__init__(model, adapted.checkpoint, adapted, dtype)
        self._adapted = adapted
        self._plan = adapter_files.plan(adapted, dtype)
        self.bytes = sum(entry.bytes for entry in self._plan)
        self.tensors = len(self._plan)
        self.adapter_of = adapter_files.name_of(adapted.base)

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write config and tensors."""
        return adapter_files.write(self._adapted, self._plan, out, advance)

    def verify(self, out: Path) -> None:
        """Compare with the names and shapes that PEFT looks for."""
        adapter_files.verify(self._adapted, out)
