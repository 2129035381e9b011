"""Which batch and how much recomputation a run takes where that is open: what fits its device.

Neither changes what is learned as long as a step has the same samples. Recomputing costs time
(about 5 % selectively, 30 % in full), and so does a pass of few tokens on a GPU, which waits for
its memory then. So the least recomputation is taken with which a pass has enough tokens to keep
the device busy; where none has, the one with the largest batch.

Spare memory is then used to communicate less, which gains a few percent at most: first a replica
of the model per node, from four nodes on; then weights that stay gathered through a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lib.planning.fit import Fit
from lib.planning.trace import Case

FEW = {True: 1 << 13, False: 0}  # tokens in a pass, below which the device waits: a GPU, a CPU
ENOUGH = {True: 1 << 15, False: 1 << 11}  # in a pass; more are hardly faster: on a GPU, a CPU


def choose(fit: Fit, rows: Sequence[Sequence[Case]], node: int = 0, gathers: bool = True) -> Case:
    """Return the case to take.

    rows: for each kind of recomputation, the least first, cases by their batch, the smallest first.
    Where nothing fits, that is the smallest batch with the most recomputation. node: GPUs of one,
    which may share a replica; 0 where the shards are given. gathers: weights may stay gathered.
    """
    best = _least_recomputed(fit, rows)
    if best is None:
        return rows[-1][0]
    in_node = replace(best, shard_size=node or best.shard_size)
    if in_node != best and fit.fits(in_node):
        best = in_node
    gathered = replace(best, keep_gathered=True)
    return gathered if gathers and fit.fits(gathered) else best


def _least_recomputed(fit: Fit, rows: Sequence[Sequence[Case]]) -> Case | None:
    """Return the case with the least recomputation whose passes keep the device busy, if any."""
    best: Case | None = None
    for cases in rows:
        if best and (
            best.batch * best.seq_length >= FEW[fit.on_gpu] or best.batch == cases[-1].batch
        ):
            break
        found = _largest(fit, cases)
        if found and (best is None or found.batch > best.batch):
            best = found
    return best


def _largest(fit: Fit, cases: Sequence[Case]) -> Case | None:
    """Return the case with the largest batch that fits, with as few checks as possible, or None."""
    if fit.fits(cases[-1]):
        return cases[-1]
    low = -1  # fits
    high = len(cases) - 1  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit.fits(cases[middle]) else (low, middle)
    return cases[low] if low >= 0 else None
