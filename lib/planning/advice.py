"""Estimate the GPU memory that training a model needs, for stage 03, as stage 04 does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from lib.core import log, units
from lib.models import architecture
from lib.planning.child_process import NoAnswer, in_child_process
from lib.planning.memory import ESTIMATED_FROM, Estimates
from lib.planning.trace import StepConfig

_GPUS = (1, 8, 64)
_LONGEST = 1024  # stage 04's default for --seq-length
_PATIENCE_S = 120


class Advice(NamedTuple):
    """Memory per GPU. tokens: of its one sequence. per_gpu: bytes, by number of GPUs."""

    tokens: int
    per_gpu: dict[int, int]

    @classmethod
    def of(cls, model_dir: Path, trust_code: bool = False) -> Advice:
        """Estimate full training in bf16, without recomputation, at stage 04's sequence length.

        The result has no figures if libraries take more memory than the model, if the model cannot
        be traced, or if the trace takes too long.
        """
        model = architecture.build_on_meta(model_dir, trust_code=trust_code)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        tokens = min(context or _LONGEST, _LONGEST)
        if model.num_parameters() < ESTIMATED_FROM:
            return cls(tokens, {})
        try:
            return cls(tokens, in_child_process(_per_gpu, model, tokens, patience_s=_PATIENCE_S))
        except NoAnswer as error:  # stage 04 may train a model that cannot be traced
            log.info(f"memory could not be estimated: {error}")
            return cls(tokens, {})

    def summary(self) -> dict[str, int]:
        """Return the figures in the form of a manifest."""
        return {str(gpus): size for gpus, size in self.per_gpu.items()}

    def rows(self) -> dict[str, str]:
        """Return the figures, if any, and what they cover, as rows of a table."""
        if not self.per_gpu:
            return {}
        *shown, last = [f"{units.memory(size)} on {gpus}" for gpus, size in self.per_gpu.items()]
        return {
            "to train": f"{', '.join(shown)} or {last} GPUs, each with 1 × {self.tokens:,} "
            "tokens, by stage 04's memory estimate:",
            "": "bf16, float32 master weights, AdamW, compiled, no recomputation; "
            "CUDA not included",
        }


def _per_gpu(model: PreTrainedModel, tokens: int) -> dict[int, int]:
    estimates = Estimates(model)
    steps = {n: StepConfig(n, n, 1, tokens, "bf16", "none", compiled=True) for n in _GPUS}
    return {n: estimates.step(step).total for n, step in steps.items()}
