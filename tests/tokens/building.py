"""Build a token store in a child process, for tests that disturb it."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import numpy as np

from lib.core import lease, log
from lib.tokens import build, split_writer
from lib.tokens import dataset as datasets
from lib.tokens.text_writer import TextTokenization


def prepare_store(dataset: str, tokenizer: str, cache: str, pause: str, node: str = "") -> None:
    """Build the token store and print its directory.

    pause: seconds before each write, which is announced; writes are small then, so that a test can
    act during the build. node: the machine as which this process acts, whose locks reach no other.
    """
    log.setup()
    if node:
        lease.fcntl.flock = lambda *_: None
        platform.node = lambda: node
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
            TextTokenization(datasets.open_dataset(Path(dataset)), Path(tokenizer), 1, False),
            Path(cache),
            100_000,
        )
    )
