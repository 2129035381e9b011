#!/usr/bin/env python3
"""Compare stage 04 to `transformers.Trainer`: tokens per second, memory, time to the first step.

Also measures the memory of stage 04 by sequence length.

  python benchmarks/train.py                        # on all GPUs of this machine, else on the CPU
  python benchmarks/train.py --only speed --rounds 5 --steps 20
  python benchmarks/train.py --ranks 1 --layers 16 --hidden 2048 --seq-length 4096 --vocab 128256 \\
      --batch 2 --only speed --ours="--compile on"

Both train the same Llama (about 28 million parameters by default, random weights) on the same
tokens with AdamW, in bfloat16 if the hardware computes in it, else in float32. They run as complete
torchrun launches, in alternation; the Trainer wraps the model in DDP.

Speed: the median over rounds of the median step after the first few. Memory: the peak resident set
of a rank minus its resident set before the model is built (on a GPU: the peak of the allocator),
for a vocabulary of 128k and 2,048 tokens. Start: the seconds from torchrun to the log line of the
first step, by phase. For comparison: the seconds to import the packages on as many ranks, and to
read the weights. Lengths: memory as above, by sequence length and kind of activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import processes
from benchmarks.parts.processes import ROOT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WARMUP_STEPS = 3  # not measured
_IMPORTS = """import torch, transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
import torch.distributed.fsdp, torch.distributed.checkpoint
"""
# Texts in the log of rank 0, and the phase that has ended by then.
_START_MARKS = {
    "model: ": "torchrun",
    "tokens: ": "imports, the model without memory",
    "sharded: ": "process group, sharding",
    "weights: ": "weights",
    "'global_step': 1,": "first step",
}


def main() -> None:
    """Run and print the measurements that --only names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=12, help="steps of a launch")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each trainer")
    parser.add_argument(
        "--only", default="speed,memory,start,lengths", help="measurements, separated by commas"
    )
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="tokens per sample")
    parser.add_argument("--ours", default="", help="further options for stage 04")
    parser.add_argument("--work", type=Path, help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        args.work = Path(folder)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {_describe_device()}, "
            f"{args.ranks} ranks, load before the start {os.getloadavg()[0]:.1f}\n",
            flush=True,
        )
        for part in args.only.split(","):
            {
                "speed": compare_speed,
                "memory": compare_memory,
                "start": measure_start,
                "lengths": measure_lengths,
            }[part](args)


def compare_speed(args: argparse.Namespace) -> None:
    """Print tokens per second of both trainers, in alternating rounds."""
    make_model(args, args.vocab)
    make_data(args, args.vocab, args.seq_length)
    rounds: dict[str, list[dict[str, float]]] = {"stage 04": [], "Trainer": []}
    for number in range(args.rounds):
        for name in rounds:
            rounds[name].append(run_contestant(name, args, f"speed-{number}"))
    print(f"| {describe_size(args)} | tokens/s (rounds) | median |\n|---|---|---|")
    medians = {}
    for name, runs in rounds.items():
        rates = [run["tokens_per_s"] for run in runs]
        medians[name] = statistics.median(rates)
        rounds_text = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(f"| {name} | {rounds_text} | {medians[name]:,.0f} |")
    print(
        f"\nstage 04 ÷ Trainer: {medians['stage 04'] / medians['Trainer']:.2f}; data share of a "
        f"step: {100 * statistics.median(r['data'] for r in rounds['stage 04']):.2f} %; steps of "
        f"stage 04: {_format_phases(rounds['stage 04'])}\n",
        flush=True,
    )


def compare_memory(args: argparse.Namespace) -> None:
    """Print the largest memory of a rank at a large vocabulary and a long sequence."""
    wide_args = argparse.Namespace(
        **vars(args)
        | {"vocab": 128_000, "seq_length": 2048, "batch": 1, "steps": _WARMUP_STEPS + 2}
    )
    make_model(wide_args, wide_args.vocab)
    make_data(wide_args, wide_args.vocab, wide_args.seq_length)
    results = {name: run_contestant(name, wide_args, "memory") for name in ("stage 04", "Trainer")}
    print(f"| {describe_size(wide_args)} | peak memory of a rank | tokens/s |\n|---|---|---|")
    for name, run in results.items():
        print(f"| {name} | {run['memory_mb']:,.0f} MB | {run['tokens_per_s']:,.0f} |")
    ratio = results["stage 04"]["memory_mb"] / results["Trainer"]["memory_mb"]
    print(f"\nstage 04 ÷ Trainer: {ratio:.2f}\n", flush=True)


