# covers: lib/models/weights.py, lib/export/full_model.py
"""Loading and exporting need little memory and read few bytes, measured in separate processes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks import models as benchmark

pytestmark = pytest.mark.slow
EMBEDDING = benchmark.VOCABULARY * benchmark.WIDTH * 4  # bytes of the largest tensor, float32
MARGIN = 60 << 20


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the figures of models with 2 and 8 layers, by number of layers."""
    found = {}
    for layers in (2, 8):
        root = tmp_path_factory.mktemp(f"layers{layers}")
        model = root / "model"
        benchmark.run_role("make", model, layers=layers)
        load = benchmark.run_role("ours", model, benchmark.RANKS)
        benchmark.run_role("checkpoint", model, benchmark.RANKS)
        export = benchmark.run_role("export", model, out=root / "out", dtype="bfloat16")
        found[layers] = {
            "bytes": benchmark.weight_bytes(model),
            "load": load,
            "export": export,
            "exported": benchmark.weight_bytes(root / "out"),
        }
        shutil.rmtree(root)
    return found


@pytest.mark.parametrize("layers", [2, 8])
def test_each_rank_reads_and_stores_only_its_shard(
    measured: dict[int, dict[str, Any]], layers: int
) -> None:
    found = measured[layers]
    assert found["load"]["read"] == pytest.approx(found["bytes"], rel=0.01)
    shard = found["bytes"] * 2 / benchmark.RANKS  # float32 out of bfloat16
    assert max(found["load"]["memory"]) < shard + EMBEDDING / 2 / benchmark.RANKS + MARGIN


def test_an_export_has_at_most_three_tensors_in_memory(measured: dict[int, dict[str, Any]]) -> None:
    memory = {layers: found["export"]["memory"] for layers, found in measured.items()}
    assert max(memory.values()) < 3 * EMBEDDING
    assert abs(memory[8] - memory[2]) < 32 << 20  # whatever the size of the model
    assert all(
        found["exported"] == pytest.approx(found["bytes"], rel=0.001) for found in measured.values()
    )
