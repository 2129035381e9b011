"""Format the rows of a run: lines for people, and records for programs and rank logs."""

from __future__ import annotations

import math
from typing import Any

from lib.core import units

_SHORT_NAMES = {  # names of figures in rank logs, in the order of the log
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "lr",
    "eval/loss": "eval_loss",
    "perf/tokens_per_sec": "tok/s",
    "perf/samples_per_sec": "samples/s",
    "perf/mfu": "mfu",
    "memory/current_gib": "current_gib",
    "memory/peak_gib": "peak_gib",
    "memory/window_peak_gib": "window_peak_gib",
    "memory/reserved_gib": "reserved_gib",
    "memory/total_gib": "total_gib",
    "memory/max_peak_gib": "max_peak_gib",
    "memory/max_peak_rank": "max_peak_rank",
    "perf/loader_share": "loader_share",
    "perf/loader_tokens_per_sec_per_device": "loader_tok/s",
}
# Initial widths of the cells of a console line.
_WIDTHS = {"loss": 10, "lr": 9, "speed": 11, "mfu": 8, "memory": 8}
_STRAGGLER = 1.5  # ratio to the median rank from which a line names the slowest rank


class ConsoleLines:
    """Formats rows as lines for people. A column is as wide as its widest value so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = f"{total_steps:,}"
        self._widths = dict(_WIDTHS)

    def format_row(self, row: dict[str, Any]) -> str:
        """Return a row of metrics.jsonl as a line of less than 120 columns."""
        cells = {
            "loss": f"loss {row['train/loss_mean']:.3f}",
            "lr": f"lr {_format_rate(row['train/learning_rate'])}",
            "speed": f"{row['perf/tokens_per_sec']:,.0f} tok/s",
            **({"mfu": f"{_format_percent(row['perf/mfu'])} MFU"} if "perf/mfu" in row else {}),
            "memory": units.memory(row["memory/max_peak_gib"] * (1 << 30)),
        }
        for name, cell in cells.items():
            self._widths[name] = max(self._widths[name], len(cell))
        step = f"{row['step']:,}".rjust(len(self._total))
        return "  ".join(
            [
                f"step {step}/{self._total}",
                *(cell.rjust(self._widths[name]) for name, cell in cells.items()),
                *_list_remarks(row),
            ]
        )


def format_record(row: dict[str, Any], rank: int) -> str:
    """Return a row as `[rank=R] {'global_step': …}` with rounded figures, for programs.

    Times are in ms, memory is in GiB.
    """
    record: dict[str, Any] = {
        "global_step": row["step"],
        "running_loss": round(row["train/loss_mean"], 4),
    }
    record |= {short: _round_figure(row[key]) for key, short in _SHORT_NAMES.items() if key in row}
    record |= {key: round(value, 1) for key, value in row.items() if key.startswith("time/")}
    if row["perf/slowest_ratio"] > _STRAGGLER:
        record["slowest_rank"] = row["perf/slowest_rank"]
    if "perf/eta_sec" in row:
        record["eta"] = units.duration(row["perf/eta_sec"])
    return f"[rank={rank}] {record}"


def _list_remarks(row: dict[str, Any]) -> list[str]:
    """Return the cells that only some rows need, for the end of a line."""
    remarks = []
    if "perf/eta_sec" in row:
        remarks.append(f"eta {units.duration(row['perf/eta_sec'])}")
    if "perf/loader_share" in row:
        remarks.append(f"{_format_percent(row['perf/loader_share'])} waiting for data")
    if row["perf/slowest_ratio"] > _STRAGGLER:
        remarks.append(f"slowest rank {row['perf/slowest_rank']}")
    return remarks


def _format_rate(value: float) -> str:
    """Return a learning rate with two digits, such as `2.9e-4`."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _format_percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 or not share else 1}f} %"


def _round_figure(value: float) -> Any:
    """Return a number rounded to four significant digits; an integer keeps all of its digits.

    The norm of a gradient that overflows is infinite.
    """
    if isinstance(value, int):
        return value
    is_large = math.isfinite(value) and abs(value) >= 1000
    return round(value) if is_large else float(f"{value:.4g}")
