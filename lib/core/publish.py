"""Atomic publish: an artifact appears under its final name whole, or not at all.

    corpus.partial-1a2b3c4d/
        .unfinished-…           the mark that makes the directory ours (unfinished.py)
        .owner.json             who builds in it (lease.py): so leftovers can be told from work in
                                progress, also of other machines that share the directory
        content/                gets its manifest last, and is then renamed to `corpus`
        replaced/               what was `corpus` until then (--overwrite), about to be deleted

No other directory beside the target is touched, whatever it is called.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, launcher, lease, log, manifest, records, unfinished, units
from lib.core.errors import EXIT_USAGE, ArtifactError, DiskFullError, UsageError
from lib.core.identity import Difference, differences, in_lines
from lib.core.paths import MANIFEST

OWNER = ".owner.json"  # in a partial directory: who builds in it, or did
_REPLACED = "replaced"
_LEFT_AFTER_S = 600  # without a sign of life before another machine's leftovers are deleted
_IN_WORDS = {
    "raw": "raw files",
    "dataset-parts": "dataset parts",  # of kinds; others are words
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
    """Tell whether `target` already holds what would be built.

    identity: `{"options": …, "inputs": …}`. run: what makes a damaged one whole (default: the
    command that was typed, with --overwrite). dry_run: leave what a run has left that was killed
    just after it had published. Returns False when it has to be built.
    Raises UsageError when something else is there and `overwrite` is off, or when what is there
    was not made by this stage (that is never replaced); ArtifactError when it is damaged, as far as
    sizes tell.
    """
    given = target
    target = target.resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        _require_replaceable(target)
        return False
    found = manifest.kind_of(target) if target.is_dir() else ""
    if not found and manifest.is_torn(target):
        raise ArtifactError(
            f"{given / MANIFEST} is damaged", run=commands.moved_away(target, commands.as_typed())
        )
    if found.partition("/")[0] != kind.partition("/")[0]:
        raise UsageError(
            f"{given} exists and was not made by this stage",
            expected="a name that is free, or an artifact of this stage",
            found=f"an artifact of kind {found}"
            if found
            else f"a directory without {MANIFEST} of ours"
            if target.is_dir()
            else "a file",
            hint="choose another name, or move it away",
        )
    there = manifest.read_if_any(target)
    if there is None:
        raise ArtifactError(
            f"{given / MANIFEST} is damaged", run=commands.moved_away(target, commands.as_typed())
        )
    if overwrite:
        _require_replaceable(target)
        return False
    changes = [*_kind_change(there, kind), *differences(there["identity"], identity)]
    if changes:
        raise UsageError(
            f"{given} exists, made from other inputs or options",
            found=in_lines(changes),
            hint="choose another name, or replace it:",
            run=commands.as_typed("--overwrite"),
        )
    manifest.check(given, there, in_words(kind), run=run or commands.as_typed("--overwrite"))
    if not dry_run:
        _remove_leftovers(target)
    return True


def _require_replaceable(target: Path) -> None:
    """Raise UsageError where the finished directory could not be renamed to the target."""
    if os.path.ismount(target):
        raise UsageError(
            f"{target} is a mount point, and nothing can be renamed to it",
            expected=f"a directory in it, such as {target / 'NAME'}",
        )


def in_words(kind: str) -> str:
    """Return what an artifact of a kind is called in messages."""
    name = kind.partition("/")[0]
    return f"the {_IN_WORDS.get(name, name)}"


def _kind_change(there: dict[str, Any], kind: str) -> list[Difference]:
    return [] if there["kind"] == kind else [Difference("format", "format", there["kind"], kind)]


class AlreadyBuilding(UsageError):
    """Another process is building the same artifact."""


class Build:
    """Makes a directory that others see when it is finished.

    >>> with Build(target, "splits/1", identity, overwrite) as build:
    ...     (build.dir / "files.jsonl").write_text(…)
    ...     build.publish(stage=…, options=…, files=[…], summary=…)

    Left without `publish` (an error, Ctrl-C) the partial directory is removed, unless `resumable`:
    then the next run with the same identity finds in `dir` what this one finished.
    Raises AlreadyBuilding when another process is at the same thing, UsageError when a directory
    that is not ours has the name of the partial one.
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
        self.dir = self.partial / "content"
        self._replaced = self.partial / _REPLACED

    def __enter__(self) -> Build:
        _require_replaceable(self.target)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        try:
            unfinished.claim(self.partial)
            self._lease = lease.Lease(self.partial / OWNER, self._lost)
        except lease.Held as error:
            raise AlreadyBuilding(
                f"another process is building {self.target} now",
                hint="wait for it, or stop it",
                found=f"{self.partial}" + f", {error.holder}" * bool(error.holder),
            ) from None
        except FileNotFoundError:
            raise self._was_built() from None
        except OSError:  # a full disk: nothing is left of the attempt
            unfinished.remove_bare(self.partial)
            raise
        try:
            self._remove_leftovers()
            if not self.overwrite and self.target.exists() and any(self.target.iterdir()):
                raise self._was_built()
            if unfinished.has_links(self.dir):  # not of this stage: it would write behind them
                unfinished.delete(self.dir)
            self.dir.mkdir(exist_ok=True)
            manifest.remove_temporary(self.dir)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        is_left = not self.published and self.resumable and self.dir.is_dir() and bool(self.files())
        if not is_left:
            self._lease.stop()
            with suppress(OSError):  # the next run deletes it
                unfinished.remove(self.partial)
        self._lease.release(keep=is_left)
        if (
            isinstance(value, FileNotFoundError)
            and not self.partial.exists()
            and not self.published
        ):
            raise self._was_built() from value  # by who took over while this process was stopped

    def files(self) -> list[Path]:
        """Return what lies in the directory so far, sorted."""
        return sorted(self.dir.iterdir())

    def publish(
        self,
        *,
        stage: str,
        options: dict[str, Any],
        files: Iterable[dict[str, Any]],
        summary: dict[str, Any],
    ) -> None:
        """Write the manifest, make everything durable, give the directory its final name."""
        files = list(files)
        for entry in files:
            fsync(self._place(entry["path"]))
        manifest.write(
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
        self._lease.stop()  # after a last look at whose it is
        if self.target.exists() and any(self.target.iterdir()):
            if not self.overwrite:
                raise AlreadyBuilding(
                    f"{self.target} appeared while this run was building it",
                    hint="choose another name, or replace it:",
                    run=commands.as_typed("--overwrite"),
                )
            self._replace()
        else:
            self.dir.replace(self.target)
        self.published = True
        fsync(self.target.parent)

    def _place(self, path: str) -> Path:
        """Return where a file lies now; `../` leads to what lies beside the target already."""
        beside = path.removeprefix("../")
        return self.dir / path if beside == path else self.target.parent / beside

    def _replace(self) -> None:
        """Put the finished directory in the place of the target, which is deleted with the partial.

        Linux swaps the two names in one step; where a file system cannot, a kill between the two
        renames leaves the old one in `replaced`, from where the next run brings it back.
        """
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if not renameat2 or renameat2(
            _AT_FDCWD, os.fsencode(self.dir), _AT_FDCWD, os.fsencode(self.target), _RENAME_EXCHANGE
        ):
            self.target.replace(self._replaced)
            self.dir.replace(self.target)

    def _was_built(self) -> AlreadyBuilding:
        return AlreadyBuilding(
            f"{self.target} was built or brought back just now", run=commands.as_typed()
        )

    def _remove_leftovers(self) -> None:
        """Delete what killed runs left, and bring back an artifact caught in mid-replacement."""
        _bring_back(self.target, self.partial)
        _remove_leftovers(self.target, self.partial)
        if not self.resumable and self.dir.exists():
            unfinished.delete(self.dir)
            log.info(f"removed {self.partial.name}, left by a run that did not finish")

    def _lost(self, text: str) -> None:
        """End the process at once: two must not write the same directory."""
        text = f"error: {text}; run the same command again to wait for that, or go on after it"
        launcher.record_failure(AlreadyBuilding.__name__, EXIT_USAGE, text)
        os.write(2, f"{text}\n".encode())
        os._exit(EXIT_USAGE)


def _remove_leftovers(target: Path, own: Path | None = None) -> None:
    """Delete what killed runs left beside a target.

    own: the partial directory of this process; without one, what a process of another machine may
    be building stays.
    """
    name = re.compile(re.escape(target.name) + r"\.partial-[0-9a-f]{8}")
    for left in sorted(target.parent.iterdir()):
        if (
            not name.fullmatch(left.name)
            or left == own
            or not (unfinished.is_ours(left) or unfinished.is_bare(left))
        ):
            continue
        descriptor = lease.lock(left)
        if descriptor < 0:
            continue
        if _is_left(left, own):
            _bring_back(target, left)
            with suppress(OSError):  # of another user: in nobody's way
                unfinished.remove(left)
            if not left.exists():
                log.info(f"removed {left.name}, left by a run that did not finish")
        os.close(descriptor)


def _bring_back(target: Path, partial: Path) -> None:
    """Return to its place what a run had taken away and not yet replaced."""
    aside = partial / _REPLACED
    if aside.is_dir() and not target.exists():
        aside.replace(target)
    unfinished.delete(aside)


def _is_left(directory: Path, own: Path | None) -> bool:
    """Tell whether nobody builds in a directory, also on another machine.

    Two times of the file server are compared, not one of it with one of this machine.
    """
    record = directory / OWNER
    found = records.mapping(record)
    if not found or found.get("released"):
        return True
    if (alive := lease.is_alive(found)) is not None:
        return not alive
    if own is None:
        return False
    silent_s = (own / OWNER).stat().st_mtime - record.stat().st_mtime
    if silent_s < _LEFT_AFTER_S:
        log.info(f"{directory} is left alone: {lease.holder(found)} may be building in it")
    return silent_s >= _LEFT_AFTER_S


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
        raise DiskFullError(
            f"not enough room for {what} under {directory}",
            expected=f"about {units.size(needed)} free",
            found=f"{units.size(free)} free",
        )
