#!/usr/bin/env python3
"""Compare stage 04 with LoRA adapters to full training: tokens per second and memory.

  python benchmarks/adapters.py              # 12 layers of 768 on the CPU, about ten minutes
  python benchmarks/adapters.py --only steps # two minutes, also on a busy machine
  python benchmarks/adapters.py --ranks 8 --layers 32 --hidden 4096 --vocab 128256 \\
      --seq-length 4096 --batch 1 --lora-rank 64 --ours="--compile on"

Steps: the processor time of one thread for forward, backward and update of the sharded model in
float32. One process alternates between both kinds of training. Launches: complete runs of stage 04
in alternation, in bfloat16 if the hardware computes in it, else in float32. Both kinds train the
same model on the same tokens; the adapters are on all linear layers of the blocks. Speed: the
median over rounds of the median step after the first few. Memory: the peak resident set of a rank
minus its resident set before the model is built (on a GPU: the peak of the allocator).
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train import describe_size, make_data, make_llama_config, make_model, run_contestant
from lib.core import units


def main() -> None:
    """Run the measurements of --only; print a table per kind of activation checkpointing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=8, help="steps of a launch")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each kind")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument(
        "--recompute",
        default="none,full",
        help="kinds of activation checkpointing, separated by commas",
    )
    parser.add_argument(
        "--only", default="steps,launches", help="measurements, separated by commas"
    )
    parser.add_argument("--ours", default="", help="further options for stage 04")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load before the start "
        f"{os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    for part in args.only.split(","):
        {"steps": time_steps, "launches": compare_launches}[part](args)


def time_steps(args: argparse.Namespace) -> None:
    """Print the processor time of steps; other processes do not affect it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    print(
        f"| {describe_size(args)} | recomputed | forward | backward | update | in all |\n"
        "|---|---|---|---|---|---|"
    )
    for kind in args.recompute.split(","):
        step_functions = {
            f"adapters of rank {rank}" if rank else "full training": make_step(
                args, mesh, kind, rank
            )
            for rank in (0, args.lora_rank)
        }
        seconds_of: dict[str, list[list[float]]] = {name: [] for name in step_functions}
        for _ in range(args.steps):
            for name, step in step_functions.items():
                seconds_of[name].append(step())
        totals = []
        for name, rounds in seconds_of.items():
            parts = [1000 * statistics.median(part) for part in zip(*rounds[1:], strict=True)]
            totals.append(parts[-1])
            print(f"| {name} | {kind} | {' | '.join(f'{part:,.0f} ms' for part in parts)} |")
        print(
            f"| full training ÷ adapters | {kind} | | | | {totals[0] / totals[1]:.2f} |", flush=True
        )
    dist.destroy_process_group()
    print()


def make_step(args: argparse.Namespace, mesh: Any, recompute: str, rank: int) -> Any:
    """Return a function that runs a step and returns its seconds.

    The seconds are those of forward, backward and update, and their sum.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lib.models.lora import Lora
    from lib.models.sharded import Placement, local_tensor
    from lib.models.weights import restore_buffers
    from lib.optim import registry
    from lib.parallel import loss, parallelize
    from lib.tokens.batches import MicroBatch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_llama_config(args, args.vocab), dtype=torch.float32
        ).train()
    if rank:
        Lora(rank, 2.0 * rank).convert(model, Placement())
    parallelize.parallelize(model, mesh, "fp32", recompute)
    parallelize.materialise_model(model, torch.device("cpu"), offload=False)
    for parameter in model.parameters():
        local_tensor(parameter).normal_(0, 0.02)
    restore_buffers(model)
    head = model.get_output_embeddings()
    head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cpu"])
    adamw = registry.build_optimizer("adamw", model, 1e-5)
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq_length))

    def step() -> list[float]:
        times = [time.process_time()]
        total = loss.token_loss_sum(model, MicroBatch(tokens, tokens))
        times.append(time.process_time())
        total.backward()
        times.append(time.process_time())
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        times.append(time.process_time())
        return [end - begin for begin, end in itertools.pairwise(times)] + [times[-1] - times[0]]

    return step


def compare_launches(args: argparse.Namespace) -> None:
    """Print tokens per second and memory of complete runs."""
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        make_model(args, args.vocab)
        make_data(args, args.vocab, args.seq_length)
        ranks = units.counted(args.ranks, "rank")
        print(
            f"| {describe_size(args)}, {ranks} | recomputed | tokens/s (rounds) | median | "
            "forward, backward, update | memory |\n|---|---|---|---|---|---|",
            flush=True,
        )
        for kind in args.recompute.split(","):
            compare_rounds(args, kind)


def compare_rounds(args: argparse.Namespace, recompute: str) -> None:
    """Run full training and LoRA in alternation, and print the figures.

    recompute: the kind of activation checkpointing.
    """
    options = {
        "full training": "",
        f"adapters of rank {args.lora_rank}": f"--lora-rank {args.lora_rank}",
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options}
    for number in range(args.rounds):
        for name, option in options.items():
            run_args = argparse.Namespace(
                **vars(args)
                | {"ours": f"--activation-checkpointing {recompute} {option} {args.ours}"}
            )
            # With a low threshold freed blocks return to the system, so the resident set is exact.
            runs[name].append(
                run_contestant(
                    "stage 04", run_args, f"round-{number}", MALLOC_MMAP_THRESHOLD_="1000000"
                )
            )
    rates = []
    for name, results in runs.items():
        medians = {key: statistics.median(run[key] for run in results) for key in results[0]}
        rates.append(medians["tokens_per_s"])
        round_rates = ", ".join(f"{run['tokens_per_s']:,.0f}" for run in results)
        times = ", ".join(
            f"{medians[f'time/{part}']:,.0f}" for part in ("forward", "backward", "update")
        )
        print(
            f"| {name} | {recompute} | {round_rates} | {rates[-1]:,.0f} | {times} ms | "
            f"{medians['peak_mb']:,.0f} MB |"
        )
    print(
        f"| adapters ÷ full training | {recompute} | | {rates[1] / rates[0]:.2f} | | |", flush=True
    )


if __name__ == "__main__":
    main()
