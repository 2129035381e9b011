"""Items that measure whole runs: MFU by model, length and compile, saves, the first step."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import traces
from tests.gpu.place import ROOT, Place, Stage

STEPS = 20  # of a measured run
WARM = 5  # first steps that are not measured
# Of model FLOPs at 989 TFLOP/s, attention by its causal half: what an H200 should reach.
AIMS = {
    "8b-wide_2x8192_compile_on": 0.52,
    "8b-wide_4x8192_compile_on": 0.55,
    "1b_2x8192_compile_on": 0.45,
    "1b_4x8192_compile_on": 0.45,
    "lora-8b": 0.49,
}
_SAVED_BYTES = 40e9  # of the disk, for the one checkpoint of the 8B-wide model
_WORDS = (
    r"([\d.]+) TFLOP/s per rank .*?([\d.]+) GFLOP per token with the whole square of "
    r"attention, ([\d.]+) with its causal half"
)


def measured(
    place: Place,
    name: str,
    model: str | Path,
    length: int,
    batch: int,
    *options: object,
    steps: int = STEPS,
    hook: str = "measure",
    **how: Any,
) -> Stage:
    """Run stage 04 and note its speed. length: tokens per sample; batch: samples per pass.

    Nothing is recomputed unless an option says so: the hook skips the memory plan, which would
    decide it.
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
        WARM,
        "--activation-checkpointing",
        "none",
        *options,
        model=model,
        hook=hook,
        **how,
    )
    place.note(**{name: figures(run)})
    return run


def figures(run: Stage) -> dict[str, Any]:
    """Return the medians of a run's steps after the first ones, MFU by both counts of attention."""
    rows = [row for row in run.rows if row["step"] > WARM] or run.rows[-1:]
    middle = {
        key: statistics.median(row[key] for row in rows)
        for key in (
            "perf/tokens_per_sec_per_device",
            "time/data",
            "time/forward",
            "time/backward",
            "time/update",
            "time/optimizer",
            "time/total",
        )
    }
    rate = middle["perf/tokens_per_sec_per_device"]
    peak, whole, causal = map(float, re.search(_WORDS, run.printed).groups())
    return middle | {
        "mfu_causal": rate * causal * 1e9 / (peak * 1e12),
        "mfu_whole_square": rate * whole * 1e9 / (peak * 1e12),
        "peak_gib": max(row["memory/peak_gib"] for row in run.rows),
        "first_step_ms": run.rows[0]["time/total"],
        "said": [
            line
            for line in run.printed.splitlines()
            if line.startswith(("attention", "loss", "compile", "packs", "warning"))
        ],
    }


def in_words(reached: dict[str, Any], aim: float | None = None) -> str:
    """Return the figures of a run in one line, with the aim."""
    aimed = f" (aim {100 * aim:.0f} %)" if aim else ""
    return (
        f"{reached['perf/tokens_per_sec_per_device']:,.0f} tokens/s, "
        f"{100 * reached['mfu_causal']:.1f} % MFU by the causal half{aimed}, "
        f"{reached['peak_gib']:.1f} GiB"
    )


def mfu_name(model: str, length: int, batch: int, compiled: str) -> str:
    """Return the name of an item that measures one setting."""
    return f"{model}_{batch}x{length}_compile_{compiled}"


def mfu(model: str, length: int, batch: int, compiled: str):
    """Return an item that measures one setting."""

    def item(place: Place) -> None:
        run = measured(place, "run", model, length, batch, "--compile", place.size(compiled, "off"))
        aim = AIMS.get(mfu_name(model, length, batch, compiled))
        place.note(aim_mfu_causal=aim, in_one_line=in_words(figures(run), aim))

    item.__doc__ = f"{model}, {batch} × {length:,} tokens a pass, compile {compiled}."
    return item


def whole_run(place: Place) -> None:
    """The best setting found so far through the whole stage, as it is typed, with a save."""
    model = "8b-wide" if shutil.disk_usage(place.work).free > _SAVED_BYTES else "1b"
    best = {"length": 8192, "batch": 2, "compile": place.size("on", "off"), "mfu": 0.0}
    results = place.out / "mfu.jsonl"
    for line in results.read_text().splitlines() if results.exists() else ():
        result = json.loads(line)
        found = re.match(rf"{model}_(\d+)x(\d+)_compile_(\w+)", result["item"])
        reached = result["figures"].get("run", {}).get("mfu_causal", 0.0)
        if found and reached > best["mfu"]:
            best = {
                "length": int(found[2]),
                "batch": int(found[1]),
                "compile": found[3],
                "mfu": reached,
            }
    place.note(setting=best | {"model": model})
    began = time.monotonic()
    run = measured(
        place,
        "whole",
        model,
        best["length"],
        best["batch"],
        "--compile",
        best["compile"],
        steps=40,
        hook="nothing",
        fresh=True,
    )
    place.note(
        seconds_in_all=time.monotonic() - began, last_words=run.printed.strip().splitlines()[-12:]
    )


def save_stall(place: Place) -> None:
    """How long the steps wait for the first save in the background and for the second."""
    every = place.size(20, 3)
    run = measured(
        place,
        "saves",
        part_of_1b(place),
        4096,
        4,
        "--ckpt-freq",
        every,
        "--ckpt-keep",
        2,
        "--compile",
        "off",
        "--log-freq",
        1,
        steps=50,
        hook="nothing",
    )
    lines = re.findall(r"(step \d+: sav.*)", run.printed)
    slowest = sorted(((row["time/total"], row["step"]) for row in run.rows), reverse=True)[:6]
    place.note(saves=lines, slowest_steps_ms=slowest)
    assert sum("training waited" in line for line in lines) >= 1, lines


def part_of_1b(place: Place) -> Path:
    """Return a model whose checkpoint takes 8 GB: three of them fit on a small disk."""
    return place.model("1b", num_hidden_layers=place.size(6, 4))


def first_step(place: Place) -> None:
    """The seconds from Python alone and from the launcher to the line of the first step."""
    python = {"fresh": True}
    launcher = {
        "command": [ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
        "env": {"PYTHON": sys.executable},
    }
    settings = [
        ("python", python, "off"),
        *place.size(  # the item `launcher` rehearses the other
            [("python", python, "on"), ("single_node.sh", launcher, "on")], []
        ),
    ]
    for name, how, compiled in settings:
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
            model=part_of_1b(place),
            hook="nothing" if "command" in how else "save_nothing",
            **how,
        )
        run.wait_for(1)
        place.note(**{f"{name}, compile {compiled}": time.monotonic() - began})
        run.ended()


def profile(place: Place) -> None:
    """A table of the dearest operations of two steps, kept beside the results."""
    for model in place.size(("8b-wide", "1b"), ("small",)):
        run = measured(
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
        keep_table(place, model, run)
        place.note(**{f"{model}, kernels by milliseconds": traces.dearest(traces.load(run))})


def keep_table(place: Place, title: str, run: Stage) -> None:
    """Append the profiler's table of a run to profiles.txt, beside the results."""
    table = next((run.experiment / "profile").glob("*.txt")).read_text(encoding="utf-8")
    with (place.out / "profiles.txt").open("a", encoding="utf-8") as file:
        file.write(f"=== {title}\n{table}\n")
