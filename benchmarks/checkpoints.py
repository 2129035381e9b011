#!/usr/bin/env python3
"""Measure how fast checkpoints are written and read, and how long they stall training.

  python benchmarks/checkpoints.py                 # needs about 6 GB of disk and of memory
  python benchmarks/checkpoints.py --only save,load --rounds 7 --ranks 2
  python benchmarks/checkpoints.py --only save --work /dev/shm    # without a disk

The checkpoint is a Llama of --layers layers with its AdamW moments (1.03 GB with 6), sharded over
--ranks gloo ranks. Each round runs every method once, in rotating order. Ratios compare runs of the
same round; their median is printed. Save: the pipeline's save (hashed and committed), the same with
a hash that does nothing, write + fsync of the same bytes, `torch.save` + fsync, and `dcp.save`.
Load: the pipeline's load, which verifies digests, and a raw read of the same files; "cold" drops
these files from the page cache first. Async: how long an asynchronous save stalls a training loop.
Prints Markdown.
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
    """Run and print the measurements that --only names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="save,load,async", help="measurements, separated by commas"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {args.ranks} ranks, load before the "
        f"start {os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    for part in args.only.split(","):
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            results = processes.run_and_read_figures(
                processes.script_command(
                    "checkpoints.py",
                    args.ranks if args.ranks > 1 else 0,
                    part=part,
                    work=folder,
                    layers=args.layers,
                    rounds=args.rounds,
                )
            )
        {"save": print_save, "load": print_load, "async": print_async}[part](results)


def print_save(results: dict[str, Any]) -> None:
    """Print the rates of writing and the cost of hashing."""
    _print_rates(results, "save", "raw write + fsync")
    ours = results["seconds"]["ours"]
    not_hashed = results["seconds"]["ours, not hashed"]
    hash_share = statistics.median(
        hash_seconds / (ours - hash_seconds)
        for hash_seconds, ours in zip(results["hashing"], ours, strict=True)
    )
    paired_share = statistics.median(_pairwise_ratios(ours, not_hashed)) - 1
    print(
        f"hashing: {100 * hash_share:.1f} % of the rest of a save (time in the hash itself), "
        f"{100 * paired_share:+.1f} % against saves that are not hashed\n",
        flush=True,
    )


def print_load(results: dict[str, Any]) -> None:
    """Print the rates of reading from the disk and from the page cache."""
    for cache in ("cold", "warm"):
        part_results = {
            "bytes": results["bytes"],
            "seconds": {
                name.partition(", ")[2]: seconds
                for name, seconds in results["seconds"].items()
                if name.startswith(cache)
            },
        }
        _print_rates(part_results, f"load, {cache}", "raw read")


def print_async(results: dict[str, Any]) -> None:
    """Print how long asynchronous saves stall the training loop."""
    print(
        f"| save of {results['bytes'] / 1e6:,.0f} MB during training | stall, s (rounds) | "
        "median | of a sync save | steps longer by, s | complete after, s |\n"
        "|---|---|---|---|---|---|"
    )
    sync = results["sync"]
    for name, rows in results["async"].items():
        stalls = [row["held"] for row in rows]
        ratio = statistics.median(_pairwise_ratios(stalls, sync))
        print(
            f"| {name} | {', '.join(f'{seconds:.3f}' for seconds in stalls)} | "
            f"{statistics.median(stalls):.3f} | "
            f"{100 * ratio:.1f} % | {statistics.median(row['longer'] for row in rows):.2f} | "
            f"{statistics.median(row['whole'] for row in rows):.2f} |"
        )
    print(
        f"\na sync save takes {statistics.median(sync):.2f} s, a step "
        f"{statistics.median(results['step']):.2f} s\n",
        flush=True,
    )


def _print_rates(results: dict[str, Any], title: str, base: str) -> None:
    size = results["bytes"] / 1e6
    rounds = results["seconds"]
    print(
        f"| {title} of {size:,.0f} MB | seconds (rounds) | MB/s | of the rate of {base} |\n"
        "|---|---|---|---|"
    )
    for name, seconds in rounds.items():
        middle = statistics.median(seconds)
        rate = statistics.median(_pairwise_ratios(rounds[base], seconds))
        print(
            f"| {name} | {', '.join(f'{value:.2f}' for value in seconds)} | {size / middle:,.0f} | "
            f"{rate:.2f} |"
        )
    print(flush=True)


def _pairwise_ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    main()
