"""Describe the files of a Hub repository and choose files to download, without a connection."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.core import commands, log, records
from lib.core.artifacts import (
    NAMED_TEMPLATES,
    OTHER_TOKENIZER_FILES,
    TOKENIZER_FILES,
    VOCABULARIES,
)
from lib.core.errors import UsageError
from lib.models.directory import CONFIG, INDEX, WEIGHTS

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_SMALL = {
    *(CONFIG, "generation_config.json", "README.md"),
    *TOKENIZER_FILES,
    *OTHER_TOKENIZER_FILES,
}
_LICENCE = re.compile(
    r"(licen[cs]e|notice|copying|use_policy)([-_]\w+)?(\.(md|txt|rst))?", re.IGNORECASE
)
_NAMED_TEMPLATE = re.compile(rf"{NAMED_TEMPLATES}/[\w-]+\.jinja")
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PASSWORD = re.compile(r"(?<=//)[^/@:\s]*(:\S*)?@")  # with any signs in a password
_SHOWN = 10


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size in bytes and the digests that the Hub declares (or "")."""

    path: str
    size: int
    sha256: str
    blob_sha1: str

    @property
    def is_unsafe(self) -> bool:
        """Return whether the path could lead out of the directory that the file is written to."""
        return records.leads_out(self.path) or "\\" in self.path

    @property
    def declared_digest(self) -> str:
        """Return the digest that the Hub declares for the content, or "" if it declares none."""
        return self.sha256 or self.blob_sha1

    def describe_difference(self, path: Path) -> str:
        """Return how a file on disk differs from what the Hub declares, or "" if it does not.

        If the Hub declares no digest, only the size is compared.
        """
        if (size := path.stat().st_size) != self.size:
            return f"{size} bytes instead of {self.size}"
        hasher = hashlib.sha256()
        if not self.sha256:
            # The name of a git blob: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            hasher = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        actual = hasher.hexdigest()
        if self.declared_digest and actual != self.declared_digest:
            return f"digest {actual} instead of {self.declared_digest}"
        return ""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit.

    kind: `model` or `dataset`. cached: the file list comes from the local Hugging Face cache, which
    may contain only some of the files.
    """

    name: str
    commit: str
    files: dict[str, RemoteFile]
    kind: str = "model"
    cached: bool = False

    def __str__(self) -> str:
        return f"{self.name} in the Hugging Face cache" if self.cached else self.name


def redact_urls(text: str) -> str:
    """Return a text with the user and password of each URL replaced."""
    return _PASSWORD.sub("[redacted]@", text)


def name_hub() -> str:
    """Return the Hub's URL without a password, or its name if it is the public one."""
    return redact_urls(os.environ.get("HF_ENDPOINT") or "the Hugging Face Hub")


def check_name(name: str, option: str) -> None:
    """Raise UsageError if a name is not a valid name of a repository."""
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise UsageError(
            f"{option} {name!r} is not a valid name of a repository",
            expected="ORG/NAME, as at the end of its page's URL",
        )


