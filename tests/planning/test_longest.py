# covers: lib/planning/longest.py, lib/planning/trace.py, lib/planning/knobs.py
"""Memory estimates of samples that ranks share, and the longest samples that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MambaConfig

from lib.core.errors import UsageError
from lib.planning.knobs import CONTEXT_OPTION, cheaper_settings
from lib.planning.longest import describe_longest, find_longest
from lib.planning.memory import Estimates
from lib.planning.memory_check import MemoryCheck
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import KINDS
from tests.conftest import run_stage
from tests.planning.test_memory import SMALL, case, on_meta

KIB = 1 << 10
# Settings of steps whose rows two ranks share: 256 tokens, or with padding 255.
SHARED = [
    {"context": 2, "recompute": "none", "accumulates": True},
    {"context": 2, "recompute": "full", "seq_length": 255, "precision": "fp32"},
    {"context": 2, "recompute": "selective"},
    {"context": 2, "recompute": "none", "context_method": "allgather", "precision": "fp32"},
]


def known(states: int = 100 * KIB, per_token: float = KIB) -> Callable[[StepConfig], StepMemory]:
    """Return an estimate with bytes of states on a rank, and of activations for each token."""

    def estimate(step: StepConfig) -> StepMemory:
        share = {"none": 1.0, "selective": 0.5, "full": 0.25}[step.recompute]
        held = dict.fromkeys(KINDS, 0) | {
            "optimizer": states,
            "activations": int(share * per_token * step.tokens),
        }
        return StepMemory(held, (held,), step.offload)

    return estimate


def test_a_real_step_on_two_ranks_takes_the_estimated_memory(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    run_stage("tests/planning/measuring.py", found, *map(json.dumps, SHARED), cwd=tmp_path, ranks=2)
    for settings, measured in zip(SHARED, json.loads(found.read_text()), strict=True):
        estimated = Estimates(on_meta()).step(case(ranks=2, **settings))
        # A thread of gloo may hold the buffers of an exchange a moment longer. The kernel for real
        # tensors with a mask takes a little less.
        buffers = 2 * 4 * 256 * 128  # bytes of queries, keys and values, in float32
        sizes = {**estimated.largest, "total": estimated.total}
        for kind, size in sizes.items():
            assert size == pytest.approx(measured[kind], abs=buffers), (settings, kind)


@pytest.mark.parametrize(("recompute", "kept", "buffers"), [("none", 2, 1), ("full", 0, 5)])
def test_four_ranks_take_the_memory_of_a_quarter_of_a_row_and_of_an_exchange(
    recompute: str, kept: int, buffers: int
) -> None:
    """Layers keep the result of attention before and after the exchange, and copies of K/V heads.

    With full checkpointing, only the block that is recomputed contains an exchange.
    """
    estimates = Estimates(on_meta())
    quarter = estimates.step(case(batch=1, seq_length=1024, recompute=recompute))
    shared = estimates.step(case(batch=1, seq_length=4096, recompute=recompute, context=4))
    for kind in ("gradients", "optimizer", "loss", "gathered"):
        assert shared.largest[kind] == quarter.largest[kind]
    hidden = 2 * 1024 * SMALL["hidden_size"]  # bytes of the features of all tokens
    added = kept * SMALL["num_hidden_layers"] * hidden
    for before, after in (
        (quarter.total, shared.total),
        (quarter.largest["activations"], shared.largest["activations"]),
    ):
        assert added <= after - before + 0.1 * hidden <= added + buffers * hidden


@pytest.mark.parametrize("usable", [10 * KIB, 400 * KIB, 5000 * KIB, 1 << 30])
def test_the_longest_sequence_is_found_with_few_traces(usable: int) -> None:
    traced: dict[int, int] = {}

    def estimate(step: StepConfig) -> StepMemory:
        assert step.documents == -(-step.seq_length // 100)
        memory = known(per_token=KIB if step.seq_length < 2000 else 1.5 * KIB)(step)
        traced[step.seq_length] = memory.total
        return memory

    limit = 1 << 17
    length = find_longest(estimate, case(batch=1, seq_length=1000, documents=10), usable, limit)
    assert len(traced) <= 8
    fitting = [tokens for tokens, size in traced.items() if size <= usable]
    assert length == max(fitting, default=0)
    too_long = [tokens for tokens, size in traced.items() if size > usable]
    assert min(too_long, default=limit) <= max(256, length * 9 / 8)


def test_the_longest_sequences_of_a_plan() -> None:
    config = LlamaConfig(**{**SMALL, "max_position_embeddings": 100_000})
    estimate = known()

    def describe(usable: int = 1100 * KIB, **changes: Any) -> list[str]:
        text = describe_longest(estimate, case(seq_length=512, **changes), usable, config)
        return text.removeprefix("longest sequence that fits, in tokens: ").split("; ")

    full = "with -b 1 --activation-checkpointing full"
    assert describe(ranks=4) == [
        "480 as chosen",  # two samples of 500 tokens would fit
        f"3,840 {full}",
        "15,360 with --context-parallel 4 as well",
    ]
    assert describe(ranks=8)[-1] == "15,360 with --context-parallel 4 as well"  # of four heads
    assert describe(ranks=1) == ["480 as chosen", f"3,840 {full}"]
    assert describe(ranks=4, context=2)[-2:] == [
        f"7,680 {full}",
        "15,360 with --context-parallel 4 as well",
    ]
    assert describe(ranks=4, batch=1, recompute="full", usable=1 << 30) == [
        "100,000 as chosen, as many as the model allows"
    ]
    assert describe(ranks=4, usable=KIB)[0] == "0 as chosen"


def test_no_sample_of_a_model_without_attention_is_divided() -> None:
    text = describe_longest(known(), case(seq_length=512), 1 << 20, MambaConfig())
    assert "full" in text and CONTEXT_OPTION not in text


def test_the_smallest_number_of_ranks_that_share_a_sample_comes_first() -> None:
    """The global batch stays divisible, so the degrees are multiples of the present one."""
    start = case(ranks=12, shard_size=12, batch=1, recompute="full", context=2)
    settings = [s for s in cheaper_settings(start) if "--activation-offload" not in s.options]
    divided = [
        setting.case.context
        for setting in settings
        if setting.case.ranks == 12
        and set(setting.options)
        == {
            "--activation-checkpointing",
            CONTEXT_OPTION,
        }
    ]
    assert divided == [4, 6, 12]
    wider = [(s.case.ranks, s.case.context) for s in settings if s.more_ranks]
    assert wider[:4] == [(24, 2), (24, 4), (24, 12), (48, 2)]
    assert all(s.options.get(CONTEXT_OPTION, "2") == str(s.case.context) for s in settings)
    offloaded = [s.case.context for s in settings if "--cpu-offload" in s.options]
    assert offloaded[:2] == [2, 12]  # without the exchange, which states do not need


def test_ranks_that_gather_keys_need_no_mask_on_a_gpu() -> None:
    """A mask takes a byte for each query of a rank and each key of the sample."""
    model = on_meta(LlamaConfig(**{**SMALL, "num_hidden_layers": 1, "num_attention_heads": 4}))
    estimates = Estimates(model)
    total = {
        (degree, on_gpu): estimates.step(
            case(batch=1, seq_length=4096, context=degree, on_gpu=on_gpu)
        ).total
        for degree, on_gpu in ((4, True), (4, False), (8, True), (8, False))
    }  # of four heads, eight ranks have no equal parts
    assert total[4, False] == total[4, True]
    assert total[8, False] - total[8, True] > 0.5 * 512 * 4096
    with pytest.raises(UsageError, match="attention heads"):
        estimates.step(case(context=8, context_method="ulysses"))
    check = MemoryCheck(model, 1 << 40, 1 << 40, on_gpu=True)
    assert not check.fits(case(context=8, context_method="ulysses", seq_length=1 << 17))
