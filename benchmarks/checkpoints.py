#!/usr/bin/env python3
"""How fast checkpoints are written and read, how long they hold training up.

  python benchmarks/checkpoints.py                 # needs about 6 GB of disk and of memory
  python benchmarks/checkpoints.py --only save,load --rounds 7 --ranks 2
  python benchmarks/checkpoints.py --only save --work /dev/shm    # without a disk

A Llama of --layers layers with its AdamW moments (1.03 GB with 6), sharded over --ranks gloo ranks.
Every round takes every way once, each time beginning with another; ratios are of the same round and
their median is shown. Save: this repository's (hashed, committed) and the same with a hash that
does nothing, raw write + fsync of the same bytes, `torch.save` + fsync, `dcp.save`. Load: verified
and loaded, against a raw read of the same files; cold is with the page cache dropped for these
files. Async: how long a save in the background holds a training loop up. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import processes


def main() -> None:
    """Measure what --only names and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="save,load,async", help="parts, with commas")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to put files (default: temporary)")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {args.ranks} ranks, load before the "
        f"start {os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    for part in args.only.split(","):
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            found = processes.figures(
                processes.command(
                    "checkpoints.py",
                    args.ranks if args.ranks > 1 else 0,
                    part=part,
                    work=folder,
                    layers=args.layers,
                    rounds=args.rounds,
                )
            )
        {"save": save, "load": load, "async": background}[part](found)


def save(found: dict[str, Any]) -> None:
    """Print rates of writing and what hashing costs."""
    _rates(found, "save", "raw write + fsync")
    own = found["seconds"]["ours"]
    plain = found["seconds"]["ours, not hashed"]
    hashed = statistics.median(h / (own - h) for h, own in zip(found["hashing"], own, strict=True))
    paired = statistics.median(_ratios(own, plain)) - 1
    print(
        f"hashing: {100 * hashed:.1f} % of the rest of a save (time in the hash itself), "
        f"{100 * paired:+.1f} % against saves that are not hashed\n",
        flush=True,
    )


def load(found: dict[str, Any]) -> None:
    """Print rates of reading from the disk and from the page cache."""
    for cache in ("cold", "warm"):
        part = {
            "bytes": found["bytes"],
            "seconds": {
                name.partition(", ")[2]: seconds
                for name, seconds in found["seconds"].items()
                if name.startswith(cache)
            },
        }
        _rates(part, f"load, {cache}", "raw read")


def background(found: dict[str, Any]) -> None:
    """Print what a save in the background costs the training loop."""
    print(
        f"| save of {found['bytes'] / 1e6:,.0f} MB beside training | held up, s (rounds) | "
        "median | of a sync save | steps longer by, s | whole after, s |\n"
        "|---|---|---|---|---|---|"
    )
    sync = found["sync"]
    for name, rows in found["async"].items():
        held = [row["held"] for row in rows]
        share = statistics.median(_ratios(held, sync))
        print(
            f"| {name} | {', '.join(f'{x:.3f}' for x in held)} | {statistics.median(held):.3f} | "
            f"{100 * share:.1f} % | {statistics.median(row['longer'] for row in rows):.2f} | "
            f"{statistics.median(row['whole'] for row in rows):.2f} |"
        )
    print(
        f"\na sync save takes {statistics.median(sync):.2f} s, a step "
        f"{statistics.median(found['step']):.2f} s\n",
        flush=True,
    )


def _rates(found: dict[str, Any], title: str, base: str) -> None:
    size = found["bytes"] / 1e6
    rounds = found["seconds"]
    print(
        f"| {title} of {size:,.0f} MB | seconds (rounds) | MB/s | of the rate of {base} |\n"
        "|---|---|---|---|"
    )
    for name, seconds in rounds.items():
        middle = statistics.median(seconds)
        rate = statistics.median(_ratios(rounds[base], seconds))
        print(
            f"| {name} | {', '.join(f'{s:.2f}' for s in seconds)} | {size / middle:,.0f} | "
            f"{rate:.2f} |"
        )
    print(flush=True)


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    main()
