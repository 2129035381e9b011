#!/usr/bin/env python3
"""Prove and measure on a GPU what no other machine can show: three commands of eight minutes each.

  python -m tests.gpu.kit                       # first, where there is a network: makes gpu_kit/
  python benchmarks/gpu.py correctness          # also `make test-gpu`
  python benchmarks/gpu.py mfu                  # `make bench-gpu` runs this one and the next
  python benchmarks/gpu.py rest
  python benchmarks/gpu.py mfu --only profile --deadline 120 --out results

Items run in order of weight (tests/gpu/items.py), each in a process of its own with a limit of its
own; one that fails stops no other. Each writes a line to <out>/<command>.jsonl as soon as it ends:
outcome (passed, failed, too slow, not here, no time), figures, the last lines of the error,
hardware and versions. Without a GPU, or with --rehearse, the same items run on the CPU with tiny
sizes: that shows that they run, and no figure of it means anything. Exit code: 0, or 1 where an
item failed.
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
import traceback
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.core import offline  # noqa: E402 (found by the line above)
from tests.gpu import machine  # noqa: E402
from tests.gpu.place import FIGURES, NotHere, Place, kill  # noqa: E402

COMMANDS = ("correctness", "mfu", "rest")
_DEADLINE_S = 470.0
_SHORTEST_S = 12.0  # with less left, nothing is begun
_ERROR_LINES, _LOG_CHARACTERS = 25, 20_000
_PROBE_S = 180.0
_EARLY = ("xxhash", "orjson", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LATE = ("torchao",)  # transformers would import it, and that may touch the GPU


def main() -> None:
    """Run the items of a command until they or the time are at an end."""
    args = parse()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        _install_missing(args.kit, Path(work) / "early", _EARLY)
        start, facts = _ready(args.rehearse)
        _install_missing(args.kit, Path(work) / "late", _LATE)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(Path(work) / "early"), os.environ.get("PYTHONPATH"))))
        rehearsed = args.rehearse or not facts["gpus"]
        if rehearsed:
            from lib.parallel import gpus
            if not args.rehearse and (found := gpus.unusable()):
                sys.exit(f"error: {found.problem}\n  found:    {found.found}\n"
                         f"  hint:     {found.hint}; --rehearse runs the items on the CPU")
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
            # On a machine that others use too, threads mostly wait for each other.
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            if not args.rehearse:
                print("There is no GPU here: what has a stand-in is rehearsed on the CPU.")
        place = Place(args.kit, Path(work), args.out, "cpu" if rehearsed else "cuda",
                      0 if rehearsed else facts["gpus"], start)
        print(json.dumps(facts), flush=True)
        failed = [item for command in args.commands for item in
                  _run_all(command, args, place, facts, began + args.deadline)]
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="correctness|mfu|rest",
                        help="what to run (default: all three)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_results")),
                        help="where results go (default: $OUT, or gpu_results)")
    parser.add_argument("--deadline", type=float, default=_DEADLINE_S, metavar="SECONDS",
                        help="when to be at an end, from now on (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="ITEM,ITEM", help="these items alone")
    parser.add_argument("--kit", type=Path, default=ROOT / "gpu_kit", help="(default: gpu_kit)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny sizes")
    args = parser.parse_args()
    if unknown := set(args.commands) - set(COMMANDS):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(COMMANDS)}")
    args.commands = args.commands or list(COMMANDS)
    args.kit, args.out = args.kit.resolve(), args.out.resolve()
    if not (args.kit / "models").is_dir():
        parser.error(f"{args.kit} is not there: `make gpu-kit` makes it, on a machine with a "
                     "network")
    return args


def _install_missing(kit: Path, site: Path, names: tuple[str, ...]) -> None:
    """Make importable what the kit has wheels of and this Python has not."""
    wheels = [wheel for wheel in kit.glob(".cache/wheelhouse/*/*.whl")
              if (name := wheel.name.partition("-")[0].lower()) in names and not find_spec(name)]
    for wheel in wheels:  # one by one: those of another Python are left out
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index",
                        "--no-deps", "--disable-pip-version-check", "--target", str(site),
                        str(wheel)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
    for name in ("transformers.models.llama.modeling_llama", "torch.distributed.checkpoint",
                 "lib.train.resume", "tests.gpu.items"):
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


def _run_all(command: str, args: argparse.Namespace, place: Place, facts: dict[str, Any],
             deadline: float) -> list[str]:
    """Run the items of a command and return the names of those that failed."""
    from tests.gpu.items import COMMANDS as ITEMS

    only, failed = set(filter(None, args.only.split(","))), []
    for number, item in enumerate(ITEMS[command]):
        if only and item.name not in only:
            continue
        began, left = time.monotonic(), deadline - time.monotonic()
        work = place.work / command / item.name
        work.mkdir(parents=True)
        if left < _SHORTEST_S:
            outcome, said = "no time", f"{max(0, left):.0f} s were left"
        elif place.gpus < item.gpus and place.on_gpu:
            outcome, said = "not here", f"it needs {item.gpus} GPUs"
        else:
            limit = item.seconds * (1 if place.start == "fork" else 2)
            outcome, said = _outcome(command, number, place, work, min(limit, left))
        figures = work / FIGURES
        result = {"item": item.name, "outcome": outcome, "rehearsed": not place.on_gpu,
                  "seconds": round(time.monotonic() - began, 1),
                  "command": f"python benchmarks/gpu.py {command} --only {item.name}",
                  "figures": json.loads(figures.read_text()) if figures.exists() else {},
                  "error": said, "machine": facts}
        _write(args.out, command, result, work / "log")
        failed += [item.name] * (outcome in ("failed", "too slow"))
        shutil.rmtree(work, ignore_errors=True)
    return failed


def _outcome(command: str, number: int, place: Place, work: Path, seconds: float,
             ) -> tuple[str, str]:
    """Run an item in a process and return how it ended, and its last lines if not well."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    own = Place(place.kit, work, place.out, place.device, place.gpus, place.start)
    process = multiprocessing.get_context(place.start).Process(
        target=_item, args=(command, number, own, theirs))
    process.start()
    theirs.close()
    try:
        outcome, said = ours.recv() if ours.poll(seconds) else \
            ("too slow", f"it was ended after {seconds:.0f} s\n{_tail(work)}")
    except EOFError:
        process.join(5)
        outcome, said = "failed", f"its process ended by {process.exitcode}\n{_tail(work)}"
    kill(process.pid)
    process.join()
    return outcome, said


