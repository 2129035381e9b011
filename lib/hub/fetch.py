"""Fetches a model, or raw files of a dataset, from the Hub: asks for, brings and converts them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.core import log, manifest, publish, units
from lib.core.errors import UsageError
from lib.core.progress import Progress
from lib.hub.client import Hub, OutOfReachError
from lib.hub.repository import RemoteFile, Repository, check_name, choose, select
from lib.hub.transfer import Transfer, bring_headers, clear_others
from lib.models import remote_code, tokenizer
from lib.models.directory import CODE_DIGESTS, CONFIG, find_whole_snapshot, rename_in_errors

_LARGE = 64 << 20  # bytes of weights that are worth looking at their headers first
_SHOWN = 10


@dataclass
class RemoteFiles:
    """Fetches files of a repository, and says where their bytes came from."""

    hub: Hub
    repository: Repository
    files: list[RemoteFile]
    bytes_from: dict[str, int] = field(default_factory=dict, init=False)
    seconds: float = field(default=0.0, init=False)

    def bring(
        self,
        directory: Path,
        *,
        earlier: Sequence[Path],
        workers: int,
        show_progress: bool,
        preview: Path | None = None,
        beside: int = 0,
    ) -> list[dict[str, Any]]:
        """Bring the files into a directory; return manifest entries.

        earlier, preview: see Transfer. beside: bytes of room that they need besides their own.
        """
        needed = clear_others(self.files, directory, earlier) + beside
        publish.require_space(directory, needed, self.repository.name)
        transfer = Transfer(
            self.hub,
            self.repository,
            earlier,
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
        """Return in words how much came, from where, and how fast."""
        parts = [
            f"{units.size(size)} from {place}" for place, size in self.bytes_from.items() if size
        ]
        rate = sum(self.bytes_from.values()) / max(self.seconds, 1e-9)
        return (
            f"{units.counted(len(self.files), 'file')} ({', '.join(parts) or 'empty'}; "
            f"{units.size(rate)}/s)"
        )

    def summary(self) -> dict[str, Any]:
        """Return what the manifest says of the source."""
        return {
            "source": "Hugging Face cache" if self.repository.cached else "hub",
            "commit": self.repository.commit,
            "size_only": self._list_undeclared(),
        }

    def describe_checks(self) -> str:
        """Return in words what the files were compared with."""
        if not (names := self._list_undeclared()):
            return "each file as the Hub declares it"
        return (
            "of the content of these files the Hub declares nothing, so that only their size "
            f"was checked: {units.join_names(names, _SHOWN)}"
        )

    def _list_undeclared(self) -> list[str]:
        return [file.path for file in self.files if not file.declared]


def look_up_raw(name: str, revision: str, include: Sequence[str], *, token: str) -> RemoteFiles:
    """Ask for raw files of a dataset; UsageError when the Hub is out of reach, or none matches."""
    hub = Hub(token)
    repository = hub.look_up(name, revision, "dataset")
    files = select(repository.files.values(), include, str(repository))
    log.info(
        f"commit {repository.commit}: {len(files):,} of {len(repository.files):,} files, "
        f"{units.size(sum(file.size for file in files))}"
    )
    return RemoteFiles(hub, repository, files)


@dataclass
class RemoteModel(RemoteFiles):
    """Fetches a model. pickles: files to convert. code: files by repository ("" for its own)."""

    pickles: list[RemoteFile]
    code: dict[str, list[str]]
    preview: Path

    @classmethod
    def look_up(
        cls,
        name: str,
        revision: str,
        preview: Path,
        *,
        token: str,
        allow_pickle: bool,
        trust_code: bool,
    ) -> RemoteModel:
        """Ask the Hub, and refuse what cannot be trained before the large files come.

        preview: an empty directory for small files. Raises UsageError, and ArtifactError when the
        files do not make a whole model.
        """
        if trust_code:  # read when transformers is imported: it copies the code that it runs
            os.environ["HF_MODULES_CACHE"] = str(preview / "modules")
        hub = Hub(token)
        repository = hub.look_up(name, revision)

        def bring(files: list[RemoteFile]) -> Path:
            Transfer(hub, repository).fetch(files, preview)
            return preview

        files, pickles = choose(repository, bring, allow_pickle=allow_pickle)
        for file in pickles:
            if not file.sha256:
                raise UsageError(
                    f"{repository}: {file.path} is not opened, since the Hub "
                    "declares no SHA-256 of it"
                )
        model = cls(hub, repository, files, pickles, {}, preview)
        with rename_in_errors(name, preview):
            if trust_code:
                model._take_code()
            model._look_ahead()
        log.info(
            f"commit {repository.commit}: {units.counted(len(model.files), 'file')}, "
            f"{units.size(sum(file.size for file in model.files))}"
        )
        return model

    def summary(self) -> dict[str, Any]:
        """Return what the manifest says of the source."""
        code = {where or self.repository.name: names for where, names in self.code.items()}
        return {
            **super().summary(),
            "converted": [file.path for file in self.pickles],
            "remote_code": code,
        }

    def fetch(
        self, directory: Path, *, earlier: Sequence[Path], workers: int, show_progress: bool
    ) -> list[dict[str, Any]]:
        """Bring the files into a directory, convert pickles; return manifest entries."""
        entries = self.bring(
            directory,
            earlier=[self.preview, *earlier],
            workers=workers,
            show_progress=show_progress,
            preview=self.preview,
            # A pickle and the safetensors made of it are both there for a while.
            beside=max((file.size for file in self.pickles), default=0),
        )
        if self.code:
            entries += self._add_code(directory)
        if self.pickles:
            entries += self._convert(directory, show_progress)
        last = {entry["path"]: entry for entry in entries if (directory / entry["path"]).exists()}
        return [last[path] for path in sorted(last)]

    def _look_ahead(self) -> None:
        """Check config and tokenizer and, if the weights are large, their headers."""
        from lib.models import check

        small = [file for file in self.files if file.path in tokenizer.FILES]
        Transfer(self.hub, self.repository).fetch(small, self.preview)
        check.examine(self.preview, weights=True, coming={}, trust_code=bool(self.code))
        weights = [file for file in self.files if file.path.endswith(".safetensors")]
        if sum(file.size for file in weights) > _LARGE:
            bring_headers(self.hub, self.repository, weights, self.preview)
            check.examine(
                self.preview,
                weights=True,
                trust_code=bool(self.code),
                coming={file.path: file.size for file in weights},
            )

    def _take_code(self) -> None:
        """Fetch the code of a model whose type only that knows."""
        from lib.models import architecture

        if remote_code.is_needed(architecture.read_content(self.preview)):
            self.code = remote_code.collect(self.preview / CONFIG, self._bring_code)
            remote_code.make_local(self.preview / CONFIG)
            remote_code.record(self.preview, self._list_code())

    def _list_code(self) -> list[str]:
        return [name for names in self.code.values() for name in names]

    def _bring_code(self, name: str, files: list[str]) -> Path:
        if name:
            check_name(name, "auto_map of config.json:")
        where = self.hub.look_up(name, "main") if name else self.repository
        if missing := [path for path in files if path not in where.files]:
            raise UsageError(f"{where} lacks code of the model", found=", ".join(missing))
        Transfer(self.hub, where).fetch([where.files[path] for path in files], self.preview)
        return self.preview

    def _add_code(self, directory: Path) -> list[dict[str, Any]]:
        """Put the code beside the model, with a config that looks for it there."""
        remote_code.make_local(directory / CONFIG)
        remote_code.carry(self.preview, directory)
        names = [CONFIG, CODE_DIGESTS, *self._list_code()]
        return [manifest.file_entry(directory, directory / name, "sha256") for name in names]

    def _convert(self, directory: Path, show_progress: bool) -> list[dict[str, Any]]:
        from lib.models import pickles

        total = sum(file.size for file in self.pickles)
        with Progress("converting pickles", total, "B", show_progress) as progress:
            return pickles.convert(
                directory,
                [file.path for file in self.pickles],
                progress.advance,
                trust_code=bool(self.code),
            )


@contextmanager
def mention_cache_in_errors(name: str, revision: str) -> Iterator[None]:
    """If the Hub is out of reach, add to the error that the local cache holds the model.

    The cache is searched for `main` alone.
    """
    try:
        yield
    except OutOfReachError as error:
        if revision == "main" and (found := find_whole_snapshot(name)):
            there = f"whole in the Hugging Face cache: {found}"
            way = f"stage 04 takes it from that cache, without stage 03: -m {name}"
            error.found = f"{error.found}\n{there}".strip()
            error.hint = f"{way}\n{error.hint}".strip()
        raise
