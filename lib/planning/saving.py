"""How often to save: the share of a run's time that is useful, and the interval that makes it most.

Failures come at random, at a constant rate (exponential times between them). A save holds the
steps up for its `stall`, and is worth something `lag` later, when it is committed; a failure takes
`restart`, and the steps since the last save that was committed are done again. All in seconds.

With work w between saves and M between failures, a stretch between two failures commits
    k saves with the probability exp(-(k (w + stall) + lag) / M)  or more,
and lasts M, or M exp(restart / M) with the failures that strike the restart itself; hence
    useful share = w exp(-(lag + restart) / M) / (M (exp((w + stall) / M) - 1)).
Without lag this is Daly 2006 ("A higher order estimate of the optimum checkpoint interval for
restart dumps"). It is largest where w / M = 1 - exp(-(w + stall) / M), whatever lag and restart;
to first order at Young's (1974) sqrt(2 stall M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.core import units

_COPY = 10e9  # bytes/s from a GPU to pinned host memory, half of what PCIe 4 can do
# Llama 3 405B: 466 interruptions of the job in 54 days on 16,384 GPUs (arXiv:2407.21783, 3.3.4).
GPU_HOURS_PER_FAILURE = round(16384 * 54 * 24 / 466)


@dataclass(frozen=True)
class Saving:
    """Says when to save. every: work between saves. lag: from the stall's end to the commit.

    One save at a time: the next waits for the commit of the one before.
    """

    every: float
    stall: float
    lag: float = 0.0


def useful_share(saving: Saving, mtbf: float, restart: float) -> float:
    """Return the share of time that goes into steps that are kept. mtbf: mean time to a failure."""
    period = saving.every + saving.stall
    if period / mtbf > 500:  # and exp() ends near 709
        return 0.0
    return (
        saving.every / mtbf * math.exp(-(saving.lag + restart) / mtbf) / math.expm1(period / mtbf)
    )


def best_interval(stall: float, lag: float, mtbf: float) -> float:
    """Return the work between saves that makes the useful share largest.

    At least what a save in the background takes: before that none can follow.
    """
    # w / M - 1 + exp(-(w + stall) / M) grows with w from below 0 to above.
    low = 0.0
    high = mtbf
    while high - low > 1e-9 * mtbf:
        middle = (low + high) / 2
        grows = middle / mtbf + math.expm1(-(middle + stall) / mtbf) < 0
        low, high = (middle, high) if grows else (low, middle)
    return max(high, lag)


def describe(
    size: int,
    gpus: int,
    mtbf_hours: float,
    write_gbps: float,
    in_background: bool,
    known_s: float | None = None,
    estimated_s: float | None = None,
) -> str:
    """Return in words how often to save checkpoints of so many bytes on so many GPUs.

    mtbf_hours: mean time to a failure of one GPU. write_gbps: GB/s that all write together.
    in_background: from copies in host memory. known_s, estimated_s: seconds of a step.
    """
    mtbf = mtbf_hours * 3600 / gpus
    written = size / write_gbps / 1e9
    copied = size / gpus / _COPY
    stall, lag = (copied, written) if in_background else (written, 0.0)
    every = best_interval(stall, lag, mtbf)
    lost = 1 - useful_share(Saving(every, stall, lag), mtbf, restart=0.0)
    step, how = (known_s, "") if known_s else (estimated_s, "an estimated ")
    steps = (
        f" = --ckpt-freq {max(1, round(every / step))} at {how}{step:.3g} s per step"
        if step
        else ""
    )
    return (
        f"a save every {units.duration(every)}{steps} is best with a failure every "
        f"{units.duration(mtbf)}: of {units.size(size)} in {units.duration(written)} at "
        f"{write_gbps:g} GB/s, steps held up for {units.duration(stall)}"
        f"{' at most' if in_background else ''}; saves and repeated steps take "
        f"{100 * lost:.2g} % of the time"
    )
