#!/usr/bin/env python3
"""Show a run from its files: progress, loss curve, speed, memory, checkpoints, warnings.

While the run is active, also show the GPUs of this machine, if nvidia-smi is installed.

  python launch/monitor.py outputs/exp            update until the run is complete or Ctrl-C
  python launch/monitor.py outputs/exp --once     print the run once, for example for a mail
  python launch/monitor.py outputs/exp --log      follow the log of rank 0 from its last lines

Reads state.json, metrics.jsonl, events.jsonl, logs/ and lock.json, on any machine that sees them,
and changes nothing. The exit code is 2 if there is no such run, otherwise 0.
"""

from __future__ import annotations

import math
import platform
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.runs import run_files
from launch.runs.run_files import Row, RunFiles
from lib.core import options, paths, run_records, stage, units
from lib.core.options import Options
from lib.core.run_records import mean_loss
from lib.parallel import nvidia

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=*#@"
_CURVE_ROWS = 8
_RECENT_ROWS = 20  # rows that are searched for a slow rank
_STRAGGLER_RATIO = 1.2  # times the median rank
_LABEL_WIDTH = 13
_LOG_LINES = 40
_LOG_BYTES = 64 << 10
_MIB = 1 << 20
_ENTER_PAGE = "\x1b[?1049h\x1b[?25l"
_LEAVE_PAGE = "\x1b[?25h\x1b[?1049l"


def parse(argv: list[str]) -> Options:
    """Parse the command line."""
    parser = options.Parser(__doc__)
    run_files.add_experiment(parser)
    parser.add_argument("--once", action="store_true", help="show the run once and exit")
    parser.add_argument(
        "--log",
        action="store_true",
        help="follow the log of rank 0 until the run is complete or Ctrl-C",
    )
    parser.add_argument(
        "--every", type=options.positive, default=2.0, metavar="S", help="seconds between updates"
    )
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Show a run once, live, or as its log."""
    opts = parse(argv)
    is_live = sys.stdout.isatty() and not (opts.once or opts.log)
    experiment = paths.existing_experiment(opts.experiment)
    if not is_live:
        run_files.require_run(experiment)
    run = RunFiles(experiment.root.resolve())
    if opts.log:
        _follow_log(run, max(0.2, opts.every))
        return
    if is_live:
        _show_live(run, max(0.2, opts.every))
    run.update()
    print("\n".join(render_page(run, shutil.get_terminal_size((100, 40)).columns)))


def _show_live(run: RunFiles, every: float) -> None:
    """Redraw the page until the run is complete, and then restore the terminal."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    sys.stdout.write(_ENTER_PAGE)
    try:
        while not run.is_complete():
            run.update()
            width, height = shutil.get_terminal_size((100, 40))
            lines = [line[: width - 1] for line in render_page(run, width - 1)][: height - 1]
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE_PAGE)
        sys.stdout.flush()


