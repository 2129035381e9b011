"""Items that measure whole runs: MFU by model, length and --compile; saves; the first step."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.gpu import traces
from tests.gpu.place import ROOT, Place, Stage

MEASURED_STEPS = 20  # of a measured run, by default
WARMUP_STEPS = 5  # not measured
# The MFU that an H200 should reach, at 989 TFLOP/s, counting the causal half of attention.
MFU_TARGETS = {
    "8b-wide_2x8192_compile_on": 0.52,
    "8b-wide_4x8192_compile_on": 0.55,
    "1b_2x8192_compile_on": 0.45,
    "1b_4x8192_compile_on": 0.45,
    "lora-8b": 0.49,
}
_BENCH_TOLERANCE = 0.1  # between a bench and a run of the same shapes
# The beginning of a line in the log of rank 0, and the phase that it ends. The first line ends the
# imports that the check of files needs.
_START_MARKS = {
    "model: ": "files",
    "tokens: ": "imports of torch and transformers, model without memory, tokens",
    "sharded: ": "process group, memory estimate, sharding",
    "weights: ": "weights",
    "loss: ": "trials",
    "[rank=0] ": "first step",
}
_CHECKPOINT_BYTES = 40e9  # of the one checkpoint of the 8B-wide model
_PEAK_LINE = (
    r"([\d.]+) TFLOP/s per GPU .*?([\d.]+) GFLOP per token with attention counted as full, "
    r"([\d.]+) as causal"
)


def run_measured(
    place: Place,
    name: str,
    model: str | Path,
    length: int,
    batch: int,
    *options: object,
    steps: int = MEASURED_STEPS,
    hook: str = "skip_saves_and_memory_check",
    **launch_options: Any,
) -> Stage:
    """Run stage 04 and note its speed. length: tokens per sample; batch: samples per micro-batch.

    Nothing is recomputed unless an option says so: the hook skips the memory check, which would
    choose the activation checkpointing.
    """
    length, batch, steps = place.size((length, batch, steps), (64, 2, 8))
    run = place.train(
        name,
        "-s",
        length,
        "-b",
        batch,
        "--max-steps",
        steps,
        "--lr",
        1e-4,
        "--log-freq",
        WARMUP_STEPS,
        "--activation-checkpointing",
        "none",
        *options,
        model=model,
        hook=hook,
        **launch_options,
    )
    place.note(**{name: summarise_run(run)})
    return run


def measure_or_reuse(
    place: Place, known: tuple[str, str] | None, name: str, *settings: Any, **options: Any
) -> dict[str, Any]:
    """Return the figures of a measured run, and note them as `name`.

    known: an item that measures the same, and the name of the figures in it. If the item has passed
    in this invocation, nothing runs again. settings, options: see `run_measured`.
    """
    item, figures_name = known or ("", "")
    if figures := place.earlier.get(item, {}).get(figures_name):
        place.note(**{name: figures | {"measured by": item}})
        return figures
    return summarise_run(run_measured(place, name, *settings, **options))


def summarise_run(run: Stage) -> dict[str, Any]:
    """Return the medians of a run's figures after the warm-up, and MFU by both FLOP counts."""
    rows = [row for row in run.rows if row["step"] > WARMUP_STEPS] or run.rows[-1:]
    medians = {
        key: statistics.median(row[key] for row in rows)
        for key in (
            "perf/tokens_per_sec_per_device",
            "perf/tflops",
            "time/data",
            "time/forward",
            "time/backward",
            "time/update",
            "time/optimizer",
            "time/total",
        )
    }
    return medians | {
        **_compute_mfu(medians, run.log_lines),
        "peak_gib": max(row["memory/peak_gib"] for row in run.rows),
        "first_step_ms": run.rows[0]["time/total"],
        "said": [
            line
            for line in run.log_lines
            if line.startswith(("attention", "loss", "compile", "packs", "warning"))
        ],
    }


