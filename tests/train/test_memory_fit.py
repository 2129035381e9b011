"""Which batch --batch-size auto takes, and what is said of one that is small."""

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
from lib.planning import capacity, memory_check
from lib.planning.memory_check import MemoryCheck
from lib.train import memory_fit, plan
from lib.train.settle import Facts, Known, apply_rules, settle_from_files
from tests.conftest import run_stage
from tests.planning.test_memory import ASKED, on_meta
from tests.planning.test_memory_check import MIB, fit, inputs
from tests.planning.test_memory_check import Known as KnownSteps

STATES_MIB = 16 * sum(p.numel() for p in on_meta().parameters()) / MIB


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is told, the last of it last."""
    lines: list[str] = []
    monkeypatch.setattr(memory_fit.log, "info", lines.append)
    monkeypatch.setattr(memory_fit.log, "warn", lines.append)
    monkeypatch.setattr(memory_check, "Estimates", KnownSteps)
    monkeypatch.setattr(capacity, "count_free_swap", lambda device: 0)
    monkeypatch.setitem(
        memory_check._USABLE, False, (0.9, 0)
    )  # no library takes more than these models
    monkeypatch.setattr(sys, "argv", ["04_train_fsdp.py", "-e", "x"])
    return lines


def here(
    monkeypatch: pytest.MonkeyPatch, samples: float, *, gpu: bool = False, ranks: int = 1
) -> None:
    """Let each rank have room for so many samples of 1,024 tokens beside its states."""
    room = round((STATES_MIB / ranks + 8 * samples) * MIB / 0.9) + 1000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(capacity, "count_free", lambda device: room)
    monkeypatch.setattr(capacity, "count_total", lambda device: room)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def chosen(seq_length: int = 1024, precision: str = "fp32", **changes: Any) -> int:
    given = replace(
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
    return fit(given, on_meta())[0].batch_size


def test_what_fits_is_taken(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    here(monkeypatch, 12, gpu=True)
    assert chosen() == 8 and "8,192 tokens in a pass, the largest that fits" in said[-1]
    assert chosen(batch_size=3) == 3
    here(monkeypatch, 0, gpu=True)
    assert chosen() == 1  # the check of a run refuses it, with what would fit
    here(monkeypatch, 1000, gpu=True)
    assert chosen() == 32 and chosen(seq_length=65536) == 1
    assert "at most 32,768 tokens" in said[-1]
    here(monkeypatch, 1000)
    assert chosen() == 2 and chosen(seq_length=32) == 64


def test_no_more_is_computed_again_than_needed(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Samples take 8, 6 or 2 MiB; a run that goes on computes no less again than before."""

    def taken(samples: float, kept: str = "", **changes: Any) -> tuple[str, int]:
        said.clear()
        here(monkeypatch, samples, gpu=True)
        given = replace(ASKED, **{"batch_size": 4, "seq_length": 1024, "compile": False, **changes})
        config, _ = fit(given, on_meta(), {"settled": {"activation_checkpointing": kept}})
        assert config.settled_by["activation_checkpointing"] == (
            "earlier launch" if config.activation_checkpointing == kept else "memory estimate"
        )
        assert config.to_record()["activation_checkpointing"] == "auto"
        return config.activation_checkpointing, config.batch_size

    assert taken(1000) == ("none", 4) and not said
    assert taken(4) == ("none", 4) and taken(3.9) == ("selective", 4) and taken(2.9) == ("full", 4)
    assert said == [
        "--activation-checkpointing auto: full, since less recomputation is not sure "
        f"to fit in {units.memory(capacity.count_free(None))} by the memory estimate"
    ]
    assert taken(0.9) == ("full", 4)  # nothing fits, which the check of a run says
    assert taken(1000, "full") == ("full", 4) and taken(1000, "none") == ("none", 4) and not said
    assert taken(2.9, "none") == ("full", 4) and len(said) == 1
    auto = {"batch_size": "auto"}  # the least with which a pass has 8,192 tokens, as a GPU wants
    assert taken(8, **auto) == ("none", 8) and taken(7.9, **auto) == ("selective", 8)
    assert taken(5.9, **auto) == ("full", 16) and taken(1, **auto) == ("full", 4)
    assert taken(7.9, **auto, global_batch_size=4) == ("none", 4)
    assert taken(1, **auto, seq_length=8192) == ("full", 1)
    config = replace(ASKED, activation_checkpointing="full").with_values("x", lr=1.0)
    assert config.to_record()["activation_checkpointing"] == "full"


