# covers: lib/train/memory_fit.py, lib/train/settle.py, lib/train/plan.py
"""Options that depend on memory: batch, recomputation, gathered weights, shard size."""

from __future__ import annotations

import json
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.core import units
from lib.core.errors import UsageError
from lib.models import architecture
from lib.planning import capacity, memory_check, sizes
from lib.planning.memory_check import MemoryCheck
from lib.planning.options import PlannedGpus
from lib.train import batch_division, memory_fit, plan
from lib.train.settle import Facts, Known, apply_rules, settle_from_files
from tests.conftest import run_stage
from tests.planning.test_memory import ASKED, on_meta
from tests.planning.test_memory_check import MIB, check_memory, inputs
from tests.planning.test_memory_check import Known as KnownSteps

STATES_MIB = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that are logged, and replace the values of this machine by constants."""
    lines: list[str] = []
    monkeypatch.setattr(memory_fit.log, "info", lines.append)
    monkeypatch.setattr(memory_fit.log, "detail", lines.append)
    monkeypatch.setattr(memory_fit.log, "warn", lines.append)
    monkeypatch.setattr(memory_check, "Estimates", KnownSteps)
    monkeypatch.setattr(capacity, "count_free_swap", lambda device: 0)
    monkeypatch.setitem(
        memory_check._USABLE, False, (0.9, 0)
    )  # no library takes more than these models
    monkeypatch.setattr(sys, "argv", ["04_train_fsdp.py", "-e", "x"])
    monkeypatch.setattr(architecture, "read_config", lambda *_: on_meta().config)
    return lines


def set_memory(
    monkeypatch: pytest.MonkeyPatch, samples: float, *, gpu: bool = False, ranks: int = 1
) -> None:
    """Give each rank memory for its states and so many samples of 1,024 tokens."""
    room = round((STATES_MIB / ranks + 8 * samples) * MIB / 0.9) + 1000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(capacity, "count_free", lambda device: room)
    monkeypatch.setattr(capacity, "count_total", lambda device: room)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def choose_batch(seq_length: int = 1024, precision: str = "fp32", **changes: Any) -> int:
    config = replace(
        ASKED,
        **{
            "batch_size": "auto",
            "seq_length": seq_length,
            "compile": False,
            "activation_checkpointing": "none",
            "precision": precision,
            **changes,
        },
    )
    return check_memory(config, on_meta())[0].batch_size


def test_the_largest_batch_that_fits_is_used(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    set_memory(monkeypatch, 12, gpu=True)
    assert choose_batch() == 8 and "8,192 tokens" in logged[-1]
    assert choose_batch(batch_size=3) == 3
    set_memory(monkeypatch, 0, gpu=True)
    assert choose_batch() == 1  # require_memory refuses the run
    set_memory(monkeypatch, 1000, gpu=True)
    assert choose_batch() == 32 and choose_batch(seq_length=65536) == 1
    assert "at most 32,768 tokens" in logged[-1]
    set_memory(monkeypatch, 1000)
    assert choose_batch() == 2 and choose_batch(seq_length=32) == 64


def test_ranks_that_share_samples_have_memory_for_more_of_them(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """Tokens on a device count: those in memory, and those that keep a GPU busy."""
    set_memory(monkeypatch, 12, gpu=True, ranks=8)
    shared = {"context_parallel": 4}
    assert choose_batch() == 8 and choose_batch(**shared) == 32
    assert "8,192 tokens in a micro-batch" in logged[-1]
    assert choose_batch(global_batch_size=6, **shared) == 3  # for two times four ranks
    set_memory(monkeypatch, 1000, gpu=True, ranks=8)
    assert choose_batch(seq_length=1 << 17) == 1 and choose_batch(1 << 17, **shared) == 1
    assert choose_batch(1 << 16, **shared) == 2 and "at most 32,768 tokens" in logged[-1]
    set_memory(monkeypatch, 7.9, gpu=True, ranks=8)
    open_kind = {"activation_checkpointing": "auto", "batch_size": 4, "seq_length": 4096}
    kinds = [
        check_memory(replace(ASKED, compile=False, **open_kind, **options), on_meta())[0]
        for options in ({}, {"context_parallel": 2}, {"context_parallel": 4})
    ]
    assert [config.activation_checkpointing for config in kinds] == ["full", "selective", "none"]


def test_no_more_is_recomputed_than_needed(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """A resumed run recomputes no less than before; a sample takes 8, 6 or 2 MiB accordingly."""

    def fill_options(samples: float, earlier_kind: str = "", **changes: Any) -> tuple[str, int]:
        logged.clear()
        set_memory(monkeypatch, samples, gpu=True)
        typed_config = replace(
            ASKED, **{"batch_size": 4, "seq_length": 1024, "compile": False, **changes}
        )
        config, _ = check_memory(
            typed_config, on_meta(), {"settled": {"activation_checkpointing": earlier_kind}}
        )
        assert config.settled_by["activation_checkpointing"] == (
            "earlier launch"
            if config.activation_checkpointing == earlier_kind
            else "memory estimate"
        )
        assert config.to_record()["activation_checkpointing"] == "auto"
        return config.activation_checkpointing, config.batch_size

    assert fill_options(1000) == ("none", 4) and not logged
    assert (
        fill_options(4) == ("none", 4)
        and fill_options(3.9) == ("selective", 4)
        and fill_options(2.9) == ("full", 4)
    )
    [line] = logged
    assert line.startswith("--activation-checkpointing auto: full")
    assert units.memory(capacity.count_free(None)) in line
    assert fill_options(0.9) == ("full", 4)  # nothing fits; require_memory refuses the run
    assert (
        fill_options(1000, "full") == ("full", 4)
        and fill_options(1000, "none") == ("none", 4)
        and not logged
    )
    assert fill_options(2.9, "none") == ("full", 4) and len(logged) == 1
    auto = {"batch_size": "auto"}  # enough for 8,192 tokens in a micro-batch
    assert fill_options(8, **auto) == ("none", 8) and fill_options(7.9, **auto) == ("selective", 8)
    assert fill_options(5.9, **auto) == ("full", 16) and fill_options(1, **auto) == ("full", 4)
    assert fill_options(7.9, **auto, global_batch_size=4) == ("none", 4)
    assert fill_options(1, **auto, seq_length=8192) == ("full", 1)
    config = replace(ASKED, activation_checkpointing="full").with_values("x", lr=1.0)
    assert config.to_record()["activation_checkpointing"] == "full"


def test_activations_in_host_memory_imply_full_recomputation(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """A plan and a run both print how much host memory they take."""
    set_memory(monkeypatch, 1000, gpu=True)
    typed_config = replace(ASKED, batch_size=4, seq_length=1024, activation_offload=True)
    config, check = check_memory(typed_config, on_meta())
    assert config.activation_checkpointing == "full"
    assert config.settled_by["activation_checkpointing"] == "--activation-offload"
    assert config.to_record()["activation_checkpointing"] == "auto"
    size = sizes.count_offloaded(on_meta(), 4 * 1024, "fp32")
    memory_fit.require_memory(config, inputs(), check)
    assert any(f"{units.memory(size)} of page-locked" in line for line in logged)
    planned = replace(config, plan_gpus=PlannedGpus([8]))
    memory_fit.fit_to_planned_gpus(planned, inputs(), on_meta())
    assert any(f"{units.memory(8 * size)} per node" in line for line in logged)
    set_memory(monkeypatch, 1000)
    assert not plan.make_step_config(config, on_meta(), 1, on_gpu=False).activation_offload


def test_an_automatic_batch_divides_the_global_batch(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    set_memory(monkeypatch, 12, gpu=True, ranks=2)
    for global_batch, batch in ((12, 6), (14, 7), (22, 11), (26, 1), (36, 9), (2, 1)):
        assert choose_batch(global_batch_size=global_batch) == batch
    assert "that a rank has" in logged[-1]
    assert any("36 samples" in line and "2 ranks" in line for line in logged)
    with pytest.raises(UsageError, match="cannot be divided"):
        choose_batch(global_batch_size=13)
    assert choose_batch(global_batch_size=32, precision="fp8", seq_length=1000) == 8
    with pytest.raises(UsageError, match="multiples of 16"):
        choose_batch(global_batch_size=6, precision="fp8", seq_length=1000)


def test_an_automatic_batch_leaves_enough_steps(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has chosen a batch of 16, so both ranks begin with that."""
    monkeypatch.setattr(memory_fit, "gather", lambda mine, group: [mine, (16, "full", False)])

    def agreed(samples: int | None, auto: bool = True, ranks: int = 2, **changes: Any) -> int:
        logged.clear()
        config = replace(
            ASKED,
            batch_size=32,
            seq_length=1000,
            precision="fp8",
            activation_checkpointing="selective",
            **changes,
        )
        config = config.with_values("memory estimate", batch_size=32) if auto else config
        layout = Namespace(ranks=ranks, control=None)
        agreed = memory_fit.agree_on_memory(config, samples, layout)
        assert agreed.activation_checkpointing == ("full" if auto else "selective")
        of_rank_1 = [line for line in logged if line.endswith("as rank 1 has chosen")]
        assert len(of_rank_1) == (2 if auto else 0)
        logged[:] = [line for line in logged if line not in of_rank_1]
        return agreed.batch_size

    assert agreed(1000) == 16 and agreed(320) == 16 and not logged
    assert agreed(319) == 8
    [line] = logged
    assert line.startswith("--batch-size auto: 8 per process") and "319 samples" in line
    assert agreed(319, num_epochs=2) == 16 and agreed(319, grad_accum_steps=4) == 2
    assert agreed(31) == 2  # fewer have no multiple of 16 tokens
    assert agreed(31, max_steps=5) == 16  # epochs without end
    assert agreed(31, num_epochs=1, max_steps=2) == 4
    assert (
        agreed(31, auto=False) == 32
        and agreed(None) == 16
        and agreed(31, global_batch_size=64) == 16
    )


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the number of nodes, and memory for so many samples."""

    def launch(
        count: int, samples: float, shards: int, gpu: bool = True, per_node: int = 8
    ) -> None:
        set_memory(monkeypatch, samples, gpu=gpu, ranks=shards)
        monkeypatch.setenv("WORLD_SIZE", str(per_node * count))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))

    return launch


def test_from_four_nodes_on_each_contains_a_replica_if_it_fits(
    nodes: Callable[..., None], logged: list[str]
) -> None:
    def shards(**changes: Any) -> int | None:
        logged.clear()
        typed_config = replace(
            ASKED, **{"batch_size": 1, "seq_length": 1024, "compile": False, **changes}
        )
        config = check_memory(typed_config, on_meta())[0]
        assert (config.settled_by.get("shard_size") == "memory estimate") == bool(logged)
        assert config.to_record()["shard_size"] == changes.get("shard_size")
        return config.shard_size

    nodes(4, 1.2, shards=8)
    assert shards() == 8
    [line] = logged
    assert line.startswith("--shard-size 8: ") and "4 nodes" in line and "--shard-size 32" in line
    assert shards(shard_size=16) == 16 and shards(shard_size=32) == 32
    nodes(3, 1000, shards=8)
    assert shards() is None
    nodes(4, 1000, shards=8, gpu=False)
    assert shards() is None
    nodes(32, 1000, shards=8, per_node=1)
    assert shards() is None
    nodes(4, 1.05, shards=32)  # a replica per node would not fit
    assert shards() is None
    assert shards(activation_checkpointing="auto") is None  # nor is it worth recomputation


def test_a_plan_for_other_machines_assumes_nodes_of_eight_gpus(logged: list[str]) -> None:
    config = replace(
        ASKED, batch_size=1, seq_length=1024, plan_gpus=PlannedGpus([8, 24, 32, 36, 64])
    )
    configs = memory_fit.fit_to_planned_gpus(config, inputs(), on_meta())
    assert {ranks: config.shard_size for ranks, config in configs.items()} == {
        8: None,
        24: None,
        32: 8,
        36: None,
        64: 8,
    }
    assert any("64 GPUs, --shard-size 8: " in line for line in logged)


def test_weights_stay_gathered_if_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    size = 4 * sum(p.numel() for p in model.parameters()) / MIB

    def choose_gathered(samples: float, gpu: bool = True, **changes: Any) -> bool:
        set_memory(monkeypatch, samples, gpu=gpu)
        typed_config = replace(
            ASKED,
            **{
                "batch_size": 1,
                "seq_length": 1024,
                "compile": False,
                "activation_checkpointing": "none",
                **changes,
            },
        )
        config, check = check_memory(typed_config, model)
        case = memory_fit.make_local_step_config(config, model)
        assert case.keep_gathered == config.keep_gathered and not check.excess(case)
        return config.keep_gathered

    assert choose_gathered(1000) and choose_gathered(1000, gpu=False)
    assert choose_gathered(1 + (size + 0.1) / 8) and not choose_gathered(1 + (size - 0.1) / 8)
    assert not choose_gathered(1000, cpu_offload=True)
    monkeypatch.setattr(memory_check, "KEPT_SHARE", 0.05)  # it fits, but takes too large a share
    assert not choose_gathered(1 + (size + 0.1) / 8)


def test_ranks_agree_on_options_that_fit_all_of_them(tmp_path: Path) -> None:
    """Two ranks have chosen different options; if they kept them, the run would hang."""
    run_stage("tests/train/agreeing.py", tmp_path / "found.json", cwd=tmp_path, ranks=2)
    assert (
        json.loads((tmp_path / "found.json").read_text())
        == [
            {
                "batch": 2,
                "recompute": "full",
                "keep_gathered": False,
                "shard_size": None,
                "mesh": [2],
            }
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("options_given", "earlier_batch", "expected"),
    [
        ({}, None, ("auto", None, None)),
        ({}, 1, ("auto", 1, None)),
        ({}, 64, ("auto", 64, None)),
        ({"grad_accum_steps": 4}, None, ("auto", None, 4)),
        ({"grad_accum_steps": 4}, 64, ("auto", 64, None)),
        ({"global_batch_size": 32}, None, (1, 32, None)),
        ({"global_batch_size": 64}, 64, (1, 64, None)),
        ({"batch_size": 2}, None, (2, None, None)),
        ({"batch_size": 2}, 64, (2, 64, None)),
    ],
)
def test_on_a_gpu_the_batch_is_chosen_unless_it_is_typed(
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    options_given: dict[str, Any],
    earlier_batch: int | None,
    expected: tuple[Any, ...],
) -> None:
    """A resumed run keeps the samples of its step, also if it started with the default 1."""
    earlier_run = (
        {"identity": {"options": {"global_batch_size": earlier_batch}}} if earlier_batch else {}
    )
    typed_config = replace(ASKED, **{"batch_size": None, **options_given})
    for gpu in (True, False):
        set_memory(monkeypatch, 1000, gpu=gpu)
        config = apply_rules(typed_config, Facts(inputs(earlier_run)), Known.HARDWARE)
        batch, global_batch, accumulation = expected
        if not gpu and batch == "auto":
            batch = 1
        assert config.batch_size == batch and config.grad_accum_steps == accumulation
        division = batch_division.divide_batch(config, 0, 1)
        assert division.global_batch == (
            global_batch or (accumulation or 1) * (batch if batch != "auto" else 1)
        )
    fitted, _ = check_memory(replace(typed_config, compile=False), on_meta(), earlier_run)
    assert batch_division.divide_batch(fitted, 0, 1).global_batch == (
        global_batch or fitted.batch_size * (accumulation or 1)
    )


def test_resume_with_changes_leaves_the_batch_on_a_gpu_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a step that nobody typed might be impossible to divide over other ranks."""
    set_memory(monkeypatch, 1000, gpu=True)
    earlier_run = {"identity": {"options": {"global_batch_size": 64}}}
    typed_config = replace(ASKED, batch_size=None, grad_accum_steps=3, resume_with_changes=True)
    config = apply_rules(typed_config, Facts(inputs(earlier_run)), Known.HARDWARE)
    assert config.batch_size == "auto" and config.grad_accum_steps == 3
    assert config.global_batch_size is None


