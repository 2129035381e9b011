# covers: lib/train/output/symptoms.py
"""Errors of torch and NCCL are replaced by errors that say what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib.core import launcher
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.train.config import Config
from lib.train.output import symptoms

PLAIN = Config(batch_size=4, seq_length=1024, precision="bf16", activation_checkpointing="none")


def explain_error(error: BaseException, **options: object):
    return symptoms.explain_error(error, replace(PLAIN, **options), Experiment(Path("o"), "e"))


def test_an_allocation_that_fails_names_the_remedies_in_order() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    first = explain_error(caught.value)
    assert first.code == 2 and "allocate" in first.found
    _, *remedies = first.hint.splitlines()
    assert "--activation-checkpointing selective" in remedies[0] and "-b" in remedies[1]
    later = explain_error(caught.value, activation_checkpointing="full", batch_size=1)
    _, *remedies = later.hint.splitlines()
    assert "more ranks" in remedies[0] and "-s" in remedies[-1]


def test_an_operation_that_is_not_deterministic_is_a_usage_error() -> None:
    error = explain_error(
        RuntimeError(
            "index_add_cuda_ does not have a deterministic implementation, "
            "but you set 'torch.use_deterministic_algorithms(True)'.\nmore"
        )
    )
    assert error.code == 2 and error.found.startswith("index_add_cuda_")
    assert "--deterministic off" in error.run


def test_a_lost_rank_is_explained_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = explain_error(RuntimeError("[pair.cc:544] Connection closed by peer [10.0.0.7]:1234"))
    assert "broke" in broken.problem and "10.0.0.7" in broken.found
    late = explain_error(
        torch.distributed.DistBackendError(
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
        )
    )
    assert "timed out" in late.problem and "logs/rank_" in late.expected
    assert explain_error(RuntimeError("shapes do not match")) is None
    monkeypatch.setattr(launcher, "is_gone", lambda: True)
    alone = explain_error(torch.distributed.DistNetworkError("Broken pipe"))
    assert "launcher" in alone.problem


def test_a_first_loss_of_nan_names_weights_or_precision() -> None:
    symptoms.require_finite(float("nan"), 2, PLAIN)
    for precision, keyword in (("bf16", "weights"), ("fp16", "overflow")):
        with pytest.raises(UsageError) as caught:
            symptoms.require_finite(float("nan"), 1, replace(PLAIN, precision=precision))
        assert keyword in caught.value.expected


def test_a_diverged_run_gets_a_command_with_a_lower_rate(tmp_path: Path) -> None:
    run = replace(PLAIN, lr=1e-3, min_lr=1e-4, max_steps=100), Experiment(tmp_path, "run")
    assert "no checkpoint" in symptoms.make_divergence_error(50, 20, 0, *run).problem
    error = symptoms.make_divergence_error(50, 20, 3, *run)
    assert "20 bad steps" in error.problem
    assert "since step 30" in error.found
    assert "-e run-lower-lr --lr 0.0001" in error.run
