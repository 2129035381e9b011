"""loss.png: loss and learning rate against tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lib.core import log, units
from lib.train import console


def loss(rows: list[dict[str, Any]], path: Path, caption: str) -> None:
    """Draw the rows of metrics.jsonl; without matplotlib, say so and go on.

    caption: what a reader of the picture alone must know (experiment, model, hardware).
    """
    try:
        import matplotlib
    except ImportError:
        log.warn(f"no {path.name}: the package `matplotlib` is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [row for row in rows if "train/loss" in row]
    held_out = [row for row in rows if "eval/loss" in row]
    if not train:
        return
    figure, left = pyplot.subplots(figsize=(9, 5), dpi=110)
    right = left.twinx()
    right.plot(*_columns(train, "train/learning_rate"), color="0.75", linewidth=1)
    right.set_ylabel("learning rate", color="0.5")
    right.set_ylim(bottom=0)
    left.plot(*_columns(train, "train/loss"), color="tab:blue", linewidth=0.6, alpha=0.35,
              label="training, single steps")
    tokens, _ = _columns(train, "train/loss")
    left.plot(tokens, [console.mean_loss(row) for row in train], color="tab:blue", linewidth=1.2,
              label="training, mean since the point before")
    if held_out:
        left.plot(*_columns(held_out, "eval/loss"), color="tab:orange", marker="o", markersize=4,
                  label="validation")
    left.set_zorder(right.get_zorder() + 1)
    left.patch.set_visible(False)
    left.set_xlabel("tokens")
    left.xaxis.set_major_formatter(lambda tokens, _: units.count(tokens))
    left.set_ylabel("loss (nats per token)")
    left.legend(loc="upper right")
    left.set_title(caption, fontsize=9)
    figure.tight_layout()
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp.png")
    figure.savefig(temporary)
    pyplot.close(figure)
    temporary.replace(path)


def _columns(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    return [row["train/tokens_seen"] for row in rows], [row[key] for row in rows]
