"""Verify that a model's files are undamaged, and with LoRA that the base is still the same."""

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
from lib.train.trained import choose_trained

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")


def verify_model_files(config: Config, inputs: Inputs) -> Inputs:
    """Verify the model's files; for a LoRA run, return the inputs with the base model's digests.

    Hashes the files of the model, unless they have not changed since they were last hashed. Call
    this before any process group exists; one process of each machine hashes, and the others return
    the inputs unchanged. The weights are hashed only if the run reads them: a resumed run without
    LoRA has them in its checkpoints. Raises ArtifactError if a file is damaged.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return inputs
    content = _read_digests(inputs.model_dir)
    is_resumed = bool(inputs.earlier_run or inputs.named_checkpoint)
    freezes_base = choose_trained(config).freezes_base
    reads_weights = freezes_base or not (inputs.scratch or is_resumed)
    files = [
        entry
        for entry in content["files"]
        if reads_weights or not entry["path"].endswith(".safetensors")
    ]
    if reads_weights and not files and not freezes_base:
        log.detail(f"{inputs.model_dir} has no digests to check its weights against")
    remedy = _suggest_remedy(inputs.model_dir, content)
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
        replace(inputs, base=_hash_base(config, inputs.model_dir, content))
        if freezes_base
        else inputs
    )


def _suggest_remedy(model_dir: Path, content: dict[str, Any]) -> Remedy:
    """Return the hint and the command that restore the files of a model, for an error.

    content: see `_read_digests`.
    """
    kind = str(content.get("kind", ""))
    if kind == directory.KIND:
        return lookup.model_remedy(model_dir, "--overwrite")
    if kind.startswith("export/"):
        return manifest.make_remedy(content, "--overwrite", out=model_dir)
    if kind:
        return {"run": commands.delete_and_rerun(model_dir)}
    if cached := _CACHED.search(model_dir.absolute().as_posix()):
        return {
            "hint": "on a machine with a network, download it again:",
            "run": commands.script(
                "03_download_model.py", "--model-name", f"{cached[1]}/{cached[2]}"
            ),
        }
    return {"hint": "copy it again from its source; -m NAME names another directory"}


def _hash_base(config: Config, model_dir: Path, content: dict[str, Any]) -> dict[str, str]:
    """Return the digests of a base model's weight files by name; hash files without a digest.

    content: see `_read_digests`. Empty if files are missing, which only --prepare-only allows.
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
            name="the model",
            workers=config.num_workers,
            progress=not config.no_progress,
            always=config.prepare_only,
        )
    return {name: known[name] for name in names}


def require_base_of_run(experiment: Experiment, inputs: Inputs) -> None:
    """Raise ArtifactError if a LoRA run would resume with different base weights.

    Call this before anything is written to the directory of the run. A base model with another
    config is not an error here, but a difference that `previous_run.require_same_run` reports.
    """
    checkpoint = commit.find_newest(experiment.checkpoints) or inputs.named_checkpoint
    if (
        checkpoint is None
        or not inputs.base
        or not (inputs.earlier_run or inputs.named_checkpoint)
        or checkpoint.commit()["identity"]["inputs"].get("model") != inputs.fingerprints["model"]
    ):
        return
    try:
        record = checkpoint.record()
    except (OSError, ValueError, ArtifactError):
        return  # loading the checkpoint will report it
    require_base_of_checkpoint(record, inputs, checkpoint.path)


def require_base_of_checkpoint(record: TrainRecord, inputs: Inputs, checkpoint: Path) -> None:
    """Raise ArtifactError if the base weights differ from those that a checkpoint was trained on.

    record: the checkpoint's record. Names, sizes and headers of the files are known to be the same,
    since they are part of the model's fingerprint.
    """
    for name, expected in record.get("base", {}).items():
        path = inputs.model_dir / name
        actual = inputs.base.get(name, "")
        has_same_algorithm = actual.partition(":")[0] == expected.partition(":")[0]
        is_same = (
            actual == expected
            if has_same_algorithm
            else path.is_file() and hashing.has_digest(path, expected)
        )
        if not is_same:
            remedy = _suggest_remedy(inputs.model_dir, _read_digests(inputs.model_dir))
            raise ArtifactError(
                f"{path} is not the file that the adapters of {checkpoint} were trained with",
                expected=expected,
                found=actual or "no such file",
                hint="the model is the same, but the bytes of its weights have changed: "
                + remedy.get("hint", "create it again:"),
                run=remedy.get("run", ""),
            )


def require_same_base_on_all_nodes(inputs: Inputs, layout: ParallelLayout) -> None:
    """Raise ArtifactError if the base weights on a node differ from the ones on rank 0's node.

    All ranks must call this. One rank of each node knows the digests, see `verify_model_files`.
    """
    digests_by_rank = gather(inputs.base, layout.control)
    expected = digests_by_rank[0]
    for rank, digests in enumerate(digests_by_rank):
        if digests and digests != expected:
            names = sorted(
                name
                for name in digests.keys() | expected.keys()
                if digests.get(name) != expected.get(name)
            )
            raise ArtifactError(
                f"the model {inputs.model_dir} contains other bytes on the node of "
                f"rank {rank} than on that of rank 0",
                found=", ".join(names),
                hint="copy it again to one of them",
            )


def _read_digests(model_dir: Path) -> dict[str, Any]:
    """Return a model's manifest, or for a model in the Hugging Face cache one with its digests.

    In that cache, a file with weights has its SHA-256 as its name.
    """
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
