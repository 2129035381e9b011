# covers: lib/checkpoints/best.py, lib/runs/figures.py
"""The best checkpoint is the one with the best figure of --best-by, whose direction is known."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from lib.checkpoints import best
from lib.checkpoints.commit import select_kept
from lib.runs import figures

ACCURACY = "eval/copying/accuracy"


def with_score(value: float | None, key: str = ACCURACY, **more: Any) -> dict[str, Any]:
    return {"score": {"key": key, "value": value}, **more}


def test_the_direction_follows_from_the_key() -> None:
    for key in ("eval/loss", "eval/loss/a", "eval/perplexity", "eval/a/bits_per_byte"):
        assert figures.is_lower_better(figures.parse_score(key))
    for key in ("eval/a/accuracy", "eval/arc.rc/accuracy_per_char", "eval/a/accuracy_per_token"):
        assert figures.is_lower_better(figures.parse_score(key)) is False
    for key in ("train/loss", "eval", "eval/", "eval/accuracy", "eval//accuracy", "eval/a/speed"):
        with pytest.raises(argparse.ArgumentTypeError, match="no figure"):
            figures.parse_score(key)


def test_the_best_checkpoint_is_kept() -> None:
    assert best.find_best({}) is None
    losses = {step: {"eval_loss": loss} for step, loss in enumerate((2.0, 1.0, 3.0, None, 1.5))}
    assert best.find_best(losses) == 1
    accuracies = {1: with_score(0.5), 2: with_score(0.75), 3: with_score(0.75), 4: with_score(None)}
    assert best.find_best(accuracies) == 3  # the newest of equal ones
    assert select_kept({step: with_score(1 / step) for step in range(1, 9)}, 2) == {1, 7, 8}
    bits = {step: with_score(step, "eval/a/bits_per_byte") for step in range(1, 9)}
    assert select_kept(bits, 2) == {1, 7, 8}


def test_the_newest_checkpoint_names_the_figure() -> None:
    commits = {1: {"eval_loss": 1.0}, 2: {"eval_loss": 2.0}}
    assert best.find_best(commits | {3: with_score(0.1, eval_loss=3.0)}) == 3
    assert best.find_best(commits | {3: with_score(None, eval_loss=3.0)}) is None
    assert best.find_best({0: with_score(0.9)} | commits) == 1  # back to the default


@pytest.mark.parametrize(
    "score", [None, 3, [], {"key": 3}, {"key": "train/loss", "value": 1.0}, {"key": ["eval/loss"]}]
)
def test_a_hostile_score_counts_as_none(score: Any) -> None:
    commits = {1: {"eval_loss": 1.0}, 2: {"eval_loss": 2.0, "score": score}}
    assert best.find_best(commits) == 1
    broken = {"key": ACCURACY, "value": math.inf}
    assert best.find_best({1: {"score": broken}, 2: with_score(0.1)}) == 2
