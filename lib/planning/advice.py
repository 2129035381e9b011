"""What training a model takes of GPUs, as stage 03 tells it: by stage 04's own plan."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from lib.core import log, units
from lib.models import architecture
from lib.planning.apart import NoAnswer, apart
from lib.planning.memory import ESTIMATED_FROM, Estimates
from lib.planning.trace import Case

_GPUS = (1, 8, 64)
_LONGEST = 1024  # stage 04's default for --seq-length
_PATIENCE_S = 120


class Advice(NamedTuple):
    """Says what each GPU needs. tokens: of its one sequence. per_gpu: bytes, by number of GPUs."""

    tokens: int
    per_gpu: dict[int, int]

    @classmethod
    def of(cls, model_dir: Path, trust_code: bool = False) -> Advice:
        """Return it for full training in bf16, nothing recomputed, samples of stage 04's length.

        There are no figures for a model so small that libraries take more, nor for one that cannot
        be traced, or takes too long for it.
        """
        model = architecture.build_on_meta(model_dir, trust_code=trust_code)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        tokens = min(context or _LONGEST, _LONGEST)
        if model.num_parameters() < ESTIMATED_FROM:
            return cls(tokens, {})
        try:
            return cls(tokens, apart(_per_gpu, model, tokens, patience_s=_PATIENCE_S))
        except NoAnswer as error:  # stage 04 may train what cannot be traced
            log.info(f"memory could not be estimated: {error}")
            return cls(tokens, {})

    def summary(self) -> dict[str, int]:
        """Return the figures as a manifest holds them."""
        return {str(gpus): size for gpus, size in self.per_gpu.items()}

    def rows(self) -> dict[str, str]:
        """Return the figures, if there are any, and what they cover, as rows of a table."""
        if not self.per_gpu:
            return {}
        *shown, last = [f"{units.memory(size)} on {gpus}" for gpus, size in self.per_gpu.items()]
        return {
            "to train": f"{', '.join(shown)} or {last} GPUs, each with 1 × {self.tokens:,} "
            "tokens, by the plan of stage 04:",
            "": "bf16, float32 masters, AdamW, compiled, nothing recomputed; not CUDA itself",
        }


def _per_gpu(model: PreTrainedModel, tokens: int) -> dict[int, int]:
    estimates = Estimates(model)
    return {
        n: estimates.step(Case(n, n, 1, tokens, "bf16", "none", compiled=True)).total for n in _GPUS
    }
