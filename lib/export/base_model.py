"""Find the base model of a LoRA run, and check that it still has the weights that the run read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.checkpoints.commit import Checkpoint
from lib.core import file_identity, manifest, verified
from lib.core.errors import ArtifactError, UsageError
from lib.models import directory, lookup

_HINT = "-m NAME|DIR names the present place of the base model"


@dataclass(frozen=True)
class BaseModel:
    """The base model of a LoRA run.

    directory: the model's directory. identities: size, inode and times of each model file, recorded
    before any file was read. cache_dir: the value of the run's --cache-dir.
    """

    directory: Path
    identities: file_identity.Identities
    cache_dir: Path

    @classmethod
    def find(cls, name: str | None, config: dict[str, Any], checkpoint: Checkpoint) -> BaseModel:
        """Return the base model of a run, whose weights are not checked yet.

        name: the value of -m. If it is None, the model is taken from the path that the run
        recorded, or from a prepared model with the same content. config: the content of the run's
        config.yaml. Raises ArtifactError if the model is gone, and UsageError if it is another
        model.
        """
        cache_dir = Path(config.get("options", {}).get("cache_dir") or ".cache")
        fingerprint = checkpoint.commit()["identity"]["inputs"]["model"]
        if name is None:
            path = config.get("model_dir", "")
            name = lookup.find_recorded_model(path, fingerprint, cache_dir)
            if name is None:
                run = checkpoint.path.parents[1]
                raise ArtifactError(
                    f"the base model {path} of {run} is gone"
                    if path
                    else f"{run}/config.yaml does not name a base model",
                    hint=_HINT,
                )
        model_dir = lookup.find_model(name, cache_dir)
        identities = file_identity.read_identities(directory.list_model_files(model_dir))
        if (actual := directory.fingerprint_model(model_dir)) != fingerprint:
            raise UsageError(
                f"{model_dir} is not the base model of this run",
                expected=f"fingerprint {fingerprint}",
                found=f"fingerprint {actual}",
                hint=_HINT,
            )
        return cls(model_dir, identities, cache_dir)

    def require_unchanged(self) -> None:
        """Raise UsageError if a file has changed since the model was found."""
        file_identity.require_same(self.identities, f"the model {self.directory}", "it was read")

    def require_same_weights(self, checkpoint: Checkpoint, show_progress: bool) -> None:
        """Raise ArtifactError if the weights differ from the weights that the run read.

        The digests of all files are compared with the digests in the checkpoint. If the checkpoint
        records none, the digests in the manifest of the model are used.
        """
        content = manifest.read_if_any(self.directory) or {}
        digests = checkpoint.record().get("base") or {
            entry["path"]: entry["digest"]
            for entry in content.get("files", [])
            if entry["path"].endswith(".safetensors")
        }
        if paths := [name for name in digests if Path(name).name != name]:
            raise ArtifactError(
                f"checkpoint {checkpoint.path} was not written by stage 04",
                found=f"paths among the files of the base model: {', '.join(paths)}",
            )
        entries = [
            {"path": name, "digest": digest, "bytes": _read_size(self.directory / name)}
            for name, digest in digests.items()
        ]
        remedy = (
            lookup.model_remedy(self.directory, "--overwrite")
            if content.get("kind") == directory.KIND
            else {"hint": f"copy it again from its source; {_HINT}"}
        )
        files = {"files": entries}
        if self.cache_dir.is_dir():
            verified.require_intact(
                self.directory,
                files,
                "the base model",
                self.cache_dir,
                progress=show_progress,
                **remedy,
            )
        else:
            manifest.require_intact(self.directory, files, "the base model", deep=True, **remedy)


def _read_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if there is no file."""
    return path.stat().st_size if path.is_file() else 0
