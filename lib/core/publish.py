"""Atomic publish: an artifact appears under its final name whole, or not at all.

It is built in `<target>.partial-<id>`, gets its manifest last, and is renamed. The partial
directory is locked while a process builds in it, so leftovers can be told from work in progress.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.core import commands, hashing, log, manifest, units
from lib.core.errors import ArtifactError, DiskFullError, UsageError
from lib.core.paths import MANIFEST

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def is_done(target: Path, kind: str, identity: dict[str, Any], overwrite: bool,
            run: str = "") -> bool:
    """Tell whether `target` already holds what would be built.

    identity: `{"options": …, "inputs": …}`. run: what makes a damaged one whole (default: the
    command that was typed, with --overwrite). Returns False when it has to be built.
    Raises UsageError when something else is there and `overwrite` is off, or when what is there
    was not made by this stage (that is never replaced); ArtifactError when it is damaged, as far as
    sizes tell.
    """
    target = target.resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    found = manifest.kind_of(target) if target.is_dir() else ""
    if not found and manifest.is_torn(target):
        raise ArtifactError(f"{target / MANIFEST} is damaged",
                            run=commands.moved_away(target, commands.again()))
    if found.partition("/")[0] != kind.partition("/")[0]:
        raise UsageError(f"{target} exists and was not made by this stage",
                         expected="a name that is free, or an artifact of this stage",
                         found=f"an artifact of kind {found}" if found else
                         f"a directory without {MANIFEST} of ours" if target.is_dir() else "a file",
                         hint="choose another name, or move it away")
    there = manifest.read_if_any(target)
    if there is None:
        raise ArtifactError(f"{target / MANIFEST} is damaged",
                            run=commands.moved_away(target, commands.again()))
    if overwrite:
        return False
    changes = [*_kind_change(there, kind), *differences(there["identity"], identity)]
    if changes:
        raise UsageError(f"{target} exists, made from other inputs or options",
                         found="\n".join(changes),
                         hint="choose another name, or replace it:",
                         run=commands.again("--overwrite"))
    manifest.check(target, there, "the finished", run=run or commands.again("--overwrite"))
    return True


def _kind_change(there: dict[str, Any], kind: str) -> list[str]:
    return [] if there["kind"] == kind else [f"format: {there['kind']} there, {kind} now"]


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return one line per option or input that differs between two identities."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return lines
    label = path.removeprefix("inputs.")
    if path.startswith("options."):
        label = "--" + path.removeprefix("options.").replace("_", "-")
    return [] if old == new else [f"{label}: {old} there, {new} now"]


class AlreadyBuilding(UsageError):
    """Another process is building the same artifact."""


class Build:
    """A directory in the making.

    >>> with Build(target, "splits/1", identity, overwrite) as build:
    ...     (build.dir / "files.jsonl").write_text(…)
    ...     build.publish(stage=…, options=…, files=[…], summary=…)

    Left without `publish` (an error, Ctrl-C) the partial directory is removed, unless `resumable`:
    then the next run with the same identity finds in `dir` what this one finished.
    Raises AlreadyBuilding when another process is at the same thing.
    """

    def __init__(self, target: Path, kind: str, identity: dict[str, Any], overwrite: bool,
                 resumable: bool = False) -> None:
        self.target = target.resolve()
        self.kind, self.identity, self.overwrite = kind, identity, overwrite
        self.resumable = resumable
        self.published = False
        suffix = hashing.fingerprint(identity)[:8]
        self.dir = self.target.with_name(f"{self.target.name}.partial-{suffix}")
        self._lock = -1

    def __enter__(self) -> Build:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if _locks_work(self.target.parent):
            self._remove_leftovers()
        else:  # nothing tells another's work from leftovers: share no directory, delete none
            self.dir = self.dir.with_name(f"{self.dir.name}-{platform.node()}-{os.getpid()}")
            self.resumable = False
        self.dir.mkdir(exist_ok=True)
        self._lock = lock(self.dir)
        if self._lock < 0:
            raise AlreadyBuilding(f"another process is building {self.target} now",
                                  found=str(self.dir), hint="wait for it, or stop it")
        if not self.overwrite and self.target.exists() and any(self.target.iterdir()):
            self.__exit__(None, None, None)
            raise AlreadyBuilding(f"{self.target} was built or brought back just now",
                                  run=commands.again())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not self.published and not (self.resumable and any(self.dir.iterdir())):
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._lock)

    def publish(self, *, stage: str, options: dict[str, Any],
                files: Iterable[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Write the manifest, make everything durable, give the directory its final name."""
        files = list(files)
        for entry in files:
            fsync(self.dir / entry["path"])
        manifest.write(self.dir, kind=self.kind, stage=stage, identity=self.identity,
                       options=options, files=files, summary=summary)
        for directory in {self.dir, *((self.dir / entry["path"]).parent for entry in files)}:
            fsync(directory)
        if self.target.exists() and any(self.target.iterdir()):
            if not self.overwrite:
                raise AlreadyBuilding(f"{self.target} appeared while this run was building it",
                                      hint="choose another name, or replace it:",
                                      run=commands.again("--overwrite"))
            _replace(self.dir, self.target)
        else:
            self.dir.replace(self.target)
        fsync(self.target.parent)
        self.published = True

    def _remove_leftovers(self) -> None:
        """Delete what killed runs left, and bring back an artifact caught in mid-replacement."""
        siblings = [path for path in self.target.parent.iterdir() if path.is_dir()]
        aside = [path for path in siblings if path.name.startswith(f"{self.target.name}.old-")]
        if aside and not self.target.exists():
            aside.pop().replace(self.target)
        partial = [path for path in siblings
                   if path.name.startswith(f"{self.target.name}.partial-")
                   and not (path == self.dir and self.resumable)]
        for left in aside + partial:
            descriptor = lock(left)
            if descriptor >= 0:
                shutil.rmtree(left)
                os.close(descriptor)
                log.info(f"removed {left.name}, left by a run that did not finish")


def lock(directory: Path) -> int:
    """Return a descriptor that holds the lock on a directory.

    Returns -1 when another process has it, or has just removed or published the directory.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), directory.stat())
    except OSError as error:
        # Without locks on a file system, nobody is known to hold one.
        is_there = error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.ENOENT)
    if is_there:
        return descriptor
    os.close(descriptor)
    return -1


def _locks_work(directory: Path) -> bool:
    """Tell whether a file system knows locks (some network file systems are mounted without)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return True


def _replace(new: Path, old: Path) -> None:
    """Put `new` in the place of `old` and delete the latter.

    Linux swaps the two names in one step; where a file system cannot, a kill between the two
    renames leaves `<old>.old-…`, which the next run brings back.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 and renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old),
                               _RENAME_EXCHANGE) == 0:
        shutil.rmtree(new)
        return
    aside = old.with_name(f"{old.name}.old-{os.getpid()}")
    old.replace(aside)
    new.replace(old)
    shutil.rmtree(aside)


def fsync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(directory: Path, needed: int, what: str) -> None:
    """Raise DiskFullError when `directory`'s file system has less than `needed` bytes free."""
    there = directory.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise DiskFullError(f"not enough room for {what} under {directory}",
                            expected=f"about {units.size(needed)} free",
                            found=f"{units.size(free)} free")
