"""The files of the model that a run begins with: every byte as it was written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lib.core import log, manifest, verified
from lib.models import directory
from lib.train.config import Config
from lib.train.inputs import Inputs

_SHA256 = re.compile(r"[0-9a-f]{64}")


def require_whole_model(config: Config, inputs: Inputs) -> None:
    """Hash the files of the model once until they change; ArtifactError when one is damaged.

    One process of each machine does it, before any process group exists. The weights are left out
    where they are not read: of a run that goes on, they are in its checkpoints.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    content, reads_weights = _model_content(inputs.model_dir), not (
        inputs.scratch or inputs.begun or inputs.named)
    files = [entry for entry in content["files"]
             if reads_weights or not entry["path"].endswith(".safetensors")]
    if reads_weights and not files:
        log.info(f"{inputs.model_dir} has no digests to check its weights against")
    remedy = directory.remedy(inputs.model_dir, "--overwrite") \
        if content.get("kind") == directory.KIND else {}
    verified.require(inputs.model_dir, content | {"files": files}, "the model", config.cache_dir,
                     workers=config.num_workers, progress=not config.no_progress,
                     always=config.prepare_only, **remedy)


def _model_content(model_dir: Path) -> dict[str, Any]:
    """Return the manifest of a model, or what the names of a Hugging Face cache's blobs say."""
    if content := manifest.read_if_any(model_dir):
        return content
    blobs = {path.name: path.resolve() for path in directory.list_files(model_dir)
             if path.is_symlink()}
    return {"files": [{"path": name, "bytes": blob.stat().st_size, "digest": f"sha256:{blob.name}"}
                      for name, blob in blobs.items() if _SHA256.fullmatch(blob.name)]}
