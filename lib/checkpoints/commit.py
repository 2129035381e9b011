"""Implement the commit protocol, which makes a checkpoint complete or invisible.

    step_00001000.tmp-<attempt>/    written, hashed and fsynced here …
        dcp/*.distcp, dcp/.metadata     sharded tensors; optimizer state in separate files
        train_state.json                step, sample cursor, …; not a pickle
        rng.safetensors                 random states, one row per rank
        manifest.json                   path, bytes and digest of every file above
        COMMIT.json                     step, number of ranks, fingerprints, digest of the manifest,
                                        and a digest of these fields
    step_00001000/                  … then renamed. Valid only if the name and COMMIT agree.

A directory that is being written contains a marker file (lib/core/partial_dirs.py). Deletion begins
with renaming COMMIT to such a marker. So the code deletes only directories with a marker, none for
its name alone.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.checkpoints import best, contents
from lib.checkpoints.contents import TrainRecord
from lib.core import (
    commands,
    hashing,
    log,
    manifest,
    partial_dirs,
    paths,
    publish,
    reading,
    records,
    units,
)
from lib.core.errors import ArtifactError, DiskFullError, StageError, is_missing
from lib.core.paths import Experiment
from lib.runs import row_files
from lib.runs.events import Event

COMMIT = paths.COMMIT
MANIFEST = paths.MANIFEST
TENSORS = "dcp"
OPTIMIZER = "optimizer_"  # in the names of files with optimizer state only
TRAIN_STATE = "train_state.json"
RNG = "rng.safetensors"
KIND = "checkpoint/1"
QUARANTINE = "quarantine"
MIN_KEPT = 2  # checkpoints that retention always keeps
_READERS = 4  # files that a rank hashes in parallel
_MARGIN = 1.15  # free space needed, relative to the last checkpoint
_READ_ERROR = "[Errno "  # start of the reason in events.jsonl if a disk failed to read
_LEFTOVER_NAME = re.compile(r"step_\d+\.tmp-[0-9a-f]+|\.trash-step_\d+(-[0-9a-f]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A directory under checkpoints/ with the name of a step, complete or not."""

    path: Path
    step: int

    def problems(self) -> list[str]:
        """Return the problems of COMMIT, the manifest and the file sizes, without hashing files.

        Raises StageError if a disk fails to read them after retries; that does not mean damage.
        """
        return reading.with_retries(self._problems)

    def _problems(self) -> list[str]:
        try:
            commit = self.commit()
            if not has_digest(commit):
                return [f"{COMMIT} does not match its digest"]
            manifest_bytes = (self.path / MANIFEST).read_bytes()
            if hashing.bytes_digest(manifest_bytes, "sha256") != commit["manifest"]:
                return [f"{MANIFEST} does not match its digest in {COMMIT}"]
            if commit["step"] != self.step:
                return [f"{COMMIT} belongs to step {commit['step']}"]
            return manifest.find_damage(self.path, self.manifest(), deep=False)
        except OSError as error:
            if not is_missing(error):
                raise
            return [f"{Path(error.filename).name} is missing"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{COMMIT} or {MANIFEST} cannot be read ({error})"]

    def content_problems(self, part: int, parts: int, for_export: bool = False) -> list[str]:
        """Hash one of `parts` shares of the files, and return a message for each damaged file.

        part: index of the share. for_export: skip the optimizer's files, which an export does not
        read. Raises StageError if a disk fails to read a file after retries; that does not mean
        damage.
        """

        def find_damage(entry: dict[str, Any]) -> str:
            return reading.with_retries(
                lambda: manifest.describe_damage(self.path / entry["path"], entry, deep=True)
            )

        try:
            files = reading.with_retries(self.manifest)["files"]
        except OSError:  # deleted in the meantime
            return [f"{MANIFEST} is missing"]
        entries = [entry for entry in files if not (for_export and OPTIMIZER in entry["path"])]
        share = sorted(entries, key=lambda entry: -entry["bytes"])[part::parts]
        with ThreadPoolExecutor(_READERS) as readers:
            return list(filter(None, readers.map(find_damage, share)))

    def manifest(self) -> dict[str, Any]:
        """Return the content of manifest.json, unchecked."""
        return records.read_json(self.path / MANIFEST)

    def commit(self) -> dict[str, Any]:
        """Return the content of COMMIT.json, unchecked."""
        return records.read_json(self.path / COMMIT)

    def record(self) -> TrainRecord:
        """Return the step, the sample cursor and all other state that is not a tensor.

        Raises ArtifactError if a value has the wrong type.
        """
        return contents.read_record(self.path / TRAIN_STATE)


def has_digest(content: dict[str, Any]) -> bool:
    """Return whether the content of COMMIT.json matches the digest in it."""
    return content["digest"] == _digest({k: v for k, v in content.items() if k != "digest"})


def _digest(content: dict[str, Any]) -> str:
    return hashing.bytes_digest(json.dumps(content, sort_keys=True).encode(), "sha256")


def list_checkpoints(checkpoints: Path) -> list[Checkpoint]:
    """Return the checkpoints in a directory, found by name and unchecked, newest step first.

    Raises StageError if a disk fails to read the directory, which may contain checkpoints.
    """
    candidates = [(paths.step_of(p.name), p) for p in _list_directory(checkpoints)]
    return sorted(
        (
            Checkpoint(path, step)
            for step, path in candidates
            if step is not None and _is_directory(path) and not _is_half_deleted(path)
        ),
        key=lambda c: c.step,
        reverse=True,
    )


def find_newest(checkpoints: Path, before: int | None = None) -> Checkpoint | None:
    """Return the newest checkpoint that is complete according to COMMIT, manifest and file sizes.

    before: consider only this step and earlier ones. Files are not hashed. Returns None if there is
    no complete checkpoint. Raises StageError if a disk fails to read one.
    """
    return next(
        (
            checkpoint
            for checkpoint in list_checkpoints(checkpoints)
            if (before is None or checkpoint.step <= before) and not checkpoint.problems()
        ),
        None,
    )


def _list_directory(directory: Path) -> list[Path]:
    """Return the entries of a directory, or an empty list if it does not exist."""
    try:
        return reading.with_retries(lambda: sorted(directory.iterdir()))
    except OSError:  # it does not exist
        return []


def _is_directory(path: Path) -> bool:
    # `is_dir` would return False after a disk error (Python 3.14).
    try:
        return stat.S_ISDIR(reading.with_retries(path.stat).st_mode)
    except OSError:  # deleted in the meantime
        return False


def create_attempt(checkpoints: Path, step: int) -> Path:
    """Create a directory for one attempt to save a step, with its marker file."""
    path = checkpoints / f"{paths.step_name(step)}.tmp-{time.time_ns():x}"
    path.mkdir(parents=True)
    partial_dirs.claim_directory(path)
    publish.fsync(checkpoints.parent)
    return path


def commit_attempt(
    attempt: Path,
    step: int,
    files: list[dict[str, Any]],
    identity: dict[str, Any],
    ranks: int,
    facts: dict[str, Any],
) -> Checkpoint:
    """Turn an attempt into a checkpoint: seal it and publish it under its name."""
    seal_attempt(attempt, step, files, identity, ranks, facts)
    return publish_attempt(attempt, step)


def seal_attempt(
    attempt: Path,
    step: int,
    files: list[dict[str, Any]],
    identity: dict[str, Any],
    ranks: int,
    facts: dict[str, Any],
) -> None:
    """Write the manifest and COMMIT, and make everything durable; `publish_attempt` must follow.

    Raises ArtifactError if this rank cannot see a file that another rank wrote.
    """
    if missing := manifest.find_damage(attempt, {"files": files}, deep=False):
        raise ArtifactError(
            "rank 0 does not see the files that other ranks wrote",
            found=missing[0],
            expected="--save-dir on a file system that all nodes share",
        )
    manifest.write_json(attempt / MANIFEST, {"kind": KIND, "files": files})
    digest = hashing.file_digest(attempt / MANIFEST, "sha256")
    content = {"step": step, "manifest": digest, "world_size": ranks, "identity": identity, **facts}
    manifest.write_json(attempt / COMMIT, content | {"digest": _digest(content)})
    for directory in (attempt / TENSORS, attempt):
        publish.fsync(directory)


def record_evaluation(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> bool:
    """Write the figures of an evaluation into COMMIT of a checkpoint that was saved before it.

    facts: the fields of COMMIT to replace. Returns whether the checkpoint was waiting for them.
    """
    try:
        content = checkpoint.commit()
    except FileNotFoundError:  # this step was not due for a checkpoint
        return False
    if content.pop("unevaluated", None) is None:
        return False
    del content["digest"]
    content |= facts
    manifest.write_json(checkpoint.path / COMMIT, content | {"digest": _digest(content)})
    return True


def publish_attempt(attempt: Path, step: int) -> Checkpoint:
    """Rename a sealed attempt to its final name, which makes it a checkpoint."""
    final = attempt.parent / paths.step_name(step)
    if final.exists():  # from an earlier, damaged save of the same step
        quarantine(Checkpoint(final, step), "replaced by a new save of the same step")
    attempt.rename(final)
    # Before the marker goes: if a power cut undid the rename, the attempt could not be deleted.
    publish.fsync(final.parent)
    (final / partial_dirs.mark_path(attempt).name).unlink(missing_ok=True)
    return Checkpoint(final, step)


def quarantine(checkpoint: Checkpoint, why: str) -> Path:
    """Move a checkpoint to quarantine/, for a person to inspect; no program deletes it there."""
    directory = checkpoint.path.parent / QUARANTINE
    directory.mkdir(exist_ok=True)
    target = directory / f"{checkpoint.path.name}-{time.time_ns():x}"
    checkpoint.path.rename(target)
    log.warn(f"{checkpoint.path.name} was moved to quarantine, {target}: {why}")
    return target


def quarantine_newer(checkpoints: Path, step: int, why: str) -> None:
    """Quarantine the checkpoints after a step, because the run continues from that step."""
    for checkpoint in list_checkpoints(checkpoints):
        if checkpoint.step > step:
            quarantine(checkpoint, why)


def list_quarantined(checkpoints: Path) -> list[Path]:
    """Return the directories in quarantine."""
    return _list_directory(checkpoints / QUARANTINE)


def prune_quarantine(checkpoints: Path, keep: int) -> None:
    """Delete all but the `keep` checkpoints that were quarantined last."""
    delete_leftovers(checkpoints / QUARANTINE)
    moved = sorted(
        (path for path in list_quarantined(checkpoints) if path.name.startswith("step_")),
        key=lambda path: path.name.rpartition("-")[2],
    )
    delete_checkpoints(moved[:-keep])


def list_unreadable(checkpoints: Path) -> list[Checkpoint]:
    """Return quarantined checkpoints that a disk failed to read, newest first.

    They may be intact.
    """
    events = Experiment(checkpoints.parent.parent, checkpoints.parent.name).events
    steps = {
        event["step"]
        for event in row_files.read_rows(events)
        if event.get("event") == Event.QUARANTINE
        and str(event.get("reason")).startswith(_READ_ERROR)
    }
    candidates = [
        (paths.step_of(path.name.partition("-")[0]), path) for path in list_quarantined(checkpoints)
    ]
    return sorted(
        (Checkpoint(path, step) for step, path in candidates if step is not None and step in steps),
        key=lambda c: c.step,
        reverse=True,
    )


def restore_command(checkpoint: Checkpoint) -> str:
    """Return the command that restores a checkpoint from quarantine."""
    return commands.shell(
        "mv", checkpoint.path, checkpoint.path.parent.parent / paths.step_name(checkpoint.step)
    )


def delete_leftovers(checkpoints: Path) -> list[str]:
    """Delete the leftovers of killed saves and interrupted deletions; return the deleted names."""
    entries = _list_directory(checkpoints)
    half_deleted = [path for path in entries if _is_half_deleted(path)]
    delete_checkpoints(half_deleted)
    leftovers = [
        path
        for path in entries
        if _LEFTOVER_NAME.fullmatch(path.name)
        and (partial_dirs.is_ours(path) or partial_dirs.is_bare(path))
    ]
    for path in leftovers:
        delete_attempt(path)
    return [path.name for path in half_deleted + leftovers if not path.exists()]


def delete_attempt(attempt: Path) -> None:
    """Delete an unfinished or half-deleted directory; disk errors are ignored."""
    with suppress(OSError):
        partial_dirs.delete_marked(attempt)


def select_kept(commits: Mapping[int, Mapping[str, Any]], newest: int) -> set[int]:
    """Return the steps that the retention rules keep.

    These are the `newest` last ones and the best one (lib/checkpoints/best.py). If the last steps
    were bad, this includes the newest step before them, to which the run may roll back. commits:
    the content of COMMIT by step.
    """
    steps = sorted(commits, reverse=True)
    best_step = best.find_best(commits)
    return (
        set(steps[:newest])
        | ({best_step} if best_step is not None else set())
        | set([step for step in steps if not commits[step].get("bad_steps")][:1])
    )


def prune_checkpoints(checkpoints: Path, keep: int, spared: Collection[int] = ()) -> list[int]:
    """Delete the checkpoints that the retention rules do not keep; return the deleted steps.

    keep: number of the newest checkpoints to keep (at least two, because the newest may turn out to
    be damaged); 0 keeps all. spared: steps to keep for now. Damaged checkpoints are neither counted
    nor deleted. Raises StageError, and deletes nothing, if a checkpoint cannot be read.
    """
    if not keep:
        return []
    intact = [
        c for c in list_checkpoints(checkpoints) if not c.path.is_symlink() and not c.problems()
    ]
    newest = max(keep, MIN_KEPT)
    if len(intact) <= newest:
        return []
    kept_steps = select_kept({c.step: c.commit() for c in intact}, newest) | set(spared)
    dropped = [c for c in intact if c.step not in kept_steps]
    delete_checkpoints(c.path for c in dropped)
    return [c.step for c in dropped]


def delete_checkpoints(paths: Iterable[Path]) -> None:
    """Delete checkpoints, which must all be in one directory.

    If the process is killed meanwhile, each checkpoint is complete or recognisable as half-deleted.
    """
    trashed = []
    for path in paths:
        trash = _trash_path(path)
        if (path / COMMIT).exists():  # a rename works on a full disk
            (path / COMMIT).rename(path / partial_dirs.mark_path(trash).name)
        else:
            (path / partial_dirs.mark_path(trash).name).touch()
        publish.fsync(path)
        if partial_dirs.is_ours(trash):  # from an earlier deletion of this step that failed
            delete_attempt(trash)
        trashed.append(path.rename(trash))
    if trashed:
        publish.fsync(trashed[0].parent)  # from here on they do not count, even after a kill
    for path in trashed:
        delete_attempt(path)


def _trash_path(path: Path) -> Path:
    return path.with_name(f".trash-{path.name}")


def _is_half_deleted(path: Path) -> bool:
    """Return whether a deletion was interrupted after COMMIT had become the marker."""
    return (path / partial_dirs.mark_path(_trash_path(path)).name).exists() and not (
        path / COMMIT
    ).exists()


def require_space(checkpoints: Path) -> None:
    """Raise DiskFullError if the disk has no space for another checkpoint of the same size."""
    with suppress(OSError):  # the save itself will report the state of the disk
        try:
            newest = find_newest(checkpoints)
            files = newest.manifest()["files"] if newest else []
        except StageError:
            return
        if files:
            require_free(checkpoints, sum(entry["bytes"] for entry in files))


def require_free(checkpoints: Path, size: int) -> None:
    """Raise DiskFullError if the disk has no space for a checkpoint of `size` bytes."""
    needed = int(_MARGIN * size)
    free = shutil.disk_usage(checkpoints).free
    if free < needed:
        raise DiskFullError(
            f"no disk space for a checkpoint in {checkpoints}",
            expected=f"{units.size(needed)} free",
            found=f"{units.size(free)} free",
        )