def measure_start(args: argparse.Namespace) -> None:
    """Print the seconds from torchrun to the first step, and the minimum for any trainer."""
    make_model(args, args.vocab)
    make_data(args, args.vocab, args.seq_length)
    script = args.work / "imports.py"
    script.write_text(_IMPORTS)
    weights = map(str, args.work.glob("model/*.safetensors"))
    read_command = [
        sys.executable,
        "-c",
        "import sys\nfor p in sys.argv[1:]: open(p, 'rb').read()",
        *weights,
    ]
    short_args = argparse.Namespace(**vars(args) | {"steps": 3})
    single_seconds = []
    torchrun_seconds = []
    read_seconds = []
    runs = []
    for number in range(args.rounds):
        single_seconds.append(_time_command([sys.executable, str(script)]))
        torchrun_seconds.append(
            _time_command([*processes.torchrun_command(args.ranks), str(script)])
        )
        read_seconds.append(
            _time_command(read_command) - _time_command([sys.executable, "-c", "pass"])
        )
        runs.append(run_contestant("stage 04", short_args, f"start-{number}"))
    imports = min(torchrun_seconds)
    weights_s = max(0.0, min(read_seconds))
    best = min(runs, key=lambda run: run["at first step"])
    print(
        f"from torchrun to the first step: {best['at first step']:.1f} s; imports by torchrun on "
        f"{args.ranks} ranks {imports:.1f} s (in one process without it "
        f"{min(single_seconds):.1f} s), reading the weights {weights_s:.1f} s: ratio "
        f"{best['at first step'] / (imports + weights_s):.2f}\n"
    )
    print("| until | seconds | since the last |\n|---|---|---|")
    previous = 0.0
    for name in _START_MARKS.values():
        print(f"| {name} | {best[f'at {name}']:.2f} | {best[f'at {name}'] - previous:.2f} |")
        previous = best[f"at {name}"]
    print(flush=True)


def measure_lengths(args: argparse.Namespace) -> None:
    """Print the memory of a rank by sequence length and kind of activation checkpointing."""
    kinds = ("none", "selective", "full")
    sizes = [int(part) for part in args.lengths.split(",")]
    args = argparse.Namespace(**vars(args) | {"batch": 1, "steps": 2, "seq_length": max(sizes)})
    make_model(args, args.vocab)
    make_data(args, args.vocab, args.seq_length)
    print(
        "Peak memory of a rank over that before the model, MB (estimated), and seconds per "
        f"step: {args.layers} layers of {args.hidden}, vocabulary {args.vocab:,}, "
        f"1 × tokens per rank, {args.ranks} ranks\n"
    )
    print(f"| tokens | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}", flush=True)
    for length in sizes:
        cells = []
        for kind in kinds:
            run_args = argparse.Namespace(
                **vars(args)
                | {"seq_length": length, "ours": f"--activation-checkpointing {kind} {args.ours}"}
            )
            # With a low threshold freed blocks return to the system, so the resident set is exact.
            run = run_contestant(
                "stage 04", run_args, f"{kind}-{length}", MALLOC_MMAP_THRESHOLD_="1000000"
            )
            cells.append(
                f"{run['peak_mb']:,.0f} ({run['estimated_mb']:,.0f}), "
                f"{run['time/total'] / 1000:.1f} s"
            )
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)
    print()


# --- the contestants ------------------------------------------------------------------------


def run_contestant(name: str, args: argparse.Namespace, tag: str, **env: str) -> dict[str, float]:
    """Run one trainer with torchrun and return its figures. name: "stage 04" or "Trainer"."""
    work = args.work
    if name == "stage 04":
        command = [
            *processes.torchrun_command(args.ranks),
            ROOT / "04_train_fsdp.py",
            "-e",
            tag,
            "-d",
            work / "data",
            "-m",
            work / "model",
            "--save-dir",
            work / "outputs",
            "--cache-dir",
            work / ".cache",
            "-s",
            args.seq_length,
            "-b",
            args.batch,
            "--max-steps",
            args.steps,
            "--log-freq",
            1,
            "--log-style",
            "dict",
            "--ckpt-freq",
            10**6,
            "--overwrite",
            *shlex.split(args.ours),
        ]
    else:
        command = processes.script_command(
            "trainer.py",
            args.ranks,
            model=work / "model",
            tokens=next((work / ".cache" / "tokens").glob("data-*")),
            out=work / "trainer.json",
            batch=args.batch,
            length=args.seq_length,
            steps=args.steps,
        )
    printed = _run_and_time_lines(name, list(map(str, command)), work, env)
    if name == "stage 04":
        return _read_stage_figures(work / "outputs" / tag, printed)
    return _read_trainer_figures(json.loads((work / "trainer.json").read_text()), args)


