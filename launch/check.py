#!/usr/bin/env python3
"""Check what a run needs: this machine, the network, this checkout and its data, Slurm.

  python launch/check.py machine                              # GPUs, disk, versions, artifacts
  torchrun --nproc-per-node 8 launch/check.py network         # all nodes and the links between them
  python launch/check.py framework                            # Python, packages, a sharded step
  python launch/check.py setup --deep                         # datasets, models, token stores
  python launch/check.py slurm --nodes 4 -- --partition=gpu   # Slurm, for a job

Each check has its own --help. Every finding has a severity and a remedy. Exit codes: 0 ready, 5 a
warning (with --fail-on warning), 6 an error, 2 bad usage. torchrun returns 1 instead of 2 to 6.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.core import options, stage


def main(argv: list[str]) -> None:
    """Run the check that the first word names. Each imports only what it needs."""
    check = argv[0] if argv else ""
    if check in ("machine", "network"):
        from launch.checks import network

        network.main(argv)
    elif check in ("framework", "setup"):
        from launch.checks import setup

        setup.main(argv)
    elif check in ("slurm", "slurm-node"):
        from launch.checks import slurm

        # `slurm` starts `slurm-node` on the nodes.
        (slurm.main if check == "slurm" else slurm.check_node)(argv[1:])
    else:
        checks = ("machine", "network", "framework", "setup", "slurm")
        parser = options.Parser(__doc__)
        parser.add_argument("check", choices=checks, help="what to check")
        main([parser.parse(argv).check])


if __name__ == "__main__":
    stage.run_main(main)
