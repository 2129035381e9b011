# covers: lib/models/weights.py, lib/export/full_model.py
"""Loading and exporting need little memory and read few bytes, measured in separate processes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import models as benchmark

pytestmark = pytest.mark.slow
EMBEDDING = benchmark.VOCABULARY * benchmark.WIDTH * 4  # bytes of the largest tensor, float32
MARGIN = 60 << 20


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Return a function that returns the figures of a model with so many layers."""

    @functools.cache
    def measure_once(layers: int) -> dict[str, Any]:
        root = tmp_path_factory.mktemp(f"layers{layers}")
        model = root / "model"
        benchmark.run_role("make", model, layers=layers)
        load = benchmark.run_role("ours", model, benchmark.RANKS)
        benchmark.run_role("checkpoint", model, benchmark.RANKS)
        export = benchmark.run_role("export", model, out=root / "out", dtype="bfloat16")
        figures = {
            "bytes": benchmark.weight_bytes(model),
            "load": load,
            "export": export,
            "exported": benchmark.weight_bytes(root / "out"),
        }
        shutil.rmtree(root)
        return figures

    return measure_once


@pytest.mark.parametrize("layers", [2, pytest.param(8, marks=pytest.mark.long)])
def test_each_rank_reads_and_stores_only_its_shard(
    measure: Callable[[int], dict[str, Any]], layers: int
) -> None:
    figures = measure(layers)
    assert figures["load"]["read"] == pytest.approx(figures["bytes"], rel=0.01)
    shard = figures["bytes"] * 2 / benchmark.RANKS  # float32 out of bfloat16
    assert max(figures["load"]["memory"]) < shard + EMBEDDING / 2 / benchmark.RANKS + MARGIN


@pytest.mark.parametrize("layers", [2, pytest.param(8, marks=pytest.mark.long)])
def test_an_export_has_at_most_three_tensors_in_memory(
    measure: Callable[[int], dict[str, Any]], layers: int
) -> None:
    figures = measure(layers)
    assert figures["export"]["memory"] < 3 * EMBEDDING
    assert figures["exported"] == pytest.approx(figures["bytes"], rel=0.001)


@pytest.mark.long
def test_the_memory_of_an_export_does_not_grow_with_the_layers(
    measure: Callable[[int], dict[str, Any]],
) -> None:
    assert abs(measure(8)["export"]["memory"] - measure(2)["export"]["memory"]) < 32 << 20
