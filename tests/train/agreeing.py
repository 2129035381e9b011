"""Run on two ranks that chose different options; write the options that they agree on.

argv: a file for the options of each rank, as a list.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.parallel.layout import ParallelLayout, gather
from lib.train import memory_fit
from lib.train.config import Config


def main() -> None:
    """Agree on the options, and write the result."""
    is_first = os.environ["RANK"] == "0"
    config = Config(seq_length=16, precision="fp32").with_values(
        "memory estimate",
        batch_size=4 if is_first else 2,
        activation_checkpointing="none" if is_first else "full",
    )
    if is_first:
        config = config.with_values("memory estimate", keep_gathered=True, shard_size=1)
    layout = ParallelLayout.start(partial(memory_fit.agree_on_shards, config))
    config = memory_fit.agree_on_memory(config, None, layout)
    agreed = {
        "batch": config.batch_size,
        "recompute": config.activation_checkpointing,
        "keep_gathered": config.keep_gathered,
        "shard_size": config.shard_size,
        "mesh": list(layout.fsdp.shape),
    }
    by_rank = gather(agreed, layout.control)
    if layout.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(by_rank))
    layout.stop()


if __name__ == "__main__":
    main()