def test_samples_of_a_step_are_divided_evenly(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    here(monkeypatch, 12, gpu=True, ranks=2)
    for whole, batch in ((12, 6), (14, 7), (22, 11), (26, 1), (36, 9), (2, 1)):
        assert chosen(global_batch_size=whole) == batch
    assert "all that a rank has of a step" in said[-1]
    assert any("divides the 36 samples of a step over 2 ranks and fits in" in line for line in said)
    with pytest.raises(UsageError, match="--global-batch-size 13 cannot be divided"):
        chosen(global_batch_size=13)
    assert chosen(global_batch_size=32, precision="fp8", seq_length=1000) == 8
    with pytest.raises(UsageError, match="no --batch-size has tokens in multiples of 16"):
        chosen(global_batch_size=6, precision="fp8", seq_length=1000)


def test_the_data_fills_a_step(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ranks have taken the smallest of theirs."""
    monkeypatch.setattr(memory_fit, "gather", lambda mine, group: [mine, (16, "full", False)])

    def agreed(samples: int | None, auto: bool = True, ranks: int = 2, **changes: Any) -> int:
        said.clear()
        given = replace(
            ASKED,
            batch_size=32,
            seq_length=1000,
            precision="fp8",
            activation_checkpointing="selective",
            **changes,
        )
        given = given.with_values("memory estimate", batch_size=32) if auto else given
        layout = Namespace(ranks=ranks, control=None)
        agreed = memory_fit.agree_on_memory(given, samples, layout)
        assert agreed.activation_checkpointing == ("full" if auto else "selective")
        of_rank_1 = [line for line in said if line.endswith("as rank 1 has chosen")]
        assert len(of_rank_1) == (2 if auto else 0)
        said[:] = [line for line in said if line not in of_rank_1]
        return agreed.batch_size

    assert agreed(1000) == 16 and agreed(320) == 16 and not said
    assert agreed(319) == 8
    assert said == [
        "--batch-size auto: 8 per process instead of 16, so that 319 samples make at "
        "least 10 steps or, if they are too few, as many as can be"
    ]
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
    """Return a function that launches on so many nodes of 8, with room for so many samples."""

    def launch(count: int, samples: float, shards: int, gpu: bool = True, each: int = 8) -> None:
        here(monkeypatch, samples, gpu=gpu, ranks=shards)
        monkeypatch.setenv("WORLD_SIZE", str(each * count))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(each))

    return launch


def test_from_four_nodes_on_each_holds_a_replica_if_it_fits(
    nodes: Callable[..., None], said: list[str]
) -> None:
    def shards(**changes: Any) -> int | None:
        said.clear()
        given = replace(ASKED, **{"batch_size": 1, "seq_length": 1024, "compile": False, **changes})
        config = fit(given, on_meta())[0]
        assert (config.settled_by.get("shard_size") == "memory estimate") == bool(said)
        assert config.to_record()["shard_size"] == changes.get("shard_size")
        return config.shard_size

    nodes(4, 1.2, shards=8)
    assert shards() == 8
    assert said == [
        "--shard-size 8: a replica of the model in each of 4 nodes, since a step fits "
        "so by the memory estimate; --shard-size 32 shards over all ranks"
    ]
    assert shards(shard_size=16) == 16 and shards(shard_size=32) == 32
    nodes(3, 1000, shards=8)
    assert shards() is None
    nodes(4, 1000, shards=8, gpu=False)
    assert shards() is None
    nodes(32, 1000, shards=8, each=1)
    assert shards() is None
    nodes(4, 1.05, shards=32)  # what a replica per node takes more would not fit
    assert shards() is None
    assert shards(activation_checkpointing="auto") is None  # nor is it worth recomputation


def test_a_plan_for_other_machines_takes_nodes_of_eight(said: list[str]) -> None:
    given = replace(ASKED, batch_size=1, seq_length=1024, plan_gpus=[8, 24, 32, 36, 64])
    asked = memory_fit.fit_to_planned_gpus(given, inputs(), on_meta())
    assert {ranks: config.shard_size for ranks, config in asked.items()} == {
        8: None,
        24: None,
        32: 8,
        36: None,
        64: 8,
    }
    assert any(line.startswith("on 64 GPUs, --shard-size 8: ") for line in said)


def test_weights_stay_gathered_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    whole = 4 * sum(p.numel() for p in model.parameters()) / MIB

    def kept(samples: float, gpu: bool = True, **changes: Any) -> bool | None:
        here(monkeypatch, samples, gpu=gpu)
        given = replace(
            ASKED,
            **{
                "batch_size": 1,
                "seq_length": 1024,
                "compile": False,
                "activation_checkpointing": "none",
                **changes,
            },
        )
        config, found = fit(given, model)
        case = memory_fit.make_local_step_config(config, model)
        assert case.keep_gathered == bool(config.keep_gathered) and not found.excess(case)
        return config.keep_gathered

    assert kept(1000) and kept(1000, gpu=False)
    assert kept(1 + (whole + 0.1) / 8) and kept(1 + (whole - 0.1) / 8) is None
    assert kept(1000, cpu_offload=True) is None
    assert kept(1000, keep_gathered=False) is False and kept(1.1, keep_gathered=True)
    monkeypatch.setattr(memory_check, "KEPT_SHARE", 0.05)  # it fits, and would be too large a part
    assert kept(1 + (whole + 0.1) / 8) is None


def test_ranks_agree_on_what_fits_them_all(tmp_path: Path) -> None:
    """Two ranks have chosen otherwise; another decision on each would be a hang."""
    run_stage("tests/train/agreeing.py", tmp_path / "found.json", cwd=tmp_path, ranks=2)
    assert (
        json.loads((tmp_path / "found.json").read_text())
        == [
            {
                "batch": 2,
                "recompute": "full",
                "keep_gathered": None,
                "shard_size": None,
                "mesh": [2],
            }
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("given", "begun_with", "then"),
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
    said: list[str],
    given: dict[str, Any],
    begun_with: int | None,
    then: tuple[Any, ...],
) -> None:
    """A resumed run keeps the samples of its step, also if it started with the default 1."""
    begun = {"identity": {"options": {"global_batch_size": begun_with}}} if begun_with else {}
    asked = replace(ASKED, **{"batch_size": None, **given})
    for gpu in (True, False):
        here(monkeypatch, 1000, gpu=gpu)
        config = apply_rules(asked, Facts(inputs(begun)), Known.HARDWARE)
        batch, whole, accumulation = then
        if not gpu and batch == "auto":
            batch = 1
        assert config.batch_size == batch and config.grad_accum_steps == accumulation
        division = plan.divide_batch(config, 0, 1)
        assert division.global_batch == (
            whole or (accumulation or 1) * (batch if batch != "auto" else 1)
        )
    chosen, _ = fit(replace(asked, compile=False), on_meta(), begun)
    assert plan.divide_batch(chosen, 0, 1).global_batch == (
        whole or chosen.batch_size * (accumulation or 1)
    )


def test_with_changes_the_batch_on_a_gpu_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the run could not be divided over other ranks, say, and nobody typed it."""
    here(monkeypatch, 1000, gpu=True)
    begun = {"identity": {"options": {"global_batch_size": 64}}}
    asked = replace(ASKED, batch_size=None, grad_accum_steps=3, resume_with_changes=True)
    config = apply_rules(asked, Facts(inputs(begun)), Known.HARDWARE)
    assert config.batch_size == "auto" and config.grad_accum_steps == 3
    assert config.global_batch_size is None


def test_a_family_that_cannot_be_traced_takes_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, 12, gpu=True)
    monkeypatch.setattr(memory_check, "Estimates", lambda model: 1 / 0)
    assert chosen() == 1


def test_beside_a_gpu_another_interpreter_finds_it_out() -> None:
    """As a fork of a process that uses a GPU could not: all of it goes there and comes back."""
    found = MemoryCheck(on_meta(), 1 << 30, 1 << 30, on_gpu=True)
    asked = pickle.loads(
        pickle.dumps((found, memory_check.choose_step, MemoryCheck.trace, MemoryCheck.nearest))
    )
    assert asked[1:] == (memory_check.choose_step, MemoryCheck.trace, MemoryCheck.nearest)
    case = plan.make_step_config(replace(ASKED, seq_length=64), asked[0].model, 1, True)
    known = {case: KnownSteps(on_meta()).step(case)}
    assert asked[0].is_easy(case) and pickle.loads(pickle.dumps(known)) == known


def test_each_number_of_gpus_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, 0)
    gib = (STATES_MIB + 8 * 7.5) / 1024 / 0.9 + 1e-6
    given = replace(
        ASKED,
        batch_size="auto",
        seq_length=1024,
        plan_gpus=[1, 64],
        plan_gpu_memory=gib,
        activation_checkpointing="none",
    )
    model = on_meta()
    assert chosen(plan_gpus=[1, 64]) == "auto"
    asked = memory_fit.fit_to_planned_gpus(given, inputs(), model)
    assert asked[1].batch_size == 4 and asked[64].batch_size == 8
    three = memory_fit.fit_to_planned_gpus(replace(given, batch_size=3), inputs(), model)
    assert [each.batch_size for each in three.values()] == [3, 3]
    both = replace(given, batch_size=8, activation_checkpointing="auto")
    kinds = memory_fit.fit_to_planned_gpus(both, inputs(), model).values()
    assert [each.activation_checkpointing for each in kinds] == ["selective", "none"]


