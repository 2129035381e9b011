"""Poll until a condition holds, and retry calls that fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def poll(until: Callable[[], Result], every: float, patience: float = math.inf) -> Result:
    """Call `until` until its result is true, and return its last result.

    every: seconds between two calls. patience: seconds until the last call, whose result is
    returned even if it is false. Errors of `until` are raised at once.
    """
    deadline = time.monotonic() + patience
    while not (result := until()):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        time.sleep(min(every, remaining))
    return result


def retry(
    do: Callable[[], Result],
    pauses: Iterable[float],
    when: Callable[[Exception], bool],
    wait: Callable[[float], object] | None = None,
) -> Result:
    """Return the result of `do`, and call it again after errors that may pass.

    pauses: seconds to wait after each failure; when none is left, the error is raised. A generator
    is asked for the next pause only after `when` has seen the error. when: returns whether an error
    may pass; other errors are raised at once. wait: called with each pause instead of `time.sleep`.
    """
    remaining = iter(pauses)
    while True:
        try:
            return do()
        except Exception as error:
            if not when(error):
                raise
            pause = next(remaining, None)
            if pause is None:
                raise
        (wait or time.sleep)(pause)


def backoff(failures: int, first: float, longest: float = math.inf) -> float:
    """Return the seconds to wait after so many failures in a row: `first`, then doubled each time.

    longest: seconds that no pause exceeds.
    """
    return min(first * 2.0 ** max(0, failures - 1), longest)
