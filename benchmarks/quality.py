"""Measure what the quality rules of a curation cost, beside the pass over the words alone.

    python benchmarks/quality.py /usr/lib/python3* docs

Reads the .py, .md, .txt and .rst files below the directories, in batches of documents as a curation
does, and prints the time per 3,000 characters. Each batch is measured several times and the fastest
time counts, because other processes slow a busy machine down.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.curate.quality import thresholds
from lib.curate.quality.judge import Judge
from lib.curate.quality.layout import find_layouts
from lib.curate.quality.word_lists import ENGLISH_LISTS
from lib.curate.words import BATCH_CHARACTERS, find_words

_SUFFIXES = {".py", ".md", ".txt", ".rst"}
_UNIT = 3000  # characters
_TIMES = 30


def read_texts(directories: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each file."""
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                yield path.read_text(encoding="utf-8", errors="replace")


def make_batches(texts: Iterator[str], most: int) -> list[list[str]]:
    """Return the texts in batches, as a curation makes them. most: characters in all."""
    batches: list[list[str]] = [[]]
    size = 0
    total = 0
    for text in texts:
        if batches[-1] and size + len(text) > BATCH_CHARACTERS:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
        total += len(text)
        if total > most:
            break
    return batches


def measure_seconds(compute: Callable[[list[str]], object], batches: list[list[str]]) -> float:
    """Return the seconds for all batches: the sum of the fastest time of each."""
    total = 0.0
    for batch in batches:
        times = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            compute(batch)
            times.append(time.perf_counter() - began)
        total += min(times)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--megabytes", type=int, default=10)
    args = parser.parse_args()
    batches = make_batches(read_texts(args.directories), args.megabytes * 1_000_000)
    characters = sum(map(len, (text for batch in batches for text in batch)))
    documents = sum(map(len, batches))
    print(f"{characters / 1e6:.1f} M characters, {documents:,} documents; load {os.getloadavg()}\n")
    print("| | MB/s | µs per 3,000 characters | beyond the words |\n|---|---|---|---|")
    words = measure_seconds(find_words, batches)
    steps: dict[str, Callable[[list[str]], object]] = {
        "words": find_words,
        "words, lines, tokens": find_layouts,
    }
    for families in (*((name,) for name in thresholds.FAMILIES), thresholds.FAMILIES):
        judge = Judge(thresholds.find_limits(families, []), {"": ENGLISH_LISTS})
        steps[", ".join(families)] = lambda batch, judge=judge: judge.measure(
            find_layouts(batch), [""] * len(batch)
        )
    for name, compute in steps.items():
        seconds = words if compute is find_words else measure_seconds(compute, batches)
        share = _UNIT / characters * 1e6
        print(
            f"| {name} | {characters / seconds / 1e6:.0f} | {seconds * share:.1f} "
            f"| {(seconds - words) * share:.1f} |"
        )


if __name__ == "__main__":
    main()
