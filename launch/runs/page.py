"""Format the page about one run: progress, losses, speed, memory, checkpoints and warnings."""

from __future__ import annotations

import math
import platform
import statistics

from rich.console import Group
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.runs.curves import render_curve, supports_unicode
from lib.core import nvidia, units
from lib.core.errors import one_line
from lib.runs.figures import documented_name
from lib.runs.run_files import Row, RunFiles
from lib.runs.run_records import mean_loss

_RECENT_ROWS = 20  # rows that are searched for a slow rank
_STRAGGLER_RATIO = 1.2  # times the median rank
_MIB = 1 << 20
_LABEL_WIDTH = 13


def render_page(run: RunFiles, width: int) -> Group:
    """Return the page about a run. width: columns of the console."""
    ranks = f", {units.counted(run.ranks(), 'rank')}" if run.ranks() else ""
    # The name of a directory may contain control characters too.
    name = one_line(run.experiment.root.name)
    head = Text(f"{name:<{_LABEL_WIDTH}} {run.status().text}{ranks}", style="bold")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH)
    grid.add_column(overflow="fold")

    def add(label: str, text: str) -> None:
        grid.add_row(label, one_line(text))

    _add_progress(grid, run, width)
    if run.rows:
        for label, text in _describe_row(run):
            if text:
                add(label, text)
        _add_curve(grid, run, width)
    checkpoints = run.checkpoints()
    if checkpoints:
        step, age = checkpoints[-1]
        age_text = units.duration(max(age, 0))
        add("checkpoint", f"step {step:,}, {age_text} ago; {len(checkpoints)} kept")
    elif run.rows:
        add("checkpoint", "none yet")
    if "copy_error" in run.state:
        add("copies", _describe_copies(run))
    for label, text in _describe_gpus() if run.status().is_held else []:
        add(label, text)
    if not (warnings := run.warnings()):
        return Group(head, grid)
    lines = Padding(Text("\n".join(warnings), style="yellow"), (0, 0, 0, 2), expand=False)
    return Group(head, grid, "", Text("warnings", style="bold"), lines)


def _add_curve(grid: Table, run: RunFiles, width: int) -> None:
    steps = run.rows[0]["step"], run.rows[-1]["step"]
    losses = [mean_loss(row) for row in run.rows]
    grid.add_row()
    if curve := render_curve(losses, width - _LABEL_WIDTH - 1, steps):
        for label, line in curve:
            grid.add_row(Text(label, justify="right"), line)
        grid.add_row()


def _describe_copies(run: RunFiles) -> str:
    """Return a text about the newest copy, and the number of checkpoints not copied yet."""
    copied = run.state.get("copied")
    newer = [step for step, _ in run.checkpoints() if copied is None or step > copied]
    behind = f"; {units.counted(len(newer), 'newer checkpoint')} not copied yet" if newer else ""
    error = run.state["copy_error"]
    failure = f"; the last attempt failed: {error}" if error else ""
    return ("none yet" if copied is None else f"step {copied:,}") + behind + failure


def _describe_gpus() -> list[tuple[str, str]]:
    """Return a label and a text for each GPU that nvidia-smi lists on this machine."""
    lines = []
    degrees = "°C" if supports_unicode() else "C"
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
        lines.append((f"GPU {load.gpu}", ", ".join(filter(None, cells)) or "no data"))
    return [("", ""), ("GPUs", f"on {platform.node()}, now"), *lines] if lines else []


def _add_progress(grid: Table, run: RunFiles, width: int) -> None:
    step = run.rows[-1]["step"] if run.rows else run.state.get("step", 0)
    total = run.state.get("total_steps") or 0
    if not total:
        if run.rows:
            grid.add_row("progress", f"step {step:,}")
        return
    share = min(1.0, step / total)
    seconds = run.rows[-1].get("perf/eta_sec") if run.rows else None
    time_left = (
        ""
        if seconds is None or not math.isfinite(seconds) or not run.status().is_held
        else f", {units.duration(seconds)} left"
    )
    text = f"{100 * share:.1f} %, step {step:,} of {total:,}{time_left}"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(1.0, share, max(10, min(40, width - 60))), text)
    grid.add_row("progress", bar)


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
        ("bits per byte", _describe_bits_per_byte(run)),
        ("speed", _describe_speed(row, since)),
        ("step time", _describe_times(row, since)),
        ("memory", _describe_memory(row)),
        ("slowest rank", _describe_slowest(run.rows[-_RECENT_ROWS:])),
        (
            "tokens",
            f"{units.count(row.get('train/tokens_seen', 0))} seen, epoch {row.get('epoch', 0):.3g}",
        ),
    ]


def _describe_bits_per_byte(run: RunFiles) -> str:
    """Return the bits per byte of the last evaluation, in total and by source; "" without any."""
    row = run.evaluations[-1] if run.evaluations else {}
    figures = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    name = "eval/bits_per_byte"
    parts = [f"{figures[name]:.4f}"] if name in figures else []
    parts += [
        f"{key.split('/', 1)[1].rpartition('/')[0]} {value:.3f}"
        for key, value in figures.items()
        if documented_name(key) == "eval/NAME/bits_per_byte"
    ]
    return ", ".join(parts)


def _describe_speed(row: Row, since: str) -> str:
    mfu = f", MFU {100 * row['perf/mfu']:.1f} %" if "perf/mfu" in row else ""
    return f"{row.get('perf/tokens_per_sec', math.nan):,.0f} tok/s {since}{mfu}"


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
    """Return a text about the slowest rank, "" if no rank is slow in most rows."""
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
