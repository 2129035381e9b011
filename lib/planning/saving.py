"""Compute how often to save: the interval with the largest useful share of a run's time.

Failures happen at random, at a constant rate (the times between them are exponential). A save
delays the steps by `stall`, and is committed `lag` later. After a failure a run needs `restart` to
start again, and repeats the steps since the last committed save. All times are in seconds.

With work w between saves and M between failures, a stretch between two failures commits
    at least k saves with the probability exp(-(k (w + stall) + lag) / M),
and lasts M, or M exp(restart / M) if failures during the restart count; hence
    useful share = w exp(-(lag + restart) / M) / (M (exp((w + stall) / M) - 1)).
Without lag this is Daly 2006 ("A higher order estimate of the optimum checkpoint interval for
restart dumps"). The share is largest if w / M = 1 - exp(-(w + stall) / M), whatever lag and restart
are. To first order, that is Young's (1974) w = sqrt(2 stall M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.core import units

_COPY = 10e9  # bytes/s from a GPU to pinned host memory: half the rate of PCIe 4
# Llama 3 405B: 466 interruptions of the job in 54 days on 16,384 GPUs (arXiv:2407.21783, 3.3.4).
GPU_HOURS_PER_FAILURE = round(16384 * 54 * 24 / 466)


@dataclass(frozen=True)
class Saving:
    """A schedule of saves, in seconds.

    every: work between saves. stall: delay of the steps by a save. lag: time from the end of the
    stall to the commit. Only one save runs at a time: the next one waits for the commit.
    """

    every: float
    stall: float
    lag: float = 0.0


def useful_share(saving: Saving, mtbf: float, restart: float) -> float:
    """Return the share of time spent on steps that are kept. mtbf: mean time between failures."""
    period = saving.every + saving.stall
    if period / mtbf > 500:  # exp() overflows near 709
        return 0.0
    return (
        saving.every / mtbf * math.exp(-(saving.lag + restart) / mtbf) / math.expm1(period / mtbf)
    )


def best_interval(stall: float, lag: float, mtbf: float) -> float:
    """Return the work between saves that gives the largest useful share.

    It is at least `lag`, since a save waits for the commit of the previous one.
    """
    # w / M - 1 + exp(-(w + stall) / M) grows with w from below 0 to above.
    low = 0.0
    high = mtbf
    while high - low > 1e-9 * mtbf:
        middle = (low + high) / 2
        grows = middle / mtbf + math.expm1(-(middle + stall) / mtbf) < 0
        low, high = (middle, high) if grows else (low, middle)
    return max(high, lag)


def describe_saving(
    size: int,
    gpus: int,
    mtbf_hours: float,
    write_gbps: float,
    in_background: bool,
    known_s: float | None = None,
    estimated_s: float | None = None,
) -> str:
    """Return a sentence on how often to save a checkpoint.

    size: bytes of a checkpoint. mtbf_hours: mean time between failures of one GPU. write_gbps: GB/s
    that all GPUs write together. in_background: the save is written from copies in host memory.
    known_s, estimated_s: seconds per step.
    """
    mtbf = mtbf_hours * 3600 / gpus
    written = size / write_gbps / 1e9
    copied = size / gpus / _COPY
    stall, lag = (copied, written) if in_background else (written, 0.0)
    every = best_interval(stall, lag, mtbf)
    lost = 1 - useful_share(Saving(every, stall, lag), mtbf, restart=0.0)
    step, origin = (known_s, "") if known_s else (estimated_s, "an estimated ")
    steps = ""
    if step:
        steps = f" = --ckpt-freq {max(1, round(every / step))} at {origin}{step:.3g} s per step"
    return (
        f"a save every {units.duration(every)}{steps} is best with a failure every "
        f"{units.duration(mtbf)}: of {units.size(size)} in {units.duration(written)} at "
        f"{write_gbps:g} GB/s, steps delayed by {units.duration(stall)}"
        f"{' at most' if in_background else ''}; saves and repeated steps take "
        f"{100 * lost:.2g} % of the time"
    )
