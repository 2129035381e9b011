# covers: lib/planning/memory.py, lib/planning/training_memory.py
"""Stage 03 and stage 04 estimate the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig

from lib.models import architecture
from lib.planning.memory import Estimates
from lib.planning.options import PlannedGpus
from lib.planning.training_memory import TrainingMemory
from lib.train import plan
from tests.planning.test_memory import ASKED


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MixtralConfig(), id="Mixtral 8x7B", marks=pytest.mark.long),
        pytest.param(
            LlamaConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=8,
                max_position_embeddings=512,
            ),
            id="small Llama",
        ),
    ],
)
def test_both_stages_estimate_the_same(tmp_path: Path, config: PretrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    memory = TrainingMemory.estimate(tmp_path)
    model = architecture.build_on_meta(tmp_path)
    planned = Estimates(model)
    for gpus, needed in memory.per_gpu.items():
        options = replace(
            ASKED,
            batch_size=1,
            seq_length=memory.tokens,
            precision="bf16",
            activation_checkpointing="none",
            plan_gpus=PlannedGpus([gpus]),
        )
        case = plan.make_step_config(options, model, gpus, True)
        assert needed == pytest.approx(planned.step(case).total, rel=0.1)
    assert memory.per_gpu[1] > 3 * memory.per_gpu[8] and set(memory.per_gpu) == {1, 8, 64}


@pytest.mark.slow
def test_experts_are_shared_by_more_ranks_than_experts(tmp_path: Path) -> None:
    """Mixtral 8x7B fits on 16 GPUs of 80 GB, but would not with one expert per rank."""
    MixtralConfig().save_pretrained(tmp_path)
    model = architecture.build_on_meta(tmp_path)
    planned = Estimates(model)
    options = replace(
        ASKED,
        batch_size=1,
        seq_length=1024,
        precision="bf16",
        activation_checkpointing="full",
        plan_gpus=PlannedGpus([16, 24, 32]),
    )
    needed = [
        planned.step(plan.make_step_config(options, model, gpus, True)).total / 2**30
        for gpus in options.plan_gpus.counts
    ]
    assert needed[0] < 0.9 * 80e9 / 2**30 and needed[0] > needed[1] > needed[2]
