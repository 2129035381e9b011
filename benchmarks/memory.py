#!/usr/bin/env python3
"""Estimate the memory per GPU that training well-known models takes (docs/how-to/speed.md).

  python benchmarks/memory.py            # or `make memory-table`: all models, a few minutes
  python benchmarks/memory.py 'Llama 3.2 1B' --gpus 1,8 --seq-length 8192 --gpu-memory 141
  python benchmarks/memory.py 'Llama 3.1 8B' --lora-rank 64      # full training and LoRA

No GPU is needed: like --plan-gpus, this traces steps of the trainer on fake tensors. A cell is the
peak in GiB per GPU, and the kind that --activation-checkpointing auto chooses. If the model only
fits with --cpu-offload on, the cell adds the GiB of host memory per GPU; a dash means that nothing
fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lib.core import options
from lib.models.lora import Lora
from lib.models.sharded import Placement
from lib.parallel.degrees import RECOMPUTATIONS
from lib.planning.memory_check import MemoryCheck, choose_step
from lib.train import plan
from lib.train.config import Config

_GIB = 1 << 30
_LLAMA_3 = {"num_key_value_heads": 8, "vocab_size": 128_256}
#                              hidden size, width of the MLP, layers, heads
_MODELS: dict[str, tuple[type[PretrainedConfig], tuple[int, int, int, int], dict[str, object]]] = {
    "Llama 3.2 1B": (LlamaConfig, (2048, 8192, 16, 32), {**_LLAMA_3, "tie_word_embeddings": True}),
    "Llama 3.2 3B": (LlamaConfig, (3072, 8192, 28, 24), {**_LLAMA_3, "tie_word_embeddings": True}),
    "Llama 2 7B": (LlamaConfig, (4096, 11_008, 32, 32), {}),
    "Llama 3.1 8B": (LlamaConfig, (4096, 14_336, 32, 32), _LLAMA_3),
    "Llama 2 13B": (LlamaConfig, (5120, 13_824, 40, 40), {}),
    "Llama 3.1 70B": (LlamaConfig, (8192, 28_672, 80, 64), _LLAMA_3),
    "Mixtral 8x7B": (MixtralConfig, (4096, 14_336, 32, 32), {"num_key_value_heads": 8}),
}


LORA_TABLE = (
    ["Llama 3.2 1B", "Llama 3.1 8B", "Llama 3.1 70B"],
    [1, 8, 64],
)  # models and GPUs of the second table


def build_model(name: str) -> PreTrainedModel:
    """Return a model by its name in _MODELS, on the meta device."""
    config_class, (hidden, width, layers, heads), values = _MODELS[name]
    config = config_class(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1 << 17,
        **{"vocab_size": 32_000, "tie_word_embeddings": False, **values},
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def format_row(
    name: str, gpus: Sequence[int], seq_length: int, gpu_memory: float, rank: int = 0
) -> str:
    """Return the row of a model. gpu_memory: GiB per GPU. rank: LoRA rank, 0 for full training."""
    model = build_model(name)
    adapted = ""
    if rank:
        Lora(rank, 2.0 * rank, precision="bf16").convert(model, Placement())
        adapted = f", LoRA r={rank}"
    check = MemoryCheck(model, gpu_memory * _GIB, float("inf"), on_gpu=True)
    cells = [
        _format_cell(check, ranks, Config(seq_length=seq_length, precision="bf16"))
        for ranks in gpus
    ]
    return f"| {name}{adapted} | {' | '.join(cells)} |"


def print_table(
    title: str,
    names: Sequence[str],
    gpus: Sequence[int],
    seq_length: int,
    gpu_memory: float,
    rank: int = 0,
) -> None:
    """Print a table, row by row. rank: LoRA rank of an additional row per model, 0 for none."""
    heads = ["1 GPU" if n == 1 else f"{n} GPUs" for n in gpus]
    print(f"| {title}1 × {seq_length:,} tokens | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for name in names:
        for adapters in {0, rank}:
            print(format_row(name, gpus, seq_length, gpu_memory, adapters), flush=True)


def _format_cell(check: MemoryCheck, ranks: int, config: Config) -> str:
    for offload in (False, True):
        step_configs = [
            plan.make_step_config(
                replace(config, activation_checkpointing=kind, cpu_offload=offload),
                check.model,
                ranks,
                True,
            )
            for kind in RECOMPUTATIONS
        ]
        case = choose_step(check, [[case] for case in step_configs], gathers=False)
        if check.fits(case):
            peak_gib = check.trace(case).total / _GIB
            host_gib = sum(check.count_states(case).values()) / _GIB
            return (
                f"{peak_gib:.0f} {case.recompute}"
                if not offload
                else f"{peak_gib:.0f} {case.recompute}, host {host_gib:.0f}"
            )
    return "–"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument(
        "--gpus", type=options.parse_counts, default=[1, 8, 16, 32, 64], metavar="N,N,…"
    )
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens, one sample per GPU")
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GiB")
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        metavar="N",
        help="also print each model with LoRA adapters of this rank (default: 0, none)",
    )
    args = parser.parse_args(argv)
    setting = args.seq_length, args.gpu_memory
    print_table("", args.models or list(_MODELS), args.gpus, *setting, args.lora_rank)
    if not args.models:
        print()
        print_table("full training or LoRA, ", *LORA_TABLE, *setting, rank=16)


if __name__ == "__main__":
    main()
