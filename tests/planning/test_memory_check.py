# covers: lib/planning/memory_check.py, lib/planning/knobs.py
"""A run that cannot fit is refused, with the least costly setting that fits."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lib.core.errors import UsageError
from lib.models import architecture
from lib.models.lora import Lora
from lib.planning import capacity, memory_check, sizes
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import KINDS
from lib.train import memory_fit, plan, settle
from lib.train.config import Config
from lib.train.inputs import Inputs
from lib.train.sources.corpora import CorporaSource
from tests.conftest import run_stage
from tests.planning.test_memory import ASKED, case, on_meta

MIB = 1 << 20


class Known:
    """Estimates with the states of the model, and 8, 6 or 2 MiB of activations per 1,024 tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.parameters = sum(p.numel() for p in model.parameters())

    def step(self, case: StepConfig) -> StepMemory:
        unit = {"none": 8, "selective": 6, "full": 2}[case.recompute] * MIB
        share = self.parameters / case.shard_size
        held = dict.fromkeys(KINDS, 0) | {
            "gradients": round(8 * share),
            "optimizer": round(share * (8 if case.optimizer.name == "adamw" else 2)),
            "activations": unit * case.tokens // 1024,
        }
        return StepMemory(held, (held,), case.offload)


def inputs(begun: dict[str, Any] | None = None) -> Inputs:
    """Return inputs without files. begun: the record of an earlier launch."""
    return Inputs(Path("model"), CorporaSource([]), {}, begun or {}, None, scratch=False)


def check_memory(
    config: Config, model: PreTrainedModel, begun: dict[str, Any] | None = None
) -> tuple[Config, memory_check.MemoryCheck]:
    """Return the options after all rules, and the check of this machine's memory."""
    check = memory_check.MemoryCheck.for_this_rank(model)
    facts = settle.Facts(inputs(begun), model, check)
    return settle.apply_rules(config, facts, settle.Known.MEMORY), check


def refused(
    monkeypatch: pytest.MonkeyPatch,
    room_mib: float,
    *,
    gpu_mib: float = 0,
    ranks: int = 1,
    begun: bool = False,
    seq_length: int = 1024,
    **changes: Any,
) -> UsageError | None:
    """Return the error for a run on ranks with this much host and GPU memory, None if it fits."""
    monkeypatch.setattr(memory_check, "Estimates", Known)
    monkeypatch.setattr(capacity, "count_free_swap", lambda device: 0)
    monkeypatch.setitem(
        memory_check._USABLE, False, (0.9, 0)
    )  # no library takes more than these models
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_mib > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rooms = {"cpu": round(room_mib * MIB), "cuda": round(gpu_mib * MIB)}
    monkeypatch.setattr(capacity, "count_free", lambda device: rooms[device.type])
    monkeypatch.setattr(capacity, "count_total", lambda device: rooms[device.type])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(sys, "argv", ["04_train_fsdp.py", "-e", "x"])
    monkeypatch.setattr(architecture, "read_config", lambda *_: on_meta().config)
    config = replace(
        ASKED,
        seq_length=seq_length,
        **{"compile": False, "activation_checkpointing": "none", **changes},
    )
    earlier = {"identity": {}} if begun else {}
    try:
        config, check = check_memory(config, on_meta(), earlier)
        memory_fit.require_memory(config, inputs(earlier), check)
    except UsageError as error:
        return error
    return None


def test_a_run_that_cannot_fit_is_refused_with_a_setting_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(memory_check.log, "warn", warned.append)
    states = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB
    need = states + 2 * 8  # two samples
    assert refused(monkeypatch, 100 * need) is None
    assert refused(monkeypatch, need / 0.89) is None and not warned
    on_disk = memory_check.MemoryCheck(
        on_meta(), 3 * need * MIB, 0, on_gpu=False, swap=2 * need * MIB
    )
    assert on_disk.usable == pytest.approx(0.9 * need * MIB)
    assert refused(monkeypatch, need / 0.95) is None
    assert "memory will be short" in warned.pop()
    assert refused(monkeypatch, need - 1, compile=True) is None  # the trace does not show it
    assert "memory will be short" in warned.pop()

    assert refused(monkeypatch, states + 3, compile=True, activation_checkpointing="full")
    on_gpu = {"gpu_mib": need / 1.05, "ckpt_async": False}
    assert (
        refused(monkeypatch, need, **on_gpu) is None and warned.pop()
    )  # within the error of an estimate
    assert refused(monkeypatch, need, **on_gpu | {"gpu_mib": need / 1.15})

    error = refused(monkeypatch, need - 1)
    assert error and "16.0 MiB activations" in error.found and "without" not in error.found
    assert error.run.endswith("04_train_fsdp.py -e x --activation-checkpointing selective")
    error = refused(monkeypatch, (states + 2.1) / 0.9)
    assert error and error.run.endswith(
        "-b 1 --activation-checkpointing full --global-batch-size 2"
    )
    assert "it fits on 2 ranks" in error.hint
    error = refused(monkeypatch, (states + 2.1) / 0.9, grad_accum_steps=4)
    assert error and error.run.endswith("--global-batch-size 8")
    assert not warned


