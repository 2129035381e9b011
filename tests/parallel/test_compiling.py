# covers: lib/parallel/compiling.py, lib/parallel/parallelize.py, lib/parallel/layout.py
# covers: lib/parallel/trial.py
"""A failing part leaves the others compiled; ranks that exchange tokens give up together."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lib.core.errors import UsageError
from lib.parallel import compiling
from lib.parallel.compiling import Compiler
from tests.conftest import run_stage
from tests.parallel import compiling_together
from tests.parallel.compiling_together import CASES, EVALUATION, TRAINING
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


def check_case(name: str, result: dict, calls: int) -> None:
    """Check one rank's result of a case that goes on. calls: exchanges of a pass, both layers."""
    uncompiled = result["uncompiled"]
    compiled = result["compiled"]
    assert compiled["losses"] == pytest.approx(uncompiled["losses"], rel=1e-5), name
    passes = 3 if CASES[name].recompute == "full" else 2
    for one in (uncompiled, compiled):
        assert one["exchanges"] == passes * calls, name
    if not CASES[name].fails:
        assert result["trials"] == 4, "two blocks, with and without gradients"
        masks = 2 if name == "masks" else 1  # there is a mask only if a row has several documents
        assert result["graphs"] <= 2 * 4 * masks, name
        assert not result["warnings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, shared",
    [(2, 2), *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((3, 3), (4, 2)))],
)
def test_ranks_that_share_rows_compile_and_give_up_together(
    tmp_path: Path, ranks: int, shared: int
) -> None:
    """One rank alone fails. Documents of all numbers and lengths share the same graphs."""
    run_stage("tests/parallel/compiling_together.py", tmp_path, shared, cwd=tmp_path, ranks=ranks)
    calls = 2 if shared == 3 else 4  # 3 ranks gather keys and values, and need one exchange each
    for rank in range(ranks):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        reason = "fp8e4nv" if rank == ranks - 1 else "another rank"
        for name, result in results.items():
            if CASES[name].required:
                assert "compiled" not in result and reason in result["error"]
                continue
            check_case(name, result, calls)
            if CASES[name].fails:
                [warning] = result["warnings"]
                assert reason in warning, name
        kept = [results[name]["compiled"]["kept"] for name in ("none", "selective", "full")]
        assert kept[0] > kept[1] > kept[2]


def compile_by(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Let compiled functions be a function's result for them."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: functools.partial(run, function))


def test_ranks_agree_once_on_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of documents does not matter, and trials before training are no such call."""
    compile_by(monkeypatch, lambda function, *arguments, **named: function(*arguments, **named))
    votes: list[bool] = []

    def agree(works: bool) -> bool:
        votes.append(works)
        return works

    compiler = Compiler(required=True, agree=agree)

    def double(value: Tensor, ends: Tensor) -> Tensor:
        return 2 * value

    wrapped = compiler.wrap_together(compiling.compile_parts(double), double)
    ends = torch.arange(5)
    with compiling.pause_compiling():
        wrapped(torch.ones(2), ends)
    assert not votes
    for size, expected in ((2, 1), (2, 1), (3, 2)):
        assert wrapped(torch.ones(size), ends[: size + 2]).tolist() == [2.0] * size
        assert votes == [True] * expected
    with torch.no_grad():
        wrapped(torch.ones(3), ends)
    assert votes == [True] * 3


def test_a_failure_after_the_agreement_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may already wait for this one, so it must not go on uncompiled."""
    calls: list[int] = []

    def run(function: Callable[..., Tensor], value: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            compiling_together.fail()
        return function(value)

    compile_by(monkeypatch, run)
    wrapped = Compiler(required=False, agree=bool).wrap_together(
        compiling.compile_parts(torch.neg), torch.neg
    )
    wrapped(torch.ones(2))  # the trial, and the call
    with pytest.raises(RuntimeError, match="fp8e4nv"):
        wrapped(torch.ones(2))


@pytest.mark.parametrize("fails", [TRAINING, EVALUATION])
@pytest.mark.parametrize("required", [True, False])
def test_all_ranks_give_up_if_one_does(required: bool, fails: str) -> None:
    """The answer of the others counts, though this rank's function works."""
    with compiling_together.stand_in("") as counts:
        compiler = Compiler(required, agree=lambda works: False)
        wrapped = compiler.wrap_together(compiling.compile_parts(torch.neg), torch.neg)
        with torch.set_grad_enabled(fails == TRAINING):
            if required:
                with pytest.raises(UsageError, match="cannot be compiled"):
                    wrapped(torch.ones(2))
                return
            for _ in range(2):
                assert wrapped(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert counts["trials"] == 1 and not compiler._works