def _run_and_time_lines(
    name: str, command: list[str], cwd: Path, env: dict[str, str]
) -> list[tuple[float, str]]:
    """Run a command and return its output lines, each with the seconds since the start."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    began = time.monotonic()
    printed = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        ) as process:
            for line in process.stdout:
                printed.append((time.monotonic() - began, line))
        if process.returncode:
            errors.seek(0)
            shown = "".join(line for _, line in printed)
            sys.exit(f"{name} failed:\n{shown[-2000:]}\n{errors.read()[-4000:]}")
    return printed


def _time_log_lines(experiment: Path, printed: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the lines of the log of rank 0, each with the seconds since the start.

    printed: see `_run_and_time_lines`; the first mark is on the console and in the log.
    """
    text = (experiment / "logs" / "rank_00000.log").read_text()
    logged = [
        (datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), line)
        for line in text.splitlines()
        if line[:4].isdigit()
    ]
    first = next(iter(_START_MARKS))
    at, began = (next(s for s, line in lines if first in line) for lines in (printed, logged))
    return [(at + seconds - began, line) for seconds, line in logged]


def _read_stage_figures(experiment: Path, printed: list[tuple[float, str]]) -> dict[str, float]:
    rows = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    steady_rows = rows[_WARMUP_STEPS:] or rows[-1:]
    figures = {
        key: statistics.median(row[key] for row in steady_rows)
        for key in steady_rows[-1]
        if key.startswith(("time/", "perf/"))
    }  # not `eta`
    logged = _time_log_lines(experiment, printed)
    for text, name in _START_MARKS.items():
        figures[f"at {name}"] = next(seconds for seconds, line in logged if text in line)
    printed_memory = "".join(line for _, line in logged if "INFO   memory " in line)
    peak, estimated = (
        float(match[1].replace(",", "")) * (1024 if match[2] == "G" else 1)
        if (match := re.search(rf"([\d.,]+) ([GM])iB {kind}", printed_memory))
        else float("nan")
        for kind in ("without", "were estimated")
    )  # small models have no estimate
    return figures | {
        "tokens_per_s": figures["perf/tokens_per_sec"],
        "data": figures["time/data"] / figures["time/total"],
        "memory_mb": max(row["memory/peak_gib"] for row in rows) * 1024,
        "peak_mb": peak,
        "estimated_mb": estimated,
    }


def _read_trainer_figures(steps: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    seconds = statistics.median(steps["seconds"][_WARMUP_STEPS:])
    return {
        "tokens_per_s": args.ranks * args.batch * args.seq_length / seconds,
        "memory_mb": steps["memory_mb"],
    }


# --- the model and the data --------------------------------------------------------------------


def make_llama_config(args: argparse.Namespace, vocabulary: int) -> PretrainedConfig:
    """Return the config of the model to train."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 128),
        max_position_embeddings=max(4096, args.seq_length),
    )


def make_model(args: argparse.Namespace, vocabulary: int) -> None:
    """Save a Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        make_llama_config(args, vocabulary), dtype=torch.bfloat16
    ).save_pretrained(args.work / "model")


def make_data(args: argparse.Namespace, vocabulary: int, seq_length: int) -> None:
    """Save a byte tokenizer and a dataset of random text, and prepare its tokens."""
    import random

    import datasets
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(
        args.work / "model"
    )
    rng = random.Random(0)
    count = max(400, 2 * args.steps * args.ranks * args.batch * seq_length // 1000)
    texts = ["".join(rng.choices("etaoin shrdlu\n", k=1000)) for _ in range(count)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(args.work / "data")
    subprocess.run(
        [
            sys.executable,
            ROOT / "04_train_fsdp.py",
            "-e",
            "x",
            "-d",
            args.work / "data",
            "-m",
            args.work / "model",
            "--cache-dir",
            args.work / ".cache",
            "-s",
            str(seq_length),
            "--prepare-only",
        ],
        check=True,
        capture_output=True,
    )


def _time_command(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def _format_phases(runs: list[dict[str, float]]) -> str:
    return ", ".join(
        f"{key[5:]} {statistics.median(run[key] for run in runs):,.0f} ms"
        for key in runs[0]
        if key.startswith("time/")
    )


def describe_size(args: argparse.Namespace) -> str:
    """Return the sizes of the model and of a micro-batch as text."""
    return (
        f"{args.layers} layers of {args.hidden}, vocabulary {args.vocab:,}, {args.batch} × "
        f"{args.seq_length} tokens per rank"
    )


def _describe_device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