def test_what_a_run_was_begun_with_is_kept() -> None:
    for given, begun_with, then in (
        ({}, 64, (64, None)),
        ({"grad_accum_steps": 2}, 64, (64, None)),
        ({}, None, (None, None)),
        ({"global_batch_size": 32}, 64, (32, None)),
        ({"batch_size": 4}, 64, (64, None)),
        ({"batch_size": 4}, 4, (None, None)),
        ({"batch_size": 4, "resume_with_changes": True}, 64, (None, None)),
    ):
        begun = {"identity": {"options": {"global_batch_size": begun_with}}}
        settled = settle_from_files(
            replace(ASKED, **{"batch_size": "auto", **given}), inputs(begun)
        )
        assert (settled.global_batch_size, settled.grad_accum_steps) == then


def test_too_few_tokens_are_told_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def advised(has_begun: bool = False, auto: bool = False, **changes: Any) -> str:
        said.clear()
        given = replace(
            ASKED,
            **{"batch_size": 1, "seq_length": 1024, "activation_checkpointing": "none", **changes},
        )
        given = given.with_values("memory estimate", batch_size=1) if auto else given
        memory_fit.suggest_batch(given, MemoryCheck.for_this_rank(on_meta()), has_begun)
        return "".join(said)

    here(monkeypatch, 12, gpu=True)
    assert "1,024 tokens in a pass" in advised() and "--batch-size 8 fits" in advised()
    assert "makes a step of 8 samples instead of 1" in advised()
    assert "--batch-size 6 fits" in advised(global_batch_size=6)
    assert "(6,144 tokens) with --global-batch-size 6" in advised(grad_accum_steps=6)
    assert not advised(has_begun=True) and not advised(auto=True) and not advised(batch_size=8)
    here(monkeypatch, 1, gpu=True)
    assert not advised()
    here(monkeypatch, 12)
    assert not advised()
