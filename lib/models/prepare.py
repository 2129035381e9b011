"""What stage 03 does with a model's directory, wherever its files came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, publish, units
from lib.core.errors import StageError
from lib.models import tokenizer

if TYPE_CHECKING:
    from lib.models.check import Facts


@contextmanager
def called(name: str, directory: Path) -> Iterator[None]:
    """Let errors about a directory of ours, maybe soon gone, speak of something known instead."""
    try:
        yield
    except StageError as error:
        for part in ("problem", "expected", "found", "run"):
            setattr(error, part, getattr(error, part).replace(str(directory), name))
        raise


def examine(build: publish.Build, *, weights: bool, name: str, trust_code: bool = False) -> Facts:
    """Check the finished directory; what was fetched is kept also if it does not fit."""
    from lib.models import check

    try:
        with called(name, build.dir):
            return check.examine(build.dir, weights=weights, trust_code=trust_code)
    except StageError:
        if build.resumable:
            log.info(f"kept in {build.partial}, so that the same command need not fetch it again; "
                     "or delete that")
        raise


def train_tokenizer(corpus: Path, vocabulary: int, context: int | None, into: Path, workers: int,
                    show_progress: bool) -> None:
    """Train the tokenizer, and say what it saw and whether it came out smaller than asked."""
    made, sample = tokenizer.train(corpus, vocabulary, context, into, workers=workers,
                                   show_progress=show_progress)
    log.info(f"tokenizer: {vocabulary:,} tokens from {sample}")
    if made < vocabulary:
        log.warn(f"{corpus} holds too little text for {vocabulary:,} tokens: text gives {made:,} "
                 "of them, the others stay unused")


def print_facts(target: Path, facts: Facts) -> None:
    """Print what a model is, and what training it takes."""
    unused = facts.vocabulary - facts.tokens
    log.table({
        "model": target,
        "parameters": f"{facts.parameters:,} ({units.count(facts.parameters)}), {facts.dtype}",
        "vocabulary": f"{facts.vocabulary:,} rows, {facts.tokens:,} tokens in the tokenizer"
                      + (f" ({units.counted(unused, 'row')} to spare)" if unused else ""),
        "context": f"{facts.context:,} tokens" if facts.context else "not limited by the config",
        "to train": facts.memory.text(),
    })
    for line in facts.memory.notes():
        log.info(f"    {line}")
