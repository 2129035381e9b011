#!/usr/bin/env python3
"""Prepare a run in this directory: create its dataset, model and tokens with stages 01 to 04.

  python launch/cloud/prepare.py                          # the first file of C4, a 1B from scratch
  python launch/cloud/prepare.py --data allenai/c4 --include 'en/c4-train.0000*.json.gz' \\
      --fields text -- -d c4 -m meta-llama/Llama-3.1-8B
  python launch/cloud/prepare.py --data /bucket/raw -- -d corpus --config recipes/llama-2-7b.yaml
  python launch/cloud/prepare.py --quick -- -d hf_datasets/test-quick -m test-quick -s 64
  python launch/cloud/prepare.py --dry-run -- -d corpus -m org/name  # only print the commands

The options of the run stand after `--`. An existing dataset or model is kept; a missing one comes
from the Hub (gated repositories need HF_TOKEN) or from --data. `launch/kubernetes.py prepare` runs
this script in a pod, on the volume that the nodes share. The exit code is that of the stage that
failed.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.cloud import pod  # noqa: E402
from launch.cloud.kube.raw_text import RawText, list_preparation_steps  # noqa: E402
from lib.core import declared, log, options, stage  # noqa: E402
from lib.core.options import Options  # noqa: E402
from lib.train import command_line  # noqa: E402


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__, "[options] -- TRAINING OPTIONS")
    declared.add_options(parser, RawText)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    own_words, train = command_line.split_at_dashes(argv)
    opts = parse(own_words)
    train = command_line.add_recipe(train)
    config = command_line.parse_options(train)
    if not config.experiment_name:
        train = [*train, "--experiment-name=prepare"]
    for script, *words in list(
        list_preparation_steps(declared.read_options(RawText, opts), config, train)
    ):
        log.info(f"$ python {script} {shlex.join(words)}")
        command = [sys.executable, str(ROOT / script), *words]
        if not opts.dry_run and (code := pod.run_with_signals(command)):
            sys.exit(code)


if __name__ == "__main__":
    # Stage 03 needs the network; the other stages set the offline guard themselves.
    stage.run_main(main, network=True)
