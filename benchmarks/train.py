#!/usr/bin/env python3
"""Stage 04 against `transformers.Trainer`: tokens per second, memory, time to the first step; and
stage 04 alone: memory by the length of sequences.

  python benchmarks/train.py                        # on the CPU or on the GPUs that there are
  python benchmarks/train.py --only speed --rounds 5 --steps 20
  python benchmarks/train.py --ranks 1 --layers 16 --hidden 2048 --seq-length 4096 --vocab 128256 \\
      --batch 2 --only speed --ours="--compile on"

Both train the same Llama (about 28 million parameters by default, random weights) on the same
tokens with AdamW, in bfloat16 where the hardware computes in it and else in float32, as whole
torchrun launches in turn; the Trainer wraps the model in DDP. Speed: the median of the steps after
the first few, the median of the rounds. Memory: the largest resident set of a rank, less what it
was before the model was built (on a GPU: the peak of the allocator), at a vocabulary of 128k and
2,048 tokens. Start: from torchrun to the log line of the first step of a longer run, and where it
goes, beside the seconds that torchrun takes to have as many ranks import what is needed, and the
reading of the weights. Lengths: the largest resident set of a rank, less what it was before the
model, for each kind of activation checkpointing.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import processes
from benchmarks.parts.processes import ROOT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WARM = 3  # steps left out
_IMPORTS = """import torch, transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
import torch.distributed.fsdp, torch.distributed.checkpoint
"""
# What stage 04 prints, and what has been done then.
_MARKS = {
    "model: ": "torchrun",
    "tokens: ": "imports, the model without memory",
    "sharded: ": "process group, sharding",
    "weights: ": "weights",
    "'global_step': 1,": "first step",
}


def main() -> None:
    """Measure what --only names and print it."""
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
    parser.add_argument("--rounds", type=int, default=3, help="launches of each")
    parser.add_argument("--only", default="speed,memory,start,lengths", help="parts, with commas")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="tokens per sample")
    parser.add_argument("--ours", default="", help="further options for stage 04")
    parser.add_argument("--work", type=Path, help="where to put files (default: temporary)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        args.work = Path(folder)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {_device()}, {args.ranks} ranks, "
            f"load before the start {os.getloadavg()[0]:.1f}\n",
            flush=True,
        )
        for part in args.only.split(","):
            {"speed": speed, "memory": memory, "start": start, "lengths": lengths}[part](args)


def speed(args: argparse.Namespace) -> None:
    """Print tokens per second of both, in alternating rounds."""
    make_model(args, args.vocab)
    make_data(args, args.vocab, args.seq_length)
    rounds: dict[str, list[dict[str, float]]] = {"stage 04": [], "Trainer": []}
    for number in range(args.rounds):
        for name in rounds:
            rounds[name].append(launch(name, args, f"speed-{number}"))
    print(f"| {size(args)} | tokens/s (rounds) | median | MFU |\n|---|---|---|---|")
    middle = {}
    for name, runs in rounds.items():
        rates = [run["tokens_per_s"] for run in runs]
        middle[name] = statistics.median(rates)
        mfu = statistics.median(run["mfu"] for run in runs) if name == "stage 04" else None
        print(
            f"| {name} | {', '.join(f'{rate:,.0f}' for rate in rates)} | {middle[name]:,.0f} | "
            f"{f'{100 * mfu:.0f} %' if mfu else ''} |"
        )
    print(
        f"\nstage 04 ÷ Trainer: {middle['stage 04'] / middle['Trainer']:.2f}; data share of a "
        f"step: {100 * statistics.median(r['data'] for r in rounds['stage 04']):.2f} %; steps of "
        f"stage 04: {_phases(rounds['stage 04'])}\n",
        flush=True,
    )


def memory(args: argparse.Namespace) -> None:
    """Print the largest memory of a rank at a large vocabulary and a long sequence."""
    wide = argparse.Namespace(
        **vars(args) | {"vocab": 128_000, "seq_length": 2048, "batch": 1, "steps": _WARM + 2}
    )
    make_model(wide, wide.vocab)
    make_data(wide, wide.vocab, wide.seq_length)
    found = {name: launch(name, wide, "memory") for name in ("stage 04", "Trainer")}
    print(f"| {size(wide)} | peak memory of a rank | tokens/s |\n|---|---|---|")
    for name, run in found.items():
        print(f"| {name} | {run['memory_mb']:,.0f} MB | {run['tokens_per_s']:,.0f} |")
    ratio = found["stage 04"]["memory_mb"] / found["Trainer"]["memory_mb"]
    print(f"\nstage 04 ÷ Trainer: {ratio:.2f}\n", flush=True)


def start(args: argparse.Namespace) -> None:
    """Print the seconds from torchrun to the first step beside those that cannot be avoided."""
    make_model(args, args.vocab)
    make_data(args, args.vocab, args.seq_length)
    script = args.work / "imports.py"
    script.write_text(_IMPORTS)
    weights = map(str, args.work.glob("model/*.safetensors"))
    read = [
        sys.executable,
        "-c",
        "import sys\nfor p in sys.argv[1:]: open(p, 'rb').read()",
        *weights,
    ]
    short = argparse.Namespace(**vars(args) | {"steps": 3})
    alone = []
    together = []
    reading = []
    runs = []
    for number in range(args.rounds):
        alone.append(_timed([sys.executable, str(script)]))
        together.append(_timed([*processes.torchrun(args.ranks), str(script)]))
        reading.append(_timed(read) - _timed([sys.executable, "-c", "pass"]))
        runs.append(launch("stage 04", short, f"start-{number}"))
    imports = min(together)
    weights_s = max(0.0, min(reading))
    best = min(runs, key=lambda run: run["at first step"])
    print(
        f"from torchrun to the first step: {best['at first step']:.1f} s; imports by torchrun on "
        f"{args.ranks} ranks {imports:.1f} s (in one process without it {min(alone):.1f} s), "
        f"reading the weights {weights_s:.1f} s: ratio "
        f"{best['at first step'] / (imports + weights_s):.2f}\n"
    )
    print("| until | seconds | since the last |\n|---|---|---|")
    before = 0.0
    for name in _MARKS.values():
        print(f"| {name} | {best[f'at {name}']:.2f} | {best[f'at {name}'] - before:.2f} |")
        before = best[f"at {name}"]
    print(flush=True)


def lengths(args: argparse.Namespace) -> None:
    """Print the memory of a rank by the length of sequences and the kind of checkpointing."""
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
    for size in sizes:
        cells = []
        for kind in kinds:
            given = argparse.Namespace(
                **vars(args)
                | {"seq_length": size, "ours": f"--activation-checkpointing {kind} {args.ours}"}
            )
            # Blocks that were freed go back at once, so that what is resident is what lives.
            run = launch("stage 04", given, f"{kind}-{size}", MALLOC_MMAP_THRESHOLD_="1000000")
            cells.append(
                f"{run['peak_mb']:,.0f} ({run['estimated_mb']:,.0f}), "
                f"{run['time/total'] / 1000:.1f} s"
            )
        print(f"| {size:,} | {' | '.join(cells)} |", flush=True)
    print()


# --- the contestants ------------------------------------------------------------------------


def launch(name: str, args: argparse.Namespace, tag: str, **env: str) -> dict[str, float]:
    """Run one contestant as a torchrun launch of its own and return its figures."""
    work = args.work
    if name == "stage 04":
        command = [
            *processes.torchrun(args.ranks),
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
        command = processes.command(
            "trainer.py",
            args.ranks,
            work=work,
            batch=args.batch,
            length=args.seq_length,
            steps=args.steps,
        )
    printed = _watch(name, list(map(str, command)), work, env)
    if name == "stage 04":
        return _ours(work / "outputs" / tag, printed)
    return _theirs(json.loads((work / "trainer.json").read_text()), args)


def _watch(
    name: str, command: list[str], cwd: Path, env: dict[str, str]
) -> list[tuple[float, str]]:
    """Run a command and return each line it printed with the seconds from the start."""
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


def _ours(experiment: Path, printed: list[tuple[float, str]]) -> dict[str, float]:
    rows = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    steady = rows[_WARM:] or rows[-1:]
    figures = {
        key: statistics.median(row[key] for row in steady)
        for key in steady[-1]
        if key.startswith(("time/", "perf/"))
    }  # no eta
    for text, name in _MARKS.items():
        figures[f"at {name}"] = next(at for at, line in printed if text in line)
    printed_memory = "".join(line for _, line in printed if line.startswith("  memory "))
    peak, estimated = (
        float(found[1].replace(",", "")) * (1024 if found[2] == "G" else 1)
        if (found := re.search(rf"([\d.,]+) ([GM])iB {kind}", printed_memory))
        else float("nan")
        for kind in ("without", "were estimated")
    )  # for small models there is none
    return figures | {
        "tokens_per_s": figures["perf/tokens_per_sec"],
        "mfu": figures["perf/mfu"],
        "data": figures["time/data"] / figures["time/total"],
        "memory_mb": max(row["memory/peak_gib"] for row in rows) * 1024,
        "peak_mb": peak,
        "estimated_mb": estimated,
    }


def _theirs(steps: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    seconds = statistics.median(steps["seconds"][_WARM:])
    return {
        "tokens_per_s": args.ranks * args.batch * args.seq_length / seconds,
        "memory_mb": steps["memory_mb"],
    }


# --- what they train ------------------------------------------------------------------------


def llama(args: argparse.Namespace, vocabulary: int) -> PretrainedConfig:
    """Return the shape of what is trained."""
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
    AutoModelForCausalLM.from_config(llama(args, vocabulary), dtype=torch.bfloat16).save_pretrained(
        args.work / "model"
    )


def make_data(args: argparse.Namespace, vocabulary: int, seq_length: int) -> None:
    """Save a tokenizer of bytes, made-up text, and prepare its tokens once."""
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
    draw = random.Random(0)
    size = max(400, 2 * args.steps * args.ranks * args.batch * seq_length // 1000)
    texts = ["".join(draw.choices("etaoin shrdlu\n", k=1000)) for _ in range(size)]
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


def _timed(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def _phases(runs: list[dict[str, float]]) -> str:
    return ", ".join(
        f"{key[5:]} {statistics.median(run[key] for run in runs):,.0f} ms"
        for key in runs[0]
        if key.startswith("time/")
    )


def size(args: argparse.Namespace) -> str:
    """Say how large the model and a pass are."""
    return (
        f"{args.layers} layers of {args.hidden}, vocabulary {args.vocab:,}, {args.batch} × "
        f"{args.seq_length} tokens per rank"
    )


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
