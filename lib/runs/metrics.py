"""Write the figures of a run on rank 0: metrics.jsonl, TensorBoard, wandb and loss.png.

Each of these may fail at any time without ending the run; the log warns once. Rows and events that
cannot be written wait in memory and are written with a later one. After a failure, wandb is not
used any more.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import log, units
from lib.core.append_only import AppendOnlyFile
from lib.core.paths import Experiment
from lib.runs.row_writer import RowFile
from lib.runs.run_records import format_time, mean_loss

_MOST_POINTS = 4_000  # loss.png is 990 pixels wide, and drawing holds the interpreter lock
_NEEDED = {"train/tokens_seen", "train/learning_rate", "train/loss"}


class Metrics:
    """Writes rows to all outputs with unrounded figures. curve: the curve of loss.png."""

    def __init__(
        self,
        experiment: Experiment,
        rank: int,
        step: int,
        wandb: bool = False,
        is_kept: bool = True,
    ) -> None:
        """Open the files on rank 0, unless is_kept is False, as for a bench.

        step: the step after which the run continues; rows of later steps are dropped.
        """
        self._active = rank == 0 and is_kept
        self.curve = Curve()
        if self._active:
            self._rows = RowFile(experiment.metrics)
            self._board_may_fail = log.WarnOnce("TensorBoard's file", Exception)
            self._wandb_may_fail = log.WarnOnce("wandb", Exception, done="used")
            self._run: Any = None
            if wandb:
                with self._wandb_may_fail:
                    self._run = _start_wandb(experiment)
            self._board = _open_board(experiment.tensorboard)
            self._continue_after(step)

    def rewind(self, step: int) -> None:
        """Drop the rows after a step, because the following steps are repeated."""
        if self._active:
            self._continue_after(step)

    def write(self, figures: dict[str, Any], ended: float | None = None) -> None:
        """Write the row of `figures["step"]`.

        ended: end of the step, in seconds since the epoch (default: now).
        """
        if not self._active:
            return
        ended = time.time() if ended is None else ended
        self.curve.add(figures)
        self._rows.write({"step": figures["step"], "time": format_time(ended), **figures})
        if self._board is not None:
            with self._board_may_fail:
                self._board.write(figures, ended)
        if self._run is not None and not self._wandb_may_fail.is_failing:
            with self._wandb_may_fail:
                self._run.log(figures, step=figures["step"])

    def write_samples(
        self, step: int, texts: dict[str, str], table: Sequence[tuple[str, str, str]]
    ) -> None:
        """Write the samples of a step to TensorBoard and wandb.

        texts: Markdown, by name. table: prompt, kind and text of each sample.
        """
        if not self._active:
            return
        if self._board is not None:
            with self._board_may_fail:
                self._board.write_texts(step, texts)
        if self._run is not None and not self._wandb_may_fail.is_failing:
            with self._wandb_may_fail:
                import wandb

                rows = [[step, *cells] for cells in table]
                samples = wandb.Table(["step", "prompt", "kind", "text"], rows)
                self._run.log({"samples": samples}, step=step)

    def close(self) -> None:
        """Write the waiting rows and close all outputs."""
        if not self._active:
            return
        self._rows.close()
        if self._board is not None:
            with self._board_may_fail:
                self._board.close()
        if self._run is not None:
            with self._wandb_may_fail:
                self._run.finish()

    def _continue_after(self, step: int) -> None:
        """Keep the rows up to a step and drop later ones."""
        if (rows := self._rows.rewind(step)) is not None:
            self.curve.reset(rows)
        if self._board is not None:
            self._board.continue_after(step)


class Board:
    """Appends to an event file of TensorBoard. Raises ImportError without that package.

    TensorBoard's own writer has a thread, whose errors appear only at a later call. This class
    writes at once instead.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._session = event_pb2.SessionLog
        # TensorBoard reads files in the order of their names; its own writer names them like this.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._file = AppendOnlyFile(directory / name, is_text=False)
        self._records = RecordWriter(self._file)
        self._next: list[Any] = [self._event(wall_time=time.time(), file_version="brain.Event:2")]

    def continue_after(self, step: int) -> None:
        """Make TensorBoard ignore all earlier records about steps after this one."""
        self._next.append(
            self._event(
                wall_time=time.time(),
                step=step + 1,
                session_log=self._session(status=self._session.START),
            )
        )

    def write(self, figures: dict[str, Any], ended: float) -> None:
        """Append the figures of a row. Raises OSError if they have to wait for the next row.

        ended: see Metrics.write.
        """
        numbers = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in figures.items()
            if isinstance(value, (int, float)) and key != "step"
        ]
        self._append(
            self._event(wall_time=ended, step=figures["step"], summary=self._summary(value=numbers))
        )

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        """Append texts, see Metrics.write_samples. Raises OSError as `write` does."""
        from tensorboard.compat.proto import tensor_pb2, types_pb2

        values = []
        for name, text in texts.items():
            value = self._summary.Value(tag=name)
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.CopyFrom(
                tensor_pb2.TensorProto(
                    dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8", "replace")]
                )
            )
            values.append(value)
        summary = self._summary(value=values)
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        """Append an event. The events that begin a file or a launch are written first."""
        events = [*self._next, event]
        self._next = []
        failure: OSError | None = None
        for event in events:
            try:
                self._records.write(event.SerializeToString())
            except OSError as error:  # the record waits in memory
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Write the waiting records. Raises OSError if they are lost."""
        self._file.close()


def describe_training_loss(rows: list[dict[str, Any]]) -> str:
    """Return a text with the first and the last training loss. rows: at least one."""
    first = rows[0]
    last = rows[-1]
    window = f", the mean since step {rows[-2]['step']:,}" if len(rows) > 1 else ""
    return (
        f"{first['train/loss']:.4f} at step {first['step']:,} → {mean_loss(last):.4f} at step "
        f"{last['step']:,}{window}"
    )


def describe_validation_loss(rows: list[dict[str, Any]]) -> str:
    """Return a text with the last validation loss."""
    losses = [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
    if not losses:
        return "not measured (no validation split, or one shorter than a sample)"
    return f"{losses[-1][1]:.4f} at step {losses[-1][0]}"


def _open_board(directory: Path) -> Board | None:
    """Return the TensorBoard file of a launch, None if it cannot be created."""
    try:
        return Board(directory)
    except ImportError:
        log.warn("no TensorBoard files: the package `tensorboard` is not installed")
    except Exception as error:  # some versions of its dependencies do not work together
        log.warn(f"no TensorBoard files: {error}")
    return None


def _start_wandb(experiment: Experiment) -> Any:
    """Return an offline wandb run, which continues the wandb run of an earlier launch."""
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
    """Contains a point of loss.png: the last figures of adjacent rows, and their mean loss."""

    tokens: int
    learning_rate: float
    loss: float
    mean_loss: float


class Curve:
    """Contains the points of loss.png, at most 4,000 for any number of rows.

    If there would be more, adjacent points are merged in pairs, and each later point covers as many
    rows as a merged one.
    """

    def __init__(self) -> None:
        self.reset(())

    def reset(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace all points by the points of these rows."""
        self.points: list[Point] = []
        self.held_out: list[tuple[int, float]] = []
        self._rows_per_point = 1
        self._rows_in_last = 0
        for row in rows:
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of metrics.jsonl. A row without a training loss is ignored."""
        if not row.keys() >= _NEEDED:
            return
        tokens = row["train/tokens_seen"]
        if "eval/loss" in row:
            if len(self.held_out) == _MOST_POINTS:
                self.held_out = self.held_out[1::2]
            self.held_out.append((tokens, row["eval/loss"]))
        point = Point(tokens, row["train/learning_rate"], row["train/loss"], mean_loss(row))
        if 0 < self._rows_in_last < self._rows_per_point:
            self.points[-1] = _merge_points(self.points[-1], point, self._rows_in_last)
            self._rows_in_last += 1
            return
        if len(self.points) == _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merge_points(first, second) for first, second in pairs]
            self._rows_per_point *= 2
        self.points.append(point)
        self._rows_in_last = 1

    def draw(self, path: Path, caption: str) -> None:
        """Draw the points so far into a file. Any thread may call this.

        caption: experiment, model and hardware. Raises ImportError without matplotlib.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the package `matplotlib` is not installed") from error
        if not self.points:
            return
        figure = Figure(figsize=(9, 5), dpi=110)  # pyplot would not work in several threads
        FigureCanvasAgg(figure)
        _draw_points(figure, list(self.points), list(self.held_out), caption)
        temporary = path.with_name(f"{path.stem}.tmp.png")  # only one process writes a run
        try:
            figure.savefig(temporary)
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _draw_points(
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
        label="training, mean since the previous point",
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


def _merge_points(first: Point, second: Point, rows: int = 1) -> Point:
    """Merge two points; the mean loss of the first one has the weight `rows`."""
    mean = (rows * first.mean_loss + second.mean_loss) / (rows + 1)
    return second._replace(mean_loss=mean)
