# covers: lib/evaluate/passes.py, lib/evaluate/results.py
"""Requests become rows that fit the context length, and log-likelihoods become figures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lib.core.errors import UsageError
from lib.evaluate import __main__ as evaluate_main
from lib.evaluate import passes, results
from lib.evaluate.passes import EncodedSuite
from lib.evaluate.tasks import Item, Request, Task
from lib.tokens.encode import Encoder
from lib.tokens.samples import IGNORED


class Letters(Encoder):
    """Encodes each character as its code point; `bos` and `eos` are settings of a test."""

    def __init__(self, bos: int | None = None, eos: int | None = 0) -> None:
        self.bos = bos
        self.eos = eos
        self.directory = Path("letters")

    def encode_bare(self, texts):
        ids = [ord(letter) for text in texts for letter in text.decode()]
        return np.array(ids, np.uint32), np.array([len(text.decode()) for text in texts])


def make_task(*items: Item, metric: str = "accuracy") -> Task:
    return Task("task", items, metric)


def encode_requests(
    requests: list[Request], context_length: int = 8, **tokens: int | None
) -> EncodedSuite:
    items = [Item((request,)) for request in requests]
    return passes.encode_suite([make_task(*items)], Letters(**tokens), context_length)


def test_space_before_the_answer_belongs_to_it_and_equal_requests_are_one() -> None:
    suite = encode_requests([Request("ab \n", "c"), Request("ab", " \nc"), Request("", "é")], bos=1)
    assert suite.requests == [0, 0, 1]
    assert (suite.tokens, suite.bytes) == ([3, 1], [3, 2])
    assert suite.rows[0].ids.tolist() == [1, *map(ord, "ab \nc")] and suite.rows[0].scored == 3
    assert suite.rows[1].ids.tolist() == [1, ord("é")]


def test_without_bos_a_bare_text_follows_eos_as_in_training() -> None:
    suite = encode_requests([Request("", "ab"), Request("x", "ab")], eos=2)
    assert [row.ids.tolist() for row in suite.rows] == [[2, 97, 98], [120, 97, 98]]
    with pytest.raises(UsageError, match="without context"):
        encode_requests([Request("", "ab")], eos=None)


def test_a_context_is_cut_at_the_left_and_an_answer_never() -> None:
    fits, cut, long = (
        Request("".ljust(n, "c"), "".ljust(m, "a")) for n, m in ((6, 3), (9, 2), (3, 21))
    )
    suite = encode_requests([fits, cut, long])
    assert suite.is_cut == [False, True, True]
    assert [(len(row.ids), row.scored) for row in suite.rows[:2]] == [(9, 3), (9, 2)]
    parts = suite.rows[2:]
    assert sum(row.scored for row in parts) == 21 and {row.request for row in parts} == {2}
    assert all(len(row.ids) <= 9 and len(row.ids) - row.scored >= 3 for row in parts)


def test_batches_have_few_shapes_and_all_ranks_as_many() -> None:
    lengths = [passes.round_length(length, 200) for length in range(1, 201)]
    assert sorted(set(lengths)) == [16, 32, 48, 64, 96, 128, 192, 200]
    assert all(length <= padded for length, padded in enumerate(lengths, 1))
    suite = encode_requests(
        [Request("".ljust(n, "c"), "ab") for n in range(1, 40)], context_length=40
    )
    plan = passes.plan_batches(suite, lambda length: 96 // length)
    shapes = {}
    for ranks in (1, 2, 5):
        of_ranks = [list(plan.of_rank(rank, ranks)) for rank in range(ranks)]
        assert {len(batches) for batches in of_ranks} == {plan.count_passes(ranks)}
        computed = [row.number for batches in of_ranks for _, rows in batches for row in rows]
        assert sorted(computed) == list(range(39))
        shapes[ranks] = {tuple(batch.labels.shape) for batches in of_ranks for batch, _ in batches}
    assert shapes[1] == shapes[2] == shapes[5] == {(6, 16), (3, 32), (2, 40)}
    batch, rows = next(plan.of_rank(0, 1))
    assert int((batch.labels != IGNORED).sum()) == sum(row.scored for row in rows)
    size = len(rows[0].ids) - 1
    assert batch.input_ids[0, :size].tolist() == rows[0].ids[:-1].tolist()
    assert batch.labels[0, size - 2 : size].tolist() == rows[0].ids[-2:].tolist()


def test_figures_of_choices() -> None:
    items = (
        Item((Request("q", " a"), Request("q", " bbbb")), 1),
        Item((Request("r", " c"), Request("r", " dd"), Request("r", " é")), 2),
    )
    suite = passes.encode_suite([make_task(*items)], Letters(), 8)
    nats = np.array([-1.0, -2.0, -1.0, -5.0, -0.5])
    (result,) = results.compute_results([make_task(*items)], suite, nats)
    assert result.values["accuracy"] == 0.5  # "a" is likelier than "bbbb"
    assert result.values["accuracy_per_char"] == 1.0
    assert result.values["bits_per_byte"] == pytest.approx(2.5 / math.log(2) / 8)  # é: two bytes
    assert result.errors["accuracy"] == pytest.approx(0.5)
    assert result.chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert result.figures()["eval/task/accuracy_per_token"] == 1.0
    head, line = results.format_table([result])
    assert head.split() == ["task", "items", "metric", "value", "chance", "licence"]
    assert line == "task      2  accuracy  0.500 ± 0.500   0.417  not named"


def test_nan_is_no_choice() -> None:
    """A diverged model must not score as if it always chose the first answer."""
    item = Item((Request("q", " a"), Request("q", " b")), 0)
    tasks = [make_task(item), make_task(Item((Request("r", " a"), Request("r", " b")), 0))]
    suite = passes.encode_suite(tasks, Letters(), 8)
    broken, sound = results.compute_results(tasks, suite, np.array([np.nan, np.nan, -1.0, -2.0]))
    assert all(map(math.isnan, [*broken.values.values(), *broken.errors.values()]))
    assert sound.values["accuracy"] == 1.0 and sound.is_known and not broken.is_known
    evaluate_main._require_numbers([sound], Path("model"), "fp32")
    with pytest.raises(UsageError, match="NaN"):
        evaluate_main._require_numbers([sound, broken], Path("model"), "fp32")
