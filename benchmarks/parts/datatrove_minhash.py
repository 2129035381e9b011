"""Run the MinHash pipeline of datatrove on a directory of JSON Lines; it prints what it kept.

  python datatrove_minhash.py INPUT WORK BANDS SIZE

Needs an environment with datatrove, spacy, xxhash, regex, orjson and nltk. One process runs all
steps, so its CPU seconds are those of one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig


def main(source: str, work: str, bands: int, size: int) -> None:
    """Run the four steps one after the other."""
    config = MinhashConfig(
        hash_config=HashConfig(precision=64),
        num_buckets=bands,
        hashes_per_bucket=size,
        n_grams=5,
        # Digits count in stage 02; by default, datatrove replaces them by 0.
        norm_config=TextNormConfig(norm_numbers=False),
    )
    reader = JsonlReader(source)
    steps = [
        [reader, MinhashDedupSignature(output_folder=f"{work}/signatures", config=config)],
        [
            MinhashDedupBuckets(
                input_folder=f"{work}/signatures", output_folder=f"{work}/buckets", config=config
            )
        ],
        [
            MinhashDedupCluster(
                input_folder=f"{work}/buckets", output_folder=f"{work}/removed", config=config
            )
        ],
        [
            reader,
            MinhashDedupFilter(input_folder=f"{work}/removed"),
            JsonlWriter(f"{work}/kept", compression=None),
        ],
    ]
    for number, pipeline in enumerate(steps):
        tasks = bands if number == 1 else 1
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=1, logging_dir=f"{work}/logs/{number}"
        ).run()
    rows = sum(len(path.read_text().splitlines()) for path in Path(work, "kept").iterdir())
    print(f"kept {rows}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
