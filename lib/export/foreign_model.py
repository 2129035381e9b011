"""Export the weights of another trainer's checkpoint as a model directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.checkpoints.foreign_weights import ForeignTensors, require_fits
from lib.core import log, manifest, publish, units
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.export import companions, full_model
from lib.export.foreign_source import ForeignSource
from lib.export.stored_model import StoredModel
from lib.models import architecture, keys, weights


@dataclass(frozen=True)
class ExportTarget:
    """The directory to write.

    kind: of its manifest. values: the dtype and the largest size of a file, by option. options: all
    options, for the manifest.
    """

    out: Path
    kind: str
    values: dict[str, Any]
    options: dict[str, Any]
    overwrite: bool


def export_checkpoint(
    source: ForeignSource,
    target: ExportTarget,
    *,
    trust_code: bool,
    dry_run: bool,
    show_progress: bool,
) -> None:
    """Plan the files, write them, read them back, publish them, and log a summary.

    trust_code: see architecture.read_config. dry_run: only plan. Raises UsageError with all weights
    that do not fit the model, before anything is written.
    """
    identity = {"options": target.values, "inputs": source.list_inputs()}
    if publish.is_done(target.out, target.kind, identity, target.overwrite, dry_run=dry_run):
        log.info(f"already done: {target.out} contains {source.checkpoint}")
        return
    began = time.monotonic()
    dtype = target.values["dtype"]
    export = ForeignExport(source, dtype, target.values["max_shard_size"], trust_code)
    log.info(f"export of {source.checkpoint}")
    log.table({**export.describe(), "to": f"{target.out}, {dtype}, {units.size(export.bytes)}"})
    if dry_run:
        return
    publish.require_space(target.out.parent, int(export.bytes * 1.01), "the export")
    with publish.Build(target.out, target.kind, identity, target.overwrite) as build:
        title = source.checkpoint.resolve().name
        config_summary = companions.write_companions(
            source.model_dir,
            export.model,
            build.dir,
            dtype,
            trust_code,
            title,
            export.collect_facts(),
        )
        files = [manifest.file_entry(build.dir, path, "sha256") for path in build.files()]
        with Progress("exporting", export.bytes, "B", show_progress) as bar:
            files += export.write(build.dir, bar.advance)
        export.verify(build.dir)
        source.require_unchanged()
        build.publish(
            stage="05_export_checkpoint.py",
            options=target.options,
            files=files,
            summary={"dtype": dtype, "bytes": export.bytes, **config_summary},
        )
    log.info(
        f"done: {units.size(export.bytes)}, written and read back in "
        f"{units.duration(time.monotonic() - began)}; the checkpoint contains no digests, so bytes "
        "that were damaged before are not noticed"
    )


class ForeignExport:
    """Writes the weights of another trainer's checkpoint under the names of the Hub.

    model: on meta. bytes: size of the exported weights in bytes.
    """

    def __init__(
        self, source: ForeignSource, dtype: str, max_shard_bytes: int, trust_code: bool = False
    ) -> None:
        """Plan an export. Raises UsageError with all weights that do not fit the model."""
        self._source = source
        self.model = architecture.build_on_meta(source.model_dir, trust_code=trust_code)
        require_fits(self.model, source.checkpoint, source.model_dir)
        self._plan = full_model.plan_export(self.model, getattr(torch, dtype), max_shard_bytes)
        self.bytes = self._plan.bytes

    def describe(self) -> dict[str, str]:
        """Return texts that describe the export, by the name of the property."""
        config = self.model.config
        progress = self._source.describe_progress()
        return {
            "model": f"{config.model_type}, {units.count(self.model.num_parameters())} parameters, "
            f"config and tokenizer of {self._source.model_dir}",
            **({"saved at": progress} if progress else {}),
        }

    def collect_facts(self) -> dict[str, Any]:
        """Return the facts about the checkpoint for the model card, by label."""
        facts: dict[str, Any] = {
            "weights from": self._source.checkpoint.resolve().name,
            "config and tokenizer from": self._source.model_dir.resolve().name,
        }
        return facts | {key.replace("_", " "): n for key, n in self._source.progress.items()}

    def write(self, out: Path, advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write the weights, read them back, and return the manifest entries of the files.

        advance: called with the bytes of each written tensor. Raises UsageError if tied weights
        have different values.
        """
        with ForeignTensors(self._source.checkpoint, self.model) as tensors:
            self._require_ties(tensors)
            stored = StoredModel(self.model, self._source.model_dir, tensors)
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
                    f"{' and '.join(keys_of_tie)} in {self._source.checkpoint} have different "
                    f"values, but {self._source.model_dir}/config.json ties them",
                    hint="set tie_word_embeddings to false there",
                )
