#!/usr/bin/env python3
"""Measure the time and memory of loading, exporting and downloading models, beside other tools.

  python benchmarks/models.py                    # needs about 20 GB of disk and 8 GB of memory
  python benchmarks/models.py --only load,export --layers 8

The models are a Llama of --layers layers (bfloat16, about 1 GB by default) and one with a quarter
of the layers, with random weights. Loading, on two gloo ranks: the pipeline's sharded loading,
from_pretrained on each rank, and loading on rank 0, which broadcasts the shards (as accelerate
does). Export: stage 05, accelerate's merge, and `cp` with fsync of the same files. Download:
stage 03 and curl, from a server on this machine. The page cache is warm throughout. Each figure is
the best of --repeat runs, in alternation. Prints Markdown.
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
    """Run and print the measurements that --only names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=34, help="layers of the larger model")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each method")
    parser.add_argument(
        "--only", default="load,export,download", help="measurements, separated by commas"
    )
    parser.add_argument("--work", type=Path, help="directory for files (default: a temporary one)")
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
            run_role("make", path, layers=layers)
        print(
            f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}, model "
            f"{weight_bytes(models['4×']) / MB:,.0f} MB in safetensors, best of "
            f"{arguments.repeat}\n"
        )
        for part in arguments.only.split(","):
            {"load": print_load, "export": print_export, "download": print_download}[part](
                models, arguments.repeat
            )


def run_role(role: str, model: Path, ranks: int = 0, **options: Any) -> dict[str, Any]:
    """Run a role of parts/models.py in a child process, or with torchrun; return its figures."""
    return processes.run_and_read_figures(
        processes.script_command(
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
    """Return the bytes of a model's safetensors files."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def run_fastest(
    ways: dict[str, Callable[[], dict[str, Any]]], repeat: int
) -> dict[str, dict[str, Any]]:
    """Run each method `repeat` times; return its fastest run."""
    return {
        name: min(runs, key=lambda run: run["seconds"])
        for name, runs in processes.run_in_turns(ways, repeat).items()
    }


def print_load(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory per rank of three ways to load a model on two ranks."""
    print(
        "| loading, 2 ranks | layers | seconds | memory per rank over imports | "
        "read by all ranks |\n|---|---|---|---|---|"
    )
    for scale, path in models.items():
        results = run_fastest(
            {
                loader: lambda loader=loader, path=path: run_role(loader, path, RANKS)
                for loader in LOADERS
            },
            repeat,
        )
        for loader, best in results.items():
            memory = " and ".join(f"{m / MB:,.0f} MB" for m in best["memory"])
            ratio = best["seconds"] / results["ours"]["seconds"]
            read = best["read"] / weight_bytes(path)
            read = f"{read:.2f} × model" if read > 0.5 else "mapped, not counted"
            print(
                f"| {loader} | {scale} ({weight_bytes(path) / MB:,.0f} MB) | {best['seconds']:.2f} "
                f"({ratio:.2f} of ours) | {memory} | {read} |"
            )
    print()


def print_export(models: dict[str, Path], repeat: int) -> None:
    """Print seconds and memory of stage 05, of accelerate's merge and of `cp` with fsync."""
    print(
        "| export | layers | to | seconds | of cp + fsync | memory over imports |\n"
        "|---|---|---|---|---|---|"
    )
    for scale, path in models.items():
        run_role("checkpoint", path, RANKS)
        for dtype in ("bfloat16", "float32"):
            results = run_fastest(_make_export_runs(path, dtype), repeat)
            base = results["cp + fsync of what stage 05 wrote"]["seconds"]
            for name, best in results.items():
                memory = f"{best['memory'] / MB:,.0f} MB" if "memory" in best else ""
                print(
                    f"| {name} | {scale} | {dtype} | {best['seconds']:.2f} | "
                    f"{best['seconds'] / base:.2f} | {memory} |"
                )
        for leftover in ("out", "copied", "merged", f"{path.name}-run"):
            shutil.rmtree(path.parent / leftover)
    print(f"\nLargest tensor, float32: {VOCABULARY * WIDTH * 4 / MB:,.0f} MB.\n")


def _make_export_runs(model: Path, dtype: str) -> dict[str, Callable[[], dict[str, Any]]]:
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
        "stage 05": lambda: _run_role_anew("export", model, out, dtype=dtype),
        "stage 05, whole command": lambda: _time_command(command, out),
        "accelerate merge-weights (always float32)": lambda: _run_role_anew("merge", model, merged),
        "cp + fsync of what stage 05 wrote": lambda: _time_copy(out, copied),
    }


def _time_copy(source: Path, target: Path) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began}


def print_download(models: dict[str, Path], repeat: int) -> None:
    """Print the rates of stage 03 and of curl, from the same server on this machine."""
    path = models["4×"]
    size = weight_bytes(models["4×"])
    work = path.parent
    server = subprocess.Popen(
        processes.script_command("models.py", role="serve", model=path),
        stdout=subprocess.PIPE,
        text=True,
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
        file_urls = [f"{url}/org/model/resolve/main/{p.name}" for p in sorted(path.iterdir())]
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
            *file_urls,
        ]
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(work / "hf")}
        results = run_fastest(
            {
                "curl --parallel": lambda: _time_command(curl, work / "curl"),
                "stage 03, whole command": lambda: _time_command(
                    command, work / "cache", environment
                ),
            },
            repeat,
        )
    finally:
        server.terminate()
        server.wait()
    print("| download | seconds | MB/s | of curl's rate |\n|---|---|---|---|")
    curl_seconds = results["curl --parallel"]["seconds"]
    rate = re.search(r"([\d.]+) ([kMG])B/s\)", results["stage 03, whole command"]["printed"])
    receive_seconds = size / (float(rate[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[rate[2]])
    for name, best in {"stage 03, receiving": {"seconds": receive_seconds}, **results}.items():
        print(
            f"| {name} | {best['seconds']:.2f} | {size / MB / best['seconds']:,.0f} | "
            f"{curl_seconds / best['seconds']:.2f} |"
        )
    print()


def _run_role_anew(role: str, model: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Delete `out`, and run a role that writes it."""
    shutil.rmtree(out, ignore_errors=True)
    return run_role(role, model, out=out, **options)


def _time_command(
    command: list[str], out: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Delete `out`, and time a command that writes it."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    printed = processes.run_command(command, environment)
    return {"seconds": time.perf_counter() - began, "printed": printed}


if __name__ == "__main__":
    main()
