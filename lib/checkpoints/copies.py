"""Keep copies of a run's checkpoints in a second place: a directory, or a prefix in a bucket.

    <place>/<experiment>-<run ID>/
        COPIES.json                      marks the directory as ours
        LEASE.json                       names the process that writes here (copy_lease.py)
        config.yaml, model/, metrics.jsonl, events.jsonl
        checkpoints/step_00001000/       the files of the checkpoint, unchanged

The place has the layout of a run, so stages 04 and 05 can read copies in a directory directly. A
bucket cannot rename files, so a copy begins with a file `.unfinished-…` and ends with COMMIT.json;
without COMMIT.json, the copy does not count. Only files in a place with COPIES.json are ever
deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.checkpoints import commit, copy_files
from lib.checkpoints.commit import COMMIT, MANIFEST, Checkpoint
from lib.core import commands, hashing, manifest, partial_dirs, paths, records
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.paths import Experiment
from lib.hub.folder import Folder, is_url

LABEL = "COPIES.json"
RETIRED_KEPT = 2  # unusable copies that are kept for a person to inspect, besides the usable ones
_LABEL_KIND = "checkpoint copies/1"
_CHECKPOINTS = "checkpoints"
_SUPERSEDED = f"{COMMIT}.superseded"
_RUN_ID = re.compile(r"[0-9a-f]+")


class CopyPlace:
    """The copies of one run's checkpoints. where: the directory or URL, for messages."""

    def __init__(self, target: str, experiment: str, run: str) -> None:
        """target: a directory or a URL. experiment: the name of the run's directory. run: its ID.

        Raises UsageError if the place cannot be used.
        """
        self._target = target
        self._folder = Folder(target, f"{experiment}-{run}")
        self.where = self._folder.where
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

    def list_steps(self) -> list[int]:
        """Return the steps that have a copy, even a damaged one, newest first.

        A copy that is being written or deleted, or that is retired, does not count.
        """
        names = set(self._folder.list_names(_CHECKPOINTS))

        def has(step: int, name: str) -> bool:
            return f"{_name_folder(step)}/{name}" in names

        return [
            step
            for step in reversed(_list_steps(names))
            if has(step, COMMIT) or not (has(step, _name_mark(step)) or has(step, _SUPERSEDED))
        ]

    def read_commits(self) -> dict[int, dict[str, Any]]:
        """Return the content of COMMIT of each complete copy, by step.

        In a directory, this also finds copies that lack a file or a part of it.
        """
        commits = {}
        root = self._folder.directory
        for step in self.list_steps():
            if root and Checkpoint(root / _name_folder(step), step).problems():
                continue
            try:
                content = records.parse_json(b"".join(self.read(f"{_name_folder(step)}/{COMMIT}")))
                if commit.has_digest(content) and content["step"] == step:
                    commits[step] = content
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                continue  # the next copy replaces a damaged one
        return commits

    def copy(self, checkpoint: Checkpoint) -> None:
        """Write a copy and verify it, COMMIT last; replace an older one.

        Raises FileNotFoundError if the checkpoint is deleted meanwhile, ArtifactError if it does
        not match its manifest, DiskFullError, or the error of the place.
        """
        folder = _name_folder(checkpoint.step)
        mark = _name_mark(checkpoint.step)
        commit_bytes = (checkpoint.path / COMMIT).read_bytes()
        manifest_bytes = (checkpoint.path / MANIFEST).read_bytes()
        files = copy_files.parse_manifest(checkpoint.step, commit_bytes, manifest_bytes)
        if self._folder.directory:
            size = sum(entry["bytes"] for entry in files)
            commit.require_free(self._folder.directory, size)
        self.write_file(f"{folder}/{mark}", b"")
        kept_names = {f"{folder}/{name}" for name in (mark, *(entry["path"] for entry in files))}
        if older := [name for name in self._folder.list_names(folder) if name not in kept_names]:
            self._folder.delete([f"{folder}/{COMMIT}", *older])
        try:
            for entry in files:
                require_mount(self._target)
                source = checkpoint.path / entry["path"]
                name = f"{folder}/{entry['path']}"
                self._folder.upload(name, source, entry["bytes"], entry["digest"])
            self.write_file(f"{folder}/{MANIFEST}", manifest_bytes)
            self.write_file(f"{folder}/{COMMIT}", commit_bytes)
        except Exception as error:
            # A bucket that fails may not answer; the next process deletes what is left there.
            if self._folder.directory or isinstance(error, FileNotFoundError):
                with suppress(StageError, OSError):
                    self._folder.delete([f"{folder}/{COMMIT}"])
                    self._delete_marked(folder, mark)
            raise
        self._folder.delete([f"{folder}/{mark}"])

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

    def restore_run_files(self, experiment: Experiment, with_logs: bool = True) -> list[Path]:
        """Write the missing files of a run, except checkpoints, and return their paths."""
        written = []
        manifest.remove_temporary(experiment.root)
        logs = {experiment.metrics.name, experiment.events.name} if with_logs else set()
        ours = {experiment.config.name} | logs
        for name in self._folder.list_names():
            path = experiment.root / name
            is_of_model = name.startswith(f"{experiment.model.name}/")
            if (name in ours or is_of_model) and not records.leads_out(name) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                manifest.write_bytes(path, b"".join(self.read(name)))
                written.append(path)
        return written

    def retire(self, steps: Collection[int]) -> None:
        """Make copies unusable, because the run continues before them.

        Their files are deleted only if more than RETIRED_KEPT copies are unusable.
        """
        for step in steps:
            content = b"".join(self.read(f"{_name_folder(step)}/{COMMIT}"))
            self.write_file(f"{_name_folder(step)}/{_SUPERSEDED}", content)
            self._folder.delete([f"{_name_folder(step)}/{COMMIT}"])
        names = set(self._folder.list_names(_CHECKPOINTS))
        retired = [s for s in _list_steps(names) if f"{_name_folder(s)}/{_SUPERSEDED}" in names]
        self.delete(retired[:-RETIRED_KEPT])

    def delete(self, steps: Collection[int]) -> None:
        """Delete copies."""
        for step in steps:
            folder = _name_folder(step)
            self.write_file(f"{folder}/{_name_mark(step)}", b"")
            self._folder.delete([f"{folder}/{COMMIT}"])
            self._delete_marked(folder, _name_mark(step))

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file; raise FileNotFoundError if it does not exist."""
        require_mount(self._target)
        return self._folder.read(name)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a small file."""
        require_mount(self._target)
        self._folder.write(name, content)

    def _delete_marked(self, folder: str, mark: str) -> None:
        """Delete the files of a copy without COMMIT; the mark comes last."""
        if root := self._folder.directory:
            partial_dirs.delete_marked(root / folder)
            return
        names = self._folder.list_names(folder)
        self._folder.delete([name for name in names if name != f"{folder}/{mark}"])
        self._folder.delete([f"{folder}/{mark}"])

    def _delete_leftovers(self) -> list[str]:
        """Delete the leftovers of interrupted copies and deletions; return their names."""
        self._folder.abort_uploads(_CHECKPOINTS)
        if root := self._folder.directory:
            manifest.remove_temporary(root)
            commit.delete_leftovers(root / _CHECKPOINTS)  # of earlier versions, which renamed
            for copy in commit.list_checkpoints(root / _CHECKPOINTS):
                if partial_dirs.is_bare(copy.path):
                    copy.path.rmdir()
        names = set(self._folder.list_names(_CHECKPOINTS))
        deleted = []
        for step in _list_steps(names):
            folder = _name_folder(step)
            if f"{folder}/{_name_mark(step)}" not in names:
                continue
            if f"{folder}/{COMMIT}" in names:  # a complete copy, whose mark was not deleted
                self._folder.delete([f"{folder}/{_name_mark(step)}"])
            else:
                self._delete_marked(folder, _name_mark(step))
                deleted.append(paths.step_name(step))
        return deleted


