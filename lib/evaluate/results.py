"""Compute the figures of tasks from log-likelihoods, and show them as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lib.evaluate.passes import EncodedSuite
from lib.evaluate.tasks import ACCURACY, BITS_PER_BYTE, PER_CHAR, PER_TOKEN, Item, Task

_COLUMNS = ("task", "items", "metric", "value", "chance", "licence")


@dataclass(frozen=True)
class TaskResult:
    """Contains the figures of a task.

    metric: the metric that the table shows. values: figures by metric. errors: standard errors of
    the accuracies, by metric. chance: accuracy of random choices, None without choices. cut: number
    of requests whose prompt did not fit the context length.
    """

    task: str
    items: int
    metric: str
    values: dict[str, float]
    errors: dict[str, float]
    chance: float | None
    licence: str
    cut: int

    def figures(self) -> dict[str, float]:
        """Return the figures by their keys in metrics.jsonl."""
        return {f"eval/{self.task}/{metric}": value for metric, value in self.values.items()}

    def describe(self) -> str:
        """Return the value of the task's metric, an accuracy with its standard error."""
        error = self.errors.get(self.metric)
        return f"{self.values[self.metric]:.3f}" + ("" if error is None else f" ± {error:.3f}")

    def row(self) -> tuple[str, ...]:
        """Return the cells of the task in the table."""
        chance = "" if self.chance is None or self.metric == BITS_PER_BYTE else f"{self.chance:.3f}"
        metric = self.metric.replace("_", " ")
        return (self.task, f"{self.items:,}", metric, self.describe(), chance, self.licence)

    def as_json(self) -> dict[str, Any]:
        """Return the result as an object for a JSON file."""
        return asdict(self)


def compute_results(
    tasks: Sequence[Task], suite: EncodedSuite, log_likelihoods: np.ndarray
) -> list[TaskResult]:
    """Return the results of tasks.

    log_likelihoods: float64 [distinct requests of the suite], in nats.
    """
    results = []
    place = 0
    for task in tasks:
        requests = suite.requests[place : place + sum(len(i.requests) for i in task.items)]
        place += len(requests)
        results.append(_compute_result(task, suite, requests, log_likelihoods))
    return results


def format_table(results: Sequence[TaskResult]) -> list[str]:
    """Return the lines of a table with one task per line."""
    rows = [_COLUMNS, *(result.row() for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    is_number = (False, True, False, False, True, False)
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    ]


def _compute_result(
    task: Task, suite: EncodedSuite, requests: Sequence[int], log_likelihoods: np.ndarray
) -> TaskResult:
    """Return the result of a task. requests: for each of its requests, the distinct request."""
    correct: dict[str, list[bool]] = {ACCURACY: [], PER_CHAR: [], PER_TOKEN: []}
    nats = []
    size = 0
    place = 0
    for item in task.items:
        of_item = requests[place : place + len(item.requests)]
        place += len(of_item)
        sums = log_likelihoods[list(of_item)]
        gold = of_item[item.gold]
        nats.append(-log_likelihoods[gold])
        size += suite.bytes[gold]
        lengths = {
            ACCURACY: np.ones(len(of_item)),
            PER_CHAR: _count_characters(item),
            PER_TOKEN: np.array([suite.tokens[request] for request in of_item]),
        }
        for metric, length in lengths.items():
            correct[metric].append(int(np.argmax(sums / length)) == item.gold)
    # fsum is exact, so the order of the items does not matter.
    values = {BITS_PER_BYTE: math.fsum(nats) / (math.log(2) * size)}
    errors = {}
    count = len(task.items)
    if task.has_choices:
        for metric, hits in correct.items():
            share = sum(hits) / count
            values[metric] = share
            errors[metric] = math.sqrt(share * (1 - share) / max(1, count - 1))
    cut = sum(suite.is_cut[request] for request in requests)
    return TaskResult(task.name, count, task.metric, values, errors, task.chance, task.licence, cut)


def _count_characters(item: Item) -> np.ndarray:
    """Return the number of characters of each choice, without the space before it."""
    texts = [request.continuation for request in item.requests]
    return np.array([max(1, len(text.removeprefix(" "))) for text in texts])
