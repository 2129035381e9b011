"""Publish artifacts atomically: one appears under its final name complete, or not at all.

    corpus.partial-1a2b3c4d/
        .unfinished-…           the mark that makes the directory ours (partial_dirs.py); it names
                                the process that builds, which keeps it locked (lease.py)
        content-HOST/           receives its manifest last, and is then renamed to `corpus`
        content/                the work of a run that ended by itself; any machine may continue it
        replaced/               the previous `corpus` (--overwrite), about to be deleted

Two machines whose locks do not exclude each other both build, and the first one publishes. No other
directory beside the target is changed, whatever its name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import (
    commands,
    hashing,
    lease,
    log,
    manifest,
    other_files,
    partial_dirs,
    records,
    units,
)
from lib.core.errors import ArtifactError, DiskFullError, UsageError
from lib.core.identity import Difference, find_differences, list_differences
from lib.core.paths import MANIFEST

_CONTENT = "content"
_REPLACED = "replaced"
_LEFT_AFTER_S = 7 * 86400  # since its start, until a build of another machine counts as a leftover
_KIND_NAMES = {
    "raw": "raw files",
    "dataset-parts": "dataset parts",  # other kinds are words already
    "curation-part": "part of a curated dataset",
    "tokens": "token store",
}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_done(
    target: Path,
    kind: str,
    identity: dict[str, Any],
    overwrite: bool,
    run: str = "",
    dry_run: bool = False,
) -> bool:
    """Return whether `target` is already the artifact that would be built.

    identity: `{"options": …, "inputs": …}`. run: the command that replaces a damaged or different
    artifact (default: the typed one with --overwrite). dry_run: keep leftovers of a run that was
    killed just after it had published. Raises UsageError if `target` is something else and
    `overwrite` is off, or if another program made it (even with `overwrite`), and ArtifactError if
    sizes show damage.
    """
    typed_target = target
    target = target.resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        _require_replaceable(target)
        return False
    found_kind = manifest.read_kind(target) if target.is_dir() else ""
    if not found_kind and manifest.is_torn(target):
        raise ArtifactError(
            f"{typed_target / MANIFEST} is damaged",
            run=commands.move_away(target, commands.as_typed()),
        )
    if found_kind.partition("/")[0] != kind.partition("/")[0]:
        raise UsageError(
            f"{typed_target} exists and was not made by this stage",
            expected="an unused name, or an artifact of this stage",
            found=_describe_path(target, found_kind),
            hint="choose another name, or move it away",
        )
    content = manifest.read_if_any(target)
    if content is None:
        raise ArtifactError(
            f"{typed_target / MANIFEST} is damaged",
            run=commands.move_away(target, commands.as_typed()),
        )
    if overwrite:
        _require_replaceable(target)
        other_files.announce_kept(typed_target)
        return False
    changes = [*_kind_change(content, kind), *find_differences(content["identity"], identity)]
    if changes:
        raise UsageError(
            f"{typed_target} exists, and was made from other inputs or options",
            found=list_differences(changes),
            hint="choose another name, or replace it:",
            run=run or commands.as_typed("--overwrite"),
        )
    manifest.require_intact(
        typed_target, content, kind_name(kind), run=run or commands.as_typed("--overwrite")
    )
    if not dry_run:
        _remove_leftovers(target)
    return True


def _describe_path(target: Path, kind: str) -> str:
    if kind:
        return f"an artifact of kind {kind}"
    return f"a directory without {MANIFEST} of ours" if target.is_dir() else "a file"


def _require_replaceable(target: Path) -> None:
    """Raise UsageError for a mount point, to which no finished directory can be renamed."""
    if os.path.ismount(target):
        raise UsageError(
            f"{target} is a mount point, and nothing can be renamed to it",
            expected=f"a directory in it, such as {target / 'NAME'}",
        )


def kind_name(kind: str) -> str:
    """Return how messages name an artifact of a kind."""
    name = kind.partition("/")[0]
    return f"the {_KIND_NAMES.get(name, name)}"


def _kind_change(content: dict[str, Any], kind: str) -> list[Difference]:
    return (
        [] if content["kind"] == kind else [Difference("format", "format", content["kind"], kind)]
    )


class AlreadyBuilding(UsageError):
    """Another process is building the same artifact."""


class Build:
    """Builds a directory that appears under its name once it is finished.

    >>> with Build(target, "splits/1", identity, overwrite) as build:
    ...     (build.dir / "files.jsonl").write_text(…)
    ...     build.publish(stage=…, options=…, files=[…], summary=…)

    Without `publish` (after an error or Ctrl-C) the partial directory is deleted, unless
    `resumable`: then the next run with the same identity finds the finished files in `dir`. Raises
    AlreadyBuilding if another process builds the same artifact, UsageError if a directory that is
    not ours has the name of the partial one.
    """

    def __init__(
        self,
        target: Path,
        kind: str,
        identity: dict[str, Any],
        overwrite: bool,
        resumable: bool = False,
    ) -> None:
        self.target = target.resolve()
        self.kind = kind
        self.identity = identity
        self.overwrite = overwrite
        self.resumable = resumable
        self.published = False
        suffix = hashing.fingerprint(identity)[:8]
        self.partial = self.target.with_name(f"{self.target.name}.partial-{suffix}")
        self.dir = self.partial / _own_content()

    def __enter__(self) -> Build:
        _require_replaceable(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.partial.mkdir()
        try:
            partial_dirs.claim_directory(self.partial)
            self._lock = lease.lock_to_build(partial_dirs.mark_path(self.partial))
        except lease.DirectoryHeld as error:
            raise AlreadyBuilding(
                f"another process is building {self.target}",
                hint="wait for it, or stop it",
                found=", ".join(filter(None, (str(self.partial), error.holder))),
            ) from None
        except FileNotFoundError:
            raise self._make_built_error() from None
        except OSError:  # a full disk: leave nothing of this attempt
            partial_dirs.delete_bare(self.partial)
            raise
        try:
            self._remove_leftovers()
            if not self.overwrite and self.target.exists() and any(self.target.iterdir()):
                raise self._make_built_error()
            if self.resumable and not self.dir.exists():
                with suppress(FileNotFoundError):
                    (self.partial / _CONTENT).replace(self.dir)
            if partial_dirs.has_links(self.dir):  # this stage makes none, and would follow them
                partial_dirs.delete_tree(self.dir)
            self.dir.mkdir(exist_ok=True)
            manifest.remove_temporary(self.dir)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        is_stale = isinstance(value, OSError) and value.errno in (errno.ENOENT, errno.ESTALE)
        is_gone = is_stale and not self.dir.exists()
        with suppress(OSError):  # the next run deletes it
            if self.published:
                for path in _list_foreign(self.partial):  # a process there loses all files at once
                    path.replace(path.with_name(f"{_REPLACED}-{path.name}"))
                partial_dirs.delete_marked(self.partial)
            elif self.resumable and self.files():
                self.dir.replace(self.partial / _CONTENT)
            else:
                partial_dirs.delete_tree(self.dir)
                partial_dirs.delete_bare(self.partial)
        self._lock.close()
        with suppress(OSError):  # only now does NFS delete a mark that was open
            self.partial.rmdir()
        if is_gone and not self.published:  # another machine built it, and deleted this directory
            raise self._make_built_error() from value

    def files(self) -> list[Path]:
        """Return the files in the directory and below it so far, sorted."""
        return sorted(path for path in self.dir.rglob("*") if path.is_file())

    def publish(
        self,
        *,
        stage: str,
        options: dict[str, Any],
        files: Iterable[dict[str, Any]],
        summary: dict[str, Any],
    ) -> None:
        """Write the manifest, fsync everything, and give the directory its final name."""
        files = list(files)
        for entry in files:
            fsync(self._place(entry["path"]))
        manifest.write_manifest(
            self.dir,
            kind=self.kind,
            stage=stage,
            identity=self.identity,
            options=options,
            files=files,
            summary=summary,
        )
        for directory in {self.dir, *(self._place(entry["path"]).parent for entry in files)}:
            fsync(directory)
        if self.overwrite and self.target.exists() and any(self.target.iterdir()):
            self._replace()
        else:
            try:
                self.dir.replace(self.target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._make_built_error() from None
                raise
        self.published = True
        fsync(self.target.parent)

    def _place(self, path: str) -> Path:
        """Return the current path of a file. `../` means a file beside the target."""
        beside = path.removeprefix("../")
        return self.dir / path if beside == path else self.target.parent / beside

    def _replace(self) -> None:
        """Replace the target by the finished directory, and keep the old one in `self.partial`.

        Linux swaps the two names in one step. If a file system cannot, a kill between two renames
        leaves the old directory in `replaced`, from where the next run restores it. Files that a
        person put into the target are moved out first, so a kill loses none of them.
        """
        other_files.keep_others(self.target)
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if not renameat2 or renameat2(
            _AT_FDCWD, os.fsencode(self.dir), _AT_FDCWD, os.fsencode(self.target), _RENAME_EXCHANGE
        ):
            self.target.replace(self.partial / _REPLACED)
            self.dir.replace(self.target)

    def _make_built_error(self) -> AlreadyBuilding:
        return AlreadyBuilding(
            f"{self.target} was built or restored just now", run=commands.as_typed()
        )

    def _remove_leftovers(self) -> None:
        """Delete leftovers of killed runs, and restore an artifact that was being replaced."""
        _restore_target(self.target, self.partial)
        _remove_leftovers(self.target, self.partial)
        for path in _list_foreign(self.partial):
            log.info(f"kept {path} during this build: another machine may be writing it")
        if not self.resumable and self.dir.exists():
            partial_dirs.delete_tree(self.dir)
            log.info(f"deleted {self.partial.name}, left by a run that did not finish")


def _remove_leftovers(target: Path, own_partial: Path | None = None) -> None:
    """Delete leftovers of killed runs beside a target, except for that of this process."""
    name = re.compile(re.escape(target.name) + r"\.partial-[0-9a-f]{8}")
    for path in sorted(target.parent.iterdir()):
        if not name.fullmatch(path.name) or path == own_partial:
            continue
        # Another process may build in it or delete it, or it may belong to another user.
        with suppress(lease.DirectoryHeld, OSError):
            if partial_dirs.is_ours(path) or partial_dirs.is_bare(path):
                _delete_leftover(target, path)


def _delete_leftover(target: Path, partial: Path) -> None:
    """Delete the directory of a killed run, unless another machine may be building in it.

    Raises DirectoryHeld or OSError if this process cannot delete it.
    """
    mark = partial_dirs.mark_path(partial)
    if _list_foreign(partial) and time.time() - mark.stat().st_mtime < _LEFT_AFTER_S:
        holder = lease.describe_holder(records.read_mapping(mark))
        log.info(f"kept {partial}: {holder} may be building in it; if not, delete it")
        return
    with lease.lock_to_build(mark):
        _restore_target(target, partial)
        partial_dirs.delete_marked(partial)
    with suppress(OSError):  # only now does NFS delete a mark that was open
        partial.rmdir()
    if not partial.exists():
        log.info(f"deleted {partial.name}, left by a run that did not finish")


def _restore_target(target: Path, partial: Path) -> None:
    """Restore a target that a run had moved away and not yet replaced."""
    previous = partial / _REPLACED
    if previous.is_dir() and not target.exists():
        previous.replace(target)
    partial_dirs.delete_tree(previous)


def _own_content() -> str:
    """Return the name of the directory to which only this machine writes."""
    return f"{_CONTENT}-{platform.node()}"


def find_kept(path: Path) -> Path:
    """Return where a path in the directory of a build lies after an error, for messages."""
    names = [_CONTENT if name == _own_content() else name for name in path.parts]
    return Path(*names)


def _list_foreign(partial: Path) -> list[Path]:
    """Return the directories to which other machines write, or wrote before they were killed."""
    return [path for path in partial.glob(f"{_CONTENT}-*") if path.name != _own_content()]


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(directory: Path, needed: int, content: str) -> None:
    """Raise DiskFullError if the file system of `directory` has fewer than `needed` bytes free."""
    existing = directory.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskFullError(
            f"not enough room for {content} under {directory}",
            expected=f"about {units.size(needed)} free",
            found=f"{units.size(free)} free",
        )
