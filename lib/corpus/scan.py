"""Finds the files of a source tree and says why others are left out."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import manifest, partial_dirs
from lib.core.errors import is_of_disk
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.corpus import saved

HIDDEN = "hidden"
EMPTY = "empty"
SPECIAL = "special"
UNREADABLE = "unreadable"
DANGLES = "link dangles"
LOOPS = "link loops"
OUTSIDE = "link leads outside"
INSIDE = "link inside the source"
PATTERN = "pattern"
OWN_OUTPUT = "output of this stage"
ARTIFACT = "made by a stage"
DESCRIPTION = "describes a dataset"
# Kinds of artifacts that are not raw files, in words.
_ARTIFACT_NAMES = {
    "dataset": "dataset",
    "dataset-parts": "dataset part",
    "tokens": "token store",
    "packs": "token store",
    "model": "model",
    "scratch": "model",
    "export": "model",
    "checkpoint": "checkpoint",
    "bundle": "bundle",
}


@dataclass(slots=True)
class TreeEntry:
    """Describes a file of the source tree, or a directory that is not entered.

    path: relative to the source, `/` between parts and at the end of a directory; bytes that are
    no UTF-8 as surrogates (os.fsencode gives them back). skipped: why it is left out, "" if not.
    kind: what it holds, once known. mtime_ns: modification time in nanoseconds.
    """

    path: str
    bytes: int = 0
    mtime_ns: int = 0
    skipped: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Rules:
    """Says which files a scan takes. A glob matches the relative path or the basename."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    follow_symlinks: bool = False


_Identity = tuple[int, int]  # of a directory: device and inode


class Scan:
    """Walks through a source tree once; `entries()` yields them in no particular order.

    output: a directory that the walk must not enter, with what unfinished runs left beside it.
    """

    def __init__(self, root: Path, rules: Rules, output: Path | None = None) -> None:
        self.root = root.resolve()
        self.rules = rules
        self._include = _compile_globs(rules.include)
        self._exclude = _compile_globs(rules.exclude)
        self._output = str(output.resolve()) if output else None

    def entries(self) -> Iterator[TreeEntry]:
        """Walk the tree; OSError only when a disk fails, or the root itself cannot be read."""
        stack: list[tuple[str, _Identity, tuple[_Identity, ...]]] = [
            ("", _get_directory_id(self.root.stat()), ())
        ]
        while stack:
            prefix, here, above = stack.pop()
            above = (*above, here)
            try:
                listing = os.scandir(self.root / prefix)
            except OSError as error:
                if not prefix or is_of_disk(error):
                    raise
                yield TreeEntry(prefix, skipped=UNREADABLE)
                continue
            with listing:
                for item in listing:
                    found = self._look(item, prefix + item.name, above)
                    if isinstance(found, TreeEntry):
                        yield found
                    else:
                        stack.append((prefix + item.name + "/", found, above))

    def _look(
        self, item: os.DirEntry, path: str, above: tuple[_Identity, ...]
    ) -> TreeEntry | _Identity:
        """Return an entry, or the identity of a directory to enter."""
        try:
            info = item.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode) and not item.name.startswith("."):
                if reason := self._why_not_link(item):
                    return TreeEntry(path, skipped=reason)
                info = item.stat()
        except OSError as error:
            if is_of_disk(error) and not (self._exclude and _matches_path(self._exclude, path)):
                raise
            reason = {errno.ENOENT: DANGLES, errno.ELOOP: LOOPS}.get(error.errno or 0, UNREADABLE)
            return TreeEntry(path, skipped=reason)
        if not stat.S_ISDIR(info.st_mode):
            reason = self._why_not_file(item.name, path, info)
            return TreeEntry(path, info.st_size, info.st_mtime_ns, reason)
        reason = self._why_not_directory(item, path, info, above)
        return TreeEntry(path + "/", skipped=reason) if reason else _get_directory_id(info)

    def _why_not_link(self, item: os.DirEntry) -> str:
        target = os.path.realpath(item.path, strict=True)
        if self.rules.follow_symlinks:
            return ""
        # What a link inside the source points to is seen under its own name: taking the link
        # as well would train on the same text twice.
        return INSIDE if Path(target).is_relative_to(self.root) else OUTSIDE

    def _why_not_file(self, name: str, path: str, info: os.stat_result) -> str:
        if name.startswith("."):
            return HIDDEN
        if not stat.S_ISREG(info.st_mode):
            return SPECIAL
        excluded = self._exclude and _matches_path(self._exclude, path)
        if excluded or (self._include and not _matches_path(self._include, path)):
            return PATTERN
        if saved.is_description(self.root, path):
            return DESCRIPTION
        return "" if info.st_size else EMPTY

    def _why_not_directory(
        self, item: os.DirEntry, path: str, info: os.stat_result, above: tuple
    ) -> str:
        if item.name.startswith("."):
            return HIDDEN
        if item.path == self._output or partial_dirs.is_ours(Path(item.path)):
            return OWN_OUTPUT
        if manifest.kind_of(Path(item.path)).startswith("splits/"):
            return OWN_OUTPUT  # of an earlier run: the same files once more
        if recognise_artifact(Path(item.path)):
            return ARTIFACT  # from text that is read elsewhere, or no text at all
        if self._exclude and _matches_path(self._exclude, path):
            return PATTERN
        return LOOPS if _get_directory_id(info) in above else ""


