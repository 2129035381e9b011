"""Curate a dataset of text or conversations: from dataset to dataset.

  python -m lib.curate hf_datasets/raw --save-dir hf_datasets/corpus --dedup near
  python -m lib.curate hf_datasets/raw --save-dir hf_datasets/corpus --language en,de \\
      --quality gopher,c4,fineweb --mask email,phone --decontaminate tests/
  python -m lib.curate hf_datasets/raw --save-dir hf_datasets/corpus --step my_filter.py
  python -m lib.curate hf_datasets/raw --quality gopher --sample-dropped 20 --dry-run
  python -m lib.curate … --part 3/16   (on each of 16 machines, with different numbers)
  python -m lib.curate … --merge       (on one machine, after all parts are done)

Reads every dataset that `-d` of stage 04 accepts, made by stage 02 or by `save_to_disk`, and writes
what stage 02 writes. dropped.jsonl lists every dropped row with the rule that drops it, and
report.html shows what each rule does. This command needs no network.
"""

from __future__ import annotations

import sys

from lib.core import stage
from lib.curate import command


def main(argv: list[str]) -> None:
    """Run the command."""
    command.run_command(__doc__, argv)


if __name__ == "__main__":
    sys.argv[0] = "lib.curate"
    stage.run_main(main)
