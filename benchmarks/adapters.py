#!/usr/bin/env python3
"""Stage 04 with adapters against full training: tokens per second, and memory.

  python benchmarks/adapters.py              # 12 layers of 768 on the CPU, in some ten minutes
  python benchmarks/adapters.py --ranks 8 --layers 32 --hidden 4096 --vocab 128256 \\
      --seq-length 4096 --batch 1 --lora-rank 64 --ours="--compile on"

Whole launches of stage 04 in turn, on the same model and tokens, in bfloat16 where the hardware
computes in it and else in float32; adapters are on all linears of the blocks. Speed: the median of
the steps after the first few, the median of the rounds. Memory: the largest resident set of a rank,
less what it was before the model (on a GPU: the peak of the allocator).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train import launch, make_data, make_model, size


def main() -> None:
    """Print a table with two rows for each kind of activation checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=8, help="steps of a launch")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--recompute", default="none,full", help="kinds, with commas")
    parser.add_argument("--ours", default="", help="further options for stage 04")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        make_model(args, args.vocab)
        make_data(args, args.vocab, args.seq_length)
        ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
        print(f"{platform.machine()}, {os.cpu_count()} cores, {ranks}, load before the start "
              f"{os.getloadavg()[0]:.1f}\n\n| {size(args)} | recomputed | tokens/s (rounds) | "
              "median | forward, backward, update | memory |\n|---|---|---|---|---|---|",
              flush=True)
        for kind in args.recompute.split(","):
            compare(args, kind)


def compare(args: argparse.Namespace, recompute: str) -> None:
    """Print the figures of both, in alternating rounds."""
    options = {"full training": "", f"adapters of rank {args.lora_rank}":
               f"--lora-rank {args.lora_rank}"}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options}
    for number in range(args.rounds):
        for name, option in options.items():
            given = argparse.Namespace(**vars(args) | {
                "ours": f"--activation-checkpointing {recompute} {option} {args.ours}"})
            # Blocks that were freed go back at once, so that what is resident is what lives.
            runs[name].append(launch("stage 04", given, f"round-{number}",
                                     MALLOC_MMAP_THRESHOLD_="1000000"))
    rates = []
    for name, found in runs.items():
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        rates.append(middle["tokens_per_s"])
        rounds = ", ".join(f"{run['tokens_per_s']:,.0f}" for run in found)
        times = ", ".join(f"{middle[f'time/{part}']:,.0f}"
                          for part in ("forward", "backward", "update"))
        print(f"| {name} | {recompute} | {rounds} | {rates[-1]:,.0f} | {times} ms | "
              f"{middle['peak_mb']:,.0f} MB |")
    print(f"| adapters ÷ full training | {recompute} | | {rates[1] / rates[0]:.2f} | | |",
          flush=True)


if __name__ == "__main__":
    main()