def choose_model_files(
    repository: Repository, fetch_small: Callable[[list[RemoteFile]], Path], *, allow_pickle: bool
) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Return the files to download, and the pickles among them.

    The files are one set of weights, config, tokenizer, licence and model card. fetch_small:
    downloads small files and returns their directory. Raises UsageError if the repository lacks a
    config, a tokenizer or safetensors weights.
    """
    files = repository.files
    kinds = [WEIGHTS, INDEX] + ([PICKLE, PICKLE_INDEX] if allow_pickle else [])
    weights = next((name for name in kinds if name in files), "")
    if CONFIG not in files or not weights or not set(VOCABULARIES) & files.keys():
        raise _incomplete_model_error(repository, allow_pickle)
    is_index = weights in (INDEX, PICKLE_INDEX)
    preview = fetch_small([files[name] for name in [CONFIG, *([weights] if is_index else [])]])
    names = {
        name
        for name in files
        if name in _SMALL or _LICENCE.fullmatch(name) or _NAMED_TEMPLATE.fullmatch(name)
    }
    shards = _read_shards(repository, preview / weights) if is_index else {weights}
    names |= shards | ({INDEX} if weights == INDEX else set())
    pickles = shards if weights in (PICKLE, PICKLE_INDEX) else set()
    return [files[name] for name in sorted(names)], [files[name] for name in sorted(pickles)]


def select_by_globs(
    files: Iterable[RemoteFile], globs: Sequence[str], name: str
) -> list[RemoteFile]:
    """Return the files that match any of the globs, sorted by path.

    `*` also matches `/`. Hidden files are omitted, because stage 01 would skip them. Raises
    UsageError if no file matches or if a path leads out of the directory.
    """
    patterns = {glob: re.compile(fnmatch.translate(glob.removeprefix("./"))) for glob in globs}
    files = sorted(files, key=lambda file: file.path)
    matched = [file for file in files if any(p.fullmatch(file.path) for p in patterns.values())]
    require_safe_paths(matched, name)
    selected = [
        file for file in matched if not any(part.startswith(".") for part in file.path.split("/"))
    ]
    if not selected:
        listing = ", ".join(file.path for file in files[:_SHOWN]) or "no files"
        raise UsageError(
            f"{name} has no file that matches {' or '.join(globs)}",
            expected="a glob of paths in the repository, such as 'en/*.json.gz'",
            found=listing + (f" … ({len(files):,} files)" if files[_SHOWN:] else ""),
        )
    for glob, pattern in patterns.items():
        if not any(pattern.fullmatch(file.path) for file in selected):
            log.warn(f"--include {glob} matches none of the {len(files):,} files of {name}")
    return selected


def require_safe_paths(files: Iterable[RemoteFile], name: str) -> None:
    """Raise UsageError if a path would lead out of the directory that the files are written to."""
    if unsafe := [file.path for file in files if file.is_unsafe]:
        raise UsageError(
            f"{name} contains unsafe paths",
            found=", ".join(repr(path) for path in unsafe[:_SHOWN]),
            expected="relative paths that stay inside the repository",
        )


def _read_shards(repository: Repository, index: Path) -> set[str]:
    """Return the weight files that an index lists; raise UsageError if one does not exist."""
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
            f"{index.name} of {repository} does not match the files of the repository",
            expected=f"a `weight_map` that lists {suffix[1:]} files in the same directory",
            found=f"missing: {', '.join(missing[:5])}" if missing else "no valid `weight_map`",
        )
    return names


def _incomplete_model_error(repository: Repository, allow_pickle: bool) -> UsageError:
    """Return the error for a repository without a config, a tokenizer or usable weights."""
    listing = ", ".join(sorted(repository.files)[:_SHOWN]) or "no files"
    if CONFIG not in repository.files:
        return UsageError(
            f"{repository} has no config.json, so it is not a transformers model",
            found=listing,
        )
    if not set(VOCABULARIES) & repository.files.keys():
        return UsageError(
            f"{repository} has no tokenizer",
            found=listing,
            expected="tokenizer.json, or the files of a slow tokenizer",
        )
    pickles = sorted(name for name in repository.files if _PICKLES.fullmatch(name))
    can_convert = {PICKLE, PICKLE_INDEX} & repository.files.keys()
    accepted = [WEIGHTS, INDEX] + ([PICKLE, PICKLE_INDEX] if allow_pickle else [])
    weights = "none"
    if pickles:
        weights = f"only pickles, which can run code when loaded: {', '.join(pickles[:5])}"
    hint = (
        "choose a repository or a --revision that has them (conversions are often published as "
        "refs/pr/N)"
    )
    if can_convert:
        hint += ", or convert the pickles, which runs none of their code:"
    return UsageError(
        f"{repository} has no safetensors weights",
        expected=" or ".join(accepted),
        found=weights,
        hint=hint,
        run=commands.as_typed("--allow-pickle") if can_convert else "",
    )