def _list_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the names of files below checkpoints/, sorted."""
    return sorted({s for name in names if (s := paths.step_of(name.split("/")[1])) is not None})


def _name_folder(step: int) -> str:
    return f"{_CHECKPOINTS}/{paths.step_name(step)}"


def _name_mark(step: int) -> str:
    """Return the name of the mark of an unfinished copy; see lib/core/partial_dirs.py."""
    return partial_dirs.mark_path(Path(paths.step_name(step))).name


def require_mount(target: str) -> None:
    """Raise UsageError if the file system of a target should be mounted, but is not.

    Otherwise the copies would fill the disk with the empty mount point, and earlier ones would
    seem to be lost. target: the value of --ckpt-copy-to.
    """
    if not is_url(target) and (mount := paths.find_missing_mount(Path(target))):
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
    names = Folder(target).list_folders()
    runs = [run for name, _, run in (name.rpartition("-") for name in names) if name == experiment]
    # An ID is the start time of a run.
    for run in sorted(filter(_RUN_ID.fullmatch, runs), key=lambda run: int(run, 16), reverse=True):
        if CopyPlace(target, experiment, run).is_ours():
            return run
    return ""


def _list_run_files(experiment: Experiment) -> list[Path]:
    """Return the files of a run that are copied with its checkpoints."""
    files = [experiment.config, experiment.metrics, experiment.events]
    return [path for path in [*files, *sorted(experiment.model.rglob("*"))] if path.is_file()]
