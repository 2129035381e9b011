#!/usr/bin/env python3
"""Run the checks and measurements that need a GPU.

  python -m tests.gpu.kit                       # first, on a machine with a network
  python benchmarks/gpu.py correctness          # also `make test-gpu`
  python benchmarks/gpu.py mfu rest             # also `make bench-gpu`
  python benchmarks/gpu.py --call 1             # the first part of all items, under ten minutes
  python benchmarks/gpu.py --only profile,fp8 --deadline 300 --out results
  python benchmarks/gpu.py --list-calls         # the items of each call, with seconds

Items (tests/gpu/items.py) run in order of importance, each in its own process with its own time
limit. An item that fails does not stop the others. Items that measure run alone; several of the
others run at the same time. As soon as an item ends, its result is a line of <out>/<command>.jsonl:
outcome (passed, failed, too slow, not here, not run), figures, the last lines of the error,
hardware and versions. `not here`: the machine or this version lacks something that the item needs.
`not run`: no time was left. Without a GPU, or with --rehearse, the items run on the CPU with tiny
sizes. That shows whether they run; their figures mean nothing. Exit code: 1 if an item failed or
was too slow, else 3 if an item was not run, else 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.core import offline  # noqa: E402 (importable only after the line above)
from tests.gpu import machine  # noqa: E402
from tests.gpu.place import Place, kill_tree  # noqa: E402

COMMANDS = ("correctness", "mfu", "rest")
_CALL_DEADLINE_S = 570.0
_PROBE_S = 180.0
_MAX_JOBS = 5
_CORES_PER_JOB = 3
_EARLY_PACKAGES = ("xxhash", "orjson", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
# These follow later: transformers would import torchao, and that may initialise CUDA. The others
# are FlashAttention 4, which a kit contains if it was made with --flash-4.
_LATE_PACKAGES = (
    "torchao",
    "flash_attn_4",
    "nvidia_cutlass_dsl",
    "nvidia_cutlass_dsl_libs_base",
    "nvidia_cutlass_dsl_libs_core",
    "nvidia_cutlass_dsl_libs_cu13",
    "quack_kernels",
    "apache_tvm_ffi",
    "torch_c_dlpack_ext",
    "einops",
    "protobuf",
)


def main() -> None:
    """Run the chosen items until all have run or the deadline comes."""
    args = parse_arguments()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        _install_missing(args.kit, Path(work) / "early", _EARLY_PACKAGES)
        start, facts = _prepare_start(args.rehearse)
        _install_missing(args.kit, Path(work) / "late", _LATE_PACKAGES)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(Path(work) / "early"), os.environ.get("PYTHONPATH")))
        )
        rehearsed = args.rehearse or not facts["gpus"]
        if rehearsed:
            _rehearse_on_cpu(args.rehearse)
        from tests.gpu import items, runner

        try:
            chosen = items.select_items(args.commands, args.only, args.call)
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
        jobs = 1 if rehearsed else max(1, min(_MAX_JOBS, (os.cpu_count() or 1) // _CORES_PER_JOB))
        print(json.dumps(facts), flush=True)
        counts = runner.run_items(
            chosen, runner.Session(place, facts, began + args.deadline, args.jobs or jobs)
        )
        print(f"{runner.format_counts(counts)}; {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(runner.choose_exit_code(counts))


def _rehearse_on_cpu(is_chosen: bool) -> None:
    """Hide GPUs and use one core; exit if this machine has a GPU that torch cannot use."""
    from lib.parallel import gpus

    if not is_chosen and (unusable := gpus.find_unusable()):
        sys.exit(
            f"error: {unusable.problem}\n  found:    {unusable.found}\n"
            f"  hint:     {unusable.hint}; --rehearse runs the items on the CPU"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # On a busy machine, threads would mostly wait for each other.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if not is_chosen:
        print("There is no GPU here: the items run on the CPU with tiny sizes.")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "commands",
        nargs="*",
        metavar="correctness|mfu|rest",
        help="kinds of items to run (default: all three)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "gpu_results")),
        help="directory for the results (default: $OUT, or gpu_results)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="end after so many seconds (default: 570 with --call, else no limit)",
    )
    parser.add_argument("--only", default="", metavar="ITEM,ITEM", help="run only these items")
    parser.add_argument("--call", type=int, metavar="N", help="run only the items of one call")
    parser.add_argument(
        "--list-calls",
        action="store_true",
        help="print the calls that make up the whole kit, and run nothing",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many items may run at the same time (default: a third of the cores, 5 at most)",
    )
    parser.add_argument(
        "--kit", type=Path, default=ROOT / "gpu_kit", help="directory of the kit (default: gpu_kit)"
    )
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny sizes")
    args = parser.parse_args()
    if args.list_calls:
        from tests.gpu import items

        print(items.format_calls())
        sys.exit()
    if unknown := set(args.commands) - set(COMMANDS):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(COMMANDS)}")
    args.commands = args.commands or list(COMMANDS)
    args.deadline = args.deadline or (_CALL_DEADLINE_S if args.call else float("inf"))
    args.kit = args.kit.resolve()
    args.out = args.out.resolve()
    if not (args.kit / "models").is_dir():
        parser.error(
            f"{args.kit} does not exist: `make gpu-kit` makes it, on a machine with a network"
        )
    return args


def _install_missing(kit: Path, target: Path, packages: tuple[str, ...]) -> None:
    """Install packages that this Python lacks from the kit's wheels, and make them importable."""
    wheels = [
        wheel
        for wheel in kit.glob(".cache/wheelhouse/*/*.whl")
        if (name := wheel.name.partition("-")[0].lower()) in packages and not _is_installed(name)
    ]
    for wheel in wheels:  # one by one, since pip refuses a wheel for another Python
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
                str(target),
                str(wheel),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    site.addsitedir(str(target))  # which also reads .pth files, as nvidia_cutlass_dsl needs


def _is_installed(distribution: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(distribution))
    return False


def _prepare_start(rehearse: bool) -> tuple[str, dict[str, Any]]:
    """Import the items' modules; return the multiprocessing start method and machine facts.

    With fork, items and their runs need no imports of their own. But if an import initialises
    CUDA, forked processes cannot use the GPU; then they are spawned, and each imports everything.
    """
    offline.enable_offline_mode()
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # is_available() must not initialise CUDA
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
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context(method).Process(target=_probe_machine, args=(sender,))
        process.start()
        sender.close()
        try:
            facts = receiver.recv() if receiver.poll(_PROBE_S) else {}
        except EOFError:
            facts = {}
        kill_tree(process.pid)
        if facts.get("gpus") or (method == "fork" and facts and not shutil.which("nvidia-smi")):
            return method, facts
    return "fork", facts or {"gpus": 0}


def _probe_machine(answer: Connection) -> None:
    try:
        answer.send(machine.describe_machine())
    except Exception as error:
        print(f"the GPU cannot be used: {error}", file=sys.stderr)
        answer.send({})


if __name__ == "__main__":
    main()
