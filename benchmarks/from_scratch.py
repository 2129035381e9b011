#!/usr/bin/env python3
"""Compare optimizers from scratch: loss by tokens and learning rate, time and memory of a step.

  python benchmarks/from_scratch.py train --work DIR --cores 0,1   # hours; continues where it was
  python benchmarks/from_scratch.py step --work DIR                # time and memory of a step
  python benchmarks/from_scratch.py draw                           # tables and pictures

`train` prepares the source code of four packages that requirements.txt installs, as a user would:
stages 01 and 02, near duplicates dropped by lib.curate, a tokenizer by stage 03. Then it runs
stage 04 for each size, optimizer and learning rate, one run per core, with its defaults except for
the warm-up, which takes 15 % of the steps. If the best rate is at an end of the list, the list
grows. The best rate by the first seed is run with two more. Each finished run is a line of
benchmarks/results/from_scratch.jsonl. docs/explanation/from-scratch.md shows what came out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.parts import processes
from lib.core import declared
from lib.models import scratch_sizes
from lib.optim.optimizers import DEFAULT, OPTIMIZERS, Choice

_RESULTS = Path(__file__).parent / "results" / "from_scratch.jsonl"
_IMAGES = processes.ROOT / "docs" / "images"
_PACKAGES = ("torch", "transformers", "sympy", "networkx")
_LENGTH = 256  # tokens of a sample
_BATCH = 16  # samples of a step
_VOCABULARY = 2048
_EVALUATIONS = 10  # of a run, each on as many tokens of the validation split:
_EVALUATED_BATCHES = 8
_WARMUP_PERCENT = 15  # the default of 5 % suits longer runs: here AdamW would lose more than Muon
_SEEDS = (0, 1, 2)
_OPTIMIZERS: dict[str, dict[str, str]] = {  # the options of stage 04
    "adamw": {},
    "adamw, bf16 moments": {"optimizer_states": "bf16"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "muon": {"optimizer": "muon"},
}
_REFERENCE = "adamw"  # what the others are compared with
# Those that are meant to train like it, at the same learning rate.
_PRECISIONS_OF_STATES = ("adamw, bf16 moments", "adamw8bit")


class _Size(NamedTuple):
    """A model, the steps of its runs, and the learning rates to begin with."""

    shape: scratch_sizes.Size
    steps: int
    rates: tuple[float, ...]


_SIZES = {
    "1M": _Size(scratch_sizes.SIZES["1M"], 800, (2e-3, 4e-3, 8e-3)),
    "4M": _Size(
        scratch_sizes.Size(5, 256, 704, 4, 2, 1024, 1e4, tied=True), 400, (2e-3, 4e-3, 8e-3)
    ),
    "10M": _Size(
        scratch_sizes.Size(6, 384, 1024, 6, 2, 1024, 1e4, tied=True), 240, (1e-3, 2e-3, 4e-3)
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
        loss = self.curves[cell][-1][1]
        return math.inf if math.isnan(loss) else loss

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
    packages = Path(np.__file__).parents[1]
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
    target.mkdir(parents=True, exist_ok=True)
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
    """Run a command of the project, on one core if it is given. Raises RuntimeError on failure."""
    pin = None if core is None else partial(os.sched_setaffinity, 0, {core})
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=processes.ROOT, preexec_fn=pin, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def _list_words(optimizer: str) -> list[str]:
    """Return the options of an optimizer as words of a command."""
    options = _OPTIMIZERS[optimizer].items()
    return [word for name, value in options for word in (declared.flag(name), value)]


def _training_options(work: Path, cell: Cell) -> list[object]:
    steps = _SIZES[cell.size].steps
    return [
        *("-e", work / "outputs" / "-".join(map(str, cell)).replace(", ", "-").replace(" ", "-")),
        *("-d", work / "corpus", "-m", work / "models" / cell.size, "--cache-dir", work / "cache"),
        "--from-scratch",
        *("-s", _LENGTH, "-b", _BATCH, "--max-steps", steps),
        *("--lr", f"{cell.rate:g}", "--seed", cell.seed, *_list_words(cell.optimizer)),
        *("--eval-freq", steps // _EVALUATIONS, "--eval-batches", _EVALUATED_BATCHES),
        *("--warmup-steps", steps * _WARMUP_PERCENT // 100),
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
        directory = Path(str(options[1]))
        try:
            _run("04_train_fsdp.py", *options, core=core)
        except RuntimeError as error:
            if "training has diverged" not in str(error):
                raise
            curve = [(_SIZES[cell.size].steps * _LENGTH * _BATCH, math.nan)]
        else:
            rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
            curve = [
                (row["step"] * _LENGTH * _BATCH, round(row["eval/loss"], 4))
                for row in rows
                if "eval/loss" in row
            ]
        results.add(cell, curve)
        shutil.rmtree(directory)
        print(cell, curve[-1], flush=True)
    finally:
        free.put(core)


def compare_steps(work: Path, size: str, samples: int, rounds: int) -> None:
    """Print the time of a step, and the bytes of the states, by optimizer."""
    prepare(work)
    ways = {name: partial(_measure_step, work, size, samples, name) for name in _OPTIMIZERS}
    results = processes.run_in_turns(ways, rounds)
    print(
        f"| {size}, {samples * _LENGTH:,} tokens per step | ms of a step | ÷ adamw | "
        "ms of the update | bytes of states per parameter |\n|---|---|---|---|---|"
    )
    steps = {
        name: statistics.median(run["time/total"] for run in runs) for name, runs in results.items()
    }
    for name, runs in results.items():
        update = statistics.median(run["time/optimizer"] for run in runs)
        print(
            f"| {name} | {steps[name]:.0f} | {steps[name] / steps['adamw']:.3f} | {update:.1f} | "
            f"{_count_state_bytes(work, size, name):.2f} |"
        )


def _measure_step(work: Path, size: str, samples: int, optimizer: str) -> dict[str, Any]:
    options = ("-m", work / "models" / size, "--from-scratch", "-d", "synthetic", "-s", _LENGTH)
    output = processes.run_command(
        [
            *(sys.executable, str(processes.ROOT / "04_train_fsdp.py"), "--bench"),
            *map(str, (*options, "-b", samples)),
            *_list_words(optimizer),
        ]
    )
    return json.loads(output.splitlines()[-1])


def _count_state_bytes(work: Path, size: str, optimizer: str) -> float:
    """Return the bytes of the optimizer's states per parameter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work / "models" / size))
    values = dict(_OPTIMIZERS[optimizer])
    kind = values.pop("optimizer", DEFAULT)
    choice = Choice(kind, OPTIMIZERS[kind].options(**values))
    total = sum(choice.state_bytes(name, p.shape) for name, p in model.named_parameters())
    return total / model.num_parameters()


