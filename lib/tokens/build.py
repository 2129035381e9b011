"""Build a token store once per dataset and tokenizer, before any process group exists."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lib.core import commands, hashing, log, manifest, paths, publish, units, verified
from lib.core.artifacts import tokenizer_fingerprint
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress
from lib.core.retry import poll
from lib.tokens import framing, store
from lib.tokens.dataset import Dataset
from lib.tokens.encode import Encoder
from lib.tokens.split_writer import PROGRESS, StoreContents

_POLL_S = 0.5


@dataclass(frozen=True)
class Tokenization(ABC):
    """Turns one dataset into tokens; a subclass does so for each format of dataset.

    num_workers: threads or processes that encode. progress: whether a bar is shown. unit: what an
    entry of *.ends.bin ends.
    """

    dataset: Dataset
    tokenizer_dir: Path
    num_workers: int
    progress: bool
    unit: ClassVar[str]

    @cached_property
    def encoder(self) -> Encoder:
        """Load the encoder of this process. Raises ArtifactError if it cannot be read."""
        return Encoder(self.tokenizer_dir, self.num_workers)

    @property
    def dtype(self) -> str:
        """Return the smallest type of integers that holds every token."""
        return "uint16" if self.encoder.vocab_size <= 1 << 16 else "uint32"

    def identity(self) -> dict[str, Any]:
        """Return the inputs that decide the tokens, besides the dataset and the tokenizer."""
        return {}

    def check_encoder(self, model_vocab: int) -> None:
        """Raise UsageError if the tokenizer contains ids that the model cannot embed."""
        require_vocabulary(self.encoder.vocab_size, model_vocab, self.tokenizer_dir)

    @abstractmethod
    def tune_encoder(self) -> None:
        """Choose the fastest engine for `encoder`, if this process encodes the dataset itself."""

    @abstractmethod
    def write_splits(self, directory: Path, bar: Progress) -> StoreContents:
        """Write the files of all splits, after those that an interrupted build has written.

        Raises UsageError if they cannot be trained on.
        """

    @abstractmethod
    def estimate_tokens(self) -> int:
        """Estimate the tokens of the training split from a sample.

        Raises ArtifactError if the tokenizer or the text cannot be read, and UsageError if nothing
        in the sample can be trained on.
        """

    def find_store(self, cache_dir: Path, has_begun: bool = False) -> tuple[Path, dict[str, Any]]:
        """Return the directory of the store, which may not exist yet, and the store's identity.

        has_begun: a run that an earlier version began keeps its store without the tokens that the
        settings of the tokenizer add. Raises ArtifactError if the tokenizer cannot be read.
        """
        changes = self.encoder.changes if framing.may_differ(self.tokenizer_dir) else {}
        choices = [self._place_store(cache_dir, {})]
        if changes:
            choices.insert(0, self._place_store(cache_dir, changes))
        existing = [choice for choice in choices if has_begun and choice[0].exists()]
        return (existing or choices)[0]

    def _place_store(
        self, cache_dir: Path, changes: dict[str, bool]
    ) -> tuple[Path, dict[str, Any]]:
        """Return the directory and the identity of a store, as identity.py compares it.

        The directory is found even if the dataset was renamed since the store was built.
        """
        inputs = {
            "dataset": self.dataset.fingerprint,
            "tokenizer": tokenizer_fingerprint(self.tokenizer_dir),
            **self.identity(),
            **changes,
        }
        key = hashing.fingerprint([store.KIND, inputs])[:12]
        root = paths.tokens_root(cache_dir)
        existing = sorted(root.glob(f"*-{key}"))
        new = root / f"{self.dataset.path.resolve().name}-{key}"
        return existing[0] if existing else new, {"options": {}, "inputs": inputs}


def prepare_store(
    tokenization: Tokenization,
    cache_dir: Path,
    model_vocab: int,
    verify: bool = False,
    has_begun: bool = False,
) -> Path:
    """Return the path of the token store of a dataset; build it if needed.

    Every process of a launch may call this function (see `build_once`). model_vocab: the number of
    ids the model can embed. verify: hash an existing store even if it has not changed since the
    last time. has_begun: see `Tokenization.find_store`. Raises UsageError if the tokenizer contains
    larger ids, the dataset was replaced meanwhile, or no conversation can be trained on. Raises
    ArtifactError if the existing store is damaged.
    """
    target, identity = tokenization.find_store(cache_dir, has_begun)

    def build() -> None:
        tokenization.check_encoder(model_vocab)
        with publish.Build(target, store.KIND, identity, overwrite=False, resumable=True) as build:
            try:
                _write_store(build, tokenization)
            except (ArtifactError, UsageError):  # a later run cannot continue after this error
                build.resumable = False
                raise
        verified.record_intact(
            target, manifest.read_manifest(target, store.KIND, "the token store"), cache_dir
        )

    build_once(
        target,
        store.KIND,
        identity,
        build,
        lambda content: verified.require_intact(
            target,
            content,
            "the token store",
            cache_dir,
            workers=tokenization.num_workers,
            progress=tokenization.progress,
            always=verify,
            run=commands.delete_and_rerun(target),
        ),
    )
    if verify:
        log.info(f"{target}: all checksums match")
    # Otherwise ranks that looked later would wait for another store.
    tokenization.dataset.require_same()
    return target


def build_once(
    target: Path,
    kind: str,
    identity: dict[str, Any],
    build: Callable[[], None],
    verify: Callable[[dict[str, Any]], None] = lambda content: None,
) -> None:
    """Build an artifact in one process of each machine while the others wait.

    The others wait for the manifest to appear, without a collective that could time out. verify:
    called by that one process with the manifest of an artifact that existed, or that another
    machine has built. Raises ArtifactError if the existing artifact is damaged.
    """
    if target.is_dir() and any(target.iterdir()) and manifest.read_if_any(target) is None:
        raise ArtifactError(
            f"{target} is damaged (no readable manifest.json)",
            run=commands.delete_and_rerun(target),
        )
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    was_built = False
    is_announced = False

    def is_complete() -> bool:
        """Return whether the artifact is complete, after building it if no other process does."""
        nonlocal was_built, is_announced
        builder = ""
        if publish.is_done(
            target, kind, identity, overwrite=False, run=commands.delete_and_rerun(target)
        ):
            return True
        if is_builder:
            try:
                build()
                was_built = True
                return True
            except publish.AlreadyBuilding as error:  # by another machine or launch
                builder = f" ({error.found})" if error.found else ""
        if not is_announced:
            log.info(f"waiting for {target} to be built by another process{builder}")
            is_announced = True
        return False

    poll(is_complete, _POLL_S)
    if is_builder and not was_built:
        verify(manifest.read_manifest(target, kind, publish.kind_name(kind)))


def require_vocabulary(vocab_size: int, model_vocab: int, tokenizer_dir: Path) -> None:
    """Raise UsageError if a tokenizer contains ids that the model cannot embed."""
    if vocab_size > model_vocab:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} is larger than the model's vocabulary",
            expected=f"at most {model_vocab:,} token ids (vocab_size in config.json)",
            found=f"{vocab_size:,} token ids",
            hint="use the tokenizer that belongs to the model",
        )


def _write_store(build: publish.Build, tokenization: Tokenization) -> None:
    """Write and publish a store, and log its counts by split."""
    dataset = tokenization.dataset
    dataset.check_content()
    text_bytes = dataset.total_bytes()
    # A store is rarely larger than its text: a token takes 2 or 4 bytes and covers 3 or more.
    publish.require_space(build.dir, text_bytes, "the token store")
    log.detail(
        f"tokenising {dataset.path} with {tokenization.tokenizer_dir} → {build.target} "
        f"({tokenization.dtype})"
    )
    tokenization.tune_encoder()
    _require_same_tokenizer(tokenization.tokenizer_dir, build.identity["inputs"]["tokenizer"])
    dataset.require_same()
    began = time.monotonic()
    with Progress("tokenising", text_bytes, "B", tokenization.progress) as bar:
        contents = tokenization.write_splits(build.dir, bar)
    for leftover in (*build.dir.glob(f"*.{PROGRESS}"), *contents.leftovers):
        leftover.unlink()
    dataset.require_same()
    build.publish(
        stage="04_train_fsdp.py",
        options={"num_workers": tokenization.num_workers},
        files=contents.files,
        summary=store.summarise_store(
            tokenization.dtype, tokenization.encoder, contents.counts, contents.facts
        ),
    )
    seconds = time.monotonic() - began
    for name, count in contents.counts.items():
        log.detail(
            f"  {name}: {units.counted(count['tokens'], 'token')} in "
            f"{units.counted(count['documents'], tokenization.unit)}"
        )
    log.detail(f"  {units.size(text_bytes / seconds)}/s, {units.duration(seconds)}")


def _require_same_tokenizer(tokenizer_dir: Path, fingerprint: str) -> None:
    """Raise UsageError if a tokenizer has changed since its fingerprint was taken."""
    if tokenizer_fingerprint(tokenizer_dir) != fingerprint:
        raise UsageError(
            f"the tokenizer in {tokenizer_dir} was replaced while it was read; "
            "no token store was published",
            hint="when no other process writes to it any more:",
            run=commands.as_typed(),
        )
