"""What an item changes in a stage before it runs, and the script that runs a stage so changed.

  python tests/gpu/hooks.py save_nothing 04_train_fsdp.py -e exp …
  python tests/gpu/hooks.py measure+slow_steps 04_train_fsdp.py -e exp …

Hooks stand in for what a test cannot wait for or cause from outside: a rank that hangs, a GPU that
is full. `measure` leaves out what costs more time than the steps that are measured: checkpoints of
tens of gigabytes and the traces of the memory plan.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NO_SYNC = "three steps without a host sync"
GRAPH = "compiled a graph with"
ALLOCATOR = "allocator: "
_FRACTION = 0.02  # of the GPU's memory


def nothing() -> None:
    """Leave the stage as it is."""


def save_nothing() -> None:
    """Train without any checkpoint."""
    from lib.checkpoints.checkpointer import Checkpointer

    Checkpointer.poll = Checkpointer.save = lambda *_: None


def measure() -> None:
    """Train without any checkpoint, estimate or trace of memory."""
    save_nothing()
    trace_nothing()


def trace_nothing() -> None:
    """Skip the check that a run fits: tracing a large model takes longer than its steps."""
    from lib.planning import memory
    from lib.planning.memory_check import MemoryCheck

    _replace(MemoryCheck, "excess", lambda *_, **__: {})
    _replace(MemoryCheck, "is_easy", lambda *_, **__: True)
    _replace(memory, "ESTIMATED_FROM", float("inf"))


def tell_allocator() -> None:
    """Print after step 3 the allocator's settings, and how many of its segments can grow."""
    import torch

    def tell(step: int) -> None:
        if step != 3:
            return
        read = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
        segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
        large = [segment for segment in segments if segment["segment_type"] == "large"]
        growing = sum(bool(segment.get("is_expandable")) for segment in large)
        print(
            ALLOCATOR
            + json.dumps({"settings": read(), "large segments": len(large), "expandable": growing}),
            flush=True,
        )

    save_nothing()
    _after_steps(tell)


def forbid_host_syncs() -> None:
    """Raise an error if the host waits for the GPU within the steps 4 to 6."""
    import torch

    def done(step: int) -> None:
        if torch.cuda.is_available() and step in (3, 6):
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        if step == 6:
            print(NO_SYNC, flush=True)

    save_nothing()
    _after_steps(done)


def tell_graphs() -> None:
    """Print a line for each graph that is compiled, with how many of its sizes are symbolic.

    A function that reaches torch's limit of graphs is an error, where it would run uncompiled.
    """
    import torch
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor.compile_fx import compile_fx

    backend = compile_fx if torch.cuda.is_available() else aot_eager

    def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
        symbolic = sum(
            isinstance(node.meta.get("example_value"), torch.SymInt)
            for node in graph.graph.nodes
            if node.op == "placeholder"
        )
        print(f"{GRAPH} {symbolic} symbolic sizes", flush=True)
        return backend(graph, inputs, **options)

    save_nothing()
    _replace(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch.compile = functools.partial(torch.compile, backend=compiled)


def fill_memory() -> None:
    """Let the run be out of the device's memory: at once with little, on a CPU in step 2."""
    import torch

    def fail(step: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(_FRACTION)
    else:
        _after_steps(fail)


def slow_steps() -> None:
    """Let each step last so long that a signal comes before the last one."""
    _after_steps(lambda step: time.sleep(0.3))


def hang() -> None:
    """Let the last rank stand still after step 3."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def wait(step: int) -> None:
        if step == 3 and int(os.environ.get("RANK", "0")) == last:
            time.sleep(3600)

    _after_steps(wait)


def tell_memory() -> None:
    """Print after step 8 which processes hold memory of which GPU, as the driver sees it."""
    from tests.gpu import machine

    def tell(step: int) -> None:
        if step == 8 and os.environ.get("RANK", "0") == "0":
            time.sleep(2)  # a save began after step 4, and its threads have done all they do
            print(f"contexts {machine.contexts()}", flush=True)

    _after_steps(tell)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute that must be there: a hook that changes nothing would go unnoticed."""
    getattr(owner, name)
    setattr(owner, name, value)


def _after_steps(act: Callable[[int], None]) -> None:
    """Call `act` with the number of each step that is done."""
    from lib.train.meters import Meters

    end_step = Meters.end_step

    def then(meters: Meters, step: int) -> None:
        end_step(meters, step)
        act(step)

    Meters.end_step = then


def main(hook: str, script: str, *arguments: str) -> None:
    """Run a stage with a hook, or several joined by +, in a process that may have imported all."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from lib.core import offline

    if "transformers" not in sys.modules:  # in a fork, the parent has enabled it
        offline.enable()
    offline.enable = lambda: None
    for name in hook.split("+"):
        globals()[name]()
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
