"""Try on a model's own weights whether its rows can be divided over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands
from lib.core.errors import UsageError
from lib.parallel import attention
from lib.parallel.attention import Attend
from lib.parallel.context import ARGUMENT, Context
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import find_dependence, trial_batch, trial_mode, trial_tokens

_TOKENS = 8  # of each rank
# Of the norm of a token's logits; different ways of rounding to half precision differ by less.
_TOLERANCE = 0.02
_LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of RoPE


class _NoExchange:
    """Takes the place of a `Context`: each token sees only itself."""

    def attend(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """Return the values of the tokens [B, T, Hq, V]; see `Context.attend`."""
        copies = query.shape[1] // value.shape[1]
        return value.repeat_interleave(copies, 1).transpose(1, 2).contiguous(), None


def require_divisible(model: PreTrainedModel, layout: ParallelLayout, packing: str) -> None:
    """Raise UsageError if a model gives other results when ranks share its rows.

    All ranks must call this. Two trials replace a table of families. In the first, attention lets
    each token see only itself. Then no token can depend on an earlier one, unless a layer mixes
    tokens without attention (Mamba, short convolutions), or computes attention without the
    interface of transformers, where the exchange is. The second one compares logits of divided rows
    with those of whole rows.
    """
    name = model.config.model_type
    assert layout.context is not None
    if packing == "documents" and _depends_on_length(model):
        raise _make_error(
            f"the RoPE of this {name} model depends on the longest document of a batch",
            "packed documents, whose lengths differ between the ranks that share a row",
        )
    if find_dependence(model, lambda tokens: _compute_without_attention(model, layout, tokens)):
        raise _make_error(
            f"{name} models mix tokens outside the attention that ranks can share",
            "tokens see others while attention is off",
        )
    if (difference := _compare_divided(model, layout, layout.context)) > _TOLERANCE:
        raise _make_error(
            f"{name} models give other results if ranks share a row",
            f"logits differ by {difference:.2g} of their norm",
        )


def _make_error(problem: str, found: str) -> UsageError:
    return UsageError(
        f"--context-parallel: {problem}",
        found=found,
        hint="without it, each rank computes whole rows:",
        run=commands.as_typed(drop=("--context-parallel", "--context-parallel-method")),
    )


def _depends_on_length(model: nn.Module) -> bool:
    """Return whether RoPE has other frequencies for longer batches; see fix_rope_frequencies."""
    return any(getattr(part, "rope_type", None) in _LENGTH_DEPENDENT for part in model.modules())


def _compute_without_attention(
    model: PreTrainedModel, layout: ParallelLayout, tokens: Tensor
) -> Tensor:
    """Return logits [rows, T, V] if each token sees only itself. tokens: int64 [rows, T]."""
    inputs = attention.make_inputs(model, trial_batch(tokens, layout))
    return model(**inputs, **{ARGUMENT: _NoExchange()}).logits


def _compare_divided(model: PreTrainedModel, layout: ParallelLayout, shared: Context) -> float:
    """Return by how much logits differ between divided and whole rows, relative to their norm.

    It is the median over tokens, because rounding may send single tokens to other experts.
    """
    tokens = trial_tokens(model, 2, _TOKENS * shared.size)
    batch = trial_batch(tokens, layout, divided=True)
    with trial_mode(model):
        expected = model(**attention.make_inputs(model, trial_batch(tokens, layout))).logits.float()
        mine = model(**attention.make_inputs(model, batch)).logits
        actual = shared.gather_rows(mine).float()
    differences = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-9)
    return differences.median().item()
