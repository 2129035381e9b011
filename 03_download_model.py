#!/usr/bin/env python3
"""Stage 03: fetch a model from the Hugging Face Hub, or make one to train from scratch.

  python 03_download_model.py --model-name ORG/NAME
  python 03_download_model.py --model-name ORG/NAME --revision v1.0 --dry-run
  python 03_download_model.py --from-scratch --model-size tiny --train-tokenizer hf_datasets/corpus
  python 03_download_model.py --from-scratch --model-size 1B --tokenizer .cache/models/ORG--NAME

Writes .cache/models/ORG--NAME/ (or .cache/models/scratch-tiny/), a plain directory that can be
copied to a machine without network and that `from_pretrained` loads: config, tokenizer and, from
the Hub, safetensors weights, each file checked against the digest the Hub declares. Pickles and
code are never fetched. A model from scratch has no weights: stage 04 draws them from its seed.
From scratch nothing goes online. HF_TOKEN (or --token) opens gated models, HF_ENDPOINT names a
mirror.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import log, manifest, offline, options, paths, publish, stage, units
from lib.core.errors import Problems, StageError, UsageError
from lib.models import hub, resolve, scratch, tokenizer

if TYPE_CHECKING:
    from lib.models.check import Facts

STAGE, KIND = "03_download_model.py", resolve.KIND
_MOST_CONNECTIONS = 8


def parse(argv: Sequence[str]) -> options.Options:
    """Return the options of this stage; UsageError when they contradict each other."""
    parser = options.Parser(__doc__)
    add = parser.add_argument
    add("--model-name", metavar="ORG/NAME",
        help="model to fetch; with --from-scratch the name to give (default: scratch-<size>)")
    add("--cache-dir", type=Path, default=Path(".cache"), metavar="DIR",
        help="the model goes to DIR/models/")
    fetching = parser.add_argument_group("from the Hub")
    add = fetching.add_argument
    add("--revision", metavar="R", help="branch, tag or commit to fetch (default: main)")
    add("--token", metavar="TOKEN",
        help="access token for gated and private models (default: HF_TOKEN, or a login)")
    making = parser.add_argument_group("from scratch")
    add = making.add_argument
    add("--from-scratch", action="store_true", help="make a model without weights, offline")
    add("--model-size", choices=tuple(scratch.SIZES), help="number of parameters, about")
    add("--vocab-size", type=options.positive_int, metavar="N",
        help="tokens of the vocabulary; the model's is padded to a multiple of "
             f"{scratch.VOCABULARY_MULTIPLE} (default: 4,096 for tiny, else 32,000, or what "
             "--tokenizer has)")
    add("--train-tokenizer", type=Path, metavar="DATASET",
        help="train a byte-level BPE tokenizer on the train split of this dataset directory")
    add("--tokenizer", type=Path, metavar="DIR", help="directory with a tokenizer to copy")
    parser.add_common("fetch files (threads, 8 at most) or train the tokenizer (threads)")
    opts = parser.parse(argv)
    check_combination(opts)
    return opts


def check_combination(opts: options.Options) -> None:
    """Raise UsageError telling every contradiction among the options."""
    problems = Problems()
    if opts.from_scratch:
        if not opts.model_size:
            problems.add(f"--from-scratch needs --model-size ({', '.join(scratch.SIZES)})")
        if bool(opts.train_tokenizer) == bool(opts.tokenizer):
            problems.add("--from-scratch needs a tokenizer: --train-tokenizer DATASET or "
                         "--tokenizer DIR" + (", not both" if opts.tokenizer else ""))
        if opts.train_tokenizer and opts.vocab_size \
                and opts.vocab_size < tokenizer.SMALLEST_VOCABULARY:
            problems.add(f"--vocab-size {opts.vocab_size} is too small to train: the bytes and "
                         f"special tokens alone take {tokenizer.SMALLEST_VOCABULARY}")
        for flag in ("revision", "token"):
            if getattr(opts, flag):
                problems.add(f"--{flag} is for the Hub; --from-scratch does not go there")
    else:
        if not opts.model_name:
            problems.add("nothing to prepare", expected="--model-name ORG/NAME, or --from-scratch",
                         run=f"python {STAGE} --help")
        for flag in ("model_size", "vocab_size", "train_tokenizer", "tokenizer"):
            if getattr(opts, flag):
                problems.add(f"--{flag.replace('_', '-')} needs --from-scratch")
    if opts.model_name:
        try:
            hub.check_name(opts.model_name)
        except UsageError as error:
            problems.add(error)
    problems.raise_if_any()


def main(argv: list[str]) -> None:
    opts = parse(argv)
    if opts.from_scratch:
        make_from_scratch(opts)
    else:
        download(opts)


def download(opts: options.Options) -> None:
    """Fetch a model from the Hub."""
    # Check the inputs. Neither the Hub nor its library is needed to see that all is done.
    name, revision, began = opts.model_name, opts.revision or "main", time.monotonic()
    target = target_of(opts, name)
    identity = {"options": {"model_name": name, "revision": revision}, "inputs": {}}
    if already_done(opts, target, name, identity):
        return

    # Plan.
    where = os.environ.get("HF_ENDPOINT") or "the Hugging Face Hub"
    print_plan(opts, {
        "fetch": f"{name} at {revision} from {where}",
        "files": "config, tokenizer, safetensors weights, licence and model card",
        "into": target})
    if opts.dry_run:
        return

    # Ask the Hub, and refuse what cannot be trained before the large files come.
    source = hub.Hub(opts.token or "")
    repository = source.look_up(name, revision)
    with tempfile.TemporaryDirectory() as preview:
        files = source.choose(repository, Path(preview))
        refuse_untrainable(Path(preview), name)
    size = sum(file.size for file in files)
    log.info(f"commit {repository.commit}: {len(files)} files, {units.size(size)}")

    with publish.Build(target, KIND, identity, opts.overwrite, resumable=True) as build:
        # Work.
        publish.require_space(build.dir, hub.bytes_to_come(files, build.dir), name)
        entries = source.fetch(repository, files, build.dir, show_progress=not opts.no_progress,
                               workers=min(opts.num_workers, _MOST_CONNECTIONS))

        # Verify and publish.
        facts = examine(build, weights=True, name=name)
        build.publish(stage=STAGE, options=options.resolved(opts), files=entries,
                      summary={**asdict(facts), "source": "hub", "commit": repository.commit})

    seconds = time.monotonic() - began
    log.info(f"done in {units.duration(seconds)}: {len(files)} files, {units.size(size)}, each as "
             f"the Hub declares it ({units.size(size / seconds)}/s)")
    finish(opts, target, name, facts)


def make_from_scratch(opts: options.Options) -> None:
    """Make the config and the tokenizer of a model that has no weights yet."""
    offline.enable()
    # Check the inputs.
    size, began = scratch.SIZES[opts.model_size], time.monotonic()
    name = opts.model_name or scratch.default_name(opts.model_size)
    target = target_of(opts, name)
    identity = scratch_identity(opts, name)
    if already_done(opts, target, name, identity):
        return
    vocabulary = wanted_vocabulary(opts)

    # Plan.
    print_plan(opts, {
        "model": name, **scratch.described(opts.model_size, vocabulary),
        "tokenizer": f"trained on {opts.train_tokenizer}" if opts.train_tokenizer
                     else f"copied from {opts.tokenizer}",
        "into": target})
    if opts.dry_run:
        return

    with publish.Build(target, KIND, identity, opts.overwrite) as build:
        # Work.
        if opts.train_tokenizer:
            train_tokenizer(opts, vocabulary, size.context, build.dir)
        else:
            tokenizer.copy(opts.tokenizer, size.context, build.dir)
        ids = tokenizer.load(build.dir)
        scratch.write(build.dir, opts.model_size, vocabulary, ids.bos_token_id, ids.eos_token_id)

        # Verify and publish.
        facts = examine(build, weights=False, name=name)
        files = [manifest.file_entry(build.dir, path, "sha256")
                 for path in sorted(build.dir.iterdir())]
        build.publish(stage=STAGE, options=options.resolved(opts), files=files,
                      summary={**asdict(facts), "source": "scratch", "commit": None})

    log.info(f"done in {units.duration(time.monotonic() - began)}")
    finish(opts, target, name, facts)


def target_of(opts: options.Options, name: str) -> Path:
    return paths.models_root(opts.cache_dir) / paths.model_dir_name(name)


def already_done(opts: options.Options, target: Path, name: str, identity: dict[str, Any]) -> bool:
    """Tell whether the model is there; if so, print the next command."""
    if not publish.is_done(target, KIND, identity, opts.overwrite):
        return False
    log.info(f"already done: {target} (--overwrite makes it again)")
    log.info(f"next: {next_command(opts, name)}")
    return True


@contextmanager
def called(name: str, directory: Path) -> Iterator[None]:
    """Let errors about a directory that is soon gone speak of the model instead."""
    try:
        yield
    except StageError as error:
        for part in ("problem", "expected", "found", "run"):
            setattr(error, part, getattr(error, part).replace(str(directory), name))
        raise


def refuse_untrainable(preview: Path, name: str) -> None:
    """Raise UsageError when a config.json is not that of a model that can be trained."""
    from lib.models import architecture

    with called(name, preview):
        architecture.build_on_meta(preview)


def scratch_identity(opts: options.Options, name: str) -> dict[str, Any]:
    """Return what decides the content of a model from scratch, wherever its inputs lie."""
    if opts.train_tokenizer:
        inputs = {"dataset content": tokenizer.corpus_identity(opts.train_tokenizer)}
        vocabulary = wanted_vocabulary(opts)
    else:
        inputs = {"tokenizer files": tokenizer.identity(opts.tokenizer)}
        vocabulary = opts.vocab_size
    return {"options": {"from_scratch": True, "model_name": name, "model_size": opts.model_size,
                        "vocab_size": vocabulary}, "inputs": inputs}


def wanted_vocabulary(opts: options.Options) -> int:
    """Return the tokens to make room for; UsageError when --vocab-size cannot hold a tokenizer."""
    if opts.train_tokenizer:
        return opts.vocab_size or scratch.SIZES[opts.model_size].vocabulary
    tokens = len(tokenizer.load(opts.tokenizer))
    if opts.vocab_size and tokens > opts.vocab_size:
        raise UsageError(f"--vocab-size {opts.vocab_size} is smaller than the tokenizer",
                         found=f"{tokens} tokens in {opts.tokenizer}",
                         expected=f"--vocab-size {tokens} or more, or none")
    return opts.vocab_size or tokens


def train_tokenizer(opts: options.Options, vocabulary: int, context: int, into: Path) -> None:
    """Train the tokenizer, and say what it saw and whether it came out smaller than asked."""
    made, sample = tokenizer.train(opts.train_tokenizer, vocabulary, context, into,
                                   workers=opts.num_workers, show_progress=not opts.no_progress)
    log.info(f"tokenizer: {made} tokens from {sample}")
    if made < vocabulary:
        log.warn(f"{opts.train_tokenizer} holds too little text for {vocabulary} tokens: the "
                 f"tokenizer has {made}, the other rows of the model's vocabulary stay unused")


def examine(build: publish.Build, *, weights: bool, name: str) -> Facts:
    """Check the finished directory; what fails here would fail again, so none of it is kept."""
    from lib.models import check

    try:
        with called(name, build.dir):
            return check.examine(build.dir, weights=weights)
    except StageError:
        build.resumable = False
        raise


def print_plan(opts: options.Options, rows: dict[str, object]) -> None:
    log.info("plan")
    log.table(rows)
    if opts.dry_run:
        log.info("dry run: the Hub was not asked and nothing was written")


def finish(opts: options.Options, target: Path, name: str, facts: Facts) -> None:
    """Print what the model is and how to train it."""
    unused = facts.vocabulary - facts.tokens
    log.table({
        "model": target,
        "parameters": f"{facts.parameters:,} ({units.count(facts.parameters)}), {facts.dtype}",
        "vocabulary": f"{facts.vocabulary} rows, {facts.tokens} tokens in the tokenizer"
                      + (f" ({unused} rows to spare)" if unused else ""),
        "context": f"{facts.context} tokens" if facts.context else "not limited by the config",
    })
    log.info(f"next: {next_command(opts, name)}")


def next_command(opts: options.Options, name: str) -> str:
    """Return the command of stage 04 that trains this model."""
    there = sorted(path.parent for path in Path("hf_datasets").glob("*/manifest.json"))
    dataset = opts.train_tokenizer or (there[0] if there else Path("hf_datasets/corpus"))
    words = ["torchrun", "04_train_fsdp.py", "-e", paths.model_dir_name(name), "-d", str(dataset),
             "-m", name]
    if opts.cache_dir != Path(".cache"):
        words += ["--cache-dir", str(opts.cache_dir)]
    return shlex.join(words)


if __name__ == "__main__":
    stage.run(main, network=True)
