"""Describe a run in short texts, from its files: status, figures, plan, options, versions.

The report shows each mapping as a column of a table. All texts are as the files contain them; the
report escapes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from lib.core import declared, units
from lib.report.run_data import TOKENS, RunData, read_number
from lib.runs.events import Event
from lib.runs.figures import Status

# Options that do not describe what a run trains.
_HIDDEN = {"experiment_name", "save_dir", "config", "dry_run", "overwrite", "no_progress"}
_STATUSES: dict[str, str] = {
    Status.COMPLETE: "is complete",
    Status.PREEMPTED: "was stopped after saving",
    Status.FAILED: "has failed",
    Status.DISK_FULL: "stopped because the disk was full",
    Status.RUNNING: "was running when this page was written",
}
_LARGEST = 1e12

Texts = dict[str, str]


def describe_status(run: RunData) -> str:
    """Return the status of a run as a sentence."""
    status = _STATUSES.get(run.state.get("status", ""), "has written no status")
    step = max(run.state.get("step", 0), run.last.get("step", 0))
    total = run.state.get("total_steps") or 0
    share = f" of {total:,}" if total else ""
    restarts = sum(event.get("event") == Event.RESUME for event in run.events)
    steps = [e.get("steps", 0) for e in run.events if e.get("event") == Event.SKIP_STEP]
    skipped = sum(count for count in steps if isinstance(count, int))
    parts = [
        f"step {step:,}{share}",
        _format_number(_find_loss(run), "training loss {:.4f}"),
        f"{units.duration(run.seconds())} from its first to its last record",
        _format_number(run.series["perf/tokens_per_sec"].mean, "{:,.0f} tokens/s"),
        units.counted(restarts, "restart"),
        units.counted(skipped, "skipped step"),
    ]
    return f"{run.name} {status}: {', '.join(filter(None, parts))}."


def list_figures(run: RunData) -> Texts:
    """Return the most important figures of a run by name, as far as the run has them."""
    validation = run.series["eval/loss"]
    texts = {
        "training loss": _format_number(_find_loss(run), "{:.4f}"),
        "validation loss": _format_number(validation.last.value, "{:.4f}"),
        "lowest validation": _format_number(validation.least.value, "{:.4f}"),
        "tokens": _format_number(run.series[TOKENS].last.value, units.count),
        "tokens/s, mean": _format_number(run.series["perf/tokens_per_sec"].mean, "{:,.0f}"),
        "MFU, mean": _format_number(run.series["perf/mfu"].mean, "{:.1%}"),
        "peak memory": _format_number(run.series["memory/max_peak_gib"].most.value, _format_gib),
        "ranks": str(next((e["ranks"] for e in reversed(run.events) if "ranks" in e), "")),
    }
    return {name: text for name, text in texts.items() if text}


def compare_with_plan(run: RunData) -> Texts:
    """Return planned or estimated values of a run beside the real ones."""
    texts = {}
    step = max(run.state.get("step", 0), run.last.get("step", 0))
    if total := run.state.get("total_steps"):
        texts["steps"] = f"{total:,} planned, {step:,} done"
    seconds_left = read_number(run.timed.get("perf/eta_sec"), _LARGEST)
    if seconds_left == seconds_left:
        is_over = run.state.get("status") == Status.COMPLETE
        texts["time"] = (
            f"{units.duration(seconds_left)} estimated after step {run.timed['step']:,}, "
            f"{units.duration(run.seconds(run.timed.get('time', '')))} "
            f"{'taken' if is_over else 'so far'}"
        )
    estimate = read_number(run.state.get("memory_estimate_gib"), _LARGEST)
    total_gib = run.series["memory/total_gib"].most.value
    texts["memory per rank"] = "not measured"
    if peak := _format_number(run.series["memory/max_peak_gib"].most.value, _format_gib):
        texts["memory per rank"] = (
            f"{_format_number(estimate, _format_gib) or 'not'} estimated, {peak} at the peak"
            + _format_number(total_gib, lambda gib: f", {_format_gib(gib)} available")
        )
    return texts


def list_changed_options(run: RunData) -> Texts:
    """Return the options of a run whose value is not the default, with the default.

    config.yaml records the defaults of these options; that of an older version does not.
    """
    settled = run.config.get("settled", {})
    values = {**run.config.get("options", {}), **settled}
    texts = {}
    for name, default in run.config.get("defaults", {}).items():
        if name in values and name not in _HIDDEN:
            notes = ["chosen by stage 04"] if name in settled else []
            notes += [f"default {_format_value(default)}"] if default not in (None, []) else []
            note = f" ({', '.join(notes)})" if notes else ""
            texts[declared.flag(name)] = _format_value(values[name]) + note
    return texts


def list_versions(run: RunData) -> Texts:
    """Return the versions of packages, the commit of the code and the command."""
    versions = run.config.get("versions")
    argv = run.config.get("argv")
    texts = {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    if commit := run.config.get("git_commit"):
        texts["commit"] = str(commit)
    if isinstance(argv, list):
        texts["command"] = " ".join(map(str, argv))
    return texts


def list_results(run: RunData, pattern: str) -> Texts:
    """Return the values of each key that matches, by the name of the result.

    pattern: a regular expression with one group, the name.
    """
    texts = {}
    for key, series in sorted(run.series.items()):
        if (match := re.fullmatch(pattern, key)) and series:
            first = f"{series.first.value:.4g} at step {series.first.step:,}"
            last = f"{series.last.value:.4g} at step {series.last.step:,}"
            extremes = f"{series.least.value:.4g} to {series.most.value:.4g}"
            texts[match[1]] = f"{last}, from {first}; {extremes}"
    return texts


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _find_loss(run: RunData) -> float:
    return (run.series["train/loss_mean"] or run.series["train/loss"]).last.value


def _format_number(value: float, form: str | Callable[[float], str]) -> str:
    """Return a number as text; an empty text for NaN."""
    if math.isnan(value):
        return ""
    return form.format(value) if isinstance(form, str) else form(value)


def _format_gib(gib: float) -> str:
    return units.memory(gib * (1 << 30))


# The tables of a report: title, and the texts about one run.
TABLES: dict[str, Callable[[RunData], Texts]] = {
    "Bits per byte by source": lambda run: list_results(run, "eval/(.+)/bits_per_byte"),
    "Accuracy by task": lambda run: list_results(run, "eval/(.+)/accuracy"),
    "Validation loss by dataset": lambda run: list_results(run, "eval/loss/(.+)"),
    "Plan and reality": compare_with_plan,
    "Options that differ from their defaults": list_changed_options,
    "Versions": list_versions,
}
