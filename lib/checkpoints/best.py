"""Decide which checkpoint of a run is the best, by the figure that --best-by names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lib.runs import figures


def find_best(commits: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the step with the best score, None if no step has one.

    The score is the figure that --best-by names in the newest checkpoint, by default the validation
    loss. Of equal scores, the newest counts. commits: the content of COMMIT by step.
    """
    key = find_score_key(commits)
    return choose_best(key, {step: read_score(commit, key) for step, commit in commits.items()})


def find_score_key(commits: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the key of the figure that decides which checkpoint is the best."""
    score = commits[max(commits)].get("score") if commits else None
    key = score.get("key") if isinstance(score, dict) else None
    is_known = isinstance(key, str) and figures.is_lower_better(key) is not None
    return str(key) if is_known else figures.DEFAULT_SCORE


def read_score(commit: Mapping[str, Any], key: str) -> float | None:
    """Return the figure with a key in the content of COMMIT, None if it is absent or not finite."""
    score = commit.get("score")
    value = commit.get("eval_loss") if key == figures.DEFAULT_SCORE else None
    if isinstance(score, dict) and score.get("key") == key:
        value = score.get("value")
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else None


def choose_best(key: str, scores: Mapping[int, float | None]) -> int | None:
    """Return the step with the best of the scores, the newest one if several are equal."""
    sign = -1 if figures.is_lower_better(key) else 1
    known = [(sign * score, step) for step, score in scores.items() if score is not None]
    return max(known)[1] if known else None
