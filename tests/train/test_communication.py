# covers: lib/train/output/communication.py
"""Test the share of communication: unions of spans, and the events of the profiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from lib.train.output import communication
from lib.train.output.communication import (
    Communication,
    CommunicationProfiler,
    compute_communication,
    measure_union,
)


def make_event(name: str, start: float, end: float, on_gpu: bool = True, note: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=note,
    )


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (2, 5), (7, 8)], 5),
        ([(1, 9), (2, 3), (4, 5)], 8),
        ([(5, 6), (1, 2)], 2),
    ],
)
def test_the_union_of_spans(spans: list[tuple[float, float]], length: float) -> None:
    assert measure_union(spans) == length


def test_kernels_of_nccl_are_communication_and_others_hide_it() -> None:
    events = [
        make_event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 0, 40),
        make_event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 60, 70),
        make_event("sm90_xmma_gemm_bf16", 10, 30),
        make_event("Memcpy DtoD", 65, 80),
        make_event("nccl:all_gather", 0, 100, note=True),  # the range of a call, not a kernel
        make_event("aten::mm", 0, 100, on_gpu=False),  # on the host, which runs ahead
    ]
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    assert compute_communication(on_gpu, 100) == Communication(0.5, 0.25)


def test_operations_of_gloo_are_communication_on_a_cpu() -> None:
    events = [
        make_event("gloo:all_gather", 0, 40, on_gpu=False),
        make_event("gloo:all_reduce", 30, 50, on_gpu=False),
        make_event("aten::mm", 45, 60, on_gpu=False),
        make_event("FSDP::all_gather (0)", 0, 100, on_gpu=False),
        make_event("autograd::engine::evaluate_function: MmBackward0", 0, 100, on_gpu=False),
    ]
    assert compute_communication(events, 100) == Communication(0.5, 0.45)


def test_a_profile_without_collectives_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="no collective"):
        compute_communication([make_event("kernel", 0, 5)], 10)


@pytest.mark.parametrize("at", ["start", "stop", "events"])
def test_a_failing_profiler_is_reported_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError(f"no {at}\nfurther lines")

    class Recording:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None: ...

        def stop(self) -> None: ...

        def events(self) -> list[Any]:
            return []

    setattr(Recording, at, fail)
    monkeypatch.setattr(communication, "profile", Recording)
    layout: Any = SimpleNamespace(
        ranks=2,
        device=SimpleNamespace(type="cpu"),
        gather_table=lambda values: torch.tensor([values, [0.5, 0.25]], dtype=torch.float64),
    )
    profiler = CommunicationProfiler(1, 2, layout)
    profiler.begin_step(2)
    profiler.end_step(2)
    assert profiler.result is None and profiler.problem == f"the profiler failed: no {at}"


def test_one_rank_is_not_profiled() -> None:
    layout: Any = SimpleNamespace(ranks=1, device=SimpleNamespace(type="cpu"))
    profiler = CommunicationProfiler(25, 28, layout)
    for step in range(1, 29):
        profiler.begin_step(step)
        profiler.end_step(step)
    assert profiler.result is None and "one rank" in profiler.problem
