"""Merge values into the columns of a chart.

The horizontal axis of a chart is divided into equally wide columns. Of all values in a column, only
the least, the largest and the mean are kept, so a million values need no more memory than a
thousand, and a spike stays visible.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LARGEST = 1e30  # a larger number counts as infinite
EXTREMES = ("last", "first", "lowest", "highest")

Numbers = npt.NDArray[np.float64]


class Value(NamedTuple):
    """A value and its step."""

    value: float
    step: int


class Series:
    """Contains the values of a key by column.

    first, last, least, most: values, NaN if there are none. low, high: least and largest value of
    each column, infinite without values. gaps: which columns contain NaN or an infinite value (bool
    [columns]). first_gap: step of the first such value.
    """

    def __init__(self, columns: int) -> None:
        self.low = np.full(columns, np.inf)
        self.high = np.full(columns, -np.inf)
        self.gaps = np.zeros(columns, dtype=bool)
        self.first_gap: int | None = None
        self.first = self.last = self.least = self.most = Value(np.nan, 0)
        self._total = np.zeros(columns)
        self._count = np.zeros(columns)

    def add(self, columns: npt.NDArray[np.intp], steps: Numbers, values: Numbers) -> None:
        """Add values in the order of their steps."""
        is_finite = np.abs(values) < LARGEST
        if not is_finite.all():
            self.gaps[columns[~is_finite]] = True
            if self.first_gap is None:
                self.first_gap = int(steps[~is_finite][0])
            columns = columns[is_finite]
            steps = steps[is_finite]
            values = values[is_finite]
        if not len(values):
            return
        np.minimum.at(self.low, columns, values)
        np.maximum.at(self.high, columns, values)
        size = len(self.low)
        self._total += np.bincount(columns, values, size)
        self._count += np.bincount(columns, minlength=size)
        picks = (0, -1, values.argmin(), values.argmax())
        first, self.last, least, most = (
            Value(float(values[pick]), int(steps[pick])) for pick in picks
        )
        if not self:
            self.first = first
            self.least = least
            self.most = most
        self.least = min(self.least, least)
        self.most = max(self.most, most, key=lambda pair: pair.value)

    def __bool__(self) -> bool:
        """Return whether there is a value."""
        return not np.isnan(self.first.value)

    @property
    def mean(self) -> float:
        """Return the mean of all values, NaN without any."""
        return float(self._total.sum() / self._count.sum()) if self else np.nan

    def column_means(self) -> Numbers:
        """Return the mean of each column, NaN without values."""
        with np.errstate(invalid="ignore"):
            return self._total / self._count

    def describe(self) -> dict[str, str]:
        """Return the last, first, lowest and highest value as texts by name."""
        values = (self.last, self.first, self.least, self.most)
        pairs = zip(EXTREMES, values, strict=True)
        return {name: f"{value:.5g} at step {step:,}" for name, (value, step) in pairs}
