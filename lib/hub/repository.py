"""Describes what a repository on the Hub holds, and chooses files; it opens no connection."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.core import commands, log, records
from lib.core.errors import UsageError
from lib.models import tokenizer
from lib.models.directory import CONFIG, INDEX, WEIGHTS

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_SMALL = {CONFIG, "generation_config.json", "README.md", *tokenizer.FILES}
_LICENCE = re.compile(
    r"(licen[cs]e|notice|copying|use_policy)([-_]\w+)?(\.(md|txt|rst))?", re.IGNORECASE
)
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PASSWORD = re.compile(r"(?<=//)[^/@\s]+@")
_SHOWN = 10


@dataclass(frozen=True)
class RemoteFile:
    """Describes a file of a repository: bytes, and the digests that the Hub declares, or ""."""

    path: str
    size: int
    sha256: str
    blob_sha1: str

    @property
    def part(self) -> str:
        """Return the name of the unfinished file; by digest, so that versions do not mix."""
        return f"{self.path}-{self.declared[:12]}.part"

    @property
    def leads_out(self) -> bool:
        """Tell whether the path is not one inside a directory."""
        return records.leads_out(self.path) or "\\" in self.path

    @property
    def declared(self) -> str:
        """Return the digest by which the Hub declares the content, "" when it declares none."""
        return self.sha256 or self.blob_sha1

    def differs(self, path: Path) -> str:
        """Tell in words how a file on disk differs from what the Hub declares; "" if it does not.

        A file without a declared digest is only measured.
        """
        if (size := path.stat().st_size) != self.size:
            return f"{size} bytes instead of {self.size}"
        check = Digest(self)
        check.read(path, self.size)
        return check.compare()


class Digest:
    """Reads a file's content from its beginning and compares it with what the Hub declares."""

    def __init__(self, file: RemoteFile) -> None:
        self.seen = 0
        self._wanted = file.declared
        self._hasher = hashlib.sha256()
        if not file.sha256:
            # How git names content: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            self._hasher = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def read(self, path: Path, end: int) -> None:
        """Read what a file holds from where this stands up to byte `end`."""
        if self.seen >= end:  # also once the file has gone to its place
            return
        with path.open("rb", buffering=0) as file:
            file.seek(self.seen)
            while self.seen < end and (chunk := file.read(min(1 << 20, end - self.seen))):
                self._hasher.update(chunk)
                self.seen += len(chunk)

    def compare(self) -> str:
        """Tell in words how what was seen differs from what was declared; "" if it does not."""
        found = self._hasher.hexdigest()
        return (
            f"digest {found} instead of {self._wanted}"
            if self._wanted and found != self._wanted
            else ""
        )


@dataclass(frozen=True)
class Repository:
    """Describes a repository at one commit. kind: `model` or `dataset`.

    cached: known from a Hugging Face cache alone, which may hold only some of the files.
    """

    name: str
    commit: str
    files: dict[str, RemoteFile]
    kind: str = "model"
    cached: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name}, as far as the Hugging Face cache holds it," if self.cached else self.name
        )


def redact(text: str) -> str:
    """Return a text without user and password in the addresses it holds."""
    return _PASSWORD.sub("[redacted]@", text)


def name_hub() -> str:
    """Return what the Hub is known as, without a password that its address may hold."""
    return redact(os.environ.get("HF_ENDPOINT") or "the Hugging Face Hub")


def check_name(name: str, option: str) -> None:
    """Raise UsageError when a name cannot be that of a repository."""
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise UsageError(
            f"{option} {name!r} is not a name of a repository",
            expected="ORG/NAME, as the address of its page ends",
        )


