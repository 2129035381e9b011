"""The commit protocol: a checkpoint is a directory that is whole, or it is not a checkpoint.

    step_00001000.tmp-<attempt>/    written, hashed and fsynced here …
        dcp/*.distcp, dcp/.metadata     sharded tensors, those of the optimizer apart
        train_state.json                step, sample cursor, … ; no pickle
        rng.safetensors                 random states, one row per rank
        manifest.json                   path, bytes and digest of every file above
        COMMIT.json                     digest of the manifest, step, number of ranks, fingerprints,
                                        and a digest of all this
    step_00001000/                  … then renamed. Valid only if name and COMMIT agree.

A directory that is being written contains a mark (lib/core/partial_dirs.py). In a directory that is
being deleted, COMMIT has become one. So nothing is ever deleted because of its name.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.checkpoints import contents
from lib.checkpoints.contents import TrainRecord
from lib.core import hashing, log, manifest, partial_dirs, paths, publish, reading, records, units
from lib.core.errors import ArtifactError, DiskFullError, StageError, is_missing

COMMIT = "COMMIT.json"
MANIFEST = paths.MANIFEST
TENSORS = "dcp"
OPTIMIZER = "optimizer_"  # in the names of files that hold nothing but its states
TRAIN_STATE = "train_state.json"
RNG = "rng.safetensors"
KIND = "checkpoint/1"
QUARANTINE = "quarantine"
_FEWEST = 2  # checkpoints that no retention goes below
_READERS = 4  # files that a rank hashes at a time
_MARGIN = 1.15  # times the last checkpoint's size
_OURS = re.compile(r"step_\d+\.tmp-[0-9a-f]+|\.trash-step_\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A directory under checkpoints/ that bears the name of a step."""

    path: Path
    step: int

    def problems(self) -> list[str]:
        """Return what is wrong with COMMIT, manifest and sizes; nothing is hashed but these two.

        Raises StageError when a disk fails to read them, for some seconds: that is no damage.
        """
        return reading.with_retries(self._problems)

    def _problems(self) -> list[str]:
        try:
            commit = self.commit()
            if commit.pop("digest") != _digest(commit):
                return [f"{COMMIT} has other content than when it was written"]
            manifest_bytes = (self.path / MANIFEST).read_bytes()
            if hashing.bytes_digest(manifest_bytes, "sha256") != commit["manifest"]:
                return [f"{MANIFEST} is not the one that {COMMIT} names"]
            if commit["step"] != self.step:
                return [f"{COMMIT} is of step {commit['step']}"]
            return manifest.find_damage(self.path, self.manifest(), deep=False)
        except OSError as error:
            if not is_missing(error):
                raise
            return [f"{Path(error.filename).name} is missing"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{COMMIT} or {MANIFEST} cannot be read ({error})"]

    def content_problems(self, part: int, parts: int, for_export: bool = False) -> list[str]:
        """Return which files have other content than when written, of an equal share of them.

        for_export: the optimizer's files are not read, so they are left out. Raises StageError
        when a disk fails to read them, for some seconds: that is no damage.
        """

        def damage(entry: dict[str, Any]) -> str:
            return reading.with_retries(
                lambda: manifest.describe_damage(self.path / entry["path"], entry, deep=True)
            )

        try:
            files = reading.with_retries(self.manifest)["files"]
        except OSError:  # it has just gone
            return [f"{MANIFEST} is missing"]
        entries = [entry for entry in files if not (for_export and OPTIMIZER in entry["path"])]
        share = sorted(entries, key=lambda entry: -entry["bytes"])[part::parts]
        with ThreadPoolExecutor(_READERS) as readers:
            return list(filter(None, readers.map(damage, share)))

    def manifest(self) -> dict[str, Any]:
        """Return the manifest, unchecked."""
        return records.read_json(self.path / MANIFEST)

    def commit(self) -> dict[str, Any]:
        """Return the content of COMMIT.json, unchecked."""
        return records.read_json(self.path / COMMIT)

    def record(self) -> TrainRecord:
        """Return step, sample cursor and all other state that is not a tensor.

        Raises ArtifactError when a value has not the type in which it is written.
        """
        return contents.read(self.path / TRAIN_STATE)


def _digest(content: dict[str, Any]) -> str:
    return hashing.bytes_digest(json.dumps(content, sort_keys=True).encode(), "sha256")


def scan(checkpoints: Path) -> list[Checkpoint]:
    """Return the checkpoints by their directory names, newest step first.

    Raises StageError when a disk fails to read the directory: that does not mean there are none.
    """
    found = [(paths.step_of(p.name), p) for p in _in(checkpoints)]
    return sorted(
        (
            Checkpoint(path, step)
            for step, path in found
            if step is not None and _is_directory(path) and not _is_discarded(path)
        ),
        key=lambda c: c.step,
        reverse=True,
    )


def _in(directory: Path) -> list[Path]:
    """Return what a directory holds, nothing when there is no such directory."""
    try:
        return reading.with_retries(lambda: sorted(directory.iterdir()))
    except OSError:  # it is not there
        return []


def _is_directory(path: Path) -> bool:
    # Not `is_dir`, to which (Python 3.14) an error of the disk is a "no".
    try:
        return stat.S_ISDIR(reading.with_retries(path.stat).st_mode)
    except OSError:  # it has just gone
        return False


def attempt_directory(checkpoints: Path, step: int) -> Path:
    """Make a fresh directory for one attempt to save a step."""
    path = checkpoints / f"{paths.step_name(step)}.tmp-{time.time_ns():x}"
    path.mkdir(parents=True)
    partial_dirs.claim(path)
    publish.fsync(checkpoints.parent)
    return path


def commit(
    attempt: Path,
    step: int,
    files: list[dict[str, Any]],
    identity: dict[str, Any],
    ranks: int,
    facts: dict[str, Any],
) -> Checkpoint:
    """Make an attempt a checkpoint: seal it and give it its name."""
    seal(attempt, step, files, identity, ranks, facts)
    return give_name(attempt, step)


def seal(
    attempt: Path,
    step: int,
    files: list[dict[str, Any]],
    identity: dict[str, Any],
    ranks: int,
    facts: dict[str, Any],
) -> None:
    """Write manifest and COMMIT and make all durable; what is left is `give_name`.

    Raises ArtifactError when a file that a rank wrote is not to be seen here.
    """
    if unseen := manifest.find_damage(attempt, {"files": files}, deep=False):
        raise ArtifactError(
            "a checkpoint is missing what other ranks wrote",
            found=unseen[0],
            expected="--save-dir on a file system that all nodes share",
        )
    manifest.write_json(attempt / MANIFEST, {"kind": KIND, "files": files})
    digest = hashing.file_digest(attempt / MANIFEST, "sha256")
    content = {"step": step, "manifest": digest, "world_size": ranks, "identity": identity, **facts}
    manifest.write_json(attempt / COMMIT, content | {"digest": _digest(content)})
    for directory in (attempt / TENSORS, attempt):
        publish.fsync(directory)


def give_name(attempt: Path, step: int) -> Checkpoint:
    """Give a sealed attempt its final name: from now on it is a checkpoint."""
    final = attempt.parent / paths.step_name(step)
    if final.exists():  # of an earlier, damaged save of the same step: never mixed, never deleted
        quarantine(Checkpoint(final, step), "replaced by a new save of the same step")
    attempt.rename(final)
    publish.fsync(final.parent)  # first: without its mark, what gets its old name back stays there
    (final / partial_dirs.mark_path(attempt).name).unlink(missing_ok=True)
    return Checkpoint(final, step)


def quarantine(checkpoint: Checkpoint, why: str) -> Path:
    """Move a checkpoint aside for a person to look at; it is never deleted by a program."""
    aside = checkpoint.path.parent / QUARANTINE
    aside.mkdir(exist_ok=True)
    target = aside / f"{checkpoint.path.name}-{time.time_ns():x}"
    checkpoint.path.rename(target)
    log.warn(f"{checkpoint.path.name} is set aside in {target}: {why}")
    return target


def supersede(checkpoints: Path, step: int, why: str) -> None:
    """Set aside what is newer than the step that a run goes on from."""
    for checkpoint in scan(checkpoints):
        if checkpoint.step > step:
            quarantine(checkpoint, why)


def quarantined(checkpoints: Path) -> list[Path]:
    """Return what was set aside."""
    return _in(checkpoints / QUARANTINE)


def clean(checkpoints: Path) -> list[str]:
    """Remove what killed saves and interrupted deletions left; return the names that are gone."""
    there = _in(checkpoints)
    half = [path for path in there if _is_discarded(path)]
    discard(half)
    found = [
        path
        for path in there
        if _OURS.fullmatch(path.name) and (partial_dirs.is_ours(path) or partial_dirs.is_bare(path))
    ]
    for path in found:
        remove(path)
    return [path.name for path in half + found if not path.exists()]


def remove(attempt: Path) -> None:
    """Delete what is being written or deleted, as far as the disk lets."""
    with suppress(OSError):
        partial_dirs.remove(attempt)


def prune(checkpoints: Path, keep: int, keep_every: int = 0) -> list[int]:
    """Delete intact checkpoints but those worth keeping; return the steps that went.

    Kept are the newest `keep` (two at least: the newest may turn out damaged), the one with the
    lowest validation loss, the steps that are multiples of keep_every, and while steps are bad the
    newest one before them, to which the run may roll back. keep: 0 keeps all. Damaged ones neither
    count nor are deleted. Raises StageError, and deletes nothing, when one cannot be read.
    """
    if not keep:
        return []
    intact = [c for c in scan(checkpoints) if not c.path.is_symlink() and not c.problems()]
    newest = max(keep, _FEWEST)
    kept = {c.step for c in intact[:newest]}
    kept |= {c.step for c in intact if keep_every and c.step % keep_every == 0}
    if len(intact) > newest:
        facts = {c.step: c.commit() for c in intact}
        measured = {
            step: f["eval_loss"] for step, f in facts.items() if f.get("eval_loss") is not None
        }
        kept |= {min(measured, key=measured.__getitem__)} if measured else set()
        kept |= set([step for step, f in facts.items() if not f.get("bad_steps")][:1])
    gone = [c for c in intact if c.step not in kept]
    discard(c.path for c in gone)
    return [c.step for c in gone]


def discard(paths: Iterable[Path]) -> None:
    """Delete checkpoints of one directory."""
    trash = []
    for path in paths:
        aside = _trash_of(path)
        if (path / COMMIT).exists():  # a rename: it needs no room where there is none
            (path / COMMIT).rename(path / partial_dirs.mark_path(aside).name)
        else:
            (path / partial_dirs.mark_path(aside).name).touch()
        publish.fsync(path)
        if partial_dirs.is_ours(aside):  # an earlier one of this step, which could not be deleted
            remove(aside)
        trash.append(path.rename(aside))
    if trash:
        publish.fsync(trash[0].parent)  # from here on they do not count, however the deletion ends
    for path in trash:
        remove(path)


def _trash_of(path: Path) -> Path:
    return path.with_name(f".trash-{path.name}")


def _is_discarded(path: Path) -> bool:
    """Tell whether a kill came after COMMIT had become the mark of what is being deleted."""
    return (path / partial_dirs.mark_path(_trash_of(path)).name).exists() and not (
        path / COMMIT
    ).exists()


def require_room(checkpoints: Path) -> None:
    """Raise DiskFullError when another checkpoint like the last one will not fit."""
    try:
        newest = next((c for c in scan(checkpoints) if not c.problems()), None)
        files = newest.manifest()["files"] if newest else []
        free = shutil.disk_usage(checkpoints).free if newest else 0
    except (OSError, StageError):  # the save itself will tell what the disk is like
        return
    needed = int(_MARGIN * sum(entry["bytes"] for entry in files))
    if free < needed:
        raise DiskFullError(
            f"no room for a checkpoint in {checkpoints}",
            expected=f"{units.size(needed)} free",
            found=f"{units.size(free)} free",
        )