def test_a_family_that_cannot_be_traced_gets_the_smallest_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_memory(monkeypatch, 12, gpu=True)
    monkeypatch.setattr(memory_check, "Estimates", lambda model: 1 / 0)
    assert choose_batch() == 1


def test_beside_a_gpu_a_child_process_traces() -> None:
    """A fork of a process that uses a GPU could not trace; so everything must be picklable."""
    check = MemoryCheck(on_meta(), 1 << 30, 1 << 30, on_gpu=True)
    message = pickle.loads(
        pickle.dumps((check, memory_check.choose_step, MemoryCheck.trace, MemoryCheck.nearest))
    )
    assert message[1:] == (memory_check.choose_step, MemoryCheck.trace, MemoryCheck.nearest)
    case = plan.make_step_config(replace(ASKED, seq_length=64), message[0].model, 1, True)
    known = {case: KnownSteps(on_meta()).step(case)}
    assert message[0].is_easy(case) and pickle.loads(pickle.dumps(known)) == known


def test_each_number_of_planned_gpus_gets_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 0)
    gib = (STATES_MIB + 8 * 7.5) / 1024 / 0.9 + 1e-6
    typed_config = replace(
        ASKED,
        batch_size="auto",
        seq_length=1024,
        plan_gpus=PlannedGpus([1, 64], gib),
        activation_checkpointing="none",
    )
    model = on_meta()
    assert choose_batch(plan_gpus=PlannedGpus([1, 64])) == "auto"
    configs = memory_fit.fit_to_planned_gpus(typed_config, inputs(), model)
    assert configs[1].batch_size == 4 and configs[64].batch_size == 8
    three = memory_fit.fit_to_planned_gpus(replace(typed_config, batch_size=3), inputs(), model)
    assert [config.batch_size for config in three.values()] == [3, 3]
    both = replace(typed_config, batch_size=8, activation_checkpointing="auto")
    kinds = memory_fit.fit_to_planned_gpus(both, inputs(), model).values()
    assert [config.activation_checkpointing for config in kinds] == ["selective", "none"]


