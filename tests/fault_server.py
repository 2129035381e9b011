"""Starts processes that have everything imported: by fork, so that a launch takes half a second.

Reads one JSON request per line: `{"ranks": …, "argv": […], …}` starts stage 04 (or, with "call", a
function `module:name` with "argv" as arguments) once per rank and answers the process ids;
`{"poll": pid}` answers the exit code, negative for a signal, or null while it runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.core import offline  # noqa: E402

_IMPORTS = ("matplotlib.pyplot", "yaml", "torch.utils.tensorboard", "transformers.models.gpt2",
            "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
            "lib.train.begin", "lib.train.startup", "lib.train.symptoms", "lib.train.plot")


def serve() -> None:
    """Answer requests until there are no more."""
    offline.enable()
    for name in _IMPORTS:
        importlib.import_module(name)
    offline.enable = lambda: None  # which insists on coming before the imports
    # A picture takes longer than the save before it, and is none of what these tests are about.
    sys.modules["lib.train.plot"].loss = lambda *rows: None
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _poll(request["poll"]) if "poll" in request \
            else [_fork(request, rank) for rank in range(request["ranks"])]
        print(json.dumps(answer), flush=True)


def _poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(request: dict[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    try:
        _become(request, rank)
        if "call" in request:
            module, _, name = request["call"].partition(":")
            getattr(importlib.import_module(module), name)(*request["argv"])
            os._exit(0)
        runpy.run_path(str(ROOT / "04_train_fsdp.py"), run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(request: dict[str, Any], rank: int) -> None:
    """Turn a fresh child into rank `rank` of a launch."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND)):
        os.dup2(os.open(os.devnull if number == 0 else request["output"], mode), number)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["ranks"] > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)}, **{
            name: str(request["ranks"]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    # One core each, so that one thread computes: several would wait for each other on a busy
    # machine, and their number would be another on another one.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(os.getppid() + rank) % len(cores)]})
    if seconds := request["clock"]:
        _move_clock(seconds)
    if (fault := request["faults"].get(str(rank))) is not None:
        from tests.fault_points import Fault
        Fault(**fault).install()
    sys.argv = ["04_train_fsdp.py", *request["argv"]]


def _move_clock(seconds: int) -> None:
    import time

    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + seconds * 10**9


if __name__ == "__main__":
    serve()
