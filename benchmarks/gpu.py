#!/usr/bin/env python3
"""Check and measure what only a machine with a GPU can show.

  python -m tests.gpu.kit                       # first, where there is a network: makes gpu_kit/
  python benchmarks/gpu.py correctness          # also `make test-gpu`
  python benchmarks/gpu.py mfu rest             # also `make bench-gpu`
  python benchmarks/gpu.py --call 1             # the first part of all items, under ten minutes
  python benchmarks/gpu.py --only profile,fp8 --deadline 300 --out results
  python benchmarks/gpu.py --list-calls         # which items each call runs, and for how long

Items run in order of weight (tests/gpu/items.py), each in a process of its own with a limit of its
own; one that fails stops no other. Items that measure run alone, others beside each other. Each
writes a line to <out>/<command>.jsonl as soon as it ends: outcome (passed, failed, too slow, not
here, not run), figures, the last lines of the error, hardware and versions. `not here`: the machine
or this version lacks what the item needs. `not run`: no time was left. Without a GPU, or with
--rehearse, the same items run on the CPU with tiny sizes: that shows that they run, and no figure
of it means anything. Exit code: 1 if an item failed or was too slow, else 3 if one was not run,
else 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.core import offline  # noqa: E402 (found by the line above)
from tests.gpu import machine  # noqa: E402
from tests.gpu.place import Place, kill  # noqa: E402

COMMANDS = ("correctness", "mfu", "rest")
_CALL_DEADLINE_S = 570.0
_PROBE_S = 180.0
_JOBS = 5
_CORES_PER_JOB = 3
_EARLY = ("xxhash", "orjson", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LATE = ("torchao",)  # transformers would import it, and that may touch the GPU


def main() -> None:
    """Run the chosen items until all have run or the time is over."""
    args = parse()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        _install_missing(args.kit, Path(work) / "early", _EARLY)
        start, facts = _ready(args.rehearse)
        _install_missing(args.kit, Path(work) / "late", _LATE)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(Path(work) / "early"), os.environ.get("PYTHONPATH")))
        )
        rehearsed = args.rehearse or not facts["gpus"]
        if rehearsed:
            _rehearse_on_cpu(args.rehearse)
        from tests.gpu import items, runner

        try:
            chosen = items.select(args.commands, args.only, args.call)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        place = Place(
            args.kit,
            Path(work),
            args.out,
            "cpu" if rehearsed else "cuda",
            0 if rehearsed else facts["gpus"],
            start,
        )
        jobs = 1 if rehearsed else max(1, min(_JOBS, (os.cpu_count() or 1) // _CORES_PER_JOB))
        print(json.dumps(facts), flush=True)
        counts = runner.run_items(
            chosen, runner.Session(place, facts, began + args.deadline, args.jobs or jobs)
        )
        print(f"{runner.summary(counts)}; {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(runner.exit_code(counts))


def _rehearse_on_cpu(asked: bool) -> None:
    """Hide GPUs and use one core; exit if torch cannot use a GPU of this machine."""
    from lib.parallel import gpus

    if not asked and (found := gpus.find_unusable()):
        sys.exit(
            f"error: {found.problem}\n  found:    {found.found}\n"
            f"  hint:     {found.hint}; --rehearse runs the items on the CPU"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # On a busy machine, threads would mostly wait for each other.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if not asked:
        print("There is no GPU here: items with a stand-in are rehearsed on the CPU.")


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "commands",
        nargs="*",
        metavar="correctness|mfu|rest",
        help="what to run (default: all three)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "gpu_results")),
        help="where results go (default: $OUT, or gpu_results)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="when to end, from now on (default: 570 with --call, else when all items have run)",
    )
    parser.add_argument("--only", default="", metavar="ITEM,ITEM", help="these items alone")
    parser.add_argument("--call", type=int, metavar="N", help="the items of one call alone")
    parser.add_argument(
        "--list-calls",
        action="store_true",
        help="print the calls that make up the whole kit, and run nothing",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many items run beside each "
        "other, unless they run alone (default: a third of the cores, 5 at most)",
    )
    parser.add_argument("--kit", type=Path, default=ROOT / "gpu_kit", help="(default: gpu_kit)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny sizes")
    args = parser.parse_args()
    if args.list_calls:
        from tests.gpu import items

        print(items.calls_table())
        sys.exit()
    if unknown := set(args.commands) - set(COMMANDS):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(COMMANDS)}")
    args.commands = args.commands or list(COMMANDS)
    args.deadline = args.deadline or (_CALL_DEADLINE_S if args.call else float("inf"))
    args.kit = args.kit.resolve()
    args.out = args.out.resolve()
    if not (args.kit / "models").is_dir():
        parser.error(
            f"{args.kit} is not there: `make gpu-kit` makes it, on a machine with a network"
        )
    return args


def _install_missing(kit: Path, site: Path, names: tuple[str, ...]) -> None:
    """Make packages importable that this Python lacks and the kit has wheels of."""
    wheels = [
        wheel
        for wheel in kit.glob(".cache/wheelhouse/*/*.whl")
        if (name := wheel.name.partition("-")[0].lower()) in names and not find_spec(name)
    ]
    for wheel in wheels:  # one by one: those of another Python are left out
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--disable-pip-version-check",
                "--target",
                str(site),
                str(wheel),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    sys.path.append(str(site))


def _ready(rehearse: bool) -> tuple[str, dict[str, Any]]:
    """Import what items need, and return how to start them, and what this machine has.

    A fork spares each item and each of its runs the imports. Where something that is imported
    touches the GPU, forks cannot use it, and each process imports all again.
    """
    offline.enable()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking must not touch the GPU
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    for name in (
        "transformers.models.llama.modeling_llama",
        "torch.distributed.checkpoint",
        "lib.train.resume",
        "tests.gpu.items",
    ):
        importlib.import_module(name)

    for method in ("fork", "spawn"):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context(method).Process(target=_probe, args=(theirs,))
        process.start()
        theirs.close()
        try:
            facts = ours.recv() if ours.poll(_PROBE_S) else {}
        except EOFError:
            facts = {}
        kill(process.pid)
        if facts.get("gpus") or (method == "fork" and facts and not shutil.which("nvidia-smi")):
            return method, facts
    return "fork", facts or {"gpus": 0}


def _probe(answer: Connection) -> None:
    try:
        answer.send(machine.describe())
    except Exception as error:
        print(f"the GPU cannot be used: {error}", file=sys.stderr)
        answer.send({})


if __name__ == "__main__":
    main()