def test_a_batch_that_can_never_fit_is_refused_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trace repeats the operations of each chunk of the loss, which would take hours here."""
    model = on_meta()
    check = memory_check.MemoryCheck(model, 10 << 30, 10 << 30, on_gpu=False)
    monkeypatch.setattr(check, "trace", pytest.fail)
    monkeypatch.setattr(check, "in_child", pytest.fail)
    step = plan.make_step_config(replace(ASKED, batch_size=10**9), model, 1, on_gpu=False)
    assert not check.fits(step)
    [(kind, size)] = check.excess(step).items()
    layers = model.config.num_hidden_layers
    assert kind == "activations, at least"
    assert size == 2 * layers * model.config.hidden_size * step.tokens
    monkeypatch.setattr(check, "in_child", lambda *_: (None, None))
    error = check.refusal(step, {kind: size}, 10**9, has_begun=False, auto=False)
    assert "at least, for" in error.found and "without" not in error.found


def test_plan_only_warn_turns_the_refusal_into_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log also says that steps wait if host memory has no room for copies of a checkpoint."""
    lines: list[str] = []
    monkeypatch.setattr(memory_check.log, "warn", lines.append)
    monkeypatch.setattr(memory_check.log, "info", lines.append)
    states = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB
    assert refused(monkeypatch, states + 2, plan_only_warn=True) is None
    assert "does not fit" in lines[0] and "--activation-" in lines[0]
    lines.clear()
    assert refused(monkeypatch, 1.5 * states, seq_length=64, batch_size=1) is None
    [line] = lines
    assert "host memory" in line and "--ckpt-async off" in line
    lines.clear()
    for fits in ({"ckpt_async": False}, {"optimizer": "adamw8bit"}):
        assert refused(monkeypatch, 1.5 * states, seq_length=64, batch_size=1, **fits) is None
    assert not lines


def test_steps_are_traced_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, torch would cache the shards of the trace's rank 0 for every rank."""
    warned = []
    here = os.getpid()
    monkeypatch.setattr(memory_check.log, "warn", warned.append)
    monkeypatch.setattr(
        Known,
        "step",
        lambda known, case, step=Known.step: step(
            known, replace(case, batch=case.batch if os.getpid() != here else 1000 * case.batch)
        ),
    )
    need = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB + 2 * 8
    assert refused(monkeypatch, need / 0.95) is None and warned


def test_ranks_share_samples_if_that_makes_a_run_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command keeps the samples of a step, of which fewer ranks now compute different ones."""
    states = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB / 8
    options = {"ranks": 8, "batch_size": 1, "seq_length": 4096, "begun": True}
    for room, degree in ((5, 2), (3, 4), (1.5, 8)):  # 8 MiB of activations with full checkpointing
        error = refused(monkeypatch, (states + room) / 0.9, **options)
        assert error and error.run.endswith(
            f"--activation-checkpointing full --context-parallel {degree} --global-batch-size 8"
        )
    error = refused(monkeypatch, (states + 3) / 0.9, **options, context_parallel=2)
    assert error and error.run.endswith("--context-parallel 4 --global-batch-size 4")
    shared = {"context_parallel": 4, "activation_checkpointing": "full"}
    assert refused(monkeypatch, (states + 3) / 0.9, **options, **shared) is None


def test_states_that_do_not_fit_need_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remedies are smaller states, if the run is new, or more ranks."""
    states = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB
    few = {"seq_length": 64, "batch_size": 1}
    error = refused(monkeypatch, states - 0.1, **few)
    assert error and "over 1 rank, without" in error.found
    assert error.run.endswith("--activation-checkpointing full --optimizer adamw8bit")
    assert "on 2 ranks" in error.hint and "no option" not in error.hint
    error = refused(monkeypatch, states / 2 - 0.1, ranks=2, begun=True, **few)
    assert error and "over 2 ranks" in error.found and not error.run
    assert "on 4 ranks" in error.hint and "no option" in error.hint


