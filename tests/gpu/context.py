"""Items about ranks that share rows: one rank of eight at a long row, and several GPUs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.gpu import traces
from tests.gpu.attention import make_lengths
from tests.gpu.eight_ranks import make_step
from tests.gpu.kernels import time_median
from tests.gpu.place import Place, Stage
from tests.gpu.runs import FP32_TOLERANCE, index_losses, small_run_options
from tests.gpu.speed import run_measured, summarise_run

if TYPE_CHECKING:
    from lib.parallel.context import Context
    from lib.tokens.batches import MicroBatch

_RANK = 3  # neither the first nor the last of those that share a row
_METHODS = ("ulysses", "allgather")
_BF16_TOLERANCE = 1e-2  # relative, of losses
_NORM_FACTOR = 10  # by which norms of gradients may differ more than losses
_LONG_ROW = 32_768  # tokens, in the measurement on several GPUs
_PROFILED_STEPS = 2
_ALL_TO_ALL = re.compile("sendrecv|alltoall", re.IGNORECASE)  # by version of NCCL


def context(place: Place) -> None:
    """One of eight ranks that share rows of 131,072 tokens needs the estimated memory; notes times.

    The model is an 8B, fully recomputed. The exchanges of the simulated group move no data, so the
    computed values mean nothing, and steps contain no time of communication.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lib.models import architecture
    from lib.parallel.context import start
    from lib.planning.memory import Estimates
    from lib.planning.trace import StepConfig

    ranks, length, precision = place.size((8, 131_072, "bf16"), (4, 256, "fp32"))
    blocks = place.size(32, 2)
    directory = place.model("8b-wide", num_hidden_layers=blocks, max_position_embeddings=length)
    documents = make_lengths(length)
    whole = StepConfig(ranks, ranks, 1, length, precision, "full", context=ranks)
    packed = replace(whole, documents=len(documents))
    estimates = Estimates(architecture.build_on_meta(directory, "sdpa"))
    estimated = [estimates.step(step_config).total / 2**30 for step_config in (whole, packed)]
    place.note(
        **dict(zip(("sdpa, estimated GiB", "varlen, estimated GiB"), estimated, strict=True))
    )
    dist.init_process_group("fake", rank=_RANK, world_size=ranks, store=FakeStore())
    shared = start(_RANK, ranks, ranks, _METHODS[0])
    lines = []
    peaks = []
    for kernel, step_config, lengths in (("sdpa", whole, [length]), ("varlen", packed, documents)):
        step, vocabulary = make_step(place, directory, step_config, compiled=False)
        batch = make_batch(place, shared, vocabulary, lengths, packed=step_config is packed)
        if place.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = time_median(place, partial(step, batch), repeats=place.size(3, 1), warm_up=1)
        figures = {"step_ms": 1000 * seconds}
        if place.on_gpu:
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)
            figures["peak_gib"] = peaks[-1]
        del step, batch
        figures |= time_attention(place, directory, kernel, ranks, lengths)
        place.note(**{kernel: figures})
        lines.append(f"{kernel}: {seconds:.2f} s, attention {figures['tflops']:.0f} TFLOP/s")
    copies_ms = time_copies(place, directory, shared, length // ranks)
    place.note(copies_ms=copies_ms)
    place.note(in_one_line=f"{'; '.join(lines)}; copies {copies_ms:.2f} ms in each layer")
    ratios = [estimate / peak for estimate, peak in zip(estimated, peaks, strict=place.on_gpu)]
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios), f"estimate ÷ peak memory: {ratios}"


def make_batch(
    place: Place, shared: Context, vocabulary: int, lengths: list[int], packed: bool
) -> MicroBatch:
    """Return this rank's part of a row of random tokens. lengths: of the documents in the row."""
    import numpy as np
    import torch

    from lib.tokens.batches import make_micro_batch
    from lib.tokens.samples import SampleArrays

    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, sum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])[None] if packed else None
    batch = make_micro_batch(SampleArrays(tokens, tokens, positions), False)
    return batch.to(SimpleNamespace(device=torch.device(place.device), context=shared))