def recognise_artifact(directory: Path) -> str:
    """Return what a stage has made in a directory: `dataset`, `run` …; empty for raw files."""
    run = Experiment(directory.parent, directory.name)
    if run.config.is_file() and run.state.is_file():
        return "run"
    name, version, _ = manifest.kind_of(directory).partition("/")
    return _ARTIFACT_NAMES.get(name, "") if version else ""


def _get_directory_id(info: os.stat_result) -> _Identity:
    return info.st_dev, info.st_ino


def _compile_globs(globs: Iterable[str]) -> re.Pattern[str] | None:
    """Compile globs; `*` also crosses `/`, and a leading `**/` may stand for nothing."""
    globs = [glob.removeprefix("./").rstrip("/") for glob in globs]
    globs += [glob.removeprefix("**/") for glob in globs if glob.startswith("**/")]
    return re.compile("|".join(map(fnmatch.translate, globs))) if globs else None


def _matches_path(pattern: re.Pattern[str], path: str) -> bool:
    return bool(pattern.match(path) or pattern.match(path.rpartition("/")[2]))


def list_unmatched(
    globs: Iterable[str], entries: Iterable[TreeEntry], skipped: str = ""
) -> list[str]:
    """Return the globs that match no entry which is taken, or is skipped for that reason."""
    left = {glob: pattern for glob in globs if (pattern := _compile_globs([glob]))}
    for entry in entries:
        if not left:
            break
        if entry.skipped == skipped:
            path = entry.path.rstrip("/")
            left = {glob: p for glob, p in left.items() if not _matches_path(p, path)}
    return list(left)


def scan_tree(
    root: Path, rules: Rules, output: Path | None = None, progress: bool = False
) -> list[TreeEntry]:
    """Return all entries of a source tree, sorted by the bytes of their path."""
    entries = []
    with Progress("scan", None, "entries", progress) as bar:
        for entry in Scan(root, rules, output).entries():
            entries.append(entry)
            bar.advance()
    entries.sort(key=lambda entry: os.fsencode(entry.path))
    return entries


def count_files(directory: str) -> int:
    """Return how many files lie in a tree; 0 when it is not there."""
    return sum(len(files) for _, _, files in os.walk(directory))


def select_taken(entries: Iterable[TreeEntry]) -> list[TreeEntry]:
    """Return the entries that are not left out."""
    return [entry for entry in entries if not entry.skipped]


def count_reasons(entries: Iterable[TreeEntry]) -> str:
    """Return why entries were left out, most frequent first: `3 hidden, 1 empty`."""
    counts = Counter(entry.skipped for entry in entries if entry.skipped)
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())


def identify_files(files: Iterable[Any]) -> dict[str, object]:
    """Return what identifies a set of files, wherever it lies: count, bytes and a fingerprint.

    files: in a fixed order, each with a path, bytes and mtime_ns, which the fingerprint covers.
    """
    hasher = hashlib.sha256()
    count = 0
    total = 0
    for file in files:
        hasher.update(b"%b\0%d\0%d\0" % (os.fsencode(file.path), file.bytes, file.mtime_ns))
        count = count + 1
        total = total + file.bytes
    return {"files": count, "bytes": total, "fingerprint": hasher.hexdigest()[:16]}


def escape_path(path: str) -> str:
    """Return a path as valid UTF-8 on one line: other bytes and line breaks become escapes."""
    try:
        text = os.fsencode(path).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # of a damaged list: no file has such a name
        text = ascii(path)
    return text.replace("\r", "\\r").replace("\n", "\\n")
