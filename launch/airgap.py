#!/usr/bin/env python3
"""Carry code, wheels, models, datasets and token stores to machines without a network.

  python launch/airgap.py pack --out bundle --dataset corpus --model org/name --tokens corpus
  python launch/airgap.py pack --out bundle --dataset corpus --model org/name --volume-size 20GB
  python bundle/airgap.py verify bundle
  python bundle/airgap.py unpack bundle --to project --install

A bundle is a directory that contains airgap.py, manifest.json with the SHA-256 of every file, and
the files themselves in volume_001/ and so on. Volumes can be carried one by one and must be side by
side again on the far side. There, its airgap.py needs only Python 3.10 or newer. Each action has
its own --help. Exit codes: 0 done; 2 bad usage; 3 the bundle is damaged; 4 out of disk space.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str]) -> None:
    """Run the action that the first word names; `pack` is the only one that imports lib/."""
    if argv[:1] == ["pack"]:
        from launch.bundles import bundle
        from lib.core import stage

        stage.run_main(lambda argv: bundle.main(argv[1:]))
    from launch.bundles import unpacking

    sys.exit(unpacking.main(argv, __doc__))


if __name__ == "__main__":
    main(sys.argv[1:])
