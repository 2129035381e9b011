"""The Hugging Face Hub: what a repository holds, and its files. Nothing else may open a connection.

A file counts as fetched when its size and the digest that the Hub declares for it (SHA-256 of
what lies in LFS, git blob SHA-1 of the rest) match what is on disk. A connection that breaks
is taken up where it broke, in this run or the next. The token goes into request headers only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import manifest
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress
from lib.models import tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SMALL = {"config.json", "generation_config.json", "README.md", *tokenizer.FILES}
_LICENCE = re.compile(r"(licen[cs]e|notice|copying|use_policy)([-_]\w+)?(\.(md|txt|rst))?",
                      re.IGNORECASE)
_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PASSING = {408, 429, 500, 502, 503, 504}  # HTTP statuses worth another try
_RETRIES, _CHUNK, _LOOK_UP_TIMEOUT_S = 5, 1 << 20, 30


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: bytes, and the digest that the Hub declares (either may be "")."""

    path: str
    size: int
    sha256: str
    blob_sha1: str

    @property
    def part(self) -> str:
        """Name of the unfinished file; by digest, so that no other version is taken up."""
        return f"{self.path}-{(self.sha256 or self.blob_sha1)[:12]}.part"

    def differs(self, path: Path) -> str:
        """Tell in words how a file on disk differs from what the Hub declares; "" if it does not.

        A file without a declared digest is only measured.
        """
        if (size := path.stat().st_size) != self.size:
            return f"{size} bytes instead of {self.size}"
        hasher, wanted = hashlib.sha256(), self.sha256
        if not wanted:
            # How git names content: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            hasher, wanted = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), \
                self.blob_sha1
        with path.open("rb", buffering=0) as file:
            while wanted and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)
        return f"digest {hasher.hexdigest()} instead of {wanted}" \
            if wanted and hasher.hexdigest() != wanted else ""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    commit: str
    files: dict[str, RemoteFile]


class Hub:
    """A Hub to fetch from; `HF_ENDPOINT` names another than the public one.

    token: of a user, or "" for the one in `HF_TOKEN` or of a login on this machine, if any.
    """

    def __init__(self, token: str) -> None:
        # Read when huggingface_hub is imported; telemetry would make requests of its own.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        from huggingface_hub import constants, get_token

        self._token = token or get_token() or False  # None would look for a login once more
        if self._token and not re.fullmatch(r"[\x21-\x7e]+", self._token):
            raise UsageError("the token holds spaces or characters that no token has",
                             expected="a token as the settings page of a Hub account shows it")
        self.endpoint = constants.ENDPOINT

    def look_up(self, name: str, revision: str) -> Repository:
        """Return what a repository holds at a revision (branch, tag or commit), asking once.

        Raises UsageError when it is not there, not allowed, or the Hub is out of reach.
        """
        from huggingface_hub import HfApi

        with _explained(name, revision, self.endpoint):
            try:
                info = HfApi(token=self._token).model_info(
                    name, revision=revision, files_metadata=True, timeout=_LOOK_UP_TIMEOUT_S)
            except (ValueError, TypeError, KeyError):  # no JSON, or JSON of something else
                raise UsageError(f"what answers at {self.endpoint} is not a Hub",
                                 expected="HF_ENDPOINT unset, or the address of a Hub") from None
        files = {s.rfilename: RemoteFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else "",
                                         (not s.lfs and s.blob_id) or "")
                 for s in info.siblings or []}
        return Repository(name, info.sha or revision, files)

    def choose(self, repository: Repository, preview: Path) -> list[RemoteFile]:
        """Return the files to fetch: one set of safetensors, config, tokenizer, licence, card.

        The config and the index of the weights are fetched into `preview`. Raises UsageError when
        the repository has no config, no tokenizer or no safetensors weights.
        """
        files = repository.files
        weights = SINGLE if SINGLE in files else INDEX if INDEX in files else ""
        if "config.json" not in files or not weights or not tokenizer.ONE_OF & files.keys():
            raise _no_model(repository)
        first = ["config.json", INDEX] if weights == INDEX else ["config.json"]
        self.fetch(repository, [files[name] for name in first], preview)
        chosen = {weights} | {name for name in files if name in _SMALL or _LICENCE.fullmatch(name)}
        if weights == INDEX:
            chosen |= _shards(repository, preview / INDEX)
        return [files[name] for name in sorted(chosen)]

    def fetch(self, repository: Repository, files: Sequence[RemoteFile], directory: Path, *,
              workers: int = 1, show_progress: bool = False) -> list[dict[str, Any]]:
        """Bring files of a repository into a directory, `workers` at a time.

        Files and parts of files that an earlier run left there are checked and used. Returns
        manifest entries with SHA-256. Raises UsageError when the Hub is out of reach or refuses,
        ArtifactError when a file differs from what the Hub declares even at a second try.
        """
        stop, lock = threading.Event(), threading.Lock()
        what, total = f"fetching {len(files)} files", sum(file.size for file in files)
        with Progress(what, total, "B", show_progress) as progress, \
                ThreadPoolExecutor(max_workers=workers) as pool:
            def advance(amount: int) -> None:
                if stop.is_set():
                    raise InterruptedError("another file failed")
                with lock:
                    progress.advance(amount)

            tasks = [pool.submit(self._fetch_file, repository, file, directory / file.path,
                                 advance) for file in files]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [_entry(file, directory) for file in files]

    def _fetch_file(self, repository: Repository, file: RemoteFile, target: Path,
                    advance: Callable[[int], None]) -> None:
        is_declared = bool(file.sha256 or file.blob_sha1)
        if is_declared and target.is_file() and not file.differs(target):
            advance(file.size)
            return
        target.unlink(missing_ok=True)
        part = target.with_name(file.part)
        for _ in range(2):
            with _explained(repository.name, repository.commit, self.endpoint):
                self._receive(repository, file, part, advance)
            if not (difference := file.differs(part)):
                part.replace(target)
                return
            advance(-part.stat().st_size)
            part.unlink()
        raise ArtifactError(f"{repository.name}: {file.path} arrives damaged, twice",
                            expected="what the Hub declares for it", found=difference,
                            run="the same command again later; finished files are kept")

    def _receive(self, repository: Repository, file: RemoteFile, part: Path,
                 advance: Callable[[int], None]) -> None:
        """Bring `part` to the size of the file, taking up a broken connection where it broke."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        url = hf_hub_url(repository.name, file.path, revision=repository.commit)
        part.touch()
        advance(part.stat().st_size)
        failures = 0
        while (done := part.stat().st_size) < file.size:
            try:
                self._stream(url, part, done, advance)
                return
            except HTTPError as error:
                final = isinstance(error, HfHubHTTPError) and \
                    error.response.status_code not in _PASSING
                failures = 0 if part.stat().st_size > done else failures + 1
                if final or failures > _RETRIES:
                    raise
                time.sleep(failures)

    def _stream(self, url: str, part: Path, done: int, advance: Callable[[int], None]) -> None:
        """Append what follows the `done` bytes of `part`, or all of it to an empty one."""
        from huggingface_hub import constants
        from huggingface_hub.utils import (
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        with http_stream_backoff("GET", url, headers=headers, max_retries=0,
                                 timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            continued = response.status_code == 206
            if not continued:
                advance(-done)
            with part.open("ab" if continued else "wb", buffering=0) as file:
                for chunk in response.iter_bytes():  # as it comes: what came survives a kill
                    file.write(chunk)
                    advance(len(chunk))


def check_name(name: str) -> None:
    """Raise UsageError when a name cannot be that of a repository."""
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise UsageError(f"--model-name {name!r} is no name of a repository",
                         expected="ORG/NAME, as the address of the model's page ends")


def bytes_to_come(files: Sequence[RemoteFile], directory: Path) -> int:
    """Delete what belongs to none of the files, and return how much of them is not there yet."""
    wanted = {name for file in files for name in (file.path, file.part)}
    for path in directory.iterdir():
        if path.name not in wanted:
            path.unlink()
    there = sum(path.stat().st_size for path in directory.iterdir())
    return max(0, sum(file.size for file in files) - there)


def _shards(repository: Repository, index: Path) -> set[str]:
    """Return the names of the weight files in an index; UsageError when it is no good."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        names = set()
    missing = sorted(str(name) for name in names if name not in repository.files
                     or "/" in name or not name.endswith(".safetensors"))
    if missing or not names:
        raise UsageError(f"{INDEX} of {repository.name} does not fit the repository",
                         expected="a `weight_map` to safetensors files beside it",
                         found=f"no such file: {', '.join(missing[:5])}" if missing else "")
    return names