def _compute_mfu(medians: dict[str, float], log_lines: list[str]) -> dict[str, float]:
    """Return MFU by both FLOP counts; {} on a CPU. The rows count the whole square of attention."""
    line = re.search(_PEAK_LINE, "\n".join(log_lines))
    if line is None:
        return {}
    peak, square, causal = map(float, line.groups())
    products = medians["perf/tokens_per_sec_per_device"] * (2 * causal - square) / 1e3
    return {
        "mfu_causal": (medians["perf/tflops"] + products) / 2 / peak,
        "mfu_whole_square": medians["perf/tflops"] / peak,
    }


def describe_figures(figures: dict[str, Any], target: float | None = None) -> str:
    """Return the figures of a run in one line. target: the MFU that it should reach."""
    target_note = f" (aim {100 * target:.0f} %)" if target else ""
    mfu = figures.get("mfu_causal")  # absent on a CPU
    mfu_text = f"{100 * mfu:.1f} % MFU by the causal half{target_note}, " if mfu else ""
    return (
        f"{figures['perf/tokens_per_sec_per_device']:,.0f} tokens/s, {mfu_text}"
        f"{figures['peak_gib']:.1f} GiB"
    )


def name_mfu_item(model: str, length: int, batch: int, compiled: str) -> str:
    """Return the name of the item that measures one setting."""
    return f"{model}_{batch}x{length}_compile_{compiled}"


def make_mfu_item(model: str, length: int, batch: int, compiled: str):
    """Return an item that measures one setting."""

    def item(place: Place) -> None:
        run = run_measured(
            place, "run", model, length, batch, "--compile", place.size(compiled, "off")
        )
        aim = MFU_TARGETS.get(name_mfu_item(model, length, batch, compiled))
        place.note(aim_mfu_causal=aim, in_one_line=describe_figures(summarise_run(run), aim))

    item.__doc__ = f"{model}, {batch} × {length:,} tokens a pass, compile {compiled}."
    return item


def whole_run(place: Place) -> None:
    """Measure the best setting so far without hooks: with the memory check and a save."""
    model = "8b-wide" if shutil.disk_usage(place.work).free > _CHECKPOINT_BYTES else "1b"
    best = {"length": 8192, "batch": 2, "compile": place.size("on", "off"), "mfu": 0.0}
    results = place.out / "mfu.jsonl"
    for line in results.read_text().splitlines() if results.exists() else ():
        result = json.loads(line)
        match = re.match(rf"{model}_(\d+)x(\d+)_compile_(\w+)", result["item"])
        mfu = result["figures"].get("run", {}).get("mfu_causal", 0.0)
        if match and mfu > best["mfu"]:
            best = {
                "length": int(match[2]),
                "batch": int(match[1]),
                "compile": match[3],
                "mfu": mfu,
            }
    place.note(setting=best | {"model": model})
    began = time.monotonic()
    run = run_measured(
        place,
        "whole",
        model,
        best["length"],
        best["batch"],
        "--compile",
        best["compile"],
        steps=25,
        hook="change_nothing",
        fresh=True,
    )
    place.note(
        seconds_in_all=time.monotonic() - began, last_words=run.printed.strip().splitlines()[-12:]
    )


def run_bench(
    place: Place, name: str, model: str, length: int, batch: int, **launch_options: Any
) -> dict[str, Any]:
    """Return the result of `--bench`, on synthetic tokens and without weights; note it."""
    length, batch = place.size((length, batch), (64, 2))
    options = ("--bench", "-m", place.model(model), "-s", length, "-b", batch, "--no-progress")
    recompute = ("--activation-checkpointing", "none")
    compiled = ("--compile", place.size("on", "off"))
    run = place.launch(
        "04_train_fsdp.py", "-e", name, *options, *recompute, *compiled, **launch_options
    ).wait_for_end()
    result = json.loads(next(line for line in run.printed.splitlines() if line.startswith("{")))
    place.note(**{name: result})
    assert not run.experiment.exists(), "a bench has left files"
    return result


