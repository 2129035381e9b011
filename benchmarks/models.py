#!/usr/bin/env python3
"""How fast models come in and go out, and in how much memory, against what others do.

  python benchmarks/models.py                    # needs about 20 GB of disk, 8 GB of memory
  python benchmarks/models.py --only load,export --layers 8

A Llama of --layers layers (bfloat16, about 1 GB by default) and one of a quarter of it are made
with random weights. Loading: on two gloo ranks, this repository's sharded loading, from_pretrained
on every rank, and rank 0 loading while the other gets its shards by broadcast (accelerate's
recipe). Export: stage 05, accelerate's merge, and `cp` with fsync of the same files. Download:
stage 03 and curl from a server on this machine. The page cache is warm throughout; each figure is
the best of --repeat runs, taken in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import processes
from benchmarks.parts.processes import ROOT

RANKS = 2
VOCABULARY = 32_000
WIDTH = 1024
LOADERS = ("ours", "from_pretrained", "broadcast")
MB = 1e6


def main() -> None:
    """Measure what --only names and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=34, help="layers of the larger model")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each")
    parser.add_argument("--only", default="load,export,download", help="parts, with commas")
    parser.add_argument(
        "--work", type=Path, help="where to put the files (default: a temporary directory)"
    )
    arguments = parser.parse_args()
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="-1", OMP_NUM_THREADS="1"
    )
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        models = {"1×": work / "quarter", "4×": work / "whole"}  # in layers
        for path, layers in zip(
            models.values(), (arguments.layers // 4, arguments.layers), strict=True
        ):
            measured("make", path, layers=layers)
        print(
            f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}, model "
            f"{weight_bytes(models['4×']) / MB:,.0f} MB in safetensors, best of "
            f"{arguments.repeat}\n"
        )
        for part in arguments.only.split(","):
            {"load": load, "export": export, "download": download}[part](models, arguments.repeat)


def measured(role: str, model: Path, ranks: int = 0, **options: Any) -> dict[str, Any]:
    """Return what a role of parts/models.py measures, in a process of its own or on ranks."""
    return processes.figures(
        processes.command(
            "models.py",
            ranks,
            role=role,
            model=model,
            vocabulary=VOCABULARY,
            width=WIDTH,
            **options,
        )
    )


def weight_bytes(model: Path) -> int:
    """Return the bytes of a model's safetensors."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def quickest(
    ways: dict[str, Callable[[], dict[str, Any]]], repeat: int
) -> dict[str, dict[str, Any]]:
    """Return the run of each way that took the fewest seconds."""
    return {
        name: min(runs, key=lambda run: run["seconds"])
        for name, runs in processes.in_turns(ways, repeat).items()
    }


def load(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory per rank of three ways to fill two ranks."""
    print(
        "| loading, 2 ranks | layers | seconds | memory per rank over imports | "
        "read by all ranks |\n|---|---|---|---|---|"
    )
    for size, path in models.items():
        results = quickest(
            {how: lambda how=how, path=path: measured(how, path, RANKS) for how in LOADERS}, repeat
        )
        for how, best in results.items():
            memory = " and ".join(f"{m / MB:,.0f} MB" for m in best["memory"])
            ratio = best["seconds"] / results["ours"]["seconds"]
            read = best["read"] / weight_bytes(path)
            read = f"{read:.2f} × model" if read > 0.5 else "mapped, not counted"
            print(
                f"| {how} | {size} ({weight_bytes(path) / MB:,.0f} MB) | {best['seconds']:.2f} "
                f"({ratio:.2f} of ours) | {memory} | {read} |"
            )
    print()


def export(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory of stage 05, of accelerate's merge and of `cp` with fsync."""
    print(
        "| export | layers | to | seconds | of cp + fsync | memory over imports |\n"
        "|---|---|---|---|---|---|"
    )
    for size, path in models.items():
        measured("checkpoint", path, RANKS)
        for dtype in ("bfloat16", "float32"):
            results = quickest(_ways_to_export(path, dtype), repeat)
            base = results["cp + fsync of what stage 05 wrote"]["seconds"]
            for name, best in results.items():
                memory = f"{best['memory'] / MB:,.0f} MB" if "memory" in best else ""
                print(
                    f"| {name} | {size} | {dtype} | {best['seconds']:.2f} | "
                    f"{best['seconds'] / base:.2f} | {memory} |"
                )
        for left in ("out", "copied", "merged", f"{path.name}-run"):
            shutil.rmtree(path.parent / left)
    print(f"\nLargest tensor, float32: {VOCABULARY * WIDTH * 4 / MB:,.0f} MB.\n")


def _ways_to_export(model: Path, dtype: str) -> dict[str, Callable[[], dict[str, Any]]]:
    root = model.with_name(f"{model.name}-run")
    (out, merged, copied) = (model.parent / name for name in ("out", "merged", "copied"))
    command = [
        sys.executable,
        str(ROOT / "05_export_checkpoint.py"),
        "-e",
        root.name,
        "--save-dir",
        str(root.parent),
        "--out",
        str(out),
        "--dtype",
        dtype,
        "--no-progress",
    ]
    return {
        "stage 05": lambda: _fresh("export", model, out, dtype=dtype),
        "stage 05, whole command": lambda: _child(command, out),
        "accelerate merge-weights (always float32)": lambda: _fresh("merge", model, merged),
        "cp + fsync of what stage 05 wrote": lambda: _copy(out, copied),
    }


def _copy(source: Path, target: Path) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began}


def download(models: dict[str, Path], repeat: int) -> None:
    """Print the rate of stage 03 and of curl from the same server on this machine."""
    path = models["4×"]
    size = weight_bytes(models["4×"])
    work = path.parent
    server = subprocess.Popen(
        processes.command("models.py", role="serve", model=path), stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        command = [
            sys.executable,
            str(ROOT / "03_download_model.py"),
            "--model-name",
            "org/model",
            "--cache-dir",
            str(work / "cache"),
            "--no-progress",
        ]
        fetched = [f"{url}/org/model/resolve/main/{p.name}" for p in sorted(path.iterdir())]
        curl = [
            "curl",
            "--silent",
            "--show-error",
            "--fail",
            "--location",
            "--parallel",
            "--remote-name-all",
            "--create-dirs",
            "--output-dir",
            str(work / "curl"),
            *fetched,
        ]
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(work / "hf")}
        results = quickest(
            {
                "curl --parallel": lambda: _child(curl, work / "curl"),
                "stage 03, whole command": lambda: _child(command, work / "cache", environment),
            },
            repeat,
        )
    finally:
        server.terminate()
        server.wait()
    print("| download | seconds | MB/s | of curl's rate |\n|---|---|---|---|")
    base = results["curl --parallel"]["seconds"]
    rate = re.search(r"([\d.]+) ([kMG])B/s\)", results["stage 03, whole command"]["printed"])
    own = size / (float(rate[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[rate[2]])
    for name, best in {"stage 03, receiving": {"seconds": own}, **results}.items():
        print(
            f"| {name} | {best['seconds']:.2f} | {size / MB / best['seconds']:,.0f} | "
            f"{base / best['seconds']:.2f} |"
        )
    print()


def _fresh(role: str, model: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Run a role that writes `out`, which is deleted before."""
    shutil.rmtree(out, ignore_errors=True)
    return measured(role, model, out=out, **options)


def _child(
    command: list[str], out: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Time a command that writes `out`, which is deleted before."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    printed = processes.run(command, environment)
    return {"seconds": time.perf_counter() - began, "printed": printed}


if __name__ == "__main__":
    main()
