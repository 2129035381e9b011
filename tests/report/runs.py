"""Write the files of a run, as a trainer leaves them, without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lib.train.config import list_changed_defaults

START = "2026-11-24T10:{:02d}:{:02d}Z"


def make_row(step: int, **more: Any) -> dict[str, Any]:
    """Return a row of metrics.jsonl, whose loss falls with the step. more: values by key."""
    loss = 3 + 4 * math.exp(-step / 100) + 0.1 * math.sin(step)
    return {
        "step": step,
        "time": START.format(step // 60 % 60, step % 60),
        "train/loss": loss,
        "train/loss_mean": loss - 0.05,
        "train/grad_norm": 1 + 0.5 * math.sin(step / 3),
        "train/learning_rate": 1e-3 * (1 - step / 1000),
        "train/tokens_seen": 1024 * step,
        "perf/tokens_per_sec": 6000 + 100 * math.sin(step),
        "perf/mfu": 0.38,
        "perf/slowest_rank": 1,
        "perf/slowest_ratio": 1.02,
        "perf/eta_sec": float(700 - step),
        "time/data": 2.0,
        "time/forward": 40.0,
        "time/backward": 80.0,
        "time/update": 10.0,
        "time/total": 140.0,
        "memory/current_gib": 30.0,
        "memory/window_peak_gib": 55.0,
        "memory/max_peak_gib": 60.0,
        "memory/total_gib": 80.0,
        **more,
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_run(
    root: Path,
    rows: list[dict[str, Any]],
    events: list[dict[str, Any]] | None = None,
    samples: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> Path:
    """Write a run with these rows, and return its directory."""
    root.mkdir(parents=True)
    write_lines(root / "metrics.jsonl", rows)
    begin = {"time": START.format(0, 0), "event": "start", "step": 0, "ranks": 2}
    write_lines(root / "events.jsonl", [begin, *(events or [])])
    if samples:
        write_lines(root / "samples.jsonl", samples)
    step = rows[-1]["step"] if rows else 0
    state = {"status": "complete", "step": step, "total_steps": 700, "memory_estimate_gib": 58.5}
    (root / "state.json").write_text(json.dumps(state), encoding="utf-8")
    chosen = {"lr": 0.001, "batch_size": 4, **(options or {})}
    settled = {"precision": "bf16"}
    config = {
        "options": chosen,
        "settled": settled,
        "defaults": list_changed_defaults(chosen | settled),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "argv": ["04_train_fsdp.py", "-e", root.name],
        "git_commit": "2c47abd5",
    }
    (root / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # YAML too
    return root
