"""Export a checkpoint as a full model, or the LoRA adapter of a run alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lib.checkpoints.commit import Checkpoint
from lib.export import adapter_checks, adapter_files, full_model
from lib.export.lora_run import LoraRun
from lib.export.stored_model import StoredModel
from lib.models import model_changes


class Export(ABC):
    """Writes the weights of a checkpoint in a format that other libraries load.

    bytes, tensors, files: size of the weights in bytes, number of tensors, number of weight files.
    adapter_of: the name of the base model if the export is an adapter, else "".
    """

    bytes: int
    tensors: int
    files: int
    adapter_of = ""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Plan an export. model: the model of the run, without adapters, on meta."""
        self.model = model
        self.checkpoint = checkpoint
        self._dtype = dtype

    @abstractmethod
    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the weights of a verified checkpoint, read them back, and return manifest entries.

        advance: called with the bytes of each written tensor. Raises ArtifactError if the
        checkpoint belongs to another model, or if a file does not read back as it was written.
        """

    @abstractmethod
    def verify(self, out: Path) -> None:
        """Check the written files, before they are published.

        Raises ArtifactError if their names, their shapes or an adapter differ from the expected
        ones.
        """


class ModelExport(Export):
    """Writes a full model as `save_pretrained` does."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        max_shard_bytes: int,
    ) -> None:
        super().__init__(model, checkpoint, dtype)
        self._plan = full_model.plan_export(model, dtype, max_shard_bytes)
        self.bytes = self._plan.bytes
        self.tensors = len(self._plan.entries)
        self.files = len(self._plan.files)

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the model, tensor by tensor."""
        return self._write_with(None, out, advance)

    def verify(self, out: Path) -> None:
        """Compare the files with the names and shapes of the model."""
        full_model.verify_model(self.model, out)

    def _write_with(
        self, base: StoredModel | None, out: Path, advance: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Write the model. base: the base model, if the checkpoint contains only adapters."""
        options = self.checkpoint.commit().get("identity", {}).get("options", {})
        changes = model_changes.build_changes(model_changes.select_settings(options))
        return full_model.write_model(
            self.model, self.checkpoint, self._plan, out, advance, changes, base
        )


class MergedExport(ModelExport):
    """Writes a full model into which the adapter of a LoRA run is merged."""

    def __init__(self, lora_run: LoraRun, dtype: torch.dtype, max_shard_bytes: int) -> None:
        super().__init__(lora_run.plain, lora_run.checkpoint, dtype, max_shard_bytes)
        self._lora_run = lora_run

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the model, tensor by tensor, from the base model and the adapter."""
        with StoredModel(self.model, self._lora_run.base.directory) as base:
            return self._write_with(base, out, advance)

    def verify(self, out: Path) -> None:
        """Compare the files with the model, and a part of them with the adapter."""
        super().verify(out)
        adapter_checks.check_merged(self._lora_run, out, self._dtype)


class AdapterExport(Export):
    """Writes a LoRA adapter as PEFT does; see adapter_files."""

    files = 1

    def __init__(self, lora_run: LoraRun, dtype: torch.dtype) -> None:
        super().__init__(lora_run.plain, lora_run.checkpoint, dtype)
        self._lora_run = lora_run
        self._plan = adapter_files.plan_adapter(lora_run, dtype)
        self.bytes = sum(entry.bytes for entry in self._plan)
        self.tensors = len(self._plan)
        self.adapter_of = adapter_files.name_base_model(lora_run.base.directory)

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the config and the tensors of the adapter."""
        return adapter_files.write_adapter(self._lora_run, self._plan, out, advance)

    def verify(self, out: Path) -> None:
        """Compare the files with the names and shapes that PEFT expects, and with the adapter."""
        adapter_files.verify_adapter(self._lora_run, out)
        adapter_checks.check_adapter(self._lora_run, out, self._dtype)