def choose(
    repository: Repository, bring: Callable[[list[RemoteFile]], Path], *, allow_pickle: bool
) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Return the files to fetch (one set of weights, config, tokenizer, licence, card), and those
    of them that are pickles.

    bring: fetches some small files and returns the directory they are in then. Raises UsageError
    when the repository has no config, no tokenizer or no safetensors weights.
    """
    files = repository.files
    kinds = [WEIGHTS, INDEX] + ([PICKLE, PICKLE_INDEX] if allow_pickle else [])
    weights = next((name for name in kinds if name in files), "")
    if CONFIG not in files or not weights or not tokenizer.ONE_OF & files.keys():
        raise _no_model(repository, allow_pickle)
    is_index = weights in (INDEX, PICKLE_INDEX)
    preview = bring([files[name] for name in [CONFIG, *([weights] if is_index else [])]])
    chosen = {name for name in files if name in _SMALL or _LICENCE.fullmatch(name)}
    shards = _read_shards(repository, preview / weights) if is_index else {weights}
    chosen |= shards | ({INDEX} if weights == INDEX else set())
    is_pickled = weights in (PICKLE, PICKLE_INDEX)
    return [files[name] for name in sorted(chosen)], [
        files[name] for name in sorted(shards)
    ] if is_pickled else []


def select(files: Iterable[RemoteFile], globs: Sequence[str], name: str) -> list[RemoteFile]:
    """Return the files that one of the globs matches, by path; UsageError when there are none.

    `*` also crosses `/`. Hidden files are left out: stage 01 would skip them. Raises UsageError
    as well when one of the paths leads out of the directory it would be written to.
    """
    patterns = {glob: re.compile(fnmatch.translate(glob.removeprefix("./"))) for glob in globs}
    files = sorted(files, key=lambda file: file.path)
    matched = [file for file in files if any(p.fullmatch(file.path) for p in patterns.values())]
    require_safe(matched, name)
    found = [
        file for file in matched if not any(part.startswith(".") for part in file.path.split("/"))
    ]
    if not found:
        there = ", ".join(file.path for file in files[:_SHOWN]) or "no files"
        raise UsageError(
            f"{name} has no file that matches {' or '.join(globs)}",
            expected="a glob of paths in the repository, such as 'en/*.json.gz'",
            found=there + (f" … ({len(files):,} files)" if files[_SHOWN:] else ""),
        )
    for glob, pattern in patterns.items():
        if not any(pattern.fullmatch(file.path) for file in found):
            log.warn(f"--include {glob} matches none of the {len(files):,} files of {name}")
    return found


def require_safe(files: Iterable[RemoteFile], name: str) -> None:
    """Raise UsageError when files would be written outside the directory they are meant for."""
    if bad := [file.path for file in files if file.leads_out]:
        raise UsageError(
            f"{name} holds paths that are not safe to write",
            found=", ".join(repr(path) for path in bad[:_SHOWN]),
            expected="paths of files inside the repository",
        )


def _read_shards(repository: Repository, index: Path) -> set[str]:
    """Return the names of the weight files in an index; UsageError when it does not fit."""
    suffix = ".bin" if index.name == PICKLE_INDEX else ".safetensors"
    try:
        names = set(records.read_json(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        names = set()
    missing = sorted(
        str(name)
        for name in names
        if name not in repository.files or "/" in name or not name.endswith(suffix)
    )
    if missing or not names:
        raise UsageError(
            f"{index.name} of {repository} does not fit the repository",
            expected=f"a `weight_map` to {suffix[1:]} files beside it",
            found=f"no such file: {', '.join(missing[:5])}" if missing else "",
        )
    return names


def _no_model(repository: Repository, allow_pickle: bool) -> UsageError:
    """Return the error for a repository without config, tokenizer or weights to take."""
    listing = ", ".join(sorted(repository.files)[:_SHOWN]) or "no files"
    if CONFIG not in repository.files:
        return UsageError(
            f"{repository} has no config.json, so it is not a transformers model", found=listing
        )
    if not tokenizer.ONE_OF & repository.files.keys():
        return UsageError(
            f"{repository} has no tokenizer",
            found=listing,
            expected="tokenizer.json, or the files of another kind of tokenizer",
        )
    pickles = sorted(name for name in repository.files if _PICKLES.fullmatch(name))
    can_convert = {PICKLE, PICKLE_INDEX} & repository.files.keys()
    only = "only pickles, which can run code when loaded:" if pickles else "none"
    return UsageError(
        f"{repository} has no safetensors weights",
        expected=f"{WEIGHTS} or {INDEX}"
        + (f", {PICKLE} or {PICKLE_INDEX}" if allow_pickle else ""),
        found=f"{only} {', '.join(pickles[:5])}".strip(),
        hint="choose a repository or a --revision that has them (conversions are often offered as "
        "refs/pr/N)" + (", or convert the pickles, without running code:" if can_convert else ""),
        run=commands.as_typed("--allow-pickle") if can_convert else "",
    )
