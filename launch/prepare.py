#!/usr/bin/env python3
"""Prepare a run in this directory: dataset, model and tokens, by stages 01 to 04 in their order.

  python launch/prepare.py                                     # ten files of C4, a 1B from scratch
  python launch/prepare.py --data allenai/c4 --include 'en/c4-train.0000*.json.gz' --fields text \\
      -- -d c4 -m meta-llama/Llama-3.1-8B
  python launch/prepare.py --data /bucket/raw -- -d corpus --config recipes/llama-2-7b.yaml
  python launch/prepare.py --dry-run -- -d corpus -m org/name  # the commands, and none is run

What stands behind `--` are the options of the run. A dataset and a model that are there are kept;
what is missing of them comes from the Hub (HF_TOKEN opens gated repositories), or from --data.
`launch/kubernetes.py prepare` runs this in a pod, on the volume that the nodes share. Exit code:
that of the stage that failed.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch import pod  # noqa: E402
from launch.kube.raw_text import RawText, steps  # noqa: E402
from lib.core import declared, log, options, stage  # noqa: E402
from lib.core.options import Options  # noqa: E402
from lib.train import command_line  # noqa: E402


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__, "[options] -- TRAINING OPTIONS")
    declared.add_options(parser, RawText)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    own, train = command_line.split_at_dashes(argv)
    opts = parse(own)
    train = command_line.add_recipe(train)
    config = command_line.parse_options(train)
    if not config.experiment_name:
        train = [*train, "--experiment-name=prepare"]
    for script, *words in list(steps(declared.read_options(RawText, opts), config, train)):
        log.info(f"$ python {script} {shlex.join(words)}")
        if not opts.dry_run and (code := pod.follow([sys.executable, str(ROOT / script), *words])):
            sys.exit(code)


if __name__ == "__main__":
    stage.run(main, network=True)  # of stage 03, which it starts; the others stay off by themselves
