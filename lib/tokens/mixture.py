"""Mix several corpora in exact proportions: `-d a=0.7 -d b=0.3`.

An epoch has as many samples as all corpora together. Each corpus has its own order and starts over
at its end. Without weights, the shares are the sizes, so an epoch contains every sample once.
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
from lib.tokens.samples import SampleArrays, Samples
from lib.tokens.text_bytes import SplitText


@dataclass(frozen=True)
class Corpus:
    """Names a dataset of the mixture. weight: as typed, None if the size decides the share."""

    weight: Fraction | None
    dataset: Dataset

    def __str__(self) -> str:
        return str(self.dataset.path) + (f" × {float(self.weight):g}" if self.weight else "")


def open_corpora(arguments: Sequence[str]) -> list[Corpus]:
    """Open the datasets that `DIR` or `DIR=WEIGHT` name.

    Raises one ArtifactError or UsageError that lists all problems.
    """
    problems = Problems()
    opened = [problems.collect(partial(_open_corpus, argument)) for argument in arguments]
    problems.raise_if_any()
    corpora = [corpus for corpus in opened if corpus is not None]
    if len({corpus.weight is None for corpus in corpora}) > 1:
        problems.add(
            "some datasets have a weight and others have none",
            expected="-d DIR=WEIGHT for each of them, or for none",
        )
    paths = [corpus.dataset.path.resolve() for corpus in corpora]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        problems.add(
            f"-d {path} is given twice",
            expected="each dataset once; a weight sets its share",
        )
    problems.raise_if_any()
    return corpora


def _open_corpus(argument: str) -> Corpus:
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
    """Split `NAME=WEIGHT`, a value of -d. The weight is None for a name alone."""
    name, equals, text = argument.rpartition("=")
    if not equals or find_dataset(argument).exists():  # names may contain the sign
        return argument, None
    return name, text


def fingerprint_corpora(corpora: Sequence[Corpus]) -> str:
    """Identify the content and the proportions of some datasets, independent of their paths."""
    if len(corpora) == 1:
        return corpora[0].dataset.fingerprint
    typed_weights = [corpus.weight for corpus in corpora if corpus.weight]
    weights = _scale_to_integers(typed_weights) if typed_weights else None
    return hashing.fingerprint([[corpus.dataset.fingerprint for corpus in corpora], weights])


def mix_samples(corpora: Sequence[Corpus], samples: Sequence[Samples]) -> Samples:
    """Return the samples of all corpora in one stream. samples[i]: from corpora[i].

    Raises UsageError if one of several corpora has no sample, or the weights have too many digits.
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
    return Mixture(name_corpora(corpora), samples, _scale_to_integers(weights))


def name_corpora(corpora: Sequence[Corpus]) -> list[str]:
    """Return a name for each corpus: its directory's name, or the path if that is ambiguous."""
    short_names = [corpus.dataset.path.resolve().name for corpus in corpora]
    return [
        name if short_names.count(name) == 1 else str(corpus.dataset.path)
        for name, corpus in zip(short_names, corpora, strict=True)
    ]


def _scale_to_integers(weights: Sequence[Fraction]) -> list[int]:
    """Return integers in the same proportions. Raises UsageError if their sum is too large."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    numbers = [number // math.gcd(*numbers) for number in numbers]
    if sum(numbers) > order.LARGEST_SUM:
        raise UsageError(
            "the weights of the datasets have too many digits",
            expected="-d DIR=WEIGHT with numbers of a few digits, such as 0.7 and 0.3",
            found=", ".join(f"{float(weight):.17g}" for weight in weights),
        )
    return numbers


@dataclass(frozen=True)
class ValidationSplit:
    """Holds the validation split of a corpus.

    weight: the weight of its loss in the mean over all corpora. text: the bytes and sources of its
    tokens; None for conversations, and for a token store that lacks them.
    """

    name: str
    weight: int
    samples: Samples
    text: SplitText | None = None


def list_validation_splits(
    corpora: Sequence[Corpus],
    train: Samples,
    validation: Sequence[Samples | None],
    texts: Sequence[SplitText | None],
) -> list[ValidationSplit]:
    """Return the validation splits that contain a sample.

    train: the result of `mix_samples`. validation: the split of each corpus, or None. texts: see
    ValidationSplit.
    """
    weights = train.weights if isinstance(train, Mixture) else [1]
    return [
        ValidationSplit(name, weight, samples, text)
        for name, weight, samples, text in zip(
            name_corpora(corpora), weights, validation, texts, strict=True
        )
        if samples
    ]


class Mixture(Samples):
    """Indexes the samples of several corpora consecutively, and mixes them in the stream.

    parts: the samples of each corpus. weights: integers, the relative shares of the corpora.
    """

    def __init__(
        self, names: Sequence[str], parts: Sequence[Samples], weights: Sequence[int]
    ) -> None:
        self.names = list(names)
        self.parts = list(parts)
        self.weights = list(weights)
        self.seq_length = self.parts[0].seq_length
        self._first = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def most_documents(self) -> int:
        return max(part.most_documents for part in self.parts)

    def stream(self, first: int, count: int, seed: int) -> np.ndarray:
        corpus, positions = order.interleave_corpora(np.arange(first, first + count), self.weights)
        samples = np.empty(count, np.int64)
        for i, part in enumerate(self.parts):
            is_own = corpus == i
            samples[is_own] = self._first[i] + order.samples_at(
                positions[is_own], len(part), seed, i
            )
        return samples

    def read_samples(self, numbers: np.ndarray) -> SampleArrays:
        split = self._split_by_corpus(numbers)
        arrays = [part.read_samples(own_numbers) for part, _, own_numbers in split]
        back = np.argsort(np.concatenate([places for _, places, _ in split]))
        return SampleArrays._make(
            None if column[0] is None else np.concatenate(column)[back]
            for column in zip(*arrays, strict=True)
        )

    def token_counts(self, numbers: np.ndarray) -> tuple[int, int]:
        counts = [
            part.token_counts(own_numbers)
            for part, _, own_numbers in self._split_by_corpus(numbers)
        ]
        return sum(labels for labels, _ in counts), sum(tokens for _, tokens in counts)

    def mean_counts(self) -> tuple[float, float]:
        means = np.array([part.mean_counts() for part in self.parts])
        labels, tokens = np.average(means, axis=0, weights=self.weights)
        return float(labels), float(tokens)

    def describe(self, count: int) -> dict[str, str]:
        """Return a row per corpus: its share, and its epochs in a run of `count` samples."""
        rows = {}
        for name, part, weight in zip(self.names, self.parts, self.weights, strict=True):
            share = weight / sum(self.weights)
            rows[f"  {name}"] = (
                f"{100 * share:.4g} % of the samples; {len(part):,} in it, "
                f"{count * share / len(part):.2f} passes"
            )
        return rows

    def _split_by_corpus(self, numbers: np.ndarray) -> list[tuple[Samples, np.ndarray, np.ndarray]]:
        """Group samples by corpus; corpora without any of them are left out.

        Return for each corpus its `Samples`, the positions of its samples in `numbers`, and the
        indices of these samples within the corpus.
        """
        corpus = np.searchsorted(self._first, numbers, side="right") - 1
        places = [np.flatnonzero(corpus == i) for i in range(len(self.parts))]
        return [
            (self.parts[i], at, numbers[at] - self._first[i])
            for i, at in enumerate(places)
            if len(at)
        ]
