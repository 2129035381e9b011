# covers: lib/parallel/compiling.py
"""A part of the step that fails to compile leaves the other parts compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_stage
from tests.parallel.failing_parts import STEPS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_failing_loss_and_update_leave_the_blocks_compiled(tmp_path: Path, ranks: int) -> None:
    """This holds with `--compile on` and if one rank alone fails; no rank waits for another."""
    run_stage("tests/parallel/failing_parts.py", tmp_path, cwd=tmp_path, ranks=ranks, timeout=100)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for rank, result in enumerate(results):
        assert result["compiled"] == pytest.approx(result["uncompiled"], rel=1e-6)
        assert result["blocks"] == 2 * (STEPS + 1), "each block is rehearsed once"
        parts = [text.partition(" for ")[2].partition(",")[0] for text in result["warnings"]]
        assert parts == (["the loss", "the update"] if rank == ranks - 1 else [])
        assert all("fp8e4nv not supported" in text for text in result["warnings"])