def test_frozen_weights_have_no_gradients_and_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not in checkpoints either, nor in their copies in host memory."""
    model = on_meta(lora=Lora(4, 8.0, precision="bf16"))
    base, trained = (
        sum(p.numel() for p in model.parameters() if p.requires_grad == is_trained)
        for is_trained in (False, True)
    )
    fitted = memory_check.MemoryCheck(model, 0.1 * base, float("inf"), on_gpu=True)
    assert fitted.count_states(case(ranks=2)) == {
        "parameters": base + 2 * trained,
        "gradients": 2 * trained,
        "optimizer": 4 * trained,
    }
    fitted.unanswered = "not asked"
    error = fitted.refusal(case(ranks=2), fitted.count_states(case(ranks=2)), 4, False, False)
    assert "464K parameters, 31.4K trained, over 2 ranks" in error.found
    lines: list[str] = []
    monkeypatch.setattr(memory_check.log, "info", lines.append)
    monkeypatch.setattr(memory_fit, "make_local_step_config", lambda config, model: case(ranks=1))
    for copies in (11.9, 13.5):  # a tenth of host memory stays free
        fitted.host = copies * trained
        memory_fit._report_copies(ASKED, fitted)
    assert len(lines) == 1 and "host memory" in lines[0]


def test_offloaded_states_have_to_fit_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    states = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB
    tight = {"gpu_mib": 2.5, "batch_size": 1, "begun": True}
    error = refused(monkeypatch, 2 * states, **tight)
    assert error and "2.5 MiB" in error.problem
    assert error.run.endswith("--activation-checkpointing full --cpu-offload on")
    assert "on 4 GPUs" in error.hint and "--context-parallel 4" in error.hint
    full = {"cpu_offload": True, "activation_checkpointing": "full"}
    assert refused(monkeypatch, 2 * states, **tight, **full) is None
    error = refused(monkeypatch, states / 2, **tight, **full)  # the host has no room either
    assert error and "of host memory" in error.problem and not error.run


def test_offloaded_activations_have_to_fit_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the states, if --cpu-offload keeps these there too."""
    model = on_meta()
    states = 16 * sum(p.numel() for p in model.parameters()) / MIB
    changes = {"batch_size": 2, "activation_offload": True, "begun": True}
    inputs_mib = sizes.count_offloaded(model, 2 * 1024, "fp32") / MIB
    assert refused(monkeypatch, 1.2 * inputs_mib, gpu_mib=2 * states + 100, **changes) is None
    error = refused(monkeypatch, 0.9 * inputs_mib, gpu_mib=2 * states + 100, **changes)
    assert error and "of host memory" in error.problem and "-b 1" in error.run
    changes |= {"cpu_offload": True}
    both = states + inputs_mib
    assert refused(monkeypatch, 1.2 * both, gpu_mib=100, **changes) is None
    error = refused(monkeypatch, 0.9 * both, gpu_mib=100, **changes)
    assert error and "activations in host memory" in error.found


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        (
            "0::/job/step",
            {
                "job/memory.max": "1000",
                "job/memory.current": "900",
                "job/memory.stat": "anon 1\ninactive_file 300\nactive_file 100",
                "job/step/memory.max": "max",
                "job/step/memory.current": "5",
                "job/step/memory.stat": "",
            },
            [500],
        ),
        (
            "5:memory:/outside/of/the/container",
            {
                "memory/memory.limit_in_bytes": "800",
                "memory/memory.usage_in_bytes": "700",
                "memory/memory.stat": "total_inactive_file 50\ntotal_active_file 0",
            },
            [150],
        ),
        ("3:cpu:/job", {}, []),
    ],
    ids=["version 2", "version 1", "another"],
)
def test_control_groups_limit_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: str,
    files: dict[str, str],
    free: list[int],
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)
    assert [room for _, room in capacity._read_limits([line])] == free
    monkeypatch.setattr(capacity, "_read_own_groups", lambda: [line])
    assert capacity.count_total(torch.device("cpu")) in (1000, 800) or not free
    assert 0 < capacity.count_free(torch.device("cpu")) < 1 << 50


def test_a_run_that_cannot_fit_ends_before_text_is_tokenised(project: Path) -> None:
    """All ranks end, and none waits for another."""
    options = ("-e", "huge", "-d", "corpus", "-m", "model")
    done = run_stage(
        "04_train_fsdp.py",
        *options,
        cwd=project,
        ranks=2,
        expect=1,
        timeout=120,
        before="tests.training:offer_little_memory",
    )
    output = done.stdout + done.stderr
    needed = "a rank needs 0.3 MiB and can have 1.0 KiB of host memory"  # 16 B · 35K / 2
    assert f"does not fit: {needed}" in output and "over 2 ranks" in output
    assert not (project / ".cache" / "tokens").exists() and not (project / "outputs").exists()