def _entry(file: RemoteFile, directory: Path) -> dict[str, Any]:
    path = directory / file.path
    if not file.sha256:
        return manifest.file_entry(directory, path, "sha256")
    return {"path": file.path, "bytes": file.size, "digest": f"sha256:{file.sha256}"}


def _no_model(repository: Repository) -> UsageError:
    """Return the error for a repository without config, tokenizer or safetensors weights."""
    listing = ", ".join(sorted(repository.files)[:10]) or "no files"
    if "config.json" not in repository.files:
        return UsageError(f"{repository.name} has no config.json, so it is no transformers model",
                          found=listing)
    if not tokenizer.ONE_OF & repository.files.keys():
        return UsageError(f"{repository.name} has no tokenizer", found=listing,
                          expected="tokenizer.json, or the files of another kind of tokenizer")
    pickles = sorted(name for name in repository.files if _PICKLE.fullmatch(name))
    only = "only pickles, which can run code when loaded" if pickles else "none"
    return UsageError(f"{repository.name} has no safetensors weights",
                      expected=f"{SINGLE} or {INDEX}",
                      found=f"{only} {', '.join(pickles[:5])}".strip(),
                      run="choose a repository or a --revision that has them "
                          "(conversions are often offered as refs/pr/N)")


@contextmanager
def _explained(name: str, revision: str, endpoint: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence each, never quoting a request header."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise UsageError("the Hub is needed, but the environment says to stay offline",
                         run="unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE") from None
    except errors.GatedRepoError:
        raise UsageError(f"{name} is gated: its owner grants access to users one by one",
                         expected="a token of a user who has access (--token or HF_TOKEN)",
                         run=f"ask for access at {endpoint}/{name}") from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{name} has no revision {revision!r}",
                         expected="a branch, a tag or a full commit hash") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(f"there is no model {name} at {endpoint}, or it is private",
                         expected="ORG/NAME; for a private one also --token or HF_TOKEN") from None
    except errors.HfHubHTTPError as error:
        raise UsageError(f"the Hub at {endpoint} refused to serve {name}",
                         found=f"HTTP status {error.response.status_code}") from None
    except errors.HTTPError as error:
        said = "" if "Bearer" in str(error) else f": {error}"
        raise UsageError(f"the Hub at {endpoint} is out of reach",
                         found=f"{type(error).__name__}{said}",
                         expected="a connection, or a copy of .cache/ from a connected machine",
                         run="the same command again; finished files are kept") from None
