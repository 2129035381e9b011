"""Turn the requests of a suite into rows of tokens, and the rows into batches of few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lib.core import units
from lib.core.errors import UsageError
from lib.evaluate.tasks import Request, Task
from lib.tokens.encode import Encoder, Ids
from lib.tokens.samples import IGNORED

if TYPE_CHECKING:  # importing torch takes seconds, and problems in a suite come first
    from lib.tokens.batches import MicroBatch

_SHORTEST = 16  # the fewest tokens of a padded row; fp8 needs multiples of it
_MOST_ROWS = 256  # the most rows of a batch


class ScoredRow(NamedTuple):
    """Contains tokens to pass through the model; only the last `scored` tokens count.

    number: index of the row in its suite. request: index of the request. ids: int64 [n + 1]; the
    model reads the first n.
    """

    number: int
    request: int
    ids: np.ndarray
    scored: int


@dataclass(frozen=True)
class EncodedSuite:
    """Contains the distinct requests of a suite as rows, and the sizes that the figures need.

    requests: for each request of the tasks, in their order, the index of the equal distinct
    request. By distinct request: tokens, bytes (sizes of the scored text), is_cut (whether the
    prompt was cut at the left). context_length: the most tokens that the model reads at once.
    """

    rows: list[ScoredRow]
    requests: list[int]
    tokens: list[int]
    bytes: list[int]
    is_cut: list[bool]
    context_length: int


class BatchPlan(NamedTuple):
    """Contains the batches of a suite: padded length, number of rows with padding, and rows."""

    batches: list[tuple[int, int, list[ScoredRow]]]

    def count_passes(self, ranks: int) -> int:
        """Return the number of forward passes of each rank."""
        return units.ceil_div(len(self.batches), ranks)

    def of_rank(self, rank: int, ranks: int) -> Iterator[tuple[MicroBatch, list[ScoredRow]]]:
        """Yield the batches of a rank; all ranks get the same number of them.

        A batch contains the same rows for any number of ranks, so that its result is the same to
        the bit. Ranks without a batch in the last round get a batch of padding.
        """
        for number in range(rank, self.count_passes(ranks) * ranks, ranks):
            length, count, rows = (
                self.batches[number]
                if number < len(self.batches)
                else (*self.batches[-1][:2], list[ScoredRow]())
            )
            yield _make_batch(length, count, rows), rows


def encode_suite(tasks: Sequence[Task], encoder: Encoder, context_length: int) -> EncodedSuite:
    """Encode the requests of tasks. Raises UsageError if a text cannot be scored.

    The tokens are those of lm-eval: space at the end of a context belongs to the text after it, and
    both are encoded together. BOS precedes a context if the tokenizer adds it, as in training.
    context_length: the most tokens that the model reads at once.
    """
    numbers: dict[Request, int] = {}
    requests = [
        numbers.setdefault(_move_space(request), len(numbers))
        for task in tasks
        for item in task.items
        for request in item.requests
    ]
    distinct = list(numbers)
    contexts = _Encodings(encoder, [request.context for request in distinct])
    together = _Encodings(encoder, ["".join(request) for request in distinct])
    rows: list[ScoredRow] = []
    tokens = []
    is_cut = []
    for index, request in enumerate(distinct):
        context = contexts[request.context]
        ids = together["".join(request)]
        if len(ids) <= len(context):  # the tokenizer joins them into one token
            ids = np.concatenate([context, _Encodings(encoder, [request[1]])[request[1]]])
        scored = len(ids) - len(context)
        if not scored:
            raise UsageError(f"the tokenizer gives no token for {request.continuation!r}")
        ids = _add_prefix(encoder, ids, not len(context))
        for part, count in _cut_rows(ids, scored, context_length):
            rows.append(ScoredRow(len(rows), index, part, count))
        tokens.append(scored)
        is_cut.append(len(ids) - 1 > context_length)
    sizes = [len(request.continuation.encode()) for request in distinct]
    return EncodedSuite(rows, requests, tokens, sizes, is_cut, context_length)


def plan_batches(suite: EncodedSuite, rows_of: Callable[[int], int]) -> BatchPlan:
    """Divide the rows of a suite into batches, the longest first.

    Rows of about the same length are in the same batch. They are padded to one of a few lengths,
    about two for each power of two. rows_of: returns the rows of a batch for the length of a row.
    """
    by_length: dict[int, list[ScoredRow]] = {}
    for row in suite.rows:
        by_length.setdefault(round_length(len(row.ids) - 1, suite.context_length), []).append(row)
    batches = []
    for length, rows in sorted(by_length.items(), reverse=True):
        count = min(_MOST_ROWS, max(1, rows_of(length)))
        batches += [
            (length, count, rows[first : first + count]) for first in range(0, len(rows), count)
        ]
    return BatchPlan(batches)


def round_length(length: int, most: int) -> int:
    """Return the padded length of a row: 16, 32, 48, 64, 96, 128, 192, 256, …, at most `most`."""
    power = _SHORTEST
    while power < length:
        if power > _SHORTEST and length <= power + power // 2:
            return min(power + power // 2, most)
        power *= 2
    return min(power, most)


class _Encodings:
    """Contains the token IDs of distinct texts, without BOS and EOS."""

    def __init__(self, encoder: Encoder, texts: Sequence[str]) -> None:
        self._numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        ids, lengths = self._encode(encoder)
        self._ids = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])

    def _encode(self, encoder: Encoder) -> Ids:
        return encoder.encode_bare([text.encode() for text in self._numbers])

    def __getitem__(self, text: str) -> np.ndarray:
        return self._ids[self._numbers[text]]


def _move_space(request: Request) -> Request:
    """Return a request whose context does not end in space; the space moves to the continuation."""
    context = request.context.rstrip()
    return Request(context, request.context[len(context) :] + request.continuation)


def _add_prefix(encoder: Encoder, ids: np.ndarray, is_bare: bool) -> np.ndarray:
    """Return ids with the token that precedes a document in training, if there is one.

    is_bare: there is no context, so a token must precede the first scored token.
    """
    prefix = encoder.bos
    if prefix is None and is_bare:
        prefix = encoder.eos
        if prefix is None:
            raise UsageError(
                "a text without context cannot be scored",
                found=f"the tokenizer in {encoder.directory} has neither BOS nor EOS",
            )
    return ids if prefix is None else np.insert(ids, 0, prefix)


def _cut_rows(
    ids: np.ndarray, scored: int, context_length: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the rows of a request and how many of their last tokens count, cut at the left.

    Scored tokens are never cut off. If there are more than `context_length`, several rows score
    parts of them, each after at least half as many earlier tokens.
    """
    if scored <= context_length:
        yield ids[-(context_length + 1) :], scored
        return
    step = max(1, context_length // 2)
    for begin in range(len(ids) - scored, len(ids), step):
        end = min(begin + step, len(ids))
        yield ids[max(0, end - 1 - context_length) : end], end - begin


def _make_batch(length: int, count: int, rows: Sequence[ScoredRow]) -> MicroBatch:
    """Return rows as a micro-batch [count, length], with IGNORED for labels that do not count."""
    import torch

    from lib.tokens.batches import MicroBatch

    inputs = np.zeros((count, length), np.int64)
    labels = np.full((count, length), IGNORED, np.int64)
    for place, row in enumerate(rows):
        size = len(row.ids) - 1
        inputs[place, :size] = row.ids[:-1]
        labels[place, size - row.scored : size] = row.ids[len(row.ids) - row.scored :]
    return MicroBatch(torch.from_numpy(inputs), torch.from_numpy(labels))
