"""Estimate for stage 03 the GPU memory that training a model needs, in the same way as stage 04."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from lib.core import log, units
from lib.models import architecture
from lib.planning.child_process import NoAnswer, in_child_process
from lib.planning.memory import ESTIMATED_FROM, Estimates
from lib.planning.trace import StepConfig

_GPU_COUNTS = (1, 8, 64)
_LONGEST_SEQUENCE = 1024  # tokens; stage 04's default of --seq-length
_PATIENCE_S = 120


class TrainingMemory(NamedTuple):
    """Bytes per GPU by number of GPUs, for one sequence of `tokens` tokens on each GPU."""

    tokens: int
    per_gpu: dict[int, int]

    @classmethod
    def estimate(cls, model_dir: Path, trust_code: bool = False) -> TrainingMemory:
        """Estimate full training in bf16 without activation checkpointing.

        `per_gpu` is empty if libraries need more memory than the model, if the model cannot be
        traced, or if tracing takes too long.
        """
        model = architecture.build_on_meta(model_dir, trust_code=trust_code)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        tokens = min(context or _LONGEST_SEQUENCE, _LONGEST_SEQUENCE)
        if model.num_parameters() < ESTIMATED_FROM:
            return cls(tokens, {})
        try:
            per_gpu = in_child_process(_estimate_per_gpu, model, tokens, patience_s=_PATIENCE_S)
        except NoAnswer as error:  # stage 04 may still be able to train the model
            log.info(f"memory could not be estimated: {error}")
            per_gpu = {}
        return cls(tokens, per_gpu)

    def summary(self) -> dict[str, int]:
        """Return the entries for a manifest."""
        return {str(gpus): size for gpus, size in self.per_gpu.items()}

    def table_rows(self) -> dict[str, str]:
        """Return the estimates and their conditions as rows of a table; {} without estimates."""
        if not self.per_gpu:
            return {}
        *shown, last = [f"{units.memory(size)} on {gpus}" for gpus, size in self.per_gpu.items()]
        return {
            "to train": f"{', '.join(shown)} or {last} GPUs, each with 1 × {self.tokens:,} "
            "tokens, by stage 04's memory estimate:",
            "": "bf16, float32 master weights, AdamW, compiled, no activation checkpointing, "
            "without CUDA's own memory",
        }


def _estimate_per_gpu(model: PreTrainedModel, tokens: int) -> dict[int, int]:
    estimates = Estimates(model)
    steps = {n: StepConfig(n, n, 1, tokens, "bf16", "none", compiled=True) for n in _GPU_COUNTS}
    return {n: estimates.step(step).total for n, step in steps.items()}
