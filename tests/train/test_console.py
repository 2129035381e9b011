# covers: lib/train/output/console.py
"""A row of metrics.jsonl as a console line for people, and as a record for programs."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from lib.train.output import console

ROW = {
    "step": 150,
    "train/loss": 1.7234567,
    "train/loss_mean": 1.72,
    "train/grad_norm": 0.5,
    "train/learning_rate": 2.91e-4,
    "perf/tokens_per_sec": 6404.4,
    "perf/mfu": 0.381,
    "perf/slowest_rank": 3,
    "perf/slowest_ratio": 1.0,
    "memory/peak_gib": 61.21,
    "memory/current_gib": 40.04,
    "memory/reserved_gib": 66.0,
    "memory/total_gib": 79.2,
    "memory/max_peak_gib": 61.24,
    "memory/max_peak_rank": 3,
    "time/data": 7.88,
    "time/total": 1279.1,
    "perf/eta_sec": 11520.0,
}


def row(**changes: Any) -> dict[str, Any]:
    return ROW | {key.replace("__", "/"): value for key, value in changes.items()}


def test_a_line_has_units_and_the_total_number_of_steps() -> None:
    assert (
        console.ConsoleLines(20_000).format_row(ROW)
        == "step    150/20,000  loss 1.720  lr 2.9e-4  6,404 tok/s  38 % MFU  61.2 GiB  "
        "eta 3 h 12 min"
    )


def test_columns_of_successive_lines_are_aligned() -> None:
    lines_of = console.ConsoleLines(20_000)
    lines = [
        lines_of.format_row(
            row(step=step, perf__tokens_per_sec=speed, train__loss_mean=loss, perf__mfu=mfu)
        )
        for step, speed, loss, mfu in ((1, 12_345, 11.3, 0.12), (20_000, 999, 9.9, 0.15))
    ]
    assert {line.index(" tok/s") for line in lines} == {lines[0].index(" tok/s")}
    assert lines[0].index("eta") == lines[1].index("eta")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__loss_mean": float("nan")}, "loss nan"),
        ({"train__learning_rate": 0.0}, "lr 0 "),
        ({"perf__mfu": 0.004}, "0.4 % MFU"),
        ({"memory__max_peak_gib": 1e-9}, "0.0 KiB"),
        ({"perf__slowest_ratio": 1.7}, "slowest rank 3"),
        ({"perf__loader_share": 0.12}, "12 % waiting for data"),
    ],
)
def test_a_line_shows_unusual_figures(changes: dict[str, float], expected: str) -> None:
    assert expected in console.ConsoleLines(20_000).format_row(row(**changes))


def test_a_line_stays_under_120_columns() -> None:
    longest = row(
        step=999_999,
        train__loss_mean=11.999,
        train__learning_rate=1.2e-10,
        perf__tokens_per_sec=12_345_678.0,
        perf__mfu=1.0,
        memory__max_peak_gib=141.2,
        perf__eta_sec=50 * 86400.0,
        perf__slowest_ratio=2.0,
        perf__slowest_rank=1023,
    )
    assert len(console.ConsoleLines(999_999).format_row(longest)) < 120


def test_the_first_row_has_no_eta() -> None:
    first = {key: value for key, value in ROW.items() if key != "perf/eta_sec"}
    line = console.ConsoleLines(20_000).format_row(first)
    assert "eta" not in line + console.format_record(first, 0)


def test_a_row_of_a_cpu_has_no_mfu() -> None:
    on_cpu = {key: value for key, value in ROW.items() if key != "perf/mfu"}
    line = console.ConsoleLines(20_000).format_row(on_cpu)
    assert "6,404 tok/s  61.2 GiB" in line and "MFU" not in line
    assert "mfu" not in console.format_record(on_cpu, 0)


def test_the_record_of_an_overflow_shows_an_infinite_norm() -> None:
    overflow = row(train__grad_norm=float("inf"), train__loss=float("nan"))
    text = console.format_record(overflow, 0)
    assert "'grad_norm': inf" in text and "'loss': nan" in text


def test_a_record_is_a_dict_after_the_rank() -> None:
    text = console.format_record(row(perf__slowest_ratio=1.7), 5)
    assert text.startswith("[rank=5] {'global_step': 150, 'running_loss': 1.72, ")
    record = ast.literal_eval(text.removeprefix("[rank=5] "))
    assert record["tok/s"] == 6404 and record["time/data"] == 7.9 and record["lr"] == 2.91e-4
    assert [
        record[f"{name}_gib"] for name in ("current", "peak", "reserved", "total", "max_peak")
    ] == [40.04, 61.21, 66.0, 79.2, 61.24] and "'max_peak_rank': 3," in text
    assert record["slowest_rank"] == 3 and record["eta"] == "3 h 12 min"
