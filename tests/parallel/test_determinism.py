"""--deterministic on: what torch is asked for, and a run with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lib.parallel import determinism
from tests.conftest import run_stage
from tests.training import losses


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave torch as it was."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch._inductor.config.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_torch_and_cublas_are_asked_strictly(monkeypatch: pytest.MonkeyPatch, given: str | None,
                                             ) -> None:
    monkeypatch.setattr(os, "environ", {"CUBLAS_WORKSPACE_CONFIG": given} if given else {})
    determinism.require()
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": given or ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch._inductor.config.deterministic


def test_the_price_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "processor" in determinism.cost(torch.device("cpu"), "fp32")
    seconds = iter([0.3, 0.2])
    monkeypatch.setattr(determinism, "_seconds", lambda _: next(seconds))
    monkeypatch.setattr(determinism.torch, "ones", lambda *_, device, **named: None)
    said = determinism.cost(torch.device("cuda", 0), "bf16")
    assert "1.50 times" in said and torch.are_deterministic_algorithms_enabled()


def test_a_run(prepared_once: Path, tmp_path: Path) -> None:
    """All of stage 04 has a deterministic way; the losses are the same."""
    common = ("-d", prepared_once / "hf_datasets" / "corpus", "-m", prepared_once / "model",
              "--save-dir", tmp_path / "outputs", "--cache-dir", prepared_once / ".cache",
              "--precision", "fp32", "--max-steps", 3, "--log-freq", 1, "-s", 64)
    for name, more in (("plain", ()), ("strict", ("--deterministic", "on"))):
        done = run_stage("04_train_fsdp.py", "-e", name, *common, *more, cwd=tmp_path)
    assert "deterministic: as a processor does anyway" in done.stdout
    assert losses(tmp_path, "plain") == losses(tmp_path, "strict")
