"""Export the weights of another trainer's checkpoint as a model directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lib.checkpoints.foreign_run import ForeignRun
from lib.checkpoints.foreign_weights import ForeignTensors, require_fits
from lib.core import units
from lib.core.errors import UsageError
from lib.export import full_model
from lib.models import architecture, keys, weights
from lib.models.stored import StoredModel


class ForeignExport:
    """Writes the weights of another trainer's checkpoint under the names of the Hub.

    model: on meta. bytes: size of the exported weights in bytes.
    """

    def __init__(
        self,
        run: ForeignRun,
        model_dir: Path,
        dtype: torch.dtype,
        max_shard_bytes: int,
        trust_code: bool = False,
    ) -> None:
        """Plan an export. Raises UsageError with all weights that do not fit the model.

        model_dir: the directory with the config of the model.
        """
        self.model = architecture.build_on_meta(model_dir, trust_code=trust_code)
        require_fits(self.model, run, model_dir)
        self._run = run
        self._model_dir = model_dir
        self._plan = full_model.plan_export(self.model, dtype, max_shard_bytes)
        self.bytes = self._plan.bytes
        with ForeignTensors(run, self.model) as stored:
            self._is_torchtitan = stored.is_torchtitan

    def describe(self) -> dict[str, str]:
        """Return texts that describe the export, by the name of the property."""
        config = self.model.config
        progress = self._run.describe_progress()
        return {
            "model": f"{config.model_type}, {units.count(self.model.num_parameters())} parameters, "
            f"config and tokenizer of {self._model_dir}",
            "names": "those of torchtitan, with the rows of queries and keys put in order"
            if self._is_torchtitan
            else "those of transformers",
            **({"saved at": progress} if progress else {}),
        }

    def collect_facts(self) -> dict[str, Any]:
        """Return the facts about the checkpoint for the model card, by label."""
        facts: dict[str, Any] = {
            "weights from": self._run.directory.resolve().name,
            "config and tokenizer from": self._model_dir.resolve().name,
        }
        return facts | {key.replace("_", " "): n for key, n in self._run.progress.items()}

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the weights, read them back, and return the manifest entries of the files.

        advance: called with the bytes of each written tensor. Raises UsageError if tied weights
        have different values.
        """
        with ForeignTensors(self._run, self.model) as tensors:
            self._require_ties(tensors)
            stored = StoredModel(self.model, self._model_dir, tensors)
            return full_model.write_stored(self.model, stored, self._plan, out, advance)

    def verify(self, out: Path) -> None:
        """Raise ArtifactError if names or shapes in the files differ from those of the model."""
        full_model.verify_model(self.model, out)

    def _require_ties(self, tensors: ForeignTensors) -> None:
        """Raise UsageError if weights differ that config.json ties."""
        plan, _ = weights.plan_stored(self.model, tensors)
        for names in keys.group_tied(self.model).values():
            keys_of_tie = [plan.recipes[name].keys[0] for name in names if name in plan.recipes]
            first, *others = keys_of_tie or [""]
            if not all(torch.equal(tensors.read(first), tensors.read(key)) for key in others):
                raise UsageError(
                    f"{' and '.join(keys_of_tie)} in {self._run.directory} have different values, "
                    f"but {self._model_dir}/config.json ties them",
                    hint="set tie_word_embeddings to false there",
                )
