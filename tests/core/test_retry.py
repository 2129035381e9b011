# covers: lib/core/retry.py
"""Polling and retrying: when they continue, when they end, and how long they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lib.core import retry as module
from lib.core.retry import backoff, poll, retry


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock: sleeping only moves it. Returns the seconds of each sleep."""
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    return pauses


def test_poll_returns_the_first_true_result(waited: list[float]) -> None:
    results = iter(["", 0, "done", "never read"])
    assert poll(lambda: next(results), every=2.0) == "done"
    assert waited == [2.0, 2.0]


def test_poll_looks_a_last_time_when_its_patience_ends(waited: list[float]) -> None:
    assert poll(lambda: False, every=2.0, patience=5.0) is False
    assert waited == [2.0, 2.0, 1.0]
    assert poll(lambda: sum(waited) >= 8.0, every=2.0, patience=3.0) is True


def fail_then_return(errors: list[Exception]):
    remaining = iter(errors)

    def act() -> str:
        if error := next(remaining, None):
            raise error
        return "done"

    return act


def test_retry_waits_after_each_error_that_may_pass(waited: list[float]) -> None:
    act = fail_then_return([OSError(), OSError()])
    assert retry(act, (1.0, 3.0), lambda error: isinstance(error, OSError)) == "done"
    assert waited == [1.0, 3.0]


@pytest.mark.parametrize(
    "errors", [[ValueError("last")], [OSError(), ValueError("last")], [OSError(), OSError("last")]]
)
def test_retry_raises_other_errors_and_the_last_one(
    waited: list[float], errors: list[Exception]
) -> None:
    with pytest.raises(type(errors[-1]), match="last"):
        retry(fail_then_return(errors), [1.0], lambda error: isinstance(error, OSError))
    assert waited == [1.0] * (len(errors) - 1)


def test_a_pause_is_chosen_after_the_error_was_seen() -> None:
    seen: list[str] = []
    paused: list[float] = []

    def pauses() -> Iterator[float]:
        while True:
            yield float(seen[-1])

    def note(error: Exception) -> bool:
        seen.append(str(error))
        return True

    act = fail_then_return([OSError("7"), OSError("2")])
    assert retry(act, pauses(), note, wait=paused.append) == "done"
    assert paused == [7.0, 2.0]


def test_a_backoff_doubles_up_to_its_limit() -> None:
    assert [backoff(n, 5.0, 30.0) for n in (0, 1, 2, 3, 4, 5)] == [5, 5, 10, 20, 30, 30]
