"""The model that a run has trained adapters beside: found again, and the same to the last byte."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lib.checkpoints.commit import Checkpoint
from lib.core import file_identity, manifest, verified
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import Experiment
from lib.models import directory, lookup
from lib.train import earlier, journal

_HINT = "-m NAME|DIR names where the model lies now that the adapters were trained beside"


class Frozen(NamedTuple):
    """The directory of a frozen model. stamps: of its files, from before it was looked at."""

    directory: Path
    stamps: file_identity.Identities

    def require_unchanged(self) -> None:
        """Raise UsageError when the files are not those any more that were found."""
        file_identity.require_same(self.stamps, f"the model {self.directory}", "it was exported")


def find(name: str | None, experiment: Experiment, checkpoint: Checkpoint) -> Frozen:
    """Return the frozen model of a run.

    name: of `-m`; None: where it was, or wherever a prepared model of the same content lies. Raises
    ArtifactError when it is gone, UsageError when it is another model.
    """
    identity = checkpoint.commit()["identity"]
    if name is None:
        begun = {
            "model_dir": journal.read_config(experiment).get("model_dir", ""),
            "identity": identity,
        }
        try:
            name = earlier.model_of(experiment, begun, None, cache_dir(experiment))
        except ArtifactError as error:
            raise ArtifactError(error.problem, hint=_HINT) from None
        if name is None:
            raise ArtifactError(
                f"nothing says where the model lies that {experiment.root} was begun with",
                hint=_HINT,
            )
    found = lookup.find_model(name, cache_dir(experiment))
    before = file_identity.read_identities(directory.list_files(found))
    if (now := directory.fingerprint(found)) != identity["inputs"]["model"]:
        raise UsageError(
            f"{found} is not the model that the adapters were trained beside",
            expected=f"a fingerprint of {identity['inputs']['model']}",
            found=now,
            hint=_HINT,
        )
    return Frozen(found, before)


def require_whole(
    base: Path, experiment: Experiment, checkpoint: Checkpoint, progress: bool
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
    if cache_dir(experiment).is_dir():
        verified.require_intact(
            base, {"files": files}, "the base", cache_dir(experiment), progress=progress, **remedy
        )
    else:
        manifest.check(base, {"files": files}, "the base", deep=True, **remedy)


def cache_dir(experiment: Experiment) -> Path:
    """Return the --cache-dir of a run."""
    return Path(journal.read_config(experiment).get("options", {}).get("cache_dir") or ".cache")
