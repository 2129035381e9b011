#!/usr/bin/env python3
"""Compare a step on one row of tokens by the number of ranks that share the row, and the method.

  python benchmarks/context.py --lengths 2048,4096 --rounds 3

Each launch trains a Llama (8 million parameters, 4 heads, random weights) on random tokens with
AdamW, in float32, on gloo ranks of this machine with one thread each. The launches alternate;
figures are medians of them. Processor time is the sum over all ranks. It does not grow while the
ranks do no more work than one rank, even on cores that other programs share. Bytes are what a rank
sends to others for attention in a step, counted at the exchanges and by the formula in
lib/parallel/context.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import processes
from lib.parallel.degrees import ALLGATHER, ULYSSES, Degrees

_VOCABULARY = 4096
_WARMUP_STEPS = 1  # not measured


def main() -> None:
    """Print a table for each length, or run a rank of a launch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,4096", help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="steps of a launch")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each kind")
    parser.add_argument("--method", default=ULYSSES, help="of a single launch by torchrun")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train_rank(args.method, int(args.lengths), args.steps)
    for length in map(int, args.lengths.split(",")):
        print_table(length, args.steps, args.rounds)


def print_table(length: int, steps: int, rounds: int) -> None:
    """Print the figures for rows of `length` tokens."""
    settings = {
        "1": (1, ULYSSES),
        **{f"{ranks}, {way}": (ranks, way) for way in (ULYSSES, ALLGATHER) for ranks in (2, 4)},
    }
    ways = {name: partial(_launch, *setting, length, steps) for name, setting in settings.items()}
    results = processes.run_in_turns(ways, rounds)
    print(
        f"| ranks that share a row of {length:,} tokens | processor time, all ranks | ÷ one rank | "
        "MB sent by a rank | by the formula |\n|---|---|---|---|---|"
    )
    one_rank = statistics.median(run["seconds"] for run in results["1"])
    for name, runs in results.items():
        figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"| {name} | {figures['seconds']:.2f} s | {figures['seconds'] / one_rank:.2f} | "
            f"{figures['sent'] / 1e6:.1f} | {figures['formula'] / 1e6:.1f} |",
            flush=True,
        )
    print()


def _launch(ranks: int, method: str, length: int, steps: int) -> dict[str, float]:
    options = ("--method", method, "--lengths", str(length), "--steps", str(steps))
    return processes.run_and_read_figures([*processes.torchrun_command(ranks), __file__, *options])


def train_rank(method: str, length: int, steps: int) -> None:
    """Train on a row that all ranks share, and end the process; rank 0 prints the figures."""
    import torch
    from transformers import AutoModelForCausalLM

    from lib.parallel import attention, context, loss, parallelize
    from lib.parallel.layout import ParallelLayout
    from lib.tokens.batches import MicroBatch

    ranks = int(os.environ["WORLD_SIZE"])
    layout = ParallelLayout.start(Degrees(None, ranks, method))
    torch.set_num_threads(1)  # for any number of ranks, because waiting threads take time too
    torch.manual_seed(0)
    config = _make_config(length)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    attention.avoid_device_reads(model, "none", length)
    parallelize.parallelize(model, layout.fsdp, "fp32", "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(_VOCABULARY, (1, length + 1))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:]).to(layout)
    sizes = _record_sent(context, ranks)
    seconds: list[float] = []
    for _ in range(steps):
        began = time.process_time()
        loss.token_loss_sum(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds += layout.sum_over_ranks([time.process_time() - began])
    layout.stop()
    passes = 2 * config.num_hidden_layers  # forward and backward
    numbers = context.count_sent(method, ranks, config, batch.input_ids.shape[1])
    figures = {
        "seconds": statistics.median(seconds[_WARMUP_STEPS:]),
        "sent": sum(sizes) / steps,
        "formula": 4 * passes * numbers,
    }
    processes.end_process(None if layout.rank else figures)


def _make_config(length: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )


def _record_sent(context: Any, ranks: int) -> list[float]:
    """Return a list to which each exchange adds the bytes that this rank sends to others.

    context: the module lib.parallel.context. ranks: how many ranks share a row.
    """
    exchange = context._exchange
    gather = context.Context.gather_rows
    sizes: list[float] = []

    def exchange_and_count(tensor: Any, *group: Any) -> Any:
        sizes.append(tensor.nbytes * (ranks - 1) / ranks)
        return exchange(tensor, *group)

    def gather_and_count(shared: Any, part: Any) -> Any:
        sizes.append(part.nbytes * (ranks - 1))
        return gather(shared, part)

    context._exchange = exchange_and_count
    context.Context.gather_rows = gather_and_count
    return sizes


if __name__ == "__main__":
    main()
