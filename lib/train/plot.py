"""loss.png: loss and learning rate against tokens."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import units
from lib.train import console

_MOST_POINTS = 4_000  # a picture has 990 columns; drawing them holds Python's lock
_NEEDED = {"train/tokens_seen", "train/learning_rate", "train/loss"}


class Point(NamedTuple):
    """What is drawn of one row, or of several neighbours: their last figures and the mean loss."""

    tokens: int
    learning_rate: float
    loss: float
    mean_loss: float


class Curve:
    """The points of loss.png: at most 4,000, whatever the number of rows.

    When there are more, neighbours are merged; so are as many rows as a point stands for then.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, rows: Iterable[dict[str, Any]]) -> None:
        """Hold these rows and no others."""
        self.points: list[Point] = []
        self.held_out: list[tuple[int, float]] = []
        self._rows_each = 1  # rows per point
        self._open = 0  # rows in the last point
        for row in rows:
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if not row.keys() >= _NEEDED:
            return
        tokens = row["train/tokens_seen"]
        if "eval/loss" in row:
            if len(self.held_out) == _MOST_POINTS:
                self.held_out = self.held_out[1::2]
            self.held_out.append((tokens, row["eval/loss"]))
        point = Point(tokens, row["train/learning_rate"], row["train/loss"], console.mean_loss(row))
        if 0 < self._open < self._rows_each:
            self.points[-1] = _merged(self.points[-1], point, self._open)
            self._open += 1
            return
        if len(self.points) == _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merged(one, other) for one, other in pairs]
            self._rows_each *= 2
        self.points.append(point)
        self._open = 1

    def draw(self, path: Path, caption: str) -> None:
        """Draw what is there; any thread may call this. Raises ImportError without matplotlib.

        caption: what a reader of the picture alone must know (experiment, model, hardware).
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the package `matplotlib` is not installed") from error
        if not self.points:
            return
        figure = Figure(figsize=(9, 5), dpi=110)  # not pyplot's, which belongs to one thread
        FigureCanvasAgg(figure)
        _draw(figure, list(self.points), list(self.held_out), caption)
        temporary = path.with_name(f"{path.stem}.tmp.png")  # the run's alone, as all here is
        try:
            figure.savefig(temporary)
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _draw(
    figure: Any, points: list[Point], held_out: list[tuple[int, float]], caption: str
) -> None:
    left = figure.subplots()
    tokens, rates, losses, means = zip(*points, strict=True)
    right = left.twinx()
    right.plot(tokens, rates, color="0.75", linewidth=1)
    right.set_ylabel("learning rate", color="0.5")
    right.set_ylim(bottom=0)
    left.plot(
        tokens, losses, color="tab:blue", linewidth=0.6, alpha=0.35, label="training, single steps"
    )
    left.plot(
        tokens,
        means,
        color="tab:blue",
        linewidth=1.2,
        label="training, mean since the point before",
    )
    if held_out:
        left.plot(
            *zip(*held_out, strict=True),
            color="tab:orange",
            marker="o",
            markersize=4,
            label="validation",
        )
    left.set_zorder(right.get_zorder() + 1)
    left.patch.set_visible(False)
    left.set_xlabel("tokens")
    left.xaxis.set_major_formatter(lambda tokens, _: units.count(tokens))
    left.set_ylabel("loss (nats per token)")
    left.legend(loc="upper right")
    left.set_title(caption, fontsize=9)
    figure.tight_layout()


def _merged(one: Point, other: Point, rows: int = 1) -> Point:
    """Return two points as one; rows: that the first stands for, to one of the other."""
    return other._replace(mean_loss=(rows * one.mean_loss + other.mean_loss) / (rows + 1))