def draw() -> None:
    """Print a table for each size, and write the pictures of the page."""
    results = Results()
    sizes = [size for size in _SIZES if results.rates(size, _REFERENCE)]
    if not sizes:
        sys.exit(f"{_RESULTS} contains no runs of {_REFERENCE}: start `train` first")
    for size in sizes:
        _print_table(results, size)
    _print_pairs(results)
    _draw_panels(sizes, "from-scratch-loss.png", partial(_draw_curves, results))
    _draw_panels(sizes, "from-scratch-rates.png", partial(_draw_rates, results))


def _list_measured(results: Results, size: str) -> list[str]:
    return [name for name in _OPTIMIZERS if results.rates(size, name)]


def _best_runs(results: Results, size: str, optimizer: str) -> list[list[tuple[int, float]]]:
    """Return the curves of all seeds at the best rate."""
    rate = results.best_rate(size, optimizer)
    cells = (Cell(size, optimizer, rate, seed) for seed in _SEEDS)
    return [results.curves[cell] for cell in cells if cell in results.curves]


def _mean_curve(runs: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    return [
        (points[0][0], statistics.mean(loss for _, loss in points))
        for points in zip(*runs, strict=True)
    ]


def _find_tokens(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Return the tokens after which a falling curve reaches a loss; NaN if it never does.

    The learning rate has not fallen to its end at that point, as it would in a run of that length.
    """
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return math.nan


def _print_table(results: Results, size: str) -> None:
    names = _list_measured(results, size)
    curves = {name: _mean_curve(_best_runs(results, size, name)) for name in names}
    tokens, aim = curves[_REFERENCE][-1]
    print(
        f"\n| {size}, {tokens / 1e6:.2f}M tokens | final loss by learning rate | seeds | mean | "
        f"lowest to highest | difference from {_REFERENCE} | "
        f"tokens to the loss of {_REFERENCE} |\n|" + "---|" * 7
    )
    for name in names:
        finals = [run[-1][1] for run in _best_runs(results, size, name)]
        best = results.best_rate(size, name)
        tried = ", ".join(
            f"**{rate:g}: {loss:.3f}**" if rate == best else f"{rate:g}: {loss:.3f}"
            for rate, loss in results.rates(size, name).items()
        )
        mean = statistics.mean(finals)
        share = _find_tokens(curves[name], aim) / tokens
        reached = "not reached" if math.isnan(share) else f"{share:.2f} ×"
        print(
            f"| {name} | {tried} | {len(finals)} | {mean:.3f} | {min(finals):.3f} to "
            f"{max(finals):.3f} | {mean - aim:+.3f} | {reached} |"
        )


def _print_pairs(results: Results) -> None:
    """Print the differences at equal size, rate and seed, which no choice of a rate can bias."""
    print(
        f"\n| difference from {_REFERENCE}, same size, rate and seed | pairs | lowest | median | "
        "highest |\n|---|---|---|---|---|"
    )
    losses = {cell: results.final(cell) for cell in results.curves}
    for name in _PRECISIONS_OF_STATES:
        pairs = ((c, c._replace(optimizer=_REFERENCE)) for c in losses if c.optimizer == name)
        differences = [losses[run] - losses[other] for run, other in pairs if other in losses]
        if differences:
            print(
                f"| {name} | {len(differences)} | {min(differences):+.4f} | "
                f"{statistics.median(differences):+.4f} | {max(differences):+.4f} |"
            )


def _draw_panels(sizes: Sequence[str], file: str, draw_panel: Callable[[Any, str], None]) -> None:
    """Write a picture with a panel per size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(sizes), 3.8), dpi=110, layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(sizes)))
    for panel, size in zip(panels, sizes, strict=True):
        draw_panel(panel, size)
        panel.set_title(f"{size} parameters", fontsize=10)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    figure.savefig(_IMAGES / file, metadata={"Software": None})


