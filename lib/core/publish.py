"""Atomic publish: an artifact appears under its final name whole, or not at all.

It is built in `<target>.partial-<id>`, gets its manifest last, and is renamed. While a process
builds in the partial directory, it holds that by a lease (lease.py), whose record lies in it: so
leftovers can be told from work in progress, also of other machines that share the directory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.core import commands, failure, hashing, lease, log, manifest, units
from lib.core.errors import EXIT_USAGE, ArtifactError, DiskFullError, UsageError
from lib.core.paths import MANIFEST

OWNER = ".owner.json"  # in a partial directory: who builds in it, or did
_LEFT_AFTER_S = 600  # without a sign of life before another machine's leftovers are deleted
_IN_WORDS = {"raw": "raw files", "dataset-parts": "dataset parts"}  # of kinds; others are words
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
    given, target = target, target.resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    found = manifest.kind_of(target) if target.is_dir() else ""
    if not found and manifest.is_torn(target):
        raise ArtifactError(f"{given / MANIFEST} is damaged",
                            run=commands.moved_away(target, commands.again()))
    if found.partition("/")[0] != kind.partition("/")[0]:
        raise UsageError(f"{given} exists and was not made by this stage",
                         expected="a name that is free, or an artifact of this stage",
                         found=f"an artifact of kind {found}" if found else
                         f"a directory without {MANIFEST} of ours" if target.is_dir() else "a file",
                         hint="choose another name, or move it away")
    there = manifest.read_if_any(target)
    if there is None:
        raise ArtifactError(f"{given / MANIFEST} is damaged",
                            run=commands.moved_away(target, commands.again()))
    if overwrite:
        return False
    changes = [*_kind_change(there, kind), *differences(there["identity"], identity)]
    if changes:
        raise UsageError(f"{given} exists, made from other inputs or options",
                         found="\n".join(changes),
                         hint="choose another name, or replace it:",
                         run=commands.again("--overwrite"))
    name = kind.partition("/")[0]
    manifest.check(given, there, f"the {_IN_WORDS.get(name, name)}",
                   run=run or commands.again("--overwrite"))
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
        self._lease: lease.Lease | None = None

    def __enter__(self) -> Build:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.dir.mkdir(exist_ok=True)
        try:
            self._lease = lease.Lease(self.dir / OWNER, self._lost)
        except lease.Held as error:
            raise AlreadyBuilding(f"another process is building {self.target} now",
                                  found=f"{self.dir}" + f", {error.holder}" * bool(error.holder),
                                  hint="wait for it, or stop it") from None
        except FileNotFoundError:
            raise AlreadyBuilding(f"{self.target} was built or brought back just now",
                                  run=commands.again()) from None
        self._remove_leftovers()
        if not self.overwrite and self.target.exists() and any(self.target.iterdir()):
            self.__exit__(None, None, None)
            raise AlreadyBuilding(f"{self.target} was built or brought back just now",
                                  run=commands.again())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        is_left = not self.published and self.resumable and bool(self.files())
        if not self.published and not is_left:
            self._lease.stop()
            shutil.rmtree(self.dir, ignore_errors=True)
        self._lease.release(keep=is_left)

    def files(self) -> list[Path]:
        """Return what lies in the directory so far, sorted, but for the record of who builds."""
        return sorted(path for path in self.dir.iterdir() if not path.name.startswith(OWNER))

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
        self._lease.stop()  # its record goes along, so nobody makes one in the directory meanwhile
        if self.target.exists() and any(self.target.iterdir()):
            if not self.overwrite:
                raise AlreadyBuilding(f"{self.target} appeared while this run was building it",
                                      hint="choose another name, or replace it:",
                                      run=commands.again("--overwrite"))
            _replace(self.dir, self.target)
        else:
            self.dir.replace(self.target)
        self.published = True
        for record in self.target.glob(f"{OWNER}*"):
            record.unlink(missing_ok=True)
        fsync(self.target.parent)

    def _remove_leftovers(self) -> None:
        """Delete what killed runs left, and bring back an artifact caught in mid-replacement."""
        siblings = [path for path in self.target.parent.iterdir() if path.is_dir()]
        aside = [path for path in siblings if path.name.startswith(f"{self.target.name}.old-")]
        if aside and not self.target.exists():
            aside.pop().replace(self.target)
        partial = [path for path in siblings if path != self.dir
                   and path.name.startswith(f"{self.target.name}.partial-")]
        for left in aside + partial:
            descriptor = lease.lock(left)
            if descriptor < 0:
                continue
            if self._is_left(left):
                shutil.rmtree(left)
                log.info(f"removed {left.name}, left by a run that did not finish")
            os.close(descriptor)
        if not self.resumable and (own := self.files()):
            for path in own:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            log.info(f"removed {self.dir.name}, left by a run that did not finish")

    def _is_left(self, directory: Path) -> bool:
        """Tell whether nobody builds in a directory, also on another machine.

        Two times of the file server are compared, not one of it with one of this machine.
        """
        record = directory / OWNER
        found = lease.read(record)
        if not found or found.get("released"):
            return True
        if (alive := lease.is_alive(found)) is not None:
            return not alive
        silent_s = (self.dir / OWNER).stat().st_mtime - record.stat().st_mtime
        if silent_s < _LEFT_AFTER_S:
            log.info(f"{directory} is left alone: {lease.holder(found)} may be building in it")
        return silent_s >= _LEFT_AFTER_S

    def _lost(self, text: str) -> None:
        """End the process at once: two must not write the same directory."""
        text = f"error: {text}; run the same command again to wait for that, or go on after it"
        failure.record(AlreadyBuilding.__name__, EXIT_USAGE, text)
        os.write(2, f"{text}\n".encode())
        os._exit(EXIT_USAGE)


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
