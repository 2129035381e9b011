#!/usr/bin/env python3
"""How fast text becomes tokens, and tokens become batches, against what others do with the same.

  python benchmarks/tokens.py --dataset hf_datasets/demo --tokenizer .cache/models/demo

Everything runs on one core (one thread each). The dataset is read from the page cache. Prints a
table; ratios are of this one run. `datasets.map` gets the same tokenizer, batched, one process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

from lib.core import offline


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that an action takes, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="dataset of stage 02")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory")
    parser.add_argument("--slow-bytes", type=int, default=8_000_000,
                        help="bytes of text for what is slow (the Hugging Face tokenizer)")
    arguments = parser.parse_args()
    offline.enable()
    rows = [*tokenising(arguments), *loading(arguments)]
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name:<{width}}  {figure}")


def tokenising(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return rates in MB of text per second, one core, and whether ids are equal."""
    import datasets
    import numpy as np

    from lib.tokens.dataset import open_dataset
    from lib.tokens.encode import Encoder

    dataset = open_dataset(arguments.dataset)
    texts = [text for batch in dataset.documents("train") for text in batch]
    few, size = [], 0
    for text in texts:
        if size < arguments.slow_bytes:
            few.append(text)
            size += len(text)
    total = sum(map(len, texts))
    encoder = Encoder(arguments.tokenizer, 1)
    plain = [text.decode() for text in few]
    backend = encoder.tokenizer.backend_tokenizer
    raw_s, _ = timed(lambda: backend.encode_batch_fast(plain, add_special_tokens=False))
    fallback_s, (slow_ids, _) = timed(lambda: encoder.encode(few))
    encoder.tune(dataset.sample())
    encoder.encode(few[:2])
    fast_s, _ = timed(lambda: encoder.encode(texts))
    equal = np.array_equal(encoder.encode(few)[0], slow_ids)
    table = datasets.Dataset.from_dict({"text": plain})
    with tempfile.TemporaryDirectory() as cache:
        map_s, _ = timed(lambda: table.map(lambda rows: encoder.tokenizer(rows["text"]),
                                           batched=True, cache_file_name=f"{cache}/map.arrow"))
    fast, mapped = total / fast_s / 1e6, size / map_s / 1e6
    return [("store's encoder", f"{fast:.1f} MB/s ({type(encoder._engine).__name__}, ids equal: "
                                f"{equal})"),
            ("tokenizers, raw encode_batch_fast", f"{size / raw_s / 1e6:.2f} MB/s"),
            ("store's encoder without gigatoken", f"{size / fallback_s / 1e6:.2f} MB/s "
                                                  f"({raw_s / fallback_s:.2f} of raw)"),
            ("datasets.map(batched=True)", f"{mapped:.2f} MB/s; the store is {fast / mapped:.0f}×")]


def loading(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the loader's rate for windows in random order, and the time to the first batch."""
    import numpy as np
    import torch

    from lib.tokens.batches import Position, SampleStream
    from lib.tokens.order import Division
    from lib.tokens.samples import Windows

    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 60_000, 200_000_000, dtype=np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        for length in (2048, 8192):
            windows, steps = Windows(tokens, length), 200
            chosen = np.random.default_rng(1).integers(0, len(windows), (steps, 16))
            take_s, _ = timed(lambda w=windows, c=chosen: [len(w.take(some)) for some in c])
            found.append((f"random windows of {length}",
                          f"{steps * 16 * length / take_s / 1e6:,.0f} M tokens/s"))
            batches = SampleStream(windows, 0, Division(16, 1, 0, 1),
                                   torch.device("cpu")).steps(Position(), steps)
            first_s, _ = timed(lambda it=batches: next(it))
            rest_s, _ = timed(lambda it=batches: [None for _ in it])
            rate = (steps - 1) * 16 * length / rest_s / 1e6
            found.append((f"loader, windows of {length}", f"{rate:,.0f} M tokens/s, first batch "
                                                          f"after {first_s * 1000:.1f} ms"))
    return found


if __name__ == "__main__":
    main()