def test_a_resumed_run_keeps_its_global_batch() -> None:
    for changes, earlier_batch, expected in (
        ({}, 64, (64, None)),
        ({"grad_accum_steps": 2}, 64, (64, None)),
        ({}, None, (None, None)),
        ({"global_batch_size": 32}, 64, (32, None)),
        ({"batch_size": 4}, 64, (64, None)),
        ({"batch_size": 4}, 4, (None, None)),
        ({"batch_size": 4, "resume_with_changes": True}, 64, (None, None)),
    ):
        earlier_run = {"identity": {"options": {"global_batch_size": earlier_batch}}}
        settled = settle_from_files(
            replace(ASKED, **{"batch_size": "auto", **changes}), inputs(earlier_run)
        )
        assert (settled.global_batch_size, settled.grad_accum_steps) == expected


def test_too_few_tokens_cause_a_warning_with_a_batch_that_fits(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def advised(has_begun: bool = False, auto: bool = False, **changes: Any) -> str:
        logged.clear()
        config = replace(
            ASKED,
            **{"batch_size": 1, "seq_length": 1024, "activation_checkpointing": "none", **changes},
        )
        config = config.with_values("memory estimate", batch_size=1) if auto else config
        memory_fit.suggest_batch(config, MemoryCheck.for_this_rank(on_meta()), has_begun)
        return "".join(logged)

    set_memory(monkeypatch, 12, gpu=True)
    assert "1,024 tokens" in advised() and "--batch-size 8 fits" in advised()
    assert "8 samples instead of 1" in advised()
    assert "--batch-size 6 fits" in advised(global_batch_size=6)
    assert "(6,144 tokens) with --global-batch-size" in advised(grad_accum_steps=6)
    assert not advised(has_begun=True) and not advised(auto=True) and not advised(batch_size=8)
    set_memory(monkeypatch, 1, gpu=True)
    assert not advised()
    set_memory(monkeypatch, 12)
    assert not advised()
