"""Show the progress of long work: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import threading
import time

from lib.core import log, units

_LINE_EVERY_S = 15.0
_REFRESH_EVERY_S = 0.2
_LONGEST_FORECAST_S = 365 * 86400.0  # a longer one means that almost nothing moves
_BAR_WITHOUT_TIMES = "{desc}: {percentage:3.0f}%|{bar}| {n}/{total}{postfix}"


class Progress:
    """Counts work done towards a total and shows it.

    total: in `unit`s; None if unknown. unit: `B` prints as kB, MB, …. done: units finished before
    this launch, which do not count for the speed. times: whether the bar shows its own times; False
    if the text of `show` contains better ones. On a terminal it is a tqdm bar, elsewhere a log line
    at most every 15 s.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        enabled: bool = True,
        done: int = 0,
        times: bool = True,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = done
        self._before = done
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._last_line = self._began
        self._enabled = enabled and log.rank() == 0
        self._bar = None
        if self._enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=label,
                total=total,
                unit=unit,
                unit_scale=True,
                leave=False,
                initial=done,
                bar_format=None if times else _BAR_WITHOUT_TIMES,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done. Any thread may call this."""
        with self._lock:
            self.done += amount
            if self._bar is not None:
                self._bar.update(amount)
            elif self._enabled and time.monotonic() - self._last_line > _LINE_EVERY_S:
                self._last_line = time.monotonic()
                log.info(self._line())

    def skip(self, amount: int) -> None:
        """Count `amount` units as done before this launch, which the speed ignores."""
        with self._lock:
            self.done = self.done + amount
            self._before = self._before + amount
            if self._bar is not None:
                for name in ("n", "initial", "last_print_n"):
                    setattr(self._bar, name, getattr(self._bar, name) + amount)
                self._bar.refresh()

    def show(self, text: str) -> None:
        """Show a short text behind the bar, if there is one."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            if time.monotonic() - self._last_line > _REFRESH_EVERY_S:
                self._last_line = time.monotonic()
                self._bar.refresh()

    def _line(self) -> str:
        finished = max(0, self.done - self._before)  # a damaged download is counted out again
        rate = finished / max(time.monotonic() - self._began, 1e-9)
        speed = f"{self._format(rate)}/s"
        if not self.total:
            done = self._format(self.done)
            return f"{self.label}: {done}" + (f", {speed}" if rate >= 1 else "")
        remaining = (self.total - self.done) / max(rate, 1e-9)
        share = 100 * self.done / self.total
        done = units.size(self.done) if self.unit == "B" else units.count(self.done)
        return f"{self.label}: {done} of {self._format(self.total)} ({share:.0f} %), {speed}" + (
            f", {units.duration(remaining)} left" if remaining < _LONGEST_FORECAST_S else ""
        )

    def _format(self, amount: float) -> str:
        """Return an amount with its unit; a slow rate keeps its decimals: `0.35 batches`."""
        if self.unit == "B":
            return units.size(amount)
        is_slow = amount < 10 and amount != int(amount)
        return f"{f'{amount:.2g}' if is_slow else units.count(amount)} {self.unit.strip()}"
