"""What a process does that prepares the tokens of a dataset, for tests that disturb it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from lib.core import lease, liveness, log
from lib.tokens import build, split_writer
from lib.tokens import dataset as datasets


def prepare(dataset: str, tokenizer: str, cache: str, pause: str, node: str = "") -> None:
    """Build the tokens and print their directory. pause: seconds before each write, which is told.
    node: which machine this process acts to be of; locks are local to each of them then.

    With a pause, so little is written at a time that a test can act while it builds.
    """
    log.setup()
    if node:
        lease.fcntl.flock = lambda *_: None
        liveness.machine_identity = lambda: node
        lease.BEAT_S = 0.1
        lease.PATIENCE_S = 2.0
        lease.SETTLE_S = 0.3
        lease._POLL_S = 0.2
    if float(pause):
        datasets._BATCH_ROWS = 5
        split_writer._SAVE_PROGRESS_S = 0
        write = split_writer.Sink.write

        def write_slowly(self: split_writer.Sink, array: np.ndarray) -> None:
            print("writing", flush=True)
            time.sleep(float(pause))
            write(self, array)

        split_writer.Sink.write = write_slowly
    print(
        build.prepare_store(
            datasets.open_dataset(Path(dataset)), Path(tokenizer), Path(cache), 100_000, 1, False
        )
    )
