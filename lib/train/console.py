"""A row of metrics.jsonl on the console: a line for people, a dict for programs and rank logs."""

from __future__ import annotations

from typing import Any

from lib.core import units

STYLES = ("line", "dict")
_SHORT = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "lr",
    "eval/loss": "eval_loss",
    "perf/tokens_per_sec": "tok/s",
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
_WIDTHS = (10, 9, 11, 8, 8)  # columns of the cells below, until a value is wider
_STRAGGLER = 1.5  # times the usual rank's time before the slowest is named


class Lines:
    """Makes the line of each row; columns are as wide as their widest value so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = f"{total_steps:,}"
        self._widths = list(_WIDTHS)

    def line(self, row: dict[str, Any]) -> str:
        """Return a row in under 120 columns; its keys are those of docs/artifacts.md."""
        cells = [
            f"loss {row['train/loss_mean']:.3f}",
            f"lr {_rate(row['train/learning_rate'])}",
            f"{row['perf/tokens_per_sec']:,.0f} tok/s",
            f"{_percent(row['perf/mfu'])} MFU",
            units.memory(row["memory/max_peak_gib"] * (1 << 30)),
        ]
        self._widths = list(map(max, self._widths, map(len, cells)))
        step = f"{row['step']:,}".rjust(len(self._total))
        return "  ".join(
            [f"step {step}/{self._total}", *map(str.rjust, cells, self._widths), *_remarks(row)]
        )


def mean_loss(row: dict[str, Any]) -> float:
    """Return the mean loss since the row before; of rows older than that key, the step's."""
    return row.get("train/loss_mean", row["train/loss"])


def record(row: dict[str, Any], rank: int) -> str:
    """Return a row as `[rank=R] {'global_step': …}`, rounded; times in ms, memory in GiB."""
    found: dict[str, Any] = {
        "global_step": row["step"],
        "running_loss": round(row["train/loss_mean"], 4),
    }
    found |= {short: _short(row[key]) for key, short in _SHORT.items() if key in row}
    found |= {key: round(value, 1) for key, value in row.items() if key.startswith("time/")}
    if row["perf/slowest_ratio"] > _STRAGGLER:
        found["slowest_rank"] = row["perf/slowest_rank"]
    if "perf/eta_sec" in row:
        found["eta"] = units.duration(row["perf/eta_sec"])
    return f"[rank={rank}] {found}"


def _remarks(row: dict[str, Any]) -> list[str]:
    """Return what not every line has."""
    said = []
    if "perf/eta_sec" in row:
        said.append(f"eta {units.duration(row['perf/eta_sec'])}")
    if "perf/loader_share" in row:
        said.append(f"{_percent(row['perf/loader_share'])} waiting for data")
    if row["perf/slowest_ratio"] > _STRAGGLER:
        said.append(f"slowest rank {row['perf/slowest_rank']}")
    return said


def _rate(value: float) -> str:
    """Return a learning rate with two digits: `2.9e-4`."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 or not share else 1}f} %"


def _short(value: float) -> Any:
    """Return four digits of a figure, all of a count or a rank."""
    if isinstance(value, int):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
