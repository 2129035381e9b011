"""Figures of a run: metrics.jsonl, TensorBoard, wandb and the plot, by rank 0 alone.

Each of them may fail, at any moment, without ending the run: that is told once. Rows and events
that find no room wait in memory and are written with a later one; wandb is given up.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import log, manifest, records, units
from lib.core.append_only import AppendOnlyFile
from lib.core.paths import Experiment
from lib.core.run_records import mean_loss
from lib.train import journal

_MOST_POINTS = 4_000  # a picture has 990 columns; drawing them holds Python's lock
_NEEDED = {"train/tokens_seen", "train/learning_rate", "train/loss"}


class Metrics:
    """Appends one JSON object per logged step; figures are not rounded. curve: what is drawn."""

    def __init__(self, experiment: Experiment, rank: int, step: int, wandb: bool = False) -> None:
        """step: where the run goes on; what an interrupted run logged after it is dropped."""
        self._active = rank == 0
        self._experiment = experiment
        self.curve = Curve()
        if self._active:
            self._rows = AppendOnlyFile(experiment.metrics)
            self._rows_may_fail = log.Tolerated(experiment.metrics.name)
            self._board_may_fail = log.Tolerated("TensorBoard's file", Exception)
            self._wandb_may_fail = log.Tolerated("wandb", Exception, done="used")
            self._run: Any = None
            if wandb:
                with self._wandb_may_fail:
                    self._run = _run_of_wandb(experiment)
            self._board = _board(experiment.tensorboard)
            self._begin(step)

    def rewind(self, step: int) -> None:
        """Drop what was logged after a step: the steps that follow it are run again."""
        if not self._active:
            return
        with self._rows_may_fail:
            self._rows.close()
        waiting = self._rows.take_back()
        self._begin(step)
        for line in waiting:
            if json.loads(line)["step"] <= step:
                with self._rows_may_fail:
                    self._rows.write(line)

    def write(self, figures: dict[str, Any], ended: float | None = None) -> None:
        """Write the figures of `figures["step"]` with a time.

        ended: when the step ended, in seconds since the epoch; None for the present.
        """
        if not self._active:
            return
        ended = time.time() if ended is None else ended
        self.curve.add(figures)
        with self._rows_may_fail:
            self._rows.write(
                _line({"step": figures["step"], "time": journal.now(ended), **figures})
            )
        if self._board is not None:
            with self._board_may_fail:
                self._board.write(figures, ended)
        if self._run is not None and not self._wandb_may_fail.is_failing:
            with self._wandb_may_fail:
                self._run.log(figures, step=figures["step"])

    def close(self) -> None:
        """Flush all sinks."""
        if not self._active:
            return
        with self._rows_may_fail:
            self._rows.close()
        if self._board is not None:
            with self._board_may_fail:
                self._board.close()
        if self._run is not None:
            with self._wandb_may_fail:
                self._run.finish()

    def _begin(self, step: int) -> None:
        """Go on after a step, with what is there of the steps up to it."""
        with log.Tolerated(f"{self._experiment.metrics.name} after step {step:,}", done="cut off"):
            self.curve.begin(_cut(self._experiment.metrics, step))
        if self._board is not None:
            self._board.begin(step)


class Board:
    """Appends to an event file of TensorBoard's; ImportError without the package.

    Without TensorBoard's own thread, whose errors come at a later call.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._session = event_pb2.SessionLog
        # Files are read in the order of their names, as TensorBoard's own writer gives them.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._file = AppendOnlyFile(directory / name, is_text=False)
        self._records = RecordWriter(self._file)
        self._next: list[Any] = [self._event(wall_time=time.time(), file_version="brain.Event:2")]

    def begin(self, step: int) -> None:
        """Go on after a step: what this and earlier files say of later ones is void."""
        self._next.append(
            self._event(
                wall_time=time.time(),
                step=step + 1,
                session_log=self._session(status=self._session.START),
            )
        )

    def write(self, figures: dict[str, Any], ended: float) -> None:
        """Append the numbers of a row; OSError when they have to wait for the next one.

        ended: see Metrics.write.
        """
        numbers = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in figures.items()
            if isinstance(value, (int, float)) and key != "step"
        ]
        row = self._event(
            wall_time=ended, step=figures["step"], summary=self._summary(value=numbers)
        )
        events = [*self._next, row]
        self._next = []
        lost: OSError | None = None
        for event in events:
            try:
                self._records.write(event.SerializeToString())
            except OSError as error:  # the record waits in the file
                lost = error
        if lost is not None:
            raise lost

    def close(self) -> None:
        """Write what waits; OSError when it is lost."""
        self._file.close()


def training(rows: list[dict[str, Any]]) -> str:
    """Return the first and the last training loss in words."""
    first = rows[0]
    last = rows[-1]
    since = f", the mean since step {rows[-2]['step']:,}" if len(rows) > 1 else ""
    return (
        f"{first['train/loss']:.4f} at step {first['step']:,} → {mean_loss(last):.4f} at step "
        f"{last['step']:,}{since}"
    )


def last_validation(rows: list[dict[str, Any]]) -> str:
    """Return the last validation loss in words."""
    losses = [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
    if not losses:
        return "not measured (no validation split, or one shorter than a sample)"
    return f"{losses[-1][1]:.4f} at step {losses[-1][0]}"


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows after `step`, which are about to be run again; return those that stay.

    They stand at the end: the file is cut, which needs no room on the disk.
    """
    rows = []
    kept = []
    ends_at = 0
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        end += len(line)
        if row := records.parse_log_row(line):
            rows.append(row)
            if row["step"] <= step:
                kept.append(row)
                ends_at = end
    if kept != rows[: len(kept)]:  # not in the order of steps, as no run of ours writes them
        manifest.write_text(path, "".join(_line(row).decode() for row in kept))
    elif ends_at < end:
        with path.open("r+b") as file:
            file.truncate(ends_at)
            os.fsync(file.fileno())
    return kept


def _line(figures: dict[str, Any]) -> bytes:
    """Return a line of metrics.jsonl; JSON knows no NaN, so what is not finite becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in figures.items()
    }
    return json.dumps(plain).encode() + b"\n"


def _board(directory: Path) -> Board | None:
    try:
        return Board(directory)
    except ImportError:
        log.warn("no TensorBoard files: the package `tensorboard` is not installed")
    except Exception as error:  # of packages that do not fit each other
        log.warn(f"no TensorBoard files: {error}")
    return None


def _run_of_wandb(experiment: Experiment) -> Any:
    import wandb

    name = experiment.root.name
    return wandb.init(
        mode="offline",
        dir=str(experiment.root),
        project="pretraining",
        name=name,
        id=name,
        resume="allow",
    )


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
        point = Point(tokens, row["train/learning_rate"], row["train/loss"], mean_loss(row))
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
