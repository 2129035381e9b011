"""Render samples as text in which trained and untrained parts are marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from lib.tokens.store import TokenStore

_TRAINED = "\033[32m"  # green
_UNTRAINED = "\033[90m"  # grey
_END = "\033[0m"
_OPEN = "⟦"
_CLOSE = "⟧"
_COLOUR_LEGEND = f"{_TRAINED}trained{_END}, {_UNTRAINED}not trained{_END}"
_BRACKET_LEGEND = (
    f"{_OPEN}trained{_CLOSE}, the rest is not trained; {_OPEN} and {_CLOSE} in the text "
    "are printed as \\u27e6 and \\u27e7"
)
_BRACKETS = re.compile(f"[{_OPEN}{_CLOSE}]")
# Text must not move the cursor or change colours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Of an excerpt: characters per part, and parts.
_LONGEST = 60
_PARTS = 5
_LONGEST_DOCUMENT = 2_000  # tokens; a book would fill the screen


def describe_marks(colour: bool) -> str:
    """Return what the marks of `render_sample` mean."""
    return _COLOUR_LEGEND if colour else _BRACKET_LEGEND


def render_sample(tokens: np.ndarray, trained: np.ndarray, tokenizer: Any, colour: bool) -> str:
    """Return the text of a sample with its special tokens and the trained parts marked.

    tokens: int [T]; trained: bool [T]. colour: mark by terminal colours instead of brackets.
    """
    mark = _mark_by_colour if colour else _mark_by_brackets
    return "".join(mark(*part) for part in _decode_parts(tokens, trained, tokenizer))


def render_excerpt(tokens: np.ndarray, trained: np.ndarray, tokenizer: Any) -> str:
    """Return the beginning of a sample on one line, with trained parts in ⟦…⟧ and long parts cut.

    tokens: int [T]; trained: bool [T].
    """
    parts = [
        _mark_by_brackets(_shorten_text(text).replace("\n", "\\n"), is_trained)
        for text, is_trained in _decode_parts(tokens, trained, tokenizer)
    ]
    return "".join(parts[:_PARTS]) + ("…" if len(parts) > _PARTS else "")


def render_documents(store: TokenStore, count: int, tokenizer: Any, colour: bool) -> Iterator[str]:
    """Yield documents spread evenly over the training split, each after a header line.

    A long document ends with … after its first tokens.
    """
    split = store.splits["train"]
    total = len(split.ends)
    for number in (np.arange(min(count, total)) * total // max(1, min(count, total))).tolist():
        start = int(split.ends[number - 1]) if number else 0
        end = int(split.ends[number])
        trained = np.arange(end - start) > 0 if split.labels is None else split.labels[start:end]
        shown = slice(start, min(end, start + _LONGEST_DOCUMENT))
        beginning = np.asarray(split.tokens[shown])
        text = render_sample(beginning, trained[: len(beginning)], tokenizer, colour)
        text += "" if shown.stop == end else "…"
        yield (
            f"--- {number + 1:,} of {total:,} in {store.path.name}: {end - start:,} tokens, "
            f"{int(trained.sum()):,} trained\n{text}"
        )


def _decode_parts(
    tokens: np.ndarray, trained: np.ndarray, tokenizer: Any
) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of trained or untrained tokens, and whether it is trained."""

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    edges = np.flatnonzero(np.diff(trained)) + 1
    for start, end in pairwise([0, *edges.tolist(), len(trained)] if len(trained) else []):
        # Decode from the start: some tokenizers drop the leading space of a run decoded alone.
        before = decode(tokens[:start])
        text = decode(tokens[:end])
        text = text[len(before) :] if text.startswith(before) else decode(tokens[start:end])
        yield escape_controls(text), bool(trained[start])


def escape_controls(text: str) -> str:
    """Return a text with control characters as escapes, except for tabs and line breaks."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _mark_by_colour(text: str, is_trained: bool) -> str:
    """Return a part of a sample in its colour, line by line for pagers."""
    paint = _TRAINED if is_trained else _UNTRAINED
    return "\n".join(f"{paint}{line}{_END}" if line else "" for line in text.split("\n"))


def _mark_by_brackets(text: str, is_trained: bool) -> str:
    """Return a part of a sample, in ⟦…⟧ if it is trained, with brackets in the text escaped."""
    text = _BRACKETS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"{_OPEN}{text}{_CLOSE}" if is_trained else text


def _shorten_text(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}"
