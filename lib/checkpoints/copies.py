"""Keep copies of a run's checkpoints in a second place: a directory, or a prefix in an S3 bucket.

    <place>/<experiment>-<run ID>/
        COPIES.json                      marks the directory as ours
        LEASE.json                       names the process that writes here (copy_lease.py)
        config.yaml, model/, metrics.jsonl, events.jsonl
        checkpoints/step_00001000/       the files of the checkpoint, unchanged

The place has the layout of a run, so stages 04 and 05 can read copies in a directory directly. A
directory gets its copies by the protocol of commit.py. A bucket cannot rename objects, so a copy
begins with an object `.unfinished-…` and ends with COMMIT.json; without COMMIT.json, the copy does
not count. Only files in a place with COPIES.json are ever deleted.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from lib.checkpoints import commit, copy_files
from lib.checkpoints.commit import COMMIT, MANIFEST, Checkpoint
from lib.core import commands, hashing, manifest, partial_dirs, paths, records
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import Experiment
from lib.hub import s3
from lib.hub.s3 import Bucket

LABEL = "COPIES.json"
RETIRED_KEPT = 2  # unusable copies that are kept for a person to inspect, besides the usable ones
_LABEL_KIND = "checkpoint copies/1"
_CHECKPOINTS = "checkpoints"
_SUPERSEDED = f"{COMMIT}.superseded"
_CHUNK = 1 << 22
_RUN_ID = re.compile(r"[0-9a-f]+")


class CopyPlace(ABC):
    """The copies of one run's checkpoints. where: the directory or URL, for messages."""

    where: str

    def __init__(self, experiment: str, run: str) -> None:
        """experiment: the name of the run's directory. run: the ID of the run."""
        self._label = {"kind": _LABEL_KIND, "experiment": experiment, "run": run}
        self._run_files: dict[str, str] = {}  # digests of the files written by this process

    def claim(self) -> None:
        """Create the place if needed. Raises UsageError if it contains something else."""
        label = self._read_label()
        if label is None:
            self.write_file(LABEL, json.dumps(self._label).encode())
        elif label != self._label:
            raise UsageError(
                f"{self.where} contains something other than copies of this run",
                expected=f"a {LABEL} of run {self._label['run']}",
                found=str(label)[:200],
            )

    def open(self) -> tuple[dict[int, dict[str, Any]], list[str]]:
        """Return the content of COMMIT of each copy by step, and the names of deleted leftovers.

        Creates the place if needed. Raises UsageError if it cannot be used.
        """
        self.claim()
        return self.read_commits(), self._delete_leftovers()

    def is_ours(self) -> bool:
        """Return whether the place contains copies of this run."""
        return self._read_label() == self._label

    def _read_label(self) -> Any:
        """Return the content of the label, or None if there is none."""
        try:
            return records.parse_json(b"".join(self.read(LABEL)))
        except FileNotFoundError:
            return None
        except ValueError:
            return "a damaged file"

    def restore(self, step: int, checkpoints: Path) -> Checkpoint:
        """Write a copy of a step to the directory of a run's checkpoints.

        Raises ArtifactError if the copy is damaged.
        """
        folder = _name_folder(step)

        def read(name: str) -> Iterator[bytes]:
            try:
                yield from self.read(f"{folder}/{name}")
            except FileNotFoundError:
                raise ArtifactError(f"{self.where}/{folder}/{name} is missing") from None

        return copy_files.write_checkpoint(checkpoints, step, read)

    def copy_commit(self, checkpoint: Checkpoint) -> None:
        """Replace COMMIT of a complete copy, whose other files are those of the checkpoint."""
        content = (checkpoint.path / COMMIT).read_bytes()
        self.write_file(f"{_name_folder(checkpoint.step)}/{COMMIT}", content)

    def copy_run_files(self, experiment: Experiment) -> None:
        """Write the other files of the run if they have changed since the last call."""
        for path in _list_run_files(experiment):
            content = path.read_bytes()
            digest = hashing.bytes_digest(content)
            name = path.relative_to(experiment.root).as_posix()
            if self._run_files.get(name) != digest:
                self.write_file(name, content)
                self._run_files[name] = digest

    def restore_run_files(self, experiment: Experiment, with_logs: bool = True) -> list[Path]:
        """Write the missing files of a run, except checkpoints, and return their paths."""
        written = []
        manifest.remove_temporary(experiment.root)
        logs = {experiment.metrics.name, experiment.events.name} if with_logs else set()
        ours = {experiment.config.name} | logs
        for name in self._list_files():
            path = experiment.root / name
            is_of_model = name.startswith(f"{experiment.model.name}/")
            if (name in ours or is_of_model) and not records.leads_out(name) and not path.exists():
                copy_files.replace_file(path, b"".join(self.read(name)))
                written.append(path)
        return written

    @abstractmethod
    def list_steps(self) -> list[int]:
        """Return the steps that have a copy, even a damaged one, newest first."""

    @abstractmethod
    def read_commits(self) -> dict[int, dict[str, Any]]:
        """Return the content of COMMIT of each complete copy, by step."""

    @abstractmethod
    def copy(self, checkpoint: Checkpoint) -> None:
        """Write a copy, and verify it before it gets its final name; replace an older one.

        Raises FileNotFoundError if the checkpoint is deleted meanwhile, ArtifactError if it does
        not match its manifest, DiskFullError, or the error of the place.
        """

    @abstractmethod
    def retire(self, steps: Collection[int]) -> None:
        """Make copies unusable, because the run continues before them.

        Their files are deleted only if more than RETIRED_KEPT copies are unusable.
        """

    @abstractmethod
    def delete(self, steps: Collection[int]) -> None:
        """Delete copies."""

    @abstractmethod
    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file; raise FileNotFoundError if it does not exist."""

    @abstractmethod
    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file."""

    @abstractmethod
    def _list_files(self) -> list[str]:
        """Return the names of the files that belong to no checkpoint."""

    @abstractmethod
    def _delete_leftovers(self) -> list[str]:
        """Delete the leftovers of interrupted copies and deletions; return their names."""