def count_heads(directory: Path, ranks: int) -> tuple[int, int, int]:
    """Return how many heads a model has, how many of keys if `ranks` share them, and their size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    return (
        config.num_attention_heads,
        math.lcm(config.num_key_value_heads, ranks),
        config.head_dim,
    )


def make_heads(place: Place, counts: tuple[int, ...], length: int, width: int) -> list[Any]:
    """Return random queries, keys and values as a model makes them: strided [1, H, length, D]."""
    import torch

    dtype = place.size(torch.bfloat16, torch.float32)
    return [
        torch.randn(1, length, count, width, device=place.device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for count in counts
    ]


def time_attention(
    place: Place, directory: Path, kernel: str, ranks: int, lengths: list[int]
) -> dict[str, float]:
    """Return the time and speed of attention on whole rows for a rank's share of the heads.

    Both are of a forward and a backward pass. Speeds count the causal half of each document.
    """
    import torch
    from transformers import AttentionInterface

    heads, key_heads, width = count_heads(directory, ranks)
    counts = (heads // ranks, *[key_heads // ranks] * 2)
    parts = make_heads(place, counts, sum(lengths), width)
    ends = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    module = SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True)
    named = {"cu_seq_lens_q": ends, "max_length_q": max(lengths)} if kernel == "varlen" else {}

    def attend() -> None:
        out, _ = AttentionInterface()[kernel](module, *parts, None, **named)
        torch.autograd.grad(out, parts, out.detach())

    seconds = time_median(place, attend, repeats=place.size(5, 1), warm_up=1)
    flops = 3.5 * 2 * counts[0] * width * sum(length**2 for length in lengths)
    return {"attention_ms": 1000 * seconds, "tflops": flops / seconds / 1e12}


def time_copies(place: Place, directory: Path, shared: Context, length: int) -> float:
    """Return the milliseconds of the copies around the exchanges of a layer, in both directions.

    They are those of a forward and a backward pass. length: tokens of a rank.
    """
    import torch

    heads, key_heads, width = count_heads(directory, shared.size)
    parts = make_heads(place, (heads, key_heads, key_heads), length, width)
    (out,) = make_heads(place, (heads // shared.size,), length * shared.size, width)
    out = out.detach().transpose(1, 2).requires_grad_()  # as a kernel returns it, [1, T, H, D]

    def copy() -> None:
        exchanged = shared._exchange_heads(*parts)
        torch.autograd.grad(exchanged, parts, [part.detach() for part in exchanged])
        returned = shared._exchange_tokens(out)
        torch.autograd.grad(returned, out, returned.detach())

    return 1000 * time_median(place, copy)


def sharing_options(gpus: int) -> dict[str, tuple[object, ...]]:
    """Return the options for each way in which ranks share rows, by name. gpus: at least 2."""
    return {
        f"{method}-over-{ranks}": (
            "--context-parallel",
            ranks,
            "--context-parallel-method",
            method,
        )
        for ranks in (2, 4)
        if ranks <= gpus
        for method in _METHODS
    }


def context_ranks(place: Place) -> None:
    """Two or four ranks that share rows train as one with whole rows; notes how fast they do."""
    ways = sharing_options(place.size(place.gpus, 2))
    packed = ("--packing", "documents", "--compile")
    settings = {
        "fp32": (FP32_TOLERANCE, (*packed, "off", "--attention", "sdpa", "--precision", "fp32")),
        **{
            f"bf16-compile-{compiled}": (
                _BF16_TOLERANCE,
                (*packed, compiled, "--attention", "varlen", "--precision", "bf16"),
            )
            for compiled in place.size(("off", "on"), ())
        },
    }
    for name, (tolerance, setting) in settings.items():
        options = small_run_options(
            place, "--max-steps", 8, "-b", 1, "--global-batch-size", 4, *setting
        )
        whole = place.train(f"{name}-whole", *options, ranks=1, hook="skip_saves")
        for way, words in ways.items():
            run = place.train(f"{name}-{way}", *options, *words, ranks=words[1], hook="skip_saves")
            compare_runs(place, f"{name}, {way}", run, whole, tolerance)
    measure_exchange(place, ways)


def compare_runs(place: Place, name: str, run: Stage, whole: Stage, tolerance: float) -> None:
    """Note and check by how much losses and norms of gradients differ, relative to whole rows."""
    expected = index_losses(whole)
    figures = index_losses(run)
    assert figures.keys() == expected.keys()
    loss, norm = (
        max(abs(figures[step][part] / expected[step][part] - 1) for step in expected)
        for part in (0, 1)
    )
    place.note(**{name: {"losses differ by": loss, "norms by": norm}})
    assert loss < tolerance and norm < _NORM_FACTOR * tolerance, (name, figures, expected)


def measure_exchange(place: Place, ways: dict[str, tuple[object, ...]]) -> None:
    """Note the time of a step on long rows, and the speed of the exchanges in a trace.

    NCCL's kernels also wait for the other ranks, so the speed of a link is higher. All-gathers of
    keys and values are left out, since FSDP's have the same kernels.
    """
    length = place.size(_LONG_ROW, 64)
    directory = place.model("8b-wide", max_position_embeddings=length)
    profiled = ("--profile", place.size("19:20", "7:8"), "--compile", place.size("on", "off"))
    settings = {"whole": ("--context-parallel", 1), **ways}
    for way, words in settings.items():
        run = run_measured(
            place,
            f"long-{way}",
            directory,
            length,
            1,
            *profiled,
            *words,
            ranks=words[1],
        )
        milliseconds = summarise_run(run)["time/total"]
        place.note(**{f"{way}, ms": milliseconds})
        if way.startswith("ulysses") and place.on_gpu:
            sent = count_sent_bytes(directory, words[1], length)
            seconds = sum_exchanges(traces.load_trace(run)) / 1000
            assert seconds, "the trace has no exchange"
            place.note(**{f"{way}, GB/s": _PROFILED_STEPS * sent / seconds / 1e9})


def sum_exchanges(events: list[traces.Event]) -> float:
    """Return the milliseconds of NCCL's kernels for all-to-all."""
    return traces.sum_milliseconds(
        event for event in traces.find_kernels(events) if _ALL_TO_ALL.search(event["name"])
    )


def count_sent_bytes(directory: Path, ranks: int, length: int) -> int:
    """Return the bytes that a rank sends by all-to-all in a step without recomputation, in bf16."""
    from transformers import AutoConfig

    from lib.parallel.context import count_sent

    config = AutoConfig.from_pretrained(directory)
    passes = 2 * config.num_hidden_layers  # forward and backward
    return 2 * passes * count_sent("ulysses", ranks, config, length // ranks)
