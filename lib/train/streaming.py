"""`--streaming`: training from raw shards, without the stages that prepare a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lib.core import log
from lib.core.paths import streaming_root
from lib.hub.dataset import HubDataset
from lib.tokens import raw_shards
from lib.tokens.build import require_vocabulary
from lib.tokens.dataset import find_dataset
from lib.tokens.encode import Encoder
from lib.tokens.raw_shards import RawShards
from lib.tokens.raw_stream import RawDocuments
from lib.train import plan
from lib.train.config import Config


def open_shards(config: Config, begun: dict[str, Any]) -> RawShards:
    """Return the shards; UsageError or ArtifactError when there are none.

    begun: see Inputs; a run that has begun keeps the commit of a dataset on the Hub.
    """
    name = config.dataset_name[0]
    if not config.online:
        return raw_shards.open_directory(find_dataset(name))
    commit = begun.get("identity", {}).get("inputs", {}).get("commit", "main")
    root = streaming_root(config.cache_dir, name)
    dataset = HubDataset(name, commit, config.include or ["*"], root)
    return raw_shards.open_repository(name, dataset.commit, dataset.sizes, root, dataset)


def identity(config: Config, found: RawShards) -> dict[str, str]:
    """Return what a run that resumes must share of the shards: each rank goes on in its own part.
    """
    shared = {"dataset": found.fingerprint, "text field": text_field(config),
              "ranks": str(plan.degrees(config).dp_size(plan.launched_size()))}
    return {**shared, "commit": found.commit} if found.commit else shared


def text_field(config: Config) -> str:
    """Return the name of the field or column that holds the text."""
    return config.text_field or "text"


def part(config: Config, found: RawShards) -> RawDocuments:
    """Return this rank's part of the shards, nothing of it read yet."""
    degrees = plan.degrees(config)
    return RawDocuments(found, text_field(config), config.seed, degrees.dp_rank(log.rank()),
                        degrees.dp_size(plan.launched_size()))


def prepare(config: Config, found: RawShards, model_dir: Path, vocab_size: int) -> RawDocuments:
    """Return this rank's part, with processes that are about to tokenise it.

    Raises UsageError when the tokenizer does not fit the model or no document has the text field,
    ArtifactError when no document can be read.
    """
    encoder = Encoder(model_dir, 1)
    require_vocabulary(encoder.vocab_size, vocab_size, model_dir)
    documents = part(config, found)
    sample = documents.sample()
    encoder.tune(sample)
    workers = max(1, config.num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    documents.start(workers, model_dir, sample)
    log.info(f"streaming: {workers} worker process{'es' * (workers > 1)} per rank tokenise "
             f"{found.name} while training. This is for trying things out: a dataset of stages 01 "
             "and 02 costs a step next to nothing, is shuffled as a whole and may have a "
             "validation split")
    return documents
