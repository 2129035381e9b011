"""The model that a run has trained adapters beside: found again, and the same to the last byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lib.checkpoints.commit import Checkpoint
from lib.core import file_identity, manifest, verified
from lib.core.errors import ArtifactError, UsageError
from lib.models import directory, lookup

_HINT = "-m NAME|DIR names where the model lies now that the adapters were trained beside"


class BaseModel(NamedTuple):
    """The directory of a frozen model. stamps: of its files, from before it was looked at."""

    directory: Path
    stamps: file_identity.Identities

    def require_unchanged(self) -> None:
        """Raise UsageError when the files are not those any more that were found."""
        file_identity.require_same(self.stamps, f"the model {self.directory}", "it was exported")


def find(name: str | None, config: dict[str, Any], checkpoint: Checkpoint) -> BaseModel:
    """Return the frozen model of a run.

    name: of `-m`; None: where it was, or wherever a prepared model of the same content lies. Raises
    ArtifactError when it is gone, UsageError when it is another model.
    """
    identity = checkpoint.commit()["identity"]
    if name is None:
        path = config.get("model_dir", "")
        name = lookup.find_recorded_model(path, identity["inputs"]["model"], cache_dir(config))
        if name is None:
            root = checkpoint.path.parents[1]
            raise ArtifactError(
                f"the model {path}, with which {root} was begun, is gone"
                if path
                else f"nothing says where the model lies that {root} was begun with",
                hint=_HINT,
            )
    found = lookup.find_model(name, cache_dir(config))
    before = file_identity.read_identities(directory.list_model_files(found))
    if (now := directory.fingerprint_model(found)) != identity["inputs"]["model"]:
        raise UsageError(
            f"{found} is not the model that the adapters were trained beside",
            expected=f"a fingerprint of {identity['inputs']['model']}",
            found=now,
            hint=_HINT,
        )
    return BaseModel(found, before)


def require_whole(
    base: Path, config: dict[str, Any], checkpoint: Checkpoint, progress: bool
) -> None:
    """Raise ArtifactError unless the weights are those that the run has read, every byte.

    Where the run has noted no digests, those count that the directory has.
    """
    content = manifest.read_if_any(base) or {}
    noted = checkpoint.record().get("base") or {
        entry["path"]: entry["digest"]
        for entry in content.get("files", [])
        if entry["path"].endswith(".safetensors")
    }
    if odd := [name for name in noted if Path(name).name != name]:
        raise ArtifactError(
            f"{checkpoint.path} is not one that stage 04 wrote",
            found=f"the base in its train state: {', '.join(odd)}",
        )
    files = [
        {
            "path": name,
            "digest": digest,
            "bytes": (base / name).stat().st_size if (base / name).is_file() else 0,
        }
        for name, digest in noted.items()
    ]
    remedy = (
        lookup.model_remedy(base, "--overwrite")
        if content.get("kind") == directory.KIND
        else {"hint": f"copy it again from where it came from; {_HINT}"}
    )
    if cache_dir(config).is_dir():
        verified.require_intact(
            base, {"files": files}, "the base", cache_dir(config), progress=progress, **remedy
        )
    else:
        manifest.check(base, {"files": files}, "the base", deep=True, **remedy)


def cache_dir(config: dict[str, Any]) -> Path:
    """Return the --cache-dir of a run."""
    return Path(config.get("options", {}).get("cache_dir") or ".cache")