def _item(command: str, number: int, place: Place, answer: Connection) -> None:
    from tests.gpu.items import COMMANDS as ITEMS

    os.setsid()
    with (place.work / "log").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        ITEMS[command][number].run(place)
        answer.send(("passed", ""))
    except NotHere as reason:
        answer.send(("not here", str(reason)))
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        answer.send(("failed", "\n".join(text.strip().splitlines()[-_ERROR_LINES:])))
    time.sleep(3600)  # whoever started this ends it, with all that it has started


def _tail(work: Path) -> str:
    """Return the last lines of what an item and its stages have printed."""
    logs = sorted(work.glob("*log"), key=lambda path: path.stat().st_mtime)
    return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-_ERROR_LINES:]) \
        if logs else ""


def _write(out: Path, command: str, result: dict[str, Any], log: Path) -> None:
    """Append a result, on the disk before the next item begins, and tell it in a line."""
    with (out / f"{command}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if result["outcome"] in ("failed", "too slow"):
        with (out / f"{command}.log").open("a", encoding="utf-8") as file:
            for part in sorted(log.parent.glob("*log")):
                text = part.read_text(errors="replace")[-_LOG_CHARACTERS:]
                file.write(f"=== {result['item']} {part.name}\n{text}\n")
    said = result["error"].strip().splitlines()
    print(f"{result['outcome']:<9} {result['seconds']:>6.1f} s  {result['item']}"
          f"{': ' + said[-1][:160] if said else ''}", flush=True)


if __name__ == "__main__":
    main()
