"""`--streaming`: training from raw shards, without the stages that prepare a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lib.core import log
from lib.core.errors import Problems
from lib.core.options import Options
from lib.core.paths import streaming_root
from lib.hub.dataset import HubDataset
from lib.tokens import raw_shards, source
from lib.tokens.build import require_vocabulary
from lib.tokens.encode import Encoder
from lib.tokens.raw_shards import RawShards
from lib.tokens.streaming import Stream
from lib.train import plan


def check_options(opts: Options) -> None:
    """Raise UsageError that tells every option that does not go with streaming, or only with it."""
    problems = Problems()
    if not opts.streaming:
        for name in ("online", "include", "text_field"):
            if getattr(opts, name):
                problems.add(f"--{name.replace('_', '-')} belongs to --streaming")
        problems.raise_if_any()
        return
    if not opts.max_steps:
        problems.add("--streaming needs --max-steps: how many samples there are is not known")
    if opts.num_epochs:
        problems.add("--streaming ends at --max-steps, not after --num-epochs")
    if opts.packing != "concat":
        problems.add("--streaming has no --packing documents: packs need all documents at hand")
    if len(opts.dataset_name) > 1:
        problems.add("--streaming takes one dataset, no mixture",
                     found=", ".join(opts.dataset_name))
    if opts.prepare_only:
        problems.add("--prepare-only makes the token store, which --streaming does without")
    if opts.resume_with_changes:
        problems.add("--streaming has no --resume-with-changes: a cursor means nothing elsewhere")
    if opts.include and not opts.online:
        problems.add("--include chooses files of a dataset on the Hub, with --online")
    problems.raise_if_any()


def open_shards(opts: Options, begun: dict[str, Any]) -> RawShards:
    """Return the shards; UsageError or ArtifactError when there are none.

    begun: see Inputs; a run that has begun keeps the commit of a dataset on the Hub.
    """
    name = opts.dataset_name[0]
    if not opts.online:
        return raw_shards.open_directory(source.resolve(name))
    commit = begun.get("identity", {}).get("inputs", {}).get("commit", "main")
    root = streaming_root(opts.cache_dir, name)
    dataset = HubDataset(name, commit, opts.include or ["*"], root)
    return raw_shards.open_repository(name, dataset.commit, dataset.sizes, root, dataset)


def identity(opts: Options, found: RawShards) -> dict[str, str]:
    """Return what a run that resumes must share of the shards: each rank goes on in its own part.
    """
    shared = {"dataset": found.fingerprint, "text field": text_field(opts),
              "ranks": str(plan.launched_size())}
    return {**shared, "commit": found.commit} if found.commit else shared


def text_field(opts: Options) -> str:
    """Return the name of the field or column that holds the text."""
    return opts.text_field or "text"


def part(opts: Options, found: RawShards) -> Stream:
    """Return this rank's part of the shards, nothing of it read yet."""
    return Stream(found, text_field(opts), opts.seed, log.rank(), plan.launched_size())


def prepare(opts: Options, found: RawShards, model_dir: Path, vocab_size: int) -> Stream:
    """Return this rank's part, with processes that are about to tokenise it.

    Raises UsageError when the tokenizer does not fit the model or no document has the text field,
    ArtifactError when no document can be read.
    """
    encoder = Encoder(model_dir, 1)
    require_vocabulary(encoder.vocab_size, vocab_size, model_dir)
    stream = part(opts, found)
    sample = stream.sample()
    encoder.tune(sample)
    workers = max(1, opts.num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    stream.start(workers, model_dir, sample)
    log.info(f"streaming: {workers} worker process{'es' * (workers > 1)} per rank tokenise "
             f"{found.name} while training. This is for trying things out: a dataset of stages 01 "
             "and 02 costs a step next to nothing, is shuffled as a whole and may have a "
             "validation split")
    return stream
