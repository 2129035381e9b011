"""The options of stage 04 for adapters, see lib/models/lora.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.core.declared import Role, option
from lib.core.options import count, non_negative, on_off, positive
from lib.train.run_options import RunOptions


@dataclass(frozen=True)
class LoraOptions(RunOptions):
    """Says whether the whole model is trained, or adapters beside it."""

    lora_rank: int = option(
        0,
        group="adapters",
        role=Role.RESULT,
        quiet=True,
        parse=count,
        help="train LoRA adapters of rank N beside the model, which stays as it is; 0: train the "
        "model",
    )
    lora_alpha: float = option(
        None,
        role=Role.RESULT,
        quiet=True,
        parse=positive,
        help="what an adapter adds is multiplied by alpha ÷ rank (default: 2 × --lora-rank)",
    )
    lora_dropout: float = option(
        0.0,
        role=Role.RESULT,
        quiet=True,
        parse=non_negative,
        help="share of an adapter's inputs that is dropped while training",
    )
    lora_targets: str = option(
        "all-linear",
        role=Role.RESULT,
        quiet=True,
        metavar="all-linear|attention|mlp|REGEX",
        help="which linears of the blocks have an adapter, routers apart; REGEX matches a whole "
        "name or the last part of it: 'q_proj|v_proj'",
    )
    lora_rslora: bool = option(
        False,
        role=Role.RESULT,
        quiet=True,
        parse=on_off,
        help="multiply by alpha ÷ √rank instead, for large ranks",
    )
    lora_from: Path | None = option(
        None,
        role=Role.LOCAL,
        parse=Path,
        help="begin with an adapter that PEFT or stage 05 wrote, and has rank, alpha and targets "
        "of its own (default: A is drawn from the seed, B is zero)",
    )

    @property
    def adapts(self) -> bool:
        """Tell whether adapters are trained."""
        return bool(self.lora_rank or self.lora_from)