def _get_style(optimizer: str) -> dict[str, Any]:
    """Return how to draw an optimizer: dashes show a line that lies on another one."""
    number = list(_OPTIMIZERS).index(optimizer)
    return {"color": f"C{number}", "dashes": (4, number) if number else (), "label": optimizer}


def _draw_curves(results: Results, panel: Any, size: str) -> None:
    for name in _list_measured(results, size):
        runs = _best_runs(results, size, name)
        millions = [tokens / 1e6 for tokens, _ in runs[0]]
        style = _get_style(name)
        panel.plot(millions, [loss for _, loss in _mean_curve(runs)], **style)
        losses = list(zip(*([loss for _, loss in run] for run in runs), strict=True))
        lowest = [min(at_once) for at_once in losses]
        highest = [max(at_once) for at_once in losses]
        panel.fill_between(millions, lowest, highest, color=style["color"], alpha=0.2)
    panel.set_xlabel("million tokens")
    panel.set_ylabel("validation loss")


def _draw_rates(results: Results, panel: Any, size: str) -> None:
    for name in _list_measured(results, size):
        rates = results.rates(size, name)
        panel.plot(list(rates), list(rates.values()), marker="o", markersize=4, **_get_style(name))
    panel.set_xscale("log", base=2)
    tried = sorted({cell.rate for cell in results.curves if cell.size == size})
    panel.set_xticks(tried, [f"{rate:g}" for rate in tried], fontsize=8)
    panel.set_xlabel("learning rate")
    panel.set_ylabel("validation loss at the end")


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
    parser.add_argument("--samples", type=int, default=64, help="of a step, for `step`")
    parser.add_argument("--rounds", type=int, default=5, help="launches of each kind, for `step`")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if args.part == "train":
        cores = [int(core) for core in args.cores.split(",")]
        train(args.work.absolute(), cores, sizes, args.optimizers.split(";"))
    elif args.part == "step":
        compare_steps(args.work.absolute(), sizes[-1], args.samples, args.rounds)
    else:
        draw()


if __name__ == "__main__":
    main()
