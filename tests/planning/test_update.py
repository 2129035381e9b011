# covers: lib/planning/update.py, lib/planning/memory.py, lib/optim/muon.py
"""Memory estimates of updates agree with real ones, and know updates of several blocks at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from lib.models.lora import Lora
from lib.optim import muon
from lib.optim.optimizers import Choice, MomentOptions
from lib.planning.memory import Estimates
from tests.conftest import run_stage
from tests.planning.test_memory import SMALL, case, on_meta

MUON = Choice("muon")
OPTIMIZERS = {"muon": MUON, "bf16": Choice("adamw", MomentOptions(optimizer_states="bf16"))}


def test_a_step_on_two_ranks_takes_the_estimated_memory_to_the_byte(tmp_path: Path) -> None:
    """On a CPU, AdamW with moments in bf16 casts those of one parameter at a time, too."""
    found = tmp_path / "found.json"
    settings = [{"optimizer": name} for name in OPTIMIZERS]
    run_stage(
        "tests/planning/measuring.py", found, *map(json.dumps, settings), cwd=tmp_path, ranks=2
    )
    cast = 2 * 4 * SMALL["vocab_size"] * SMALL["hidden_size"] // 2
    for (name, optimizer), measured in zip(
        OPTIMIZERS.items(), json.loads(found.read_text()), strict=True
    ):
        estimated = Estimates(on_meta()).step(case(ranks=2, optimizer=optimizer))
        update = sum(estimated.moments[-1].values()) + (cast if name == "bf16" else 0)
        sizes = {**estimated.largest, "total": estimated.total, "update": update}
        # A thread of gloo may hold the gathered weights of a block a moment longer.
        assert 0 <= measured.pop("gathered") - sizes.pop("gathered") <= 1 << 18
        assert sizes == pytest.approx(measured, abs=64), name  # a few scalars


def test_more_blocks_do_not_exchange_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges are under way at a time, each with rows to send and rows to receive."""
    monkeypatch.setattr(muon, "_BUCKET", 1 << 14)  # the rows of three blocks
    exchanged: dict[int, dict[int, int]] = {}
    for blocks in (4, 12, 24):
        model = on_meta(LlamaConfig(**{**SMALL, "num_hidden_layers": blocks}))
        estimates = Estimates(model)
        exchanged[blocks] = {
            ranks: estimates.step(case(ranks=ranks, optimizer=MUON)).moments[-1]["gathered"]
            for ranks in (8, 2)
        }
    assert exchanged[4] != exchanged[12] == exchanged[24]
    for size in exchanged[24].values():
        assert 0.5 < size / (2 * 2 * 2 * (1 << 14)) < 1.3  # some owners get more rows


def test_the_update_of_frozen_blocks_takes_no_memory() -> None:
    steps = {
        name: Estimates(on_meta(lora=Lora(4, 8.0, precision="bf16"))).step(
            case(optimizer=Choice(name))
        )
        for name in ("adamw", "muon")
    }
    assert steps["muon"].largest == steps["adamw"].largest
    assert steps["muon"].total == steps["adamw"].total
