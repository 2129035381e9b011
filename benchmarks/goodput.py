#!/usr/bin/env python3
"""Simulate runs with failures at published rates, and print the useful share of their time.

  python benchmarks/goodput.py --failures 3000

The simulation steps through random failures, saves, commits and restarts. It checks the closed form
of `lib/planning/saving.py`, and also measures checkpoints in two tiers, which the closed form does
not cover. Prints Markdown.
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

_RESTART_S = 600.0  # seconds
_LOCAL_SURVIVAL = 0.5  # share of the failures that leave the local disks of all nodes intact
_LOCAL_RATE = 0.6e9  # bytes/s per GPU to the local disks
_COPY_RATE = 10e9  # bytes/s per GPU to host memory
# GPUs, hours between failures and their source, parameters, bytes/s to the shared storage
_JOBS = [
    (1024, 44.5, "Llama 3, per GPU-hour", 70e9, 100e9),
    (1024, 7.9, "Kokolis et al.", 70e9, 100e9),
    (16384, 2.78, "Llama 3", 405e9, 2000e9),
    (16384, 1.8, "Kokolis et al., projected", 405e9, 2000e9),
    (16384, 2.78, "Llama 3, slow storage", 405e9, 50e9),
]


def main() -> None:
    """Simulate the runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failures", type=int, default=3000, help="of each simulated run")
    print_table(parser.parse_args().failures)


def print_table(failures: int) -> None:
    """Print the simulated useful share of time for three ways to save, each at its best interval.

    Llama 3 405B: arXiv:2407.21783, 466 interruptions in 54 days on 16,384 GPUs. Kokolis et al.:
    arXiv:2410.21680.
    """
    print(
        "| GPUs | hours between failures | state | save takes | sync | async | two tiers |\n"
        "|---|---|---|---|---|---|---|"
    )
    for gpus, hours, source, parameters, storage_rate in _JOBS:
        mtbf = hours * 3600
        size = 12 * parameters
        stall = size / gpus / _COPY_RATE
        write_seconds = size / storage_rate
        local_lag = size / gpus / _LOCAL_RATE
        sync = Saving(best_interval(write_seconds, 0, mtbf), write_seconds)
        asynchronous = Saving(best_interval(stall, write_seconds, mtbf), stall, write_seconds)
        local = Saving(best_interval(stall, local_lag, mtbf), stall, local_lag)
        shared = Saving(
            best_interval(stall, write_seconds, mtbf / (1 - _LOCAL_SURVIVAL)), stall, write_seconds
        )
        cells = []
        for saving in (sync, asynchronous):
            run = simulate_run(saving, mtbf, _RESTART_S, failures)
            cells.append(
                f"{100 * run.useful / run.total:.2f} % every "
                f"{units.duration(saving.every)} (closed form "
                f"{100 * useful_share(saving, mtbf, _RESTART_S):.2f} %)"
            )
        run = simulate_run(
            shared, mtbf, _RESTART_S, failures, local=local, survives=_LOCAL_SURVIVAL
        )
        cells.append(
            f"{100 * run.useful / run.total:.2f} % every {units.duration(local.every)} / "
            f"{units.duration(shared.every)}"
        )
        print(
            f"| {gpus:,} | {hours} ({source}) | {units.size(size)} | "
            f"{units.duration(write_seconds)} | {' | '.join(cells)} |",
            flush=True,
        )
    print()


@dataclass
class Outcome:
    """The seconds of a simulated run, by use."""

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
    """A place for checkpoints.

    since: seconds of work until the last save. committed: seconds of work until the last complete
    checkpoint. commit_at: when the pending save will be complete, infinity if none is pending.
    """

    saving: Saving
    since: float = 0.0
    committed: float = 0.0
    commit_at: float = math.inf

    @property
    def is_free(self) -> bool:
        return self.commit_at == math.inf

    def commit(self, now: float) -> None:
        """Complete the pending save if its time has come."""
        if self.commit_at <= now:
            self.committed = self.since
            self.commit_at = math.inf

    def due(self, now: float, work: float) -> float:
        """Return when the next save can begin if nothing stalls the steps."""
        due_at = now + self.saving.every - (work - self.since)
        return due_at if self.is_free else max(due_at, self.commit_at)


def simulate_run(
    shared: Saving,
    mtbf: float,
    restart: float,
    failures: int,
    seed: int = 0,
    local: Saving | None = None,
    survives: float = 0.0,
) -> Outcome:
    """Simulate a run until at least `failures` failures, and return its seconds by use.

    mtbf: mean seconds between failures. restart: seconds of a restart. local: saves to the nodes'
    own disks, in addition to the shared ones. survives: share of the failures after which the local
    checkpoints of all nodes still exist.
    """
    draw = random.Random(seed)
    tiers = [_Tier(shared)] + ([_Tier(local)] if local else [])
    outcome = Outcome()
    work = 0.0
    while outcome.failures < failures:
        work_at_failure = _work_until_failure(tiers, outcome, work, draw.expovariate(1 / mtbf))
        failures_in_a_row = 1
        while (
            seconds_to_next := draw.expovariate(1 / mtbf)
        ) < restart:  # another failure before the steps go on
            outcome.restarting += seconds_to_next
            failures_in_a_row += 1
        outcome.restarting = outcome.restarting + restart
        outcome.failures = outcome.failures + failures_in_a_row
        intact = (
            tiers if all(draw.random() < survives for _ in range(failures_in_a_row)) else tiers[:1]
        )
        work = max(tier.committed for tier in intact)
        outcome.useful = work
        outcome.repeated = outcome.repeated + work_at_failure - work
        tiers = [
            _Tier(tier.saving, work, tier.committed if tier in intact else 0.0) for tier in tiers
        ]
    return outcome


def _work_until_failure(tiers: list[_Tier], outcome: Outcome, work: float, failure: float) -> float:
    """Work, save and commit until the failure; return the seconds of work done by then."""
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
