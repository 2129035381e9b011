# covers: lib/planning/child_process.py, lib/planning/training_memory.py
# covers: lib/planning/memory_check.py, lib/planning/capacity.py, lib/planning/trace.py
"""A trace that fails or takes too long prevents neither a download nor a run."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from lib.planning import capacity, memory_check, training_memory
from lib.planning.child_process import NoAnswer, in_child_process
from lib.planning.trace import StepConfig
from lib.train import memory_fit
from tests.planning.test_memory import ASKED, on_meta
from tests.planning.test_memory_check import check_memory

LARGE = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    vocab_size=40000,
)


class Endless:
    """Estimates that take as long as for a family that computes a sample token by token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def step(self, case: StepConfig) -> None:
        time.sleep(60)


def raise_stage_error() -> None:
    raise ValueError("no such operator\nand more")


def end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raise_stage_error, "ValueError: no such operator"),
        (end_process, "its process was killed"),
        (lambda: time.sleep(3600), "it takes longer than 1 s"),
    ],
)
def test_a_child_without_a_result_is_reported(function: Callable[[], None], why: str) -> None:
    assert in_child_process(sum, (1, 2), patience_s=30) == 3
    with pytest.raises(NoAnswer) as error:
        in_child_process(function, patience_s=1)
    assert str(error.value) == why


def test_stage_03_continues_without_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    LARGE.save_pretrained(tmp_path)
    monkeypatch.setattr(training_memory, "Estimates", Endless)
    monkeypatch.setattr(training_memory, "_PATIENCE_S", 0.1)
    memory = training_memory.TrainingMemory.estimate(tmp_path)
    assert memory.summary() == {} and memory.table_rows() == {}
    assert "it takes longer than 0.1" in caplog.text


def test_stage_04_takes_safe_settings_after_one_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    monkeypatch.setattr(memory_check, "Estimates", Endless)
    monkeypatch.setattr(memory_check, "_PATIENCE_S", 1)
    model = on_meta()
    states = 16 * model.num_parameters()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("count_free", "count_total"):
        monkeypatch.setattr(capacity, name, lambda device: round(1.2 * states))
    monkeypatch.setattr(capacity, "count_free_swap", lambda device: 0)
    options = replace(ASKED, batch_size="auto", seq_length=1024, activation_checkpointing="auto")
    config, check = check_memory(options, model)
    assert (config.batch_size, config.activation_checkpointing) == (1, "full")
    assert check.excess(memory_fit.make_local_step_config(config, model)) == {}
    assert caplog.text.count("could not be estimated: ") == 2


@pytest.mark.parametrize("in_use", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_that_traces_sees_no_gpu(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> None:
    """This holds for a fork and, if a GPU is in use, for a new interpreter."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    assert in_child_process(os.getenv, "CUDA_VISIBLE_DEVICES", patience_s=60) == ""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_child_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(NoAnswer, match="Cannot allocate memory"):
        in_child_process(raise_stage_error, patience_s=5.0)