def _follow_log(run: RunFiles, every: float) -> None:
    """Print the last lines of rank 0's log and all new ones until the run is complete."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    log = run_files.GrowingFile(run.experiment.rank_log(0), _LOG_BYTES)
    try:
        lines = log.read_new()[0][-_LOG_LINES:]
        if not lines:
            print(f"no log in {run.experiment.root} yet", flush=True)
        is_last = False
        while True:
            for line in lines:
                print(run_records.one_line(line.decode("utf-8", "replace")), flush=True)
            if is_last:
                return
            run.update()
            is_last = run.is_complete()  # the summary is logged after state.json is written
            time.sleep(every)
            lines = log.read_new()[0]
    except KeyboardInterrupt:
        pass


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def render_page(run: RunFiles, width: int) -> list[str]:
    """Return the lines of the page about a run. width: columns of the terminal."""
    ranks = f", {units.counted(run.ranks(), 'rank')}" if run.ranks() else ""
    lines = [_format_line(run.experiment.root.name, run.status().text + ranks)]
    if progress := _format_progress(run, width):
        lines.append(_format_line("progress", progress))
    if run.rows:
        lines += [_format_line(label, text) for label, text in _describe_row(run) if text]
        lines += [
            "",
            *render_curve(
                [mean_loss(row) for row in run.rows],
                width,
                (run.rows[0]["step"], run.rows[-1]["step"]),
            ),
        ]
    checkpoints = run.checkpoints()
    if checkpoints:
        step, age = checkpoints[-1]
        lines.append(
            _format_line(
                "checkpoint",
                f"step {step:,}, {units.duration(max(age, 0))} ago; {len(checkpoints)} kept",
            )
        )
    elif run.rows:
        lines.append(_format_line("checkpoint", "none yet"))
    if run.status().is_held:
        lines += _format_gpus()
    if warnings := run.warnings():
        lines += ["", "warnings", *(f"  {text}" for text in warnings)]
    # The name of a directory may contain control characters too.
    return [run_records.one_line(line) for line in lines]


def _format_gpus() -> list[str]:
    """Return a line for each GPU that nvidia-smi lists on this machine."""
    lines = []
    degrees = "°C" if _is_unicode() else "C"
    for load in nvidia.list_loads():
        memory = (
            f"{units.memory(load.used * _MIB)} of {units.memory(load.total * _MIB)}"
            if load.total and load.used is not None
            else ""
        )
        limit = "" if load.limit is None else f" of {load.limit:.0f}"
        cells = [
            "" if load.busy is None else f"busy {load.busy:.0f} %",
            memory,
            "" if load.watts is None else f"{load.watts:.0f}{limit} W",
            "" if load.celsius is None else f"{load.celsius:.0f} {degrees}",
        ]
        lines.append(_format_line(f"GPU {load.gpu}", ", ".join(filter(None, cells)) or "no data"))
    return ["", _format_line("GPUs", f"on {platform.node()}, now"), *lines] if lines else []


def _format_line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"


def _format_progress(run: RunFiles, width: int) -> str:
    step = run.rows[-1]["step"] if run.rows else run.state.get("step", 0)
    total = run.state.get("total_steps") or 0
    if not total:
        return f"step {step:,}" if run.rows else ""
    share = min(1.0, step / total)
    cells = max(10, min(40, width - 60))
    full, empty = ("█", "·") if _is_unicode() else ("#", ".")
    bar = (full * round(share * cells)).ljust(cells, empty)
    seconds = run.rows[-1].get("perf/eta_sec") if run.rows else None
    time_left = (
        ""
        if seconds is None or not math.isfinite(seconds) or not run.status().is_held
        else f", {units.duration(seconds)} left"
    )
    return f"{bar} {100 * share:.1f} %, step {step:,} of {total:,}{time_left}"


def _describe_row(run: RunFiles) -> list[tuple[str, str]]:
    """Return labels and texts about the last row (docs/reference/metrics.md)."""
    row = run.rows[-1]
    best = min(
        (r for r in run.evaluations if math.isfinite(r["eval/loss"])),
        key=lambda r: r["eval/loss"],
        default=None,
    )
    since = f"since step {run.rows[-2]['step']:,}" if len(run.rows) > 1 else "in the first step"
    validation = (
        f"{run.evaluations[-1]['eval/loss']:.4f} at step "
        f"{run.evaluations[-1]['step']:,}, the lowest {best['eval/loss']:.4f} at "
        f"{best['step']:,}"
        if best
        else ""
    )
    return [
        (
            "loss",
            f"{mean_loss(row):.4f} on average {since}, {row['train/loss']:.4f} in step "
            f"{row['step']:,}; gradient norm {row.get('train/grad_norm', math.nan):.3g}, "
            f"learning rate {row.get('train/learning_rate', math.nan):.3g}",
        ),
        ("validation", validation),
        ("speed", _describe_speed(row, since)),
        ("step time", _describe_times(row, since)),
        ("memory", _describe_memory(row)),
        ("slowest rank", _describe_slowest(run.rows[-_RECENT_ROWS:])),
        (
            "tokens",
            f"{units.count(row.get('train/tokens_seen', 0))} seen, epoch {row.get('epoch', 0):.3g}",
        ),
    ]


def _describe_speed(row: Row, since: str) -> str:
    rate, device, launch, tflops, mfu = (
        row.get(f"perf/{key}", math.nan)
        for key in (
            "tokens_per_sec",
            "tokens_per_sec_per_device",
            "run_tokens_per_sec",
            "tflops",
            "mfu",
        )
    )
    of_launch = (
        f"{launch:,.0f} tok/s in this launch after its first step, with evaluation and saves; "
        if "perf/run_tokens_per_sec" in row
        else ""
    )
    return (
        f"{rate:,.0f} tok/s {since}, {of_launch}per device {device:,.0f} tok/s, {tflops:.3g} "
        f"TFLOP/s, MFU {100 * mfu:.1f} %"
    )


def _describe_times(row: Row, since: str) -> str:
    names = ("data", "forward", "backward", "update")
    parts = [f"{name} {row[f'time/{name}']:,.0f}" for name in names if f"time/{name}" in row]
    return f"{row.get('time/total', math.nan):,.0f} ms on average {since}: {', '.join(parts)}"


def _describe_memory(row: Row) -> str:
    if "memory/peak_gib" not in row:
        return ""
    kind = "max_peak" if "memory/max_peak_gib" in row else "peak"  # older rows have only rank 0's
    peak, total = (row.get(f"memory/{name}_gib", 0) * (1 << 30) for name in (kind, "total"))
    share = f" of {units.memory(total)} ({100 * peak / total:.0f} %)" if total else ""
    return (
        f"peak of this launch {units.memory(peak)}{share}, on rank "
        f"{row.get('memory/max_peak_rank', 0)}"
    )


def _describe_slowest(rows: list[Row]) -> str:
    """Return a text about the rank for which the others wait, if it is mostly the same one."""
    slow = [
        (row["perf/slowest_rank"], row["perf/slowest_ratio"])
        for row in rows
        if row.get("perf/slowest_ratio", 0) > _STRAGGLER_RATIO
        and math.isfinite(row.get("perf/slowest_rank", math.nan))
    ]
    if not slow or len(slow) * 2 < len(rows):
        return ""
    rank = statistics.mode(rank for rank, _ in slow)
    ratios = [ratio for slowest, ratio in slow if slowest == rank]
    return f"{rank}, in {len(ratios)} of the last {len(rows)}, up to {max(ratios):.2f} × the median"


def render_curve(losses: list[float], width: int, steps: tuple[int, int]) -> list[str]:
    """Return the lines of a loss curve. A column is the mean of an equal number of rows.

    steps: first and last step of the axis.
    """
    columns = max(10, min(width - _LABEL_WIDTH - 2, 100, len(losses)))
    spans = [
        losses[i * len(losses) // columns : (i + 1) * len(losses) // columns]
        for i in range(columns)
    ]
    means = [
        statistics.fmean(known) if (known := [x for x in span if math.isfinite(x)]) else math.nan
        for span in spans
        if span
    ]
    known = [x for x in means if math.isfinite(x)]
    if len(known) < 2:
        return []
    low = min(known)
    high = max(known)
    blocks = _BLOCKS if _is_unicode() else _ASCII_BLOCKS
    levels = _CURVE_ROWS * len(blocks)
    heights = [
        0 if not math.isfinite(x) else 1 + round((x - low) / ((high - low) or 1) * (levels - 1))
        for x in means
    ]
    labels = {_CURVE_ROWS - 1: f"{high:.4f}", 0: f"{low:.4f}"}
    lines = []
    for row in range(_CURVE_ROWS - 1, -1, -1):
        cells = (min(max(h - row * len(blocks), 0), len(blocks)) for h in heights)
        label = labels.get(row, "")
        lines.append(
            f"{label:>{_LABEL_WIDTH}} " + "".join(blocks[c - 1] if c else " " for c in cells)
        )
    first = f"step {steps[0]:,}"
    last = f"{steps[1]:,}"
    gap = max(len(means) - len(first) - len(last), 4)
    return [*lines, f"{'':{_LABEL_WIDTH}} {first}{' to ':^{gap}}{last}", ""]


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


if __name__ == "__main__":
    stage.run(main, only_shows=True)