class DirectoryPlace(CopyPlace):
    """Copies in a directory; see CopyPlace."""

    def __init__(self, directory: Path, experiment: str, run: str) -> None:
        super().__init__(experiment, run)
        self._root = directory / f"{experiment}-{run}"
        self._checkpoints = self._root / _CHECKPOINTS
        self.where = str(self._root)

    def list_steps(self) -> list[int]:
        return [copy.step for copy in commit.list_checkpoints(self._checkpoints)]

    def read_commits(self) -> dict[int, dict[str, Any]]:
        copies = commit.list_checkpoints(self._checkpoints)
        return {copy.step: copy.commit() for copy in copies if not copy.problems()}

    def copy(self, checkpoint: Checkpoint) -> None:
        require_mount(str(self._root))
        copy_files.write_checkpoint(
            self._checkpoints, checkpoint.step, lambda name: _read_file(checkpoint.path / name)
        )

    def retire(self, steps: Collection[int]) -> None:
        for copy in commit.list_checkpoints(self._checkpoints):
            if copy.step in steps:
                commit.quarantine(copy, "the run continues from an earlier step")
        commit.prune_quarantine(self._checkpoints, RETIRED_KEPT)

    def delete(self, steps: Collection[int]) -> None:
        commit.delete_checkpoints(self._checkpoints / paths.step_name(step) for step in steps)

    def read(self, name: str) -> Iterator[bytes]:
        require_mount(str(self._root))
        return _read_file(self._root / name)

    def write_file(self, name: str, content: bytes) -> None:
        require_mount(str(self._root))
        copy_files.replace_file(self._root / name, content)

    def _list_files(self) -> list[str]:
        names = (p.relative_to(self._root).as_posix() for p in self._root.rglob("*") if p.is_file())
        return [name for name in names if not name.startswith(f"{_CHECKPOINTS}/")]

    def _delete_leftovers(self) -> list[str]:
        manifest.remove_temporary(self._root)
        return commit.delete_leftovers(self._checkpoints)


