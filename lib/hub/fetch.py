"""Download a model, or raw files of a dataset, from the Hub, and convert pickled weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import artifacts, log, manifest, publish, units
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.hub.client import Hub, HubUnreachableError
from lib.hub.repository import (
    RemoteFile,
    Repository,
    check_name,
    choose_model_files,
    select_by_globs,
)
from lib.hub.transfer import Transfer, fetch_headers, prepare_directory
from lib.models import remote_code
from lib.models.directory import CODE_DIGESTS, CONFIG, rename_in_errors
from lib.models.hf_cache import find_complete_snapshot

_LARGE = 64 << 20  # bytes of weights from which the headers are checked before the download
_SHOWN = 10


@dataclass
class RemoteFiles:
    """Downloads files of a repository, and counts the bytes by source."""

    hub: Hub
    repository: Repository
    files: list[RemoteFile]
    bytes_from: dict[str, int] = field(default_factory=dict, init=False)
    seconds: float = field(default=0.0, init=False)

    def fetch_files(
        self,
        directory: Path,
        *,
        reuse_from: Sequence[Path],
        workers: int,
        show_progress: bool,
        preview: Path | None = None,
        extra_bytes: int = 0,
    ) -> list[dict[str, Any]]:
        """Download the files into a directory and return their manifest entries.

        reuse_from, preview: see Transfer. extra_bytes: disk space needed besides the files.
        """
        needed = prepare_directory(self.files, directory, reuse_from) + extra_bytes
        publish.require_space(directory, needed, self.repository.name)
        transfer = Transfer(
            self.hub,
            self.repository,
            reuse_from,
            preview=preview,
            workers=workers,
            show_progress=show_progress,
        )
        began = time.monotonic()
        entries = transfer.fetch(self.files, directory)
        self.bytes_from = transfer.bytes_from
        self.seconds = time.monotonic() - began
        return entries

    def describe_source(self) -> str:
        """Return a text with the number of files, the bytes by source, and the speed."""
        parts = [
            f"{units.size(size)} from {place}" for place, size in self.bytes_from.items() if size
        ]
        rate = sum(self.bytes_from.values()) / max(self.seconds, 1e-9)
        return (
            f"{units.counted(len(self.files), 'file')} ({', '.join(parts) or 'empty'}; "
            f"{units.size(rate)}/s)"
        )

    def summary(self) -> dict[str, Any]:
        """Return the entries about the source for the manifest."""
        return {
            "source": "Hugging Face cache" if self.repository.cached else "hub",
            "commit": self.repository.commit,
            "size_only": self._list_undeclared(),
        }

    def describe_checks(self) -> str:
        """Return a text that says how the files were checked."""
        if not (names := self._list_undeclared()):
            return "every file matches the digest that the Hub declares"
        return (
            "the Hub declares no digest for these files, so only their size was checked: "
            f"{units.join_names(names, _SHOWN)}"
        )

    def _list_undeclared(self) -> list[str]:
        return [file.path for file in self.files if not file.declared_digest]


def find_raw_files(name: str, revision: str, include: Sequence[str], *, token: str) -> RemoteFiles:
    """Return the raw files of a dataset that match the globs.

    Raises UsageError if the Hub is unreachable or no file matches.
    """
    hub = Hub(token)
    repository = hub.find_repository(name, revision, "dataset")
    files = select_by_globs(repository.files.values(), include, str(repository))
    log.info(
        f"commit {repository.commit}: {len(files):,} of {len(repository.files):,} files, "
        f"{units.size(sum(file.size for file in files))}"
    )
    return RemoteFiles(hub, repository, files)


@dataclass
class RemoteModel(RemoteFiles):
    """Downloads a model.

    pickles: files to convert. code: code files by repository ("" is the model's own). preview: the
    directory with the small files that were downloaded for the checks.
    """

    pickles: list[RemoteFile]
    code: dict[str, list[str]]
    preview: Path

    @classmethod
    def from_hub(
        cls,
        name: str,
        revision: str,
        preview: Path,
        *,
        token: str,
        allow_pickle: bool,
        trust_code: bool,
    ) -> RemoteModel:
        """Return the model of a repository, after the checks that need no large file.

        preview: an empty directory for small files. Raises UsageError if the model cannot be
        trained, and ArtifactError if its files are incomplete or contradict each other.
        """
        if trust_code:  # transformers reads it at import: it copies the code that it runs
            os.environ["HF_MODULES_CACHE"] = str(preview / "modules")
        hub = Hub(token)
        repository = hub.find_repository(name, revision)

        def fetch_small(files: list[RemoteFile]) -> Path:
            Transfer(hub, repository).fetch(files, preview)
            return preview

        files, pickles = choose_model_files(repository, fetch_small, allow_pickle=allow_pickle)
        for file in pickles:
            if not file.sha256:
                raise UsageError(
                    f"{repository}: {file.path} is a pickle without a checksum",
                    expected="a SHA-256 that the Hub declares; without one, no pickle is opened",
                )
        model = cls(hub, repository, files, pickles, {}, preview)
        with rename_in_errors(name, preview):
            if trust_code:
                model._fetch_code()
            model._check_small_files()
        log.info(
            f"commit {repository.commit}: {units.counted(len(model.files), 'file')}, "
            f"{units.size(sum(file.size for file in model.files))}"
        )
        return model

    def summary(self) -> dict[str, Any]:
        """Return the entries about the source for the manifest."""
        code = {source or self.repository.name: names for source, names in self.code.items()}
        return {
            **super().summary(),
            "converted": [file.path for file in self.pickles],
            "remote_code": code,
        }

    def fetch(
        self, directory: Path, *, reuse_from: Sequence[Path], workers: int, show_progress: bool
    ) -> list[dict[str, Any]]:
        """Download the files into a directory, convert pickles, and return manifest entries."""
        entries = self.fetch_files(
            directory,
            reuse_from=[self.preview, *reuse_from],
            workers=workers,
            show_progress=show_progress,
            preview=self.preview,
            # During the conversion, a pickle and its safetensors file exist side by side.
            extra_bytes=max((file.size for file in self.pickles), default=0),
        )
        if self.code:
            entries += self._add_code(directory)
        if self.pickles:
            entries += self._convert(directory, show_progress)
        # A file that was rewritten has two entries, of which the later one counts.
        latest = {entry["path"]: entry for entry in entries if (directory / entry["path"]).exists()}
        return [latest[path] for path in sorted(latest)]

    def _check_small_files(self) -> None:
        """Check the config, the tokenizer and, if the weights are large, their headers."""
        from lib.models import check

        small = [file for file in self.files if file.path in artifacts.TOKENIZER_FILES]
        Transfer(self.hub, self.repository).fetch(small, self.preview)
        check.check_model(self.preview, weights=True, expected_sizes={}, trust_code=bool(self.code))
        weights = [file for file in self.files if file.path.endswith(".safetensors")]
        if sum(file.size for file in weights) > _LARGE:
            fetch_headers(self.hub, self.repository, weights, self.preview)
            check.check_model(
                self.preview,
                weights=True,
                trust_code=bool(self.code),
                expected_sizes={file.path: file.size for file in weights},
            )

    def _fetch_code(self) -> None:
        """Download the modeling code if transformers does not know the model's type."""
        from lib.models import architecture

        if remote_code.is_needed(architecture.read_config_json(self.preview)):
            self.code = remote_code.fetch_code(self.preview / CONFIG, self._fetch_code_files)
            remote_code.use_local_code(self.preview / CONFIG)
            remote_code.write_digests(self.preview, self._list_code())

    def _list_code(self) -> list[str]:
        return [name for names in self.code.values() for name in names]

    def _fetch_code_files(self, name: str, files: list[str]) -> Path:
        if name:
            check_name(name, "auto_map of config.json:")
        source = self.hub.find_repository(name, "main") if name else self.repository
        if missing := [path for path in files if path not in source.files]:
            raise UsageError(
                f"{source} does not contain all code of the model",
                expected="the files that auto_map in config.json names",
                found=f"missing: {', '.join(missing)}",
            )
        Transfer(self.hub, source).fetch([source.files[path] for path in files], self.preview)
        return self.preview

    def _add_code(self, directory: Path) -> list[dict[str, Any]]:
        """Copy the code into the model's directory, and make its config refer to it there."""
        remote_code.use_local_code(directory / CONFIG)
        remote_code.copy_code(self.preview, directory)
        names = [CONFIG, CODE_DIGESTS, *self._list_code()]
        return [manifest.file_entry(directory, directory / name, "sha256") for name in names]

    def _convert(self, directory: Path, show_progress: bool) -> list[dict[str, Any]]:
        from lib.models import pickles

        total = sum(file.size for file in self.pickles)
        with Progress("converting pickles", total, "B", show_progress) as progress:
            return pickles.convert_pickles(
                directory,
                [file.path for file in self.pickles],
                progress.advance,
                trust_code=bool(self.code),
            )


@contextmanager
def mention_cache_in_errors(name: str, revision: str) -> Iterator[None]:
    """If the Hub is unreachable and the local cache has the whole model, say so in the error.

    Only the revision `main` is looked up in the cache.
    """
    try:
        yield
    except HubUnreachableError as error:
        if revision == "main" and (snapshot := find_complete_snapshot(name)):
            cached = f"the complete model is in the Hugging Face cache: {snapshot}"
            shortcut = f"stage 04 can use that cache without stage 03: -m {name}"
            error.found = f"{error.found}\n{cached}".strip()
            error.hint = f"{shortcut}\n{error.hint}".strip()
        raise
