"""Format the page about one run: progress, losses, speed, memory, checkpoints and warnings."""

from __future__ import annotations

import math
import platform
import statistics

from launch.runs.curves import LABEL_WIDTH, render_curve, supports_unicode
from launch.runs.run_files import Row, RunFiles
from lib.core import run_records, units
from lib.core.figures import documented_name
from lib.core.run_records import mean_loss
from lib.parallel import nvidia

_RECENT_ROWS = 20  # rows that are searched for a slow rank
_STRAGGLER_RATIO = 1.2  # times the median rank
_MIB = 1 << 20


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
    if "copy_error" in run.state:
        lines.append(_format_line("copies", _describe_copies(run)))
    if run.status().is_held:
        lines += _format_gpus()
    if warnings := run.warnings():
        lines += ["", "warnings", *(f"  {text}" for text in warnings)]
    # The name of a directory may contain control characters too.
    return [run_records.one_line(line) for line in lines]


def _describe_copies(run: RunFiles) -> str:
    """Return a text about the newest copy, and the number of checkpoints not copied yet."""
    copied = run.state.get("copied")
    newer = [step for step, _ in run.checkpoints() if copied is None or step > copied]
    behind = f"; {units.counted(len(newer), 'newer checkpoint')} not copied yet" if newer else ""
    error = run.state["copy_error"]
    failure = f"; the last attempt failed: {error}" if error else ""
    return ("none yet" if copied is None else f"step {copied:,}") + behind + failure


def _format_gpus() -> list[str]:
    """Return a line for each GPU that nvidia-smi lists on this machine."""
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
        lines.append(_format_line(f"GPU {load.gpu}", ", ".join(filter(None, cells)) or "no data"))
    return ["", _format_line("GPUs", f"on {platform.node()}, now"), *lines] if lines else []


def _format_line(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}} {text}"


def _format_progress(run: RunFiles, width: int) -> str:
    step = run.rows[-1]["step"] if run.rows else run.state.get("step", 0)
    total = run.state.get("total_steps") or 0
    if not total:
        return f"step {step:,}" if run.rows else ""
    share = min(1.0, step / total)
    cells = max(10, min(40, width - 60))
    full, empty = ("█", "·") if supports_unicode() else ("#", ".")
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