class BucketPlace(CopyPlace):
    """Copies in an S3 bucket; see CopyPlace."""

    def __init__(self, url: str, experiment: str, run: str) -> None:
        super().__init__(experiment, run)
        self._bucket = Bucket(url, f"{experiment}-{run}")
        self.where = self._bucket.url

    def list_steps(self) -> list[int]:
        names = self._bucket.list_names(f"{_CHECKPOINTS}/")
        folders = [name.split("/")[1] for name in names if name.split("/")[2:] == [COMMIT]]
        steps = [step for step in map(paths.step_of, folders) if step is not None]
        return sorted(steps, reverse=True)

    def read_commits(self) -> dict[int, dict[str, Any]]:
        commits = {}
        for step in self.list_steps():
            try:
                content = records.parse_json(b"".join(self.read(f"{_name_folder(step)}/{COMMIT}")))
                if commit.has_digest(content) and content["step"] == step:
                    commits[step] = content
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                continue  # the next copy replaces a damaged one
        return commits

    def copy(self, checkpoint: Checkpoint) -> None:
        folder = _name_folder(checkpoint.step)
        commit_bytes = (checkpoint.path / COMMIT).read_bytes()
        manifest_bytes = (checkpoint.path / MANIFEST).read_bytes()
        files = copy_files.parse_manifest(checkpoint.step, commit_bytes, manifest_bytes)
        self._bucket.write(f"{folder}/{_name_mark(checkpoint.step)}", b"")
        names = {f"{folder}/{entry['path']}" for entry in files} | {
            f"{folder}/{_name_mark(checkpoint.step)}"
        }
        older = [name for name in self._bucket.list_names(f"{folder}/") if name not in names]
        self._bucket.delete([name for name in older if name.endswith(f"/{COMMIT}")])
        self._bucket.delete(older)
        for entry in files:
            self._bucket.upload(
                f"{folder}/{entry['path']}",
                checkpoint.path / entry["path"],
                entry["bytes"],
                entry["digest"],
            )
        self._bucket.write(f"{folder}/{MANIFEST}", manifest_bytes)
        self._bucket.write(f"{folder}/{COMMIT}", commit_bytes)
        self._bucket.delete([f"{folder}/{_name_mark(checkpoint.step)}"])

    def retire(self, steps: Collection[int]) -> None:
        for step in steps:
            content = b"".join(self.read(f"{_name_folder(step)}/{COMMIT}"))
            self._bucket.write(f"{_name_folder(step)}/{_SUPERSEDED}", content)
            self._bucket.delete([f"{_name_folder(step)}/{COMMIT}"])
        names = set(self._bucket.list_names(f"{_CHECKPOINTS}/"))
        retired = [s for s in _list_steps(names) if f"{_name_folder(s)}/{_SUPERSEDED}" in names]
        for step in retired[:-RETIRED_KEPT]:
            self._bucket.write(f"{_name_folder(step)}/{_name_mark(step)}", b"")
            self._delete_marked(step)

    def delete(self, steps: Collection[int]) -> None:
        for step in steps:
            self._bucket.write(f"{_name_folder(step)}/{_name_mark(step)}", b"")
            self._bucket.delete([f"{_name_folder(step)}/{COMMIT}"])
            self._delete_marked(step)

    def _delete_marked(self, step: int) -> None:
        """Delete the objects of a copy without COMMIT.json; the mark comes last."""
        mark = f"{_name_folder(step)}/{_name_mark(step)}"
        names = self._bucket.list_names(f"{_name_folder(step)}/")
        self._bucket.delete([name for name in names if name != mark])
        self._bucket.delete([mark])

    def read(self, name: str) -> Iterator[bytes]:
        return self._bucket.read(name)

    def write_file(self, name: str, content: bytes) -> None:
        self._bucket.write(name, content)

    def _list_files(self) -> list[str]:
        names = self._bucket.list_names()
        return [name for name in names if not name.startswith(f"{_CHECKPOINTS}/")]

    def _delete_leftovers(self) -> list[str]:
        self._bucket.abort_uploads(f"{_CHECKPOINTS}/")
        names = set(self._bucket.list_names(f"{_CHECKPOINTS}/"))
        deleted = []
        for step in _list_steps(names):
            folder = _name_folder(step)
            if f"{folder}/{_name_mark(step)}" not in names:
                continue
            if f"{folder}/{COMMIT}" in names:  # a complete copy, whose mark was not deleted
                self._bucket.delete([f"{folder}/{_name_mark(step)}"])
            else:
                self._delete_marked(step)
                deleted.append(paths.step_name(step))
        return deleted


def _list_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the names of objects below checkpoints/, sorted."""
    return sorted({s for name in names if (s := paths.step_of(name.split("/")[1])) is not None})


def _name_folder(step: int) -> str:
    return f"{_CHECKPOINTS}/{paths.step_name(step)}"


def _name_mark(step: int) -> str:
    """Return the name of the mark of an unfinished copy; see lib/core/partial_dirs.py."""
    return partial_dirs.mark_path(Path(paths.step_name(step))).name


def open_place(target: str, experiment: str, run: str) -> CopyPlace:
    """Return the place for the copies of a run. target: the value of --ckpt-copy-to."""
    if s3.is_url(target):
        return BucketPlace(target, experiment, run)
    return DirectoryPlace(Path(target), experiment, run)


def require_mount(target: str) -> None:
    """Raise UsageError if the file system of a target should be mounted, but is not.

    Otherwise the copies would fill the disk with the empty mount point, and earlier ones would
    seem to be lost. target: the value of --ckpt-copy-to.
    """
    if not s3.is_url(target) and (mount := paths.find_missing_mount(Path(target))):
        raise UsageError(
            f"{mount}, which /etc/fstab lists, is not mounted",
            expected="a mounted file system for the copies of --ckpt-copy-to",
            run=commands.shell("mount", str(mount)),
        )


def name_place(target: str, experiment: str, run: str) -> str:
    """Return the name of the place for the copies of a run, for messages."""
    return f"{target.rstrip('/')}/{experiment}-{run}"


def find_last_run(target: str, experiment: str) -> str:
    """Return the ID of the last run of this name that has copies in a place, or "".

    target: the value of --ckpt-copy-to.
    """
    if s3.is_url(target):
        names: Iterable[str] = Bucket(target).list_folders(f"{experiment}-")
    else:
        directory = Path(target)
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    runs = [run for name, _, run in (name.rpartition("-") for name in names) if name == experiment]
    # An ID is the start time of a run.
    for run in sorted(filter(_RUN_ID.fullmatch, runs), key=lambda run: int(run, 16), reverse=True):
        if open_place(target, experiment, run).is_ours():
            return run
    return ""


def _list_run_files(experiment: Experiment) -> list[Path]:
    """Return the files of a run that are copied with its checkpoints."""
    files = [experiment.config, experiment.metrics, experiment.events]
    return [path for path in [*files, *sorted(experiment.model.rglob("*"))] if path.is_file()]


def _read_file(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            yield chunk
