#!/usr/bin/env python3
"""Compare optimizers from scratch: the runs behind docs/explanation/from-scratch.md.

  python benchmarks/from_scratch.py train --work DIR --cores 0,1   # hours; continues where it was
  python benchmarks/from_scratch.py step --work DIR                # time and memory of a step
  python benchmarks/from_scratch.py draw                           # tables and pictures

`train` prepares the source code of four packages that requirements.txt installs, as a user would:
stages 01 and 02, near duplicates dropped by lib.curate, a tokenizer by stage 03. Then it runs
stage 04 with its defaults for each size, optimizer and learning rate, one run per core. If the best
rate is at an end of the list, the list grows. The best rate of each optimizer is run with three
seeds. Each finished run is a line of benchmarks/results/from_scratch.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts import processes
from lib.models import scratch_sizes

_RESULTS = Path(__file__).parent / "results" / "from_scratch.jsonl"
_IMAGES = processes.ROOT / "docs" / "images"
_PACKAGES = ("torch", "transformers", "sympy", "networkx")
_LENGTH, _BATCH = 256, 16  # tokens of a sample, samples of a step
_VOCABULARY = 2048
_EVALUATIONS = 10  # of a run, each on as many tokens of the validation split:
_EVALUATED_BATCHES = 8
_SEEDS = (0, 1, 2)
_OPTIMIZERS = {
    "adamw": (),
    "adamw, bf16 moments": ("--optimizer-states", "bf16"),
    "adamw8bit": ("--optimizer", "adamw8bit"),
    "muon": ("--optimizer", "muon"),
}


class _Size(NamedTuple):
    """A model, the steps of its runs, and the learning rates to begin with."""

    shape: scratch_sizes.Size
    steps: int
    rates: tuple[float, ...]


_SIZES = {
    "1M": _Size(scratch_sizes.SIZES["1M"], 800, (4e-3, 8e-3, 1.6e-2)),
    "4M": _Size(
        scratch_sizes.Size(5, 256, 704, 4, 2, 1024, 1e4, tied=True), 400, (2e-3, 4e-3, 8e-3)
    ),
    "10M": _Size(
        scratch_sizes.Size(6, 384, 1024, 6, 2, 1024, 1e4, tied=True), 300, (2e-3, 4e-3, 8e-3)
    ),
}


class Cell(NamedTuple):
    """What distinguishes a run from the others."""

    size: str
    optimizer: str
    rate: float
    seed: int = 0


class Results:
    """The finished runs: (tokens, validation loss) of each evaluation, by cell."""

    def __init__(self) -> None:
        lines = _RESULTS.read_text().splitlines() if _RESULTS.exists() else []
        self.curves: dict[Cell, list[tuple[int, float]]] = {}
        for record in map(json.loads, lines):
            self.curves[Cell(*record["cell"])] = record["curve"]
        self._lock = threading.Lock()

    def add(self, cell: Cell, curve: Sequence[tuple[int, float]]) -> None:
        """Write the curve of a run."""
        with self._lock, _RESULTS.open("a") as file:
            file.write(json.dumps({"cell": cell, "curve": curve}) + "\n")
            self.curves[cell] = list(curve)

    def final(self, cell: Cell) -> float:
        """Return the validation loss at the end of a run; infinite if it is not a number."""
        return self.curves[cell][-1][1]

    def rates(self, size: str, optimizer: str) -> dict[float, float]:
        """Return the final losses of the first seed, by learning rate in ascending order."""
        cells = [c for c in self.curves if c[:2] == (size, optimizer) and c.seed == _SEEDS[0]]
        return {cell.rate: self.final(cell) for cell in sorted(cells)}

    def best_rate(self, size: str, optimizer: str) -> float:
        """Return the learning rate with the lowest final loss."""
        losses = self.rates(size, optimizer)
        return min(losses, key=losses.__getitem__)


def prepare(work: Path) -> None:
    """Write the dataset, the models and the token store, unless they are there."""
    if (work / "prepared").exists():
        return
    packages = Path(next(p for p in sys.path if p.endswith("site-packages")))
    patterns = [f"--include={package}/**/*.py" for package in _PACKAGES]
    corpus = str(work / "corpus")
    _run("01_organize_data.py", "--src-dir", packages, "--dst-root", work / "splits",
         "--num-dirs", 4, "--mode", "symlink", *patterns)  # fmt: skip
    _run("02_build_hf_dataset.py", "--data-folder", work / "splits", "--save-dir", work / "raw",
         "--validation-percent", 1)  # fmt: skip
    _run("-m", "lib.curate", work / "raw", "--save-dir", corpus, "--dedup", "near")
    _run("03_download_model.py", "--from-scratch", "--model-size", "1M", "--model-name", "1M",
         "--cache-dir", work / "cache", "--train-tokenizer", corpus,
         "--vocab-size", _VOCABULARY)  # fmt: skip
    for name, size in _SIZES.items():
        _write_model(work / "cache" / "models" / "1M", work / "models" / name, size.shape)
    _run("04_train_fsdp.py", *_training_options(work, Cell("1M", "adamw", 1e-3)), "--prepare-only")
    (work / "prepared").touch()


def _write_model(like: Path, target: Path, shape: scratch_sizes.Size) -> None:
    """Write a model directory of another shape, with the same tokenizer."""
    target.mkdir(parents=True)
    for path in like.glob("tokenizer*.json"):
        shutil.copy(path, target)
    config = json.loads((like / "config.json").read_text())
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
    }
    (target / "config.json").write_text(json.dumps(config))


def _run(*words: object, core: int | None = None) -> None:
    """Run a command of the project, on one core if it is given; exits if it fails."""
    pin = None if core is None else partial(os.sched_setaffinity, 0, {core})
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=processes.ROOT, preexec_fn=pin, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def _training_options(work: Path, cell: Cell) -> list[object]:
    steps = _SIZES[cell.size].steps
    return [
        *("-e", work / "outputs" / "-".join(map(str, cell)).replace(", ", "-").replace(" ", "-")),
        *("-d", work / "corpus", "-m", work / "models" / cell.size, "--cache-dir", work / "cache"),
        "--from-scratch",
        *("-s", _LENGTH, "-b", _BATCH, "--max-steps", steps, "--precision", "bf16"),
        *("--lr", f"{cell.rate:g}", "--seed", cell.seed, *_OPTIMIZERS[cell.optimizer]),
        *("--eval-freq", steps // _EVALUATIONS, "--eval-batches", _EVALUATED_BATCHES),
        *("--ckpt-freq", steps, "--log-freq", 50),
    ]


def train(work: Path, cores: Sequence[int], sizes: Sequence[str], names: Sequence[str]) -> None:
    """Run what is missing, a size after the other; a run per core at a time."""
    prepare(work)
    results = Results()
    free: Queue[int] = Queue()
    for core in cores:
        free.put(core)
    for size in sizes:
        with ThreadPoolExecutor(len(cores)) as pool:
            while cells := [c for name in names for c in _find_missing(results, size, name)]:
                list(pool.map(partial(_train_cell, work, results, free), cells))


def _find_missing(results: Results, size: str, optimizer: str) -> Iterator[Cell]:
    """Yield what can be started: the first rates, then a neighbour of the best rate, or seeds."""
    losses = results.rates(size, optimizer)
    first = [rate for rate in _SIZES[size].rates if rate not in losses]
    if first:
        yield from (Cell(size, optimizer, rate) for rate in first)
        return
    best = results.best_rate(size, optimizer)
    if best in (min(losses), max(losses)):
        yield Cell(size, optimizer, best / 2 if best == min(losses) else best * 2)
        return
    cells = (Cell(size, optimizer, best, seed) for seed in _SEEDS)
    yield from (cell for cell in cells if cell not in results.curves)


def _train_cell(work: Path, results: Results, free: Queue[int], cell: Cell) -> None:
    core = free.get()
    try:
        options = _training_options(work, cell)
        _run("04_train_fsdp.py", *options, core=core)
        directory = Path(str(options[1]))
        rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        evaluated = [row for row in rows if "eval/loss" in row]
        curve = [(row["step"] * _LENGTH * _BATCH, round(row["eval/loss"], 4)) for row in evaluated]
        results.add(cell, curve)
        shutil.rmtree(directory)
        print(cell, curve[-1], flush=True)
    finally:
        free.put(core)


def main() -> None:
    """Run a part of the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("train", "step", "draw"))
    parser.add_argument("--work", type=Path, default=Path("outputs/from-scratch"), metavar="DIR")
    parser.add_argument("--cores", default="0", help="numbers of the cores that train")
    parser.add_argument("--sizes", default=",".join(_SIZES))
    parser.add_argument("--optimizers", default=";".join(_OPTIMIZERS), help="separated by ;")
    args = parser.parse_args()
    sizes, names = args.sizes.split(","), args.optimizers.split(";")
    if args.part == "train":
        train(args.work.absolute(), [int(core) for core in args.cores.split(",")], sizes, names)


if __name__ == "__main__":
    main()
