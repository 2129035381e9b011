"""The files of the model that a run begins with: every byte as it was written."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.checkpoints import commit
from lib.checkpoints.contents import TrainRecord
from lib.core import commands, hashing, log, manifest, verified
from lib.core.errors import ArtifactError
from lib.core.manifest import Remedy
from lib.core.paths import Experiment
from lib.models import directory, lookup
from lib.parallel.layout import ParallelLayout, gather
from lib.train.config import Config
from lib.train.inputs import Inputs

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")


def require_whole_model(config: Config, inputs: Inputs) -> Inputs:
    """Hash the files of the model once until they change; ArtifactError when one is damaged.

    One process of each machine does it, before any process group exists. The weights are left out
    where they are not read: of a run that goes on, they are in its checkpoints, unless it trains
    adapters. Returns the inputs, there with the digests of the frozen weights.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return inputs
    content = _model_content(inputs.model_dir)
    reads_weights = bool(config.lora_rank) or not (inputs.scratch or inputs.begun or inputs.named)
    files = [
        entry
        for entry in content["files"]
        if reads_weights or not entry["path"].endswith(".safetensors")
    ]
    if reads_weights and not files and not config.lora_rank:
        log.info(f"{inputs.model_dir} has no digests to check its weights against")
    remedy = _remedy(inputs.model_dir, content)
    verified.require_intact(
        inputs.model_dir,
        content | {"files": files},
        "the model",
        config.cache_dir,
        workers=config.num_workers,
        progress=not config.no_progress,
        always=config.prepare_only,
        **remedy,
    )
    return (
        replace(inputs, base=_digests(config, inputs.model_dir, content))
        if config.lora_rank
        else inputs
    )


def _remedy(model_dir: Path, content: dict[str, Any]) -> Remedy:
    """Return what brings the files of a model back, as parts of an error."""
    kind = str(content.get("kind", ""))
    if kind == directory.KIND:
        return lookup.model_remedy(model_dir, "--overwrite")
    if kind.startswith("export/"):
        return manifest.remedy(content, "--overwrite", out=model_dir)
    if kind:
        return {"run": commands.delete_and_rerun(model_dir)}
    if cached := _CACHED.search(model_dir.absolute().as_posix()):
        return {
            "hint": "on a machine with a network, fetch it anew:",
            "run": commands.script(
                "03_download_model.py", "--model-name", f"{cached[1]}/{cached[2]}"
            ),
        }
    return {"hint": "copy it again from where it came from; -m NAME names another directory"}


def _digests(config: Config, model_dir: Path, content: dict[str, Any]) -> dict[str, str]:
    """Return the digests of a model's weight files: those that are known, else of their bytes.

    Empty where files are missing, which --prepare-only has told.
    """
    if directory.list_missing_weights(model_dir):
        return {}
    known = {entry["path"]: entry["digest"] for entry in content["files"]}
    names = directory.list_weight_files(model_dir)
    if unknown := [name for name in names if name not in known]:
        known |= verified.file_digests(
            model_dir,
            unknown,
            config.cache_dir,
            what="the model",
            workers=config.num_workers,
            progress=not config.no_progress,
            always=config.prepare_only,
        )
    return {name: known[name] for name in names}


def require_begun_base(experiment: Experiment, inputs: Inputs) -> None:
    """Raise ArtifactError when the frozen weights are not those that a run goes on with.

    Before anything is written to its directory, which would remember them.
    """
    checkpoint = commit.find_newest(experiment.checkpoints) or inputs.named
    if (
        checkpoint is None
        or not inputs.base
        or not (inputs.begun or inputs.named)
        or checkpoint.commit()["identity"]["inputs"].get("model") != inputs.fingerprints["model"]
    ):
        return
    try:
        record = checkpoint.record()
    except (OSError, ValueError, ArtifactError):
        return  # loading it will tell
    require_same_base(record, inputs, checkpoint.path)


def require_same_base(record: TrainRecord, inputs: Inputs, checkpoint: Path) -> None:
    """Raise ArtifactError when the frozen weights are not those that a checkpoint was made with.

    Their names, sizes and headers are the same, or it would be another model.
    """
    for name, digest in record.get("base", {}).items():
        path = inputs.model_dir / name
        now = inputs.base.get(name, "")
        is_same = (
            now == digest
            if now.partition(":")[0] == digest.partition(":")[0]
            else path.is_file() and hashing.matches(path, digest)
        )
        if not is_same:
            remedy = _remedy(inputs.model_dir, _model_content(inputs.model_dir))
            raise ArtifactError(
                f"{path} is not the file that the adapters of {checkpoint} were trained beside",
                expected=digest,
                found=now or "no such file",
                hint="its bytes have changed, though it is of the same model: "
                + remedy.get("hint", "make it anew:"),
                run=remedy.get("run", ""),
            )


def require_same_on_all_nodes(inputs: Inputs, layout: ParallelLayout) -> None:
    """Raise ArtifactError when the frozen weights of a node are not those of rank 0.

    All ranks must call this. One rank of each node knows their digests.
    """
    found = gather(inputs.base, layout.control)
    for rank, base in enumerate(found):
        if base and base != found[0]:
            wrong = sorted(
                name
                for name in base.keys() | found[0].keys()
                if base.get(name) != found[0].get(name)
            )
            raise ArtifactError(
                f"the model {inputs.model_dir} holds other bytes on the node of "
                f"rank {rank} than on that of rank 0",
                found=", ".join(wrong),
                hint="copy it anew to one of them",
            )


def _model_content(model_dir: Path) -> dict[str, Any]:
    """Return the manifest of a model, or what the names of a Hugging Face cache's blobs say."""
    if content := manifest.read_if_any(model_dir):
        return content
    blobs = {
        path.name: path.resolve()
        for path in directory.list_model_files(model_dir)
        if path.is_symlink()
    }
    return {
        "files": [
            {"path": name, "bytes": blob.stat().st_size, "digest": f"sha256:{blob.name}"}
            for name, blob in blobs.items()
            if _SHA256.fullmatch(blob.name)
        ]
    }
