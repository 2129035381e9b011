"""Check machines before a run: connections, their speed, and nodes that differ from the others.

  torchrun --nproc-per-node 8 launch/check.py network                      # one node
  torchrun --nnodes 4 --node-rank R --master-addr ADDR --nproc-per-node 8 \\
      launch/check.py network
  srun torchrun … launch/check.py network --min-bandwidth 300 --json network.json
  python launch/check.py machine                                           # this machine alone

Start the check as you will start the run: the same nodes, ranks per node, image and directory. It
takes a minute or two, writes only probe files that it deletes (up to 512 MiB per node), and opens
connections only between its ranks. Checks whose tools a node lacks are listed as not checked. Exit
codes: 0 ready, 5 a warning (with --fail-on warning), 6 an error. torchrun itself returns 1 for
either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.checks import findings
from launch.checks.findings import Finding
from lib.core import log, options, units
from lib.core.errors import UsageError
from lib.core.options import Options

ROOT = Path(__file__).resolve().parents[2]

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    from launch.checks.ranks import AllRanks


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__)
    parser.prog = f"check.py {argv[0]}"
    parser.add_argument(
        "--save-dir",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="parent directory of the runs, whose disk is measured and must be shared",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="directory of prepared models and token stores",
    )
    parser.add_argument(
        "--artifact",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="directory that must be equal on all nodes; may be repeated (default: "
        "all artifacts of stages 02 to 04)",
    )
    parser.add_argument(
        "--min-bandwidth",
        type=options.positive,
        metavar="GB/S",
        help="required bus bandwidth of an all-reduce over all ranks (default: any)",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive,
        default=30.0,
        metavar="S",
        help="seconds after which no further pair of nodes is measured",
    )
    parser.add_argument(
        "--timeout",
        type=options.positive,
        default=30.0,
        metavar="S",
        help="seconds to wait for a rank until it counts as dead; half of that for a pair of nodes",
    )
    findings.add_options(parser)
    options.add_config(parser, "print the checks and run none")
    return parser.parse(argv[1:])


def main(argv: list[str]) -> None:
    """Connect the ranks, examine each machine, measure the network, and agree on the findings.

    argv: `machine` or `network`, then its options.
    """
    began = time.monotonic()
    opts = parse(argv)
    if opts.dry_run:
        _print_plan(opts)
        return
    if argv[0] == "network" and "RANK" not in os.environ:
        raise UsageError(
            "torchrun has not started this check, so there are no ranks to measure",
            expected="torchrun on every node, as for the run",
            hint="`launch/check.py machine` checks this machine alone",
        )
    from launch.checks import bandwidth, node_findings, table
    from launch.checks.ranks import AllRanks

    launch = AllRanks(opts.timeout)
    log.info(
        f"{units.counted(launch.world_size, 'rank')} on "
        f"{units.counted(len(launch.ranks_of), 'node')}, "
        f"{'GPUs' if launch.on_gpu else 'CPUs'}"
    )
    facts = examine_nodes(launch, opts)
    speed = bandwidth.measure_speeds(launch, began + opts.seconds)
    all_findings: list[Finding] = []
    if launch.rank == 0:
        all_findings = node_findings.find_problems(facts, speed, launch.name, opts.min_bandwidth)
        table.print_tables(facts, speed, launch.host_of, all_findings)
        log.info("")
        findings.print_findings(all_findings)
        log.info(f"took {time.monotonic() - began:.0f} s")
        if opts.json:
            findings.write_json(
                opts.json, all_findings, nodes=facts, speed=speed, hosts=launch.host_of
            )
    verdict = launch.decide("verdict", [vars(finding) for finding in all_findings])
    launch.leave()
    findings.require_ready(
        [Finding(**finding) for finding in verdict],
        opts.fail_on,
        "this machine" if len(launch.ranks_of) == 1 else f"these {len(launch.ranks_of)} machines",
    )


def examine_nodes(launch: AllRanks, opts: Options) -> dict[int, dict[str, Any]]:
    """Return the facts of each node on rank 0; all ranks must call this."""
    from launch.checks import bandwidth, machine
    from launch.checks.ranks import measure_clock_offset

    facts: dict[str, Any] = {}
    with _share_probe(launch, machine.find_existing_parent(opts.save_dir)) as probe:
        if launch.leads_node:  # before a rank of the node uses memory or time of its GPUs
            facts = {
                **machine.collect_facts(opts.save_dir, opts.cache_dir, opts.artifact, ROOT),
                "ranks": len(launch.ranks_of[launch.node]),
                "shared": probe is None or probe.exists(),
                "clock": measure_clock_offset(launch),
            }
        launch.barrier("examined")
    launch.share("compute", bandwidth.measure_compute(launch))
    if launch.leads_node:
        facts["compute"] = launch.gather("compute", launch.ranks_of[launch.node])
        facts["throttled"] = machine.query_throttled()
        launch.share("facts", facts)
    launch.barrier("computed")
    if launch.rank != 0:
        return {}
    return {
        node: launch.gather("facts", [launch.leader(node)])[launch.leader(node)]
        for node in sorted(launch.ranks_of)
    }


@contextmanager
def _share_probe(launch: AllRanks, directory: Path) -> Iterator[Path | None]:
    """Yield a file that rank 0 has created in a directory; None if rank 0 may not write there."""
    name = f".check-{time.time_ns()}"
    if launch.rank == 0:
        try:
            (directory / name).touch()
        except OSError:
            name = ""
    name = launch.decide("probe", name)
    try:
        yield directory / name if name else None
    finally:
        if launch.rank == 0 and name:
            (directory / name).unlink(missing_ok=True)


def _print_plan(opts: Options) -> None:
    log.table(
        {
            "ranks and nodes": "as torchrun starts them",
            "network": f"all ranks, each node, each pair of nodes for {opts.seconds:.0f} s",
            "GPUs": "nvidia-smi: clocks, ECC, memory rows, NVLink, temperature; matrix products",
            "EFA": "/sys/class/infiniband, fi_info",
            "disk": f"{opts.save_dir}: up to 512 MB for 2 s, deleted again",
            "equal on all nodes": "versions, code, NCCL settings, "
            f"{', '.join(map(str, opts.artifact)) or 'all artifacts'}",
        }
    )
