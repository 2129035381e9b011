"""Find the longest sequences that fit in memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from transformers import PretrainedConfig

from lib.core.errors import UsageError
from lib.models.architecture import has_attention
from lib.parallel import attention
from lib.parallel.degrees import RECOMPUTATIONS
from lib.planning.knobs import BATCH_OPTION, CONTEXT_OPTION, MIN_SEQ_LENGTH, RECOMPUTE_OPTION
from lib.planning.trace import StepConfig, StepMemory
from lib.planning.tracker import SHARDED

_LONGEST = 1 << 22  # tokens of a sequence, for a model without a limit
_MAX_TRACES = 8  # of a search; a trace takes some seconds
_PREDICTED = 5  # of these traces; the others halve the interval

Estimate = Callable[[StepConfig], StepMemory]


def describe_longest(
    estimate: Estimate, chosen_step: StepConfig, usable: float, config: PretrainedConfig
) -> str:
    """Return a text with the longest sequences that fit, as chosen and with more options.

    estimate: returns the memory of a step. usable: bytes that a step may take. config: of the
    model. The text is empty if the step cannot be traced.
    """
    text_config = config.get_text_config()
    limit = attention.get_field(text_config, "max_position_embeddings") or _LONGEST
    smallest = replace(chosen_step, batch=1, recompute=RECOMPUTATIONS[-1])
    cases = {
        "as chosen": chosen_step,
        f"with {BATCH_OPTION} 1 {RECOMPUTE_OPTION} {smallest.recompute}": smallest,
    }
    if has_attention(text_config):
        degree = _find_largest_degree(chosen_step, text_config)
        divided = replace(smallest, context=degree)
        cases[f"with {CONTEXT_OPTION} {degree} as well"] = divided
    texts: dict[StepConfig, str] = {}
    for words, case in cases.items():
        if case not in texts:
            # Some families cannot be checkpointed selectively, or their samples not divided so.
            with suppress(RuntimeError, UsageError):
                length = find_longest(estimate, case, usable, limit)
                texts[case] = f"{length:,} {words}"
                if length == limit:
                    texts[case] += ", as many as the model allows"
                    break
    return f"longest sequence that fits, in tokens: {'; '.join(texts.values())}" if texts else ""


def find_longest(estimate: Estimate, case: StepConfig, usable: float, limit: int) -> int:
    """Return the longest sequence, in tokens, with which a step fits; 0 if there is none.

    Lengths of four significant binary digits are tried, and the limit. Memory grows about linearly,
    so a line through the last two results predicts the next length to try.

    estimate, usable: see `describe_longest`. limit: no longer sequence is tried.
    """
    rounded = {digits << power for power in range(limit.bit_length()) for digits in range(8, 16)}
    allowed = {length for length in rounded if MIN_SEQ_LENGTH <= length < limit}
    lengths = sorted(allowed | {case.seq_length, limit})
    low = -1  # the index of the longest length known to fit
    high = len(lengths)  # that of the shortest one known not to fit
    points: list[tuple[int, int]] = []  # lengths with their bytes
    index = lengths.index(case.seq_length)
    for traces in range(1, _MAX_TRACES + 1):
        length = lengths[index]
        documents = math.ceil(case.documents * length / case.seq_length)
        step = estimate(replace(case, seq_length=length, documents=documents))
        low, high = (index, high) if step.total <= usable else (low, index)
        if high - low == 1:
            break
        points += [] if points else [(0, sum(step.peak.get(kind, 0) for kind in SHARDED))]
        points.append((length, step.total))
        middle = (low + high) // 2
        if traces <= _PREDICTED:
            predicted = _extrapolate(points[-2], points[-1], usable)
            middle = bisect_right(lengths, predicted) - 1
        index = min(max(middle, low + 1), high - 1)
    return lengths[low] if low >= 0 else 0


def _extrapolate(first: tuple[int, int], second: tuple[int, int], size: float) -> float:
    """Return where the line through two points (length, bytes) reaches `size` bytes."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return second[0] + (size - second[1]) / slope if slope > 0 else math.inf


def _find_largest_degree(step: StepConfig, config: PretrainedConfig) -> int:
    """Return over how many of its ranks a step may divide samples: at most the attention heads."""
    most = max(step.context, attention.get_field(config, "num_attention_heads") or 1)
    degrees = range(step.context, min(step.shard_size, most) + 1, step.context)
    return max(degree for degree in degrees if step.shard_size % degree == 0)
