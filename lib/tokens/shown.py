"""Print samples before training, with trained and untrained text told apart."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import log
from lib.tokens.encode import Encoder
from lib.tokens.store import TokenStore

_TRAINED = "\033[32m"  # green
_READ = "\033[90m"  # grey
_END = "\033[0m"
_OPEN = "⟦"
_CLOSE = "⟧"
_LEGEND = {
    True: f"{_TRAINED}trained{_END}, {_READ}not trained{_END}",
    False: f"{_OPEN}trained{_CLOSE}, the rest is not trained; {_OPEN} and {_CLOSE} in the text "
    "are printed as \\u27e6 and \\u27e7",
}
_OWN_BRACKETS = re.compile(f"[{_OPEN}{_CLOSE}]")
# Text must not move the cursor or change colours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def render_sample(tokens: np.ndarray, trained: np.ndarray, tokenizer: Any, colour: bool) -> str:
    """Return the text of a sample with its special tokens and the trained parts marked.

    tokens: int [T]; trained: bool [T]. colour: mark by terminal colours instead of brackets.
    """
    shown = []
    for start, end in _find_runs(trained):
        # Decode from the start: some tokenizers drop the leading space of a run decoded alone.
        before, text = (
            tokenizer.decode(
                tokens[:stop].tolist(),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            for stop in (start, end)
        )
        text = (
            text[len(before) :]
            if text.startswith(before)
            else tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        )
        text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        if colour:  # line by line, since pagers reset colours at a line break
            paint = _TRAINED if trained[start] else _READ
            text = "\n".join(f"{paint}{line}{_END}" if line else "" for line in text.split("\n"))
        else:
            text = mark_trained(text, trained[start])
        shown.append(text)
    return "".join(shown)


def mark_trained(text: str, is_trained: bool) -> str:
    """Return a part of a sample, in ⟦…⟧ if it is trained, with brackets in the text escaped."""
    text = _OWN_BRACKETS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"{_OPEN}{text}{_CLOSE}" if is_trained else text


def _find_runs(trained: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of tokens that are all trained or all untrained."""
    edges = np.flatnonzero(np.diff(trained)) + 1
    bounds = [0, *edges.tolist(), len(trained)]
    return pairwise(bounds) if len(trained) else iter(())


def render_documents(store: TokenStore, count: int, tokenizer: Any, colour: bool) -> Iterator[str]:
    """Yield documents spread evenly over the training split, each after a header line."""
    split = store.splits["train"]
    total = len(split.ends)
    for number in (np.arange(min(count, total)) * total // max(1, min(count, total))).tolist():
        start = int(split.ends[number - 1]) if number else 0
        end = int(split.ends[number])
        trained = np.arange(end - start) > 0 if split.labels is None else split.labels[start:end]
        text = render_sample(np.asarray(split.tokens[start:end]), trained, tokenizer, colour)
        yield (
            f"--- {number + 1:,} of {total:,} in {store.path.name}: {end - start:,} tokens, "
            f"{int(trained.sum()):,} trained\n{text}"
        )


def print_samples(stores: Sequence[TokenStore], count: int, tokenizer_dir: Path) -> None:
    """Print some samples of each store, in colour on a terminal."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    tokenizer = Encoder(tokenizer_dir, 1).tokenizer
    log.info(f"training samples ({_LEGEND[colour]}):")
    for store in stores:
        for text in render_documents(store, count, tokenizer, colour):
            log.info(text)
