#!/usr/bin/env python3
"""The share of a run's time that is useful, in simulated runs with failures at published rates.

  python benchmarks/goodput.py --failures 3000

Failures come at random and saves are made, committed and gone back to, event after event, so that
`lib/planning/saving.py`, which computes the share in closed form, is checked and two tiers of
checkpoints, which it does not know, are measured. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.core import units
from lib.planning.saving import Saving, best_interval, useful_share

_RESTART = 600.0  # seconds
_SURVIVE = 0.5  # of the failures leave all nodes' local disks as they were
_LOCAL = 0.6e9  # bytes/s per GPU to the local disks, and to host memory:
_COPY = 10e9
# GPUs, hours between failures, whose; parameters; bytes/s to the shared storage
_JOBS = [
    (1024, 44.5, "Llama 3, per GPU-hour", 70e9, 100e9),
    (1024, 7.9, "Kokolis et al.", 70e9, 100e9),
    (16384, 2.78, "Llama 3", 405e9, 2000e9),
    (16384, 1.8, "Kokolis et al., projected", 405e9, 2000e9),
    (16384, 2.78, "Llama 3, slow storage", 405e9, 50e9),
]


def main() -> None:
    """Simulate the runs and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failures", type=int, default=3000, help="of each simulated run")
    show(parser.parse_args().failures)


def show(failures: int) -> None:
    """Print the useful share of time for three ways to save, simulated, each at its best interval.

    Llama 3 405B: arXiv:2407.21783, 466 interruptions in 54 days on 16,384 GPUs. Kokolis et al.:
    arXiv:2410.21680.
    """
    print(
        "| GPUs | hours between failures | state | save takes | sync | async | two tiers |\n"
        "|---|---|---|---|---|---|---|"
    )
    for gpus, hours, whose, parameters, rate in _JOBS:
        mtbf = hours * 3600
        size = 12 * parameters
        stall = size / gpus / _COPY
        lag = size / rate
        near = size / gpus / _LOCAL
        sync = Saving(best_interval(lag, 0, mtbf), lag)
        later = Saving(best_interval(stall, lag, mtbf), stall, lag)
        local = Saving(best_interval(stall, near, mtbf), stall, near)
        shared = Saving(best_interval(stall, lag, mtbf / (1 - _SURVIVE)), stall, lag)
        cells = []
        for saving in (sync, later):
            run = simulate(saving, mtbf, _RESTART, failures)
            cells.append(
                f"{100 * run.useful / run.total:.2f} % every "
                f"{units.duration(saving.every)} (closed form "
                f"{100 * useful_share(saving, mtbf, _RESTART):.2f} %)"
            )
        run = simulate(shared, mtbf, _RESTART, failures, local=local, survives=_SURVIVE)
        cells.append(
            f"{100 * run.useful / run.total:.2f} % every {units.duration(local.every)} / "
            f"{units.duration(shared.every)}"
        )
        print(
            f"| {gpus:,} | {hours} ({whose}) | {units.size(size)} | {units.duration(lag)} | "
            f"{' | '.join(cells)} |",
            flush=True,
        )
    print()


@dataclass
class Outcome:
    """Where the time of a simulated run went."""

    useful: float = 0.0
    stalled: float = 0.0
    repeated: float = 0.0
    restarting: float = 0.0
    failures: int = 0

    @property
    def total(self) -> float:
        return self.useful + self.stalled + self.repeated + self.restarting


@dataclass
class _Tier:
    """A place for checkpoints. since: the work at its last save; committed: at the last whole one.

    commit_at: when the save in the background will be whole.
    """

    saving: Saving
    since: float = 0.0
    committed: float = 0.0
    commit_at: float = math.inf

    @property
    def is_free(self) -> bool:
        return self.commit_at == math.inf

    def commit(self, now: float) -> None:
        """Take note of what is whole by now."""
        if self.commit_at <= now:
            self.committed = self.since
            self.commit_at = math.inf

    def due(self, now: float, work: float) -> float:
        """Return when the next save can begin if nothing holds the steps up."""
        wanted = now + self.saving.every - (work - self.since)
        return wanted if self.is_free else max(wanted, self.commit_at)


def simulate(
    shared: Saving,
    mtbf: float,
    restart: float,
    failures: int,
    seed: int = 0,
    local: Saving | None = None,
    survives: float = 0.0,
) -> Outcome:
    """Return where the time goes until so many failures, at least, have struck.

    local: saves on the nodes' own disks beside the shared ones. survives: the share of failures
    after which those are still there on all nodes.
    """
    draw = random.Random(seed)
    tiers = [_Tier(shared)] + ([_Tier(local)] if local else [])
    outcome = Outcome()
    work = 0.0
    while outcome.failures < failures:
        reached = _until_failure(tiers, outcome, work, draw.expovariate(1 / mtbf))
        struck = 1
        while (after := draw.expovariate(1 / mtbf)) < restart:  # again, before the steps go on
            outcome.restarting += after
            struck += 1
        outcome.restarting = outcome.restarting + restart
        outcome.failures = outcome.failures + struck
        intact = tiers if all(draw.random() < survives for _ in range(struck)) else tiers[:1]
        work = max(tier.committed for tier in intact)
        outcome.useful = work
        outcome.repeated = outcome.repeated + reached - work
        tiers = [
            _Tier(tier.saving, work, tier.committed if tier in intact else 0.0) for tier in tiers
        ]
    return outcome


def _until_failure(tiers: list[_Tier], outcome: Outcome, work: float, failure: float) -> float:
    """Work, save and commit, event after event; return the work done when the failure strikes."""
    now = 0.0
    while now < failure:
        event = min(failure, *(tier.due(now, work) for tier in tiers))
        now, work = event, work + event - now
        for tier in tiers:
            tier.commit(now)
            if now < failure and tier.is_free and tier.due(now, work) <= now + 1e-6:
                stop = min(now + tier.saving.stall, failure)
                outcome.stalled = outcome.stalled + stop - now
                now = stop
                if now < failure:
                    tier.since = work
                    tier.commit_at = now + tier.saving.lag
                    tier.commit(now)
    for tier in tiers:
        tier.commit(now)
    return work


if __name__ == "__main__":
    main()
