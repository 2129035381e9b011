"""Hooks that change a stage before it runs, and the script that runs a stage with them.

  python tests/gpu/hooks.py skip_saves 04_train_fsdp.py -e exp …
  python tests/gpu/hooks.py skip_saves+slow_steps 04_train_fsdp.py -e exp …

Hooks cause what a test cannot wait for or cause from outside: a rank that hangs, a GPU that is
full. `skip_saves_and_memory_check` is for measurements: checkpoints of tens of gigabytes and the
traces of the memory check would take longer than the measured steps.
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
NO_SYNC_LINE = "three steps without a host sync"
GRAPH_LINE = "compiled a graph with"
ALLOCATOR_LINE = "allocator: "
_MEMORY_SHARE = 0.02  # of the GPU's memory


def change_nothing() -> None:
    """Leave the stage as it is."""


def skip_saves() -> None:
    """Train without checkpoints."""
    from lib.checkpoints.checkpointer import Checkpointer

    Checkpointer.poll = Checkpointer.save = lambda *_: None


def skip_saves_and_memory_check() -> None:
    """Train without checkpoints, and without estimating memory."""
    skip_saves()
    skip_memory_check()


def skip_memory_check() -> None:
    """Skip the check that a run fits in memory, which traces the model."""
    from lib.planning import memory
    from lib.planning.memory_check import MemoryCheck

    _replace_attribute(MemoryCheck, "excess", lambda *_, **__: {})
    _replace_attribute(MemoryCheck, "is_easy", lambda *_, **__: True)
    _replace_attribute(memory, "ESTIMATED_FROM", float("inf"))


def print_allocator() -> None:
    """After step 3, print the allocator's settings and the number of its segments that can grow."""
    import torch

    def print_settings(step: int) -> None:
        if step != 3:
            return
        get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
        segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
        large_segments = [segment for segment in segments if segment["segment_type"] == "large"]
        expandable_count = sum(bool(segment.get("is_expandable")) for segment in large_segments)
        print(
            ALLOCATOR_LINE
            + json.dumps(
                {
                    "settings": get_settings(),
                    "large segments": len(large_segments),
                    "expandable": expandable_count,
                }
            ),
            flush=True,
        )

    skip_saves()
    _after_steps(print_settings)


def forbid_host_syncs() -> None:
    """Make it an error if the host waits for the GPU in steps 4 to 6."""
    import torch

    def switch_debug_mode(step: int) -> None:
        if torch.cuda.is_available() and step in (3, 6):
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        if step == 6:
            print(NO_SYNC_LINE, flush=True)

    skip_saves()
    _after_steps(switch_debug_mode)


def print_graphs() -> None:
    """Print a line for each compiled graph, with the number of its symbolic sizes.

    If a function reaches torch's limit of graphs, torch raises an error. Without this hook it would
    run the function uncompiled.
    """
    import torch
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor.compile_fx import compile_fx

    backend = compile_fx if torch.cuda.is_available() else aot_eager

    def print_and_compile(graph: Any, inputs: Any, **options: Any) -> Any:
        symbolic = sum(
            isinstance(node.meta.get("example_value"), torch.SymInt)
            for node in graph.graph.nodes
            if node.op == "placeholder"
        )
        print(f"{GRAPH_LINE} {symbolic} symbolic sizes", flush=True)
        return backend(graph, inputs, **options)

    skip_saves()
    _replace_attribute(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch.compile = functools.partial(torch.compile, backend=print_and_compile)


def fill_memory() -> None:
    """Make the run run out of memory: on a GPU at once, on a CPU after step 2."""
    import torch

    def raise_out_of_memory(step: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE)
    else:
        _after_steps(raise_out_of_memory)


def slow_steps() -> None:
    """Make steps so slow that a signal arrives before the last one."""
    _after_steps(lambda step: time.sleep(0.3))


def hang_last_rank() -> None:
    """Make the last rank hang after step 3."""
    last_rank = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def wait_forever(step: int) -> None:
        if step == 3 and int(os.environ.get("RANK", "0")) == last_rank:
            time.sleep(3600)

    _after_steps(wait_forever)


def print_gpu_processes() -> None:
    """After step 8, print which processes use memory of which GPU, as the driver sees it."""
    from tests.gpu import machine

    def print_processes(step: int) -> None:
        if step == 8 and os.environ.get("RANK", "0") == "0":
            time.sleep(2)  # a save began after step 4; wait until its threads have finished
            print(f"contexts {machine.list_gpu_processes()}", flush=True)

    _after_steps(print_processes)


def _replace_attribute(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute. Raises AttributeError if there is none, since nothing would change."""
    getattr(owner, name)
    setattr(owner, name, value)


def _after_steps(action: Callable[[int], None]) -> None:
    """Call `action` with the number of each completed step."""
    from lib.train.output.meters import Meters

    end_step = Meters.end_step

    def end_step_and_act(meters: Meters, step: int) -> None:
        end_step(meters, step)
        action(step)

    Meters.end_step = end_step_and_act


def main(hook: str, script: str, *arguments: str) -> None:
    """Run a stage with a hook, or with several joined by +, in this process."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from lib.core import offline

    if "transformers" not in sys.modules:  # in a fork, the parent process has enabled it
        offline.enable_offline_mode()
    offline.enable_offline_mode = lambda: None
    for name in hook.split("+"):
        globals()[name]()
    sys.argv = [str(ROOT / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
