# covers: lib/parallel/parallelize.py
"""Weights are gathered only when necessary, counted on real ranks, with the same results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_stage

BLOCKS = ["0", "1", "2"]
ALL = ["embedding", *BLOCKS, "head"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))]
)
def test_weights_that_may_stay_gathered_are_gathered_once(tmp_path: Path, ranks: int) -> None:
    """Backward gathers neither the embedding nor the last block, with which it begins.

    With four ranks there are two replicas, and reductions in a process group of their own.
    """
    run_stage("tests/parallel/gathering.py", tmp_path / "found.json", cwd=tmp_path, ranks=ranks)
    results = json.loads((tmp_path / "found.json").read_text())
    for case, run in results.items():
        name, _, keeps_gathered = case.rpartition(" ")
        forward = ["head", *BLOCKS] if name == "tied" else ALL
        again = ["2", "1", "0"] if name == "offload" else ["1", "0"]
        later = [forward, again]
        if keeps_gathered == "True":
            again = []
            later = [[], []]
        passes = 1 if name == "one pass" else 3
        assert run["passes"] == [[forward, again], *[later] * (passes - 1)], case
        for part in ("losses", "validated", "weights"):
            assert run[part] == results[f"{name} False"][part], (case, part)
    assert len({run["losses"][0] != run["losses"][1] for run in results.values()}) == 1
    if ranks == 4:
        assert results["replicas False"]["weights"] == results["separate False"]["weights"]
