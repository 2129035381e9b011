"""Try on a model's own weights whether its rows can be divided over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lib.core import commands
from lib.core.errors import UsageError
from lib.models.options import FLOAT8_RECIPES
from lib.parallel import attention
from lib.parallel.attention import Attend
from lib.parallel.context import ARGUMENT, Context
from lib.parallel.layout import ParallelLayout
from lib.parallel.trial import find_dependence, trial_batch, trial_mode, trial_tokens

_TOKENS = 8  # of each rank
# Of the norm of a token's logits; different ways of rounding to half precision differ by less.
_TOLERANCE = 0.02
_FLOAT8_TOLERANCE = 0.2  # one scale for all tokens of a rank depends on which tokens it has
_LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of RoPE


class _NoExchange:
    """Takes the place of a `Context`: each token sees only itself.

    is_used: attention has received the object.
    """

    is_used = False

    def attend(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """Return the values of the tokens [B, T, Hq, V]; see `Context.attend`."""
        self.is_used = True
        copies = query.shape[1] // value.shape[1]
        return value.repeat_interleave(copies, 1).transpose(1, 2).contiguous(), None


def require_divisible(
    model: PreTrainedModel,
    layout: ParallelLayout,
    packing: str,
    precision: str = "fp32",
    length: int = 0,
) -> None:
    """Raise UsageError if a model gives other results when ranks share its rows.

    All ranks must call this. Two trials replace a table of families. In the first, attention lets
    each token see only itself. Then no token can depend on an earlier one, unless a layer mixes
    tokens without attention (Mamba, short convolutions), or computes attention without the
    interface of transformers, where the exchange is. The second one compares logits of divided rows
    with those of whole rows.

    length: tokens of a row in training.
    """
    name = model.config.model_type
    assert layout.context is not None
    if packing == "documents" and _depends_on_length(model):
        raise _make_error(
            f"the RoPE of this {name} model depends on the longest document of a batch",
            "packed documents, whose lengths differ between the ranks that share a row",
        )
    if _counts_tokens(model, length):
        raise _make_error(
            f"{name} models scale queries by their place, which each rank would count from 0",
            f"attn_temperature_tuning in the config, with effect on rows of {length:,} tokens",
        )
    without = _NoExchange()

    def compute_logits(tokens: Tensor) -> Tensor:
        inputs = attention.make_inputs(model, trial_batch(tokens, layout))
        return model(**inputs, **{ARGUMENT: without}).logits

    if find_dependence(model, compute_logits) is not None:
        if not without.is_used:
            raise _make_error(
                f"{name} models have attention that ranks cannot share",
                "no call of the attention interface of transformers gets the model's arguments",
            )
        raise _make_error(
            f"{name} models mix tokens outside of attention",
            "tokens see others while attention is off",
        )
    difference = _compare_divided(model, layout, layout.context)
    if not difference <= (_FLOAT8_TOLERANCE if precision in FLOAT8_RECIPES else _TOLERANCE):
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


def _counts_tokens(model: PreTrainedModel, length: int) -> bool:
    """Return whether layers count tokens by themselves (Llama 4). In short rows that is no matter.

    The trials are too short to find it.
    """
    text = model.config.get_text_config()
    counts = attention.get_field(text, "attn_temperature_tuning")
    return bool(counts) and length >= (attention.get_field(text, "floor_scale") or 0)


def _compare_divided(model: PreTrainedModel, layout: ParallelLayout, shared: Context) -> float:
    """Return by how much logits differ between divided and whole rows, relative to their norm.

    It is the largest of the ranks' medians over tokens: rounding may send single tokens to other
    experts. NaN if logits are. Raises UsageError if the model cannot compute divided rows.
    """
    tokens = trial_tokens(model, 2, _TOKENS * shared.size)
    batch = trial_batch(tokens, layout, divided=True)
    with trial_mode(model):
        expected = model(**attention.make_inputs(model, trial_batch(tokens, layout))).logits.float()
        try:
            mine = model(**attention.make_inputs(model, batch)).logits
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            first, *_ = str(error).splitlines() or [""]
            raise _make_error(
                f"{model.config.model_type} models cannot compute a part of a row",
                f"{type(error).__name__}: {first[:200]}",
            ) from error
        actual = shared.gather_rows(mine).float()
    differences = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-9)
    of_ranks = differences.unflatten(1, (shared.size, -1)).transpose(0, 1).flatten(1)
    return of_ranks.median(dim=1).values.max().item()
