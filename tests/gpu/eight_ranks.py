"""An item that runs one rank of eight; a fake process group simulates the other seven."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.place import Place

if TYPE_CHECKING:
    from lib.planning.trace import StepConfig
    from lib.tokens.batches import MicroBatch

_SHOWN = 15  # functions and operations in a profile
Step = Callable[["MicroBatch"], None]  # trains on a micro-batch


def eight_ranks(place: Place) -> None:
    """One of eight ranks that train a full 8B needs the estimated memory; notes the host's time.

    The collectives of the simulated group move no data, so the computed values mean nothing. If the
    host takes almost as long as a step, the GPU waits for it; the profile shows what the host does.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lib.models import architecture
    from lib.planning import trace
    from lib.planning.memory import Estimates
    from lib.tokens.batches import MicroBatch

    directory = place.model("8b-wide", num_hidden_layers=place.size(32, 6))
    step_config = trace.StepConfig(8, 8, *place.size((1, 8192, "bf16"), (1, 64, "fp32")), "full")
    estimated_bytes = (
        Estimates(architecture.build_on_meta(directory, "sdpa")).step(step_config).total
    )
    place.note(estimated_gib=estimated_bytes / 2**30)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    lines = []
    for kind in place.size(("eager", "compiled"), ("eager",)):
        step, vocabulary = make_step(place, directory, step_config, kind == "compiled")
        batch, short = (
            MicroBatch(ids, ids)
            for ids in (
                torch.randint(vocabulary, (step_config.batch, length), device=place.device)
                for length in (step_config.seq_length, place.size(64, 16))
            )
        )
        figures = measure_host(place, step, batch, short)
        place.note(**{kind: figures | profile_host(step, short)})
        lines.append(f"{kind}: host {figures['host_ms']:.0f} ms of {figures['step_ms']:.0f}")
        if place.on_gpu and kind == "eager":
            error = estimated_bytes / 2**30 / figures["peak_gib"] - 1
            assert abs(error) < 0.1, "the estimate is off by over 10 %"
        del step
    place.note(in_one_line="; ".join(lines))


def make_step(
    place: Place, directory: Path, step_config: StepConfig, compiled: bool
) -> tuple[Step, int]:
    """Return a function that trains this rank for a step, and the size of the vocabulary.

    With packed documents, attention is computed by varlen, else by sdpa.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from lib.models import architecture
    from lib.optim import registry
    from lib.optim.guard import StepGuard
    from lib.parallel import attention, attention_kernel, compiling, loss, parallelize

    gc.collect()  # an earlier model, whose references form cycles
    device = torch.device(place.device)
    compiler = compiling.make_compiler(compiled, device)
    mesh = init_device_mesh(place.device, (step_config.ranks,), mesh_dim_names=("shard",))
    model = architecture.build_on_meta(directory, "varlen" if step_config.documents else "sdpa")
    precision = step_config.precision
    length = step_config.seq_length
    packing = "documents" if step_config.documents else "none"
    attention.avoid_device_reads(model, packing, length)
    attention_kernel.pick_attention_kernel(model, packing, precision, device, length)
    parallelize.parallelize(model, mesh, precision, step_config.recompute, compiler)
    parallelize.materialise_model(model, device, offload=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02)
    head = model.get_output_embeddings()
    head.forward = loss.LossHead(head, loss.CHUNK_LOGITS[place.device], compiler)
    adamw = registry.build_optimizer("adamw", model, 1e-5)
    guard = StepGuard("fp32", 0.0, device)

    def step(batch: MicroBatch) -> None:
        loss.token_loss_sum(model, batch).backward()
        guard.clip(adamw, 1.0, guard.scale_for(1))
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step, model.config.vocab_size


def measure_host(place: Place, step: Step, batch: MicroBatch, short: MicroBatch) -> dict[str, Any]:
    """Return the medians of the milliseconds of steps, on the host and in all.

    host_ms: until a step of few tokens has ended, so that the host never waits for a full queue of
    launches. until_launched_ms: until the host has launched a whole step.
    """
    import torch

    def time_step(batch: MicroBatch) -> tuple[float, float]:
        began = time.perf_counter()
        step(batch)
        launched = time.perf_counter()
        if place.on_gpu:
            torch.cuda.synchronize()
        return 1000 * (launched - began), 1000 * (time.perf_counter() - began)

    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [time_step(batch) for _ in range(place.size(8, 3))][2:]  # the first ones warm up
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if place.on_gpu else {}
    short_times = [time_step(short) for _ in range(place.size(6, 3))][2:]
    return peak | {
        "host_ms": statistics.median(in_all for _, in_all in short_times),
        "until_launched_ms": statistics.median(launched for launched, _ in times),
        "step_ms": statistics.median(in_all for _, in_all in times),
    }


def profile_host(step: Step, batch: MicroBatch) -> dict[str, dict[str, float]]:
    """Return the Python functions and the operations that take most of the host's time in a step.

    Both are the milliseconds of their own, without what they call. Python's profiler makes calls
    slower, and on a GPU it does not see the thread of the backward pass; the operations are those
    of all threads.
    """
    import torch

    python = cProfile.Profile()
    python.runcall(step, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(batch)
    functions = {
        f"{Path(file).name}:{line} {name}": 1000 * own_seconds
        for (file, line, name), (_, _, own_seconds, _, _) in pstats.Stats(python).stats.items()
    }
    operations = {event.key: event.self_cpu_time_total / 1000 for event in profiler.key_averages()}
    return {"python_ms": _list_largest(functions), "operations_ms": _list_largest(operations)}


def _list_largest(figures: dict[str, float]) -> dict[str, float]:
    largest = sorted(figures.items(), key=lambda item: item[1], reverse=True)[:_SHOWN]
    return {name: round(value, 3) for name, value in largest}