def bench(place: Place) -> None:
    """`--bench` measures the speed that a run on data has; both are noted."""
    model = place.size("1b", "small")
    measured = run_bench(place, "bench", model, 8192, 2)
    known = ("1b_2x8192_compile_on", "run")
    run = measure_or_reuse(
        place, known, "run", model, 8192, 2, "--compile", place.size("on", "off")
    )
    key = "perf/tokens_per_sec_per_device"
    ratio = measured[key] / run[key]
    place.note(bench_to_run=ratio)
    if place.on_gpu:
        assert abs(ratio - 1) < _BENCH_TOLERANCE, f"{ratio:.2f} times the speed of a run on data"


def save_stall(place: Place) -> None:
    """Note how long steps wait for the first and the second asynchronous save."""
    ckpt_freq = place.size(20, 3)
    run = run_measured(
        place,
        "saves",
        find_part_of_1b(place),
        4096,
        4,
        "--ckpt-freq",
        ckpt_freq,
        "--ckpt-keep",
        2,
        "--compile",
        "off",
        "--log-freq",
        1,
        steps=50,
        hook="change_nothing",
    )
    lines = re.findall(r"(step \d+: sav.*)", run.printed)
    slowest = sorted(((row["time/total"], row["step"]) for row in run.rows), reverse=True)[:6]
    place.note(saves=lines, slowest_steps_ms=slowest)
    assert sum("training waited" in line for line in lines) >= 1, lines


def find_part_of_1b(place: Place) -> Path:
    """Return the directory of a model whose checkpoint takes 8 GB; three fit on a small disk."""
    return place.model("1b", num_hidden_layers=place.size(6, 4))


def find_phases(log: str) -> dict[str, float]:
    """Return the seconds between the lines of a rank's log that end the phases of a start."""
    times = {}
    for line in log.splitlines():
        mark = next((mark for mark in _START_MARKS if f" INFO {mark}" in line), "")
        if mark:
            times.setdefault(mark, datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f"))
    return {
        _START_MARKS[mark]: (times[mark] - times[before]).total_seconds()
        for before, mark in pairwise(times)
    }


def first_step(place: Place) -> None:
    """Note the seconds until the log line of the first step, and of the phases before it.

    It is started with plain Python and by the launcher.
    """
    python = {"fresh": True}
    launcher = {
        "command": [ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
        "env": {"PYTHON": sys.executable},
    }
    settings = [
        ("python", python, "off"),
        *place.size(  # the item `launcher` rehearses single_node.sh
            [("python", python, "on"), ("single_node.sh", launcher, "on")], []
        ),
    ]
    for name, launch_options, compiled in settings:
        began = time.monotonic()
        run = place.begin(
            f"{name}-{compiled}",
            "-s",
            place.size(4096, 64),
            "-b",
            1,
            "--max-steps",
            2,
            "--compile",
            compiled,
            model=find_part_of_1b(place),
            hook="change_nothing" if "command" in launch_options else "skip_saves",
            **launch_options,
        )
        run.wait_for(1)
        setting = f"{name}, compile {compiled}"
        place.note(**{setting: time.monotonic() - began})
        run.wait_for_end()
        log = (run.experiment / "logs" / "rank_00000.log").read_text()
        place.note(**{f"{setting}, by phase": find_phases(log)})


def profile(place: Place) -> None:
    """Profile two steps; append the table of the slowest operations to profiles.txt."""
    for model in place.size(("8b-wide", "1b"), ("small",)):
        run = run_measured(
            place,
            model,
            model,
            8192,
            2,
            "--compile",
            place.size("on", "off"),
            "--profile",
            "7:8",
            steps=9,
        )
        append_profile(place, model, run)
        events = traces.load_trace(run)
        place.note(
            **{
                f"{model}, kernels by milliseconds": traces.find_slowest(events),
                f"{model}, ms by part": traces.sum_by_part(events),
            }
        )


def append_profile(place: Place, title: str, run: Stage) -> None:
    """Append the profiler's table of a run to profiles.txt, in the directory of the results."""
    table = next((run.experiment / "profile").glob("*.txt")).read_text(encoding="utf-8")
    with (place.out / "profiles.txt").open("a", encoding="utf-8") as file:
        file.write(f"=== {title}\n{table}\n")
