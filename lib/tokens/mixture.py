"""Several corpora in one stream, in exact proportions: `-d a=0.7 -d b=0.3`.

An epoch is as many samples as the corpora have together. Each corpus runs through its own order
and starts over when it is through. Without weights each has the share of its size, so that an
epoch holds every sample once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from lib.core import hashing
from lib.core.errors import Problems, UsageError
from lib.tokens import order
from lib.tokens.dataset import Dataset, find_dataset, open_dataset
from lib.tokens.samples import Rows, Samples


@dataclass(frozen=True)
class Corpus:
    """Names a dataset of the mixture. weight: as given, None for the share of its size."""

    weight: Fraction | None
    dataset: Dataset

    def __str__(self) -> str:
        return str(self.dataset.path) + (f" × {float(self.weight):g}" if self.weight else "")


def open_corpora(arguments: Sequence[str]) -> list[Corpus]:
    """Return the datasets that `DIR` or `DIR=WEIGHT` name.

    Raises ArtifactError or UsageError that tells all that is wrong with them.
    """
    problems = Problems()
    opened = [problems.collect(partial(_open, argument)) for argument in arguments]
    problems.raise_if_any()
    corpora = [corpus for corpus in opened if corpus is not None]
    if len({corpus.weight is None for corpus in corpora}) > 1:
        problems.add(
            "some datasets have a weight and some have none",
            expected="-d DIR=WEIGHT for each of them, or for none",
        )
    paths = [corpus.dataset.path.resolve() for corpus in corpora]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        problems.add(
            f"-d {path} is given twice",
            expected="each dataset once; a weight says how much of it there is",
        )
    problems.raise_if_any()
    return corpora


def _open(argument: str) -> Corpus:
    name, text = split_weight(argument)
    if text is None:
        return Corpus(None, open_dataset(find_dataset(name)))
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        raise UsageError(f"-d {argument}: {text!r} is not a weight", expected="a number above 0")
    return Corpus(weight, open_dataset(find_dataset(name)))


def split_weight(argument: str) -> tuple[str, str | None]:
    """Split `NAME=WEIGHT` as -d takes it; the weight is None for a name alone."""
    name, equals, text = argument.rpartition("=")
    if not equals or find_dataset(argument).exists():  # names may contain the sign
        return argument, None
    return name, text


def fingerprint(corpora: Sequence[Corpus]) -> str:
    """Identify the content and the proportions of some datasets, wherever they lie."""
    if len(corpora) == 1:
        return corpora[0].dataset.fingerprint
    given = [corpus.weight for corpus in corpora if corpus.weight]
    weights = _whole(given) if given else None
    return hashing.fingerprint([[corpus.dataset.fingerprint for corpus in corpora], weights])


def mix(corpora: Sequence[Corpus], samples: Sequence[Samples]) -> Samples:
    """Return the stream of all corpora, samples[i] those of corpora[i].

    Raises UsageError when one of several has no sample, or the weights are too fine.
    """
    if len(corpora) == 1:
        return samples[0]
    problems = Problems()
    for corpus, part in zip(corpora, samples, strict=True):
        if len(part) == 0:
            problems.add(
                f"{corpus.dataset.path} is shorter than one sample",
                expected="more text, a smaller --seq-length, or a mixture without it",
            )
    problems.raise_if_any()
    weights = [
        corpus.weight or Fraction(len(part)) for corpus, part in zip(corpora, samples, strict=True)
    ]
    return Mixture(names(corpora), samples, _whole(weights))


def names(corpora: Sequence[Corpus]) -> list[str]:
    """Return what to call each: the name of its directory, or the path where that is not enough."""
    short = [corpus.dataset.path.resolve().name for corpus in corpora]
    return [
        name if short.count(name) == 1 else str(corpus.dataset.path)
        for name, corpus in zip(short, corpora, strict=True)
    ]


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Return weights as whole numbers; UsageError when they differ by too much."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    numbers = [number // math.gcd(*numbers) for number in numbers]
    if sum(numbers) > order.LARGEST_SUM:
        raise UsageError(
            "the shares of the datasets are too fine",
            expected="-d DIR=WEIGHT with numbers of a few digits, as 0.7 and 0.3",
            found=", ".join(f"{float(weight):.17g}" for weight in weights),
        )
    return numbers


@dataclass(frozen=True)
class HeldOut:
    """Holds the validation split of a corpus. weight: of its loss in the mean over all."""

    name: str
    weight: int
    samples: Samples


def held_out(
    corpora: Sequence[Corpus], train: Samples, validation: Sequence[Samples | None]
) -> list[HeldOut]:
    """Return the validation splits that there are and that hold a sample."""
    weights = train.weights if isinstance(train, Mixture) else [1]
    return [
        HeldOut(name, weight, samples)
        for name, weight, samples in zip(names(corpora), weights, validation, strict=True)
        if samples
    ]


class Mixture(Samples):
    """Numbers the samples of several corpora, one corpus after the other.

    weights: their shares of the stream, whole numbers.
    """

    def __init__(
        self, names: Sequence[str], parts: Sequence[Samples], weights: Sequence[int]
    ) -> None:
        self.names = list(names)
        self.parts = list(parts)
        self.weights = list(weights)
        self._first = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def most_documents(self) -> int:
        return max(part.most_documents for part in self.parts)

    def stream(self, first: int, count: int, seed: int) -> np.ndarray:
        corpus, own = order.deal(np.arange(first, first + count), self.weights)
        chosen = np.empty(count, np.int64)
        for i, part in enumerate(self.parts):
            mine = corpus == i
            chosen[mine] = self._first[i] + order.samples_at(own[mine], len(part), seed, i)
        return chosen

    def rows(self, samples: np.ndarray) -> Rows:
        places, found = self._by_corpus(samples)
        taken = [self.parts[i].rows(numbers) for i, numbers in found]
        back = np.argsort(np.concatenate(places))
        return Rows._make(
            None if column[0] is None else np.concatenate(column)[back]
            for column in zip(*taken, strict=True)
        )

    def counts(self, samples: np.ndarray) -> tuple[int, int]:
        each = [self.parts[i].counts(numbers) for i, numbers in self._by_corpus(samples)[1]]
        return sum(labels for labels, _ in each), sum(tokens for _, tokens in each)

    def means(self) -> tuple[float, float]:
        each = np.array([part.means() for part in self.parts])
        labels, tokens = np.average(each, axis=0, weights=self.weights)
        return float(labels), float(tokens)

    def describe(self, numbers: int) -> dict[str, str]:
        """Return a line per corpus: its share, and how often `numbers` samples run through it."""
        rows = {}
        for name, part, weight in zip(self.names, self.parts, self.weights, strict=True):
            share = weight / sum(self.weights)
            rows[f"  {name}"] = (
                f"{100 * share:.4g} % of the samples; {len(part):,} in it, "
                f"{numbers * share / len(part):.2f} passes"
            )
        return rows

    def _by_corpus(
        self, samples: np.ndarray
    ) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]]]:
        """Return by corpus that has any: where its samples stand, and its number and theirs."""
        corpus = np.searchsorted(self._first, samples, side="right") - 1
        places = [np.flatnonzero(corpus == i) for i in range(len(self.parts))]
        return (
            [at for at in places if len(at)],
            [(i, samples[at] - self._first[i]) for i, at in enumerate(places) if len(at)],
        )
