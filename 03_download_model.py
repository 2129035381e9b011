#!/usr/bin/env python3
"""Stage 03: fetch a model or raw text from the Hugging Face Hub, or make a model from scratch.

  python 03_download_model.py --model-name ORG/NAME
  python 03_download_model.py --model-name ORG/NAME --revision v1.0 --dry-run
  python 03_download_model.py --dataset-name ORG/NAME --include 'en/part.0000*.json.gz'
  python 03_download_model.py --from-scratch --model-size tiny --train-tokenizer hf_datasets/corpus
  python 03_download_model.py --from-scratch --config-json FILE --tokenizer .cache/models/ORG--NAME
  python 03_download_model.py --verify

A model becomes .cache/models/ORG--NAME/ (or .cache/models/scratch-tiny/), a plain directory that
can be copied to a machine without network and that `from_pretrained` loads: config, tokenizer and,
from the Hub, safetensors weights. Raw text becomes raw_text/ORG--NAME/, for stage 01. Each file is
checked against the digest the Hub declares; what a Hugging Face cache (HF_HOME) on this machine
holds is not fetched. Pickles and code only with the options that say so. A model from scratch has
no weights: stage 04 draws them from its seed. HF_TOKEN, --token or a login opens gated
repositories, HF_ENDPOINT names a mirror. --verify and --from-scratch never go online.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib.core import commands, log, manifest, offline, options, paths, publish, stage, units
from lib.core.errors import Problems
from lib.hub import raw_text, repository
from lib.models import directory, lookup, scratch, tokenizer, verify
from lib.models.scratch import Design

STAGE = "03_download_model.py"
KIND = directory.KIND
_MODES = {  # what may stand beside the option that chooses the mode
    "--model-name": {"model_name", "revision", "token", "allow_pickle", "trust_remote_code"},
    "--dataset-name": {"dataset_name", "revision", "token", "include", "dst_root"},
    "--from-scratch": {
        "from_scratch",
        "model_name",
        "model_size",
        "config_json",
        "vocab_size",
        "train_tokenizer",
        "tokenizer",
    },
    "--verify": {"verify", "dst_root"},
}


def parse(argv: Sequence[str]) -> options.Options:
    """Return the options of this stage; UsageError when they contradict each other."""
    parser = options.Parser(__doc__)
    add = parser.add_argument
    add(
        "--model-name",
        metavar="ORG/NAME",
        help="model to fetch; with --from-scratch the name to give (default: scratch-<size>)",
    )
    add(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="models go to DIR/models/",
    )
    add(
        "--verify",
        action="store_true",
        help="hash everything under --cache-dir, and the files under --dst-root if that is given, "
        "and name what is damaged, offline",
    )
    add = parser.add_argument_group("from the Hub").add_argument
    add("--revision", metavar="R", help="branch, tag or commit to fetch (default: main)")
    add(
        "--token",
        metavar="TOKEN",
        help="access token for gated and private repositories (default: HF_TOKEN, or a login)",
    )
    add(
        "--allow-pickle",
        action="store_true",
        help="where there are only pickled weights, convert them to safetensors; nothing but "
        "tensors is read from them",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="for a type of model that transformers does not know, fetch the code that comes with "
        "the model, and run it here; stages 04 and 05 run it only if they are told so, too",
    )
    add(
        "--dataset-name",
        metavar="ORG/NAME",
        help="dataset to fetch raw files of (default: none, a model is prepared)",
    )
    add(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="files of the dataset, by path; `*` also matches `/`; may be repeated; adds to what "
        "is there, unless --overwrite (default: none; '*' takes all)",
    )
    add(
        "--dst-root",
        type=Path,
        metavar="DIR",
        help="the files go to DIR/ORG--NAME/ (default: raw_text)",
    )
    add = parser.add_argument_group("from scratch").add_argument
    add("--from-scratch", action="store_true", help="make a model without weights, offline")
    add(
        "--model-size",
        choices=tuple(scratch.SIZES),
        help="number of parameters, about (default: none, it or --config-json is needed)",
    )
    add(
        "--config-json",
        type=Path,
        metavar="FILE",
        help="instead of a size: a config.json of any architecture that transformers knows "
        "(default: none)",
    )
    add(
        "--vocab-size",
        type=options.positive_int,
        metavar="N",
        help="tokens of the vocabulary; the model's is padded to a multiple of "
        f"{scratch.VOCABULARY_MULTIPLE} (default: what --tokenizer has, or FILE; else 1,024 "
        "for 1M, 4,096 for tiny, 32,000 for the others)",
    )
    add(
        "--train-tokenizer",
        type=Path,
        metavar="DATASET",
        help="train a byte-level BPE tokenizer on the train split of this dataset directory "
        "(default: none, it or --tokenizer is needed)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="directory with a tokenizer to copy (default: none)",
    )
    parser.add_common("fetch (threads, 2 connections each, 8 at most), hash or train (threads)")
    opts = parser.parse(argv)
    check_combination(opts)
    return opts


def choose_mode(opts: options.Options) -> str:
    """Return the option that says what to do."""
    for mode in ("--verify", "--from-scratch", "--dataset-name"):
        if getattr(opts, mode[2:].replace("-", "_")):
            return mode
    return "--model-name"


def check_combination(opts: options.Options) -> None:
    """Raise UsageError naming every contradiction among the options."""
    problems = Problems()
    mode = choose_mode(opts)
    for key in sorted(set.union(*_MODES.values()) - _MODES[mode]):
        if getattr(opts, key):
            places = " or ".join(place for place, keys in _MODES.items() if key in keys)
            problems.add(f"--{key.replace('_', '-')} belongs to {places}, not to {mode}")
    if mode == "--model-name" and not opts.model_name:
        problems.add(
            "nothing to prepare",
            run=commands.help_of(),
            expected="--model-name ORG/NAME, --dataset-name, --from-scratch or --verify",
        )
    if mode == "--dataset-name" and not opts.include:
        problems.add(
            "--dataset-name needs --include GLOB",
            expected="files to fetch, such as 'en/*.json.gz', or '*' for all of them",
        )
    if mode == "--from-scratch":
        if bool(opts.model_size) == bool(opts.config_json):
            problems.add(
                f"--from-scratch needs --model-size ({', '.join(scratch.SIZES)}) or "
                "--config-json FILE" + (", not both" if opts.model_size else "")
            )
        if bool(opts.train_tokenizer) == bool(opts.tokenizer):
            problems.add(
                "--from-scratch needs a tokenizer: --train-tokenizer DATASET or "
                "--tokenizer DIR" + (", not both" if opts.tokenizer else "")
            )
        if opts.train_tokenizer and (opts.vocab_size or 1 << 30) < tokenizer.SMALLEST_VOCABULARY:
            problems.add(
                f"--vocab-size {opts.vocab_size} is too small to train: the bytes and "
                f"special tokens alone take {tokenizer.SMALLEST_VOCABULARY}"
            )
    for key in ("model_name", "dataset_name"):
        if name := getattr(opts, key):
            problems.collect(partial(repository.check_name, name, f"--{key.replace('_', '-')}"))
    problems.raise_if_any()


def main(argv: list[str]) -> None:
    """Run the stage."""
    opts = parse(argv)
    {
        "--verify": verify_all,
        "--from-scratch": make_from_scratch,
        "--dataset-name": fetch_dataset,
        "--model-name": fetch_model,
    }[choose_mode(opts)](opts)


def fetch_model(opts: options.Options) -> None:
    """Fetch a model from the Hub."""
    # Check the inputs. Neither the Hub nor its library is needed to see that all is done.
    name = opts.model_name
    revision = opts.revision or "main"
    began = time.monotonic()
    target = paths.models_root(opts.cache_dir) / paths.model_dir_name(name)
    identity = {"options": {"model_name": name, "revision": revision}, "inputs": {}}
    if already_done(target, KIND, identity, opts, next_command(opts, name)):
        return

    # Plan.
    print_plan(
        opts,
        {
            "fetch": f"model {name} at {revision} from {repository.name_hub()}",
            "files": "config, tokenizer, safetensors weights, licence and model card",
            "into": target,
        },
    )
    if opts.dry_run:
        return

    # Ask the Hub, and refuse what cannot be trained before the large files come.
    from lib.hub.fetch import RemoteModel, mention_cache_in_errors

    with tempfile.TemporaryDirectory() as preview, mention_cache_in_errors(name, revision):
        model = RemoteModel.from_hub(
            name,
            revision,
            Path(preview),
            token=opts.token or "",
            allow_pickle=opts.allow_pickle,
            trust_code=opts.trust_remote_code,
        )
        with publish.Build(target, KIND, identity, opts.overwrite, resumable=True) as build:
            # Work.
            entries = model.fetch(
                build.dir,
                reuse_from=[target],
                workers=opts.num_workers,
                show_progress=not opts.no_progress,
            )

            # Verify and publish.
            from lib.models import check  # not before the Hub has set up the library for itself
            from lib.planning.advice import Advice

            facts = check.check_build(build, weights=True, name=name, trust_code=bool(model.code))
            training = Advice.of(build.dir, bool(model.code))
            build.publish(
                stage=STAGE,
                options=options.to_plain_values(opts),
                files=entries,
                summary={**facts.summary(), "memory": training.summary(), **model.summary()},
            )

    log.info(
        f"done in {units.duration(time.monotonic() - began)}: {model.describe_source()}; "
        f"{model.describe_checks()}"
    )
    facts.print(target, training.rows())
    log.info(f"next: {next_command(opts, name)}")


def fetch_dataset(opts: options.Options) -> None:
    """Fetch raw files of a dataset for stage 01."""
    # Check the inputs.
    name = opts.dataset_name
    revision = opts.revision or "main"
    began = time.monotonic()
    target = raw_text.locate_record(root := opts.dst_root or Path("raw_text"), name)
    opts.include, is_more = raw_text.merge_globs(target, revision, opts.include, opts.overwrite)
    identity = {
        "options": {"dataset_name": name, "revision": revision, "include": opts.include},
        "inputs": {},
    }
    then = commands.script("01_organize_data.py", "--src-dir", root)
    with raw_text.rename_paths_in_errors(target):
        if not is_more and already_done(target, raw_text.KIND, identity, opts, then):
            return

    # Plan.
    print_plan(
        opts,
        {
            "fetch": f"dataset {name} at {revision} from {repository.name_hub()}",
            "files": " or ".join(opts.include) + (", with those there" if is_more else ""),
            "into": target.parent,
        },
    )
    if opts.dry_run:
        return

    from lib.hub.fetch import find_raw_files

    dataset = find_raw_files(name, revision, opts.include, token=opts.token or "")
    raw_text.require_no_conflicts(target, dataset.files)
    raw_text.warn_about_outdated(target, dataset.files)
    with (
        raw_text.rename_paths_in_errors(target),
        publish.Build(
            target, raw_text.KIND, identity, opts.overwrite or is_more, resumable=True
        ) as build,
    ):
        # Work.
        entries = dataset.fetch_files(
            build.dir,
            reuse_from=[target.parent],
            workers=opts.num_workers,
            show_progress=not opts.no_progress,
        )

        # Publish: what is whole moves to its place, then the manifest says so.
        before = raw_text.list_fetched(target)
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(opts),
            files=raw_text.move_into_place(build.dir, target, entries),
            summary=dataset.summary(),
        )
        raw_text.delete_outdated(target, before)

    log.info(
        f"done in {units.duration(time.monotonic() - began)}: {dataset.describe_source()} in "
        f"{target.parent}; {dataset.describe_checks()}"
    )
    log.info(f"next: {then}")


def make_from_scratch(opts: options.Options) -> None:
    """Make the config and the tokenizer of a model that has no weights yet."""
    offline.enable()
    # Check the inputs.
    began = time.monotonic()
    design = Design(
        opts.model_size,
        opts.config_json,
        opts.vocab_size,
        (opts.train_tokenizer,) if opts.train_tokenizer else (),
        opts.tokenizer,
    )
    name = opts.model_name or design.choose_name()
    target = paths.models_root(opts.cache_dir) / paths.model_dir_name(name)
    identity = design.identity(name)
    if already_done(target, KIND, identity, opts, next_command(opts, name)):
        return
    vocabulary = design.vocabulary()

    # Plan.
    print_plan(
        opts,
        {
            "model": name,
            **design.describe(vocabulary),
            "tokenizer": design.describe_tokenizer(),
            "into": target,
        },
    )
    if opts.dry_run:
        return

    from lib.models import check
    from lib.planning.advice import Advice

    with publish.Build(target, KIND, identity, opts.overwrite) as build:
        # Work.
        design.write_tokenizer(build.dir, opts.num_workers, not opts.no_progress)
        config_facts = design.write_configs(build.dir, vocabulary)

        # Verify and publish.
        facts = check.check_build(build, weights=False, name=name)
        design.require_same(identity, name)
        training = Advice.of(build.dir)
        files = [manifest.file_entry(build.dir, path, "sha256") for path in build.files()]
        origin = {"source": "scratch", "commit": None}
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(opts),
            files=files,
            summary={**facts.summary(), "memory": training.summary(), **origin, **config_facts},
        )

    log.info(f"done in {units.duration(time.monotonic() - began)}")
    facts.print(target, training.rows())
    log.info(f"next: {next_command(opts, name)}")


def verify_all(opts: options.Options) -> None:
    """Hash everything prepared under the cache directory; ArtifactError naming what is damaged."""
    began = time.monotonic()
    found = verify.find_artifacts(opts.cache_dir, opts.dst_root)
    total = sum(artifact.bytes for artifact in found)
    print_plan(opts, {"verify": f"{units.counted(len(found), 'artifact')}, {units.size(total)}"})
    if opts.dry_run:
        return
    verify.check_all(found, opts.num_workers, not opts.no_progress)
    for path in verify.find_unfinished(opts.cache_dir):
        log.warn(f"not verified: {path} has no manifest (unfinished, or made elsewhere)")
    verify.require_whole(found)
    log.info(
        f"done in {units.duration(time.monotonic() - began)}: "
        f"{units.counted(len(found), 'artifact')}, "
        f"{units.size(total)}, every byte as it was written"
    )


def already_done(target: Path, kind: str, identity: dict, opts: options.Options, then: str) -> bool:
    """Tell whether the artifact is there; if so, print the next command."""
    if not publish.is_done(target, kind, identity, opts.overwrite, dry_run=opts.dry_run):
        return False
    place = target.parent if kind == raw_text.KIND else target
    log.info(f"already done: {place} (--overwrite makes it again)\nnext: {then}")
    return True


def print_plan(opts: options.Options, rows: dict[str, object]) -> None:
    """Print what will be done."""
    log.info("plan")
    log.table(rows)
    if opts.dry_run:
        log.info("dry run: the Hub was not asked and nothing was written")


def next_command(opts: options.Options, name: str) -> str:
    """Return the command of stage 04 that trains this model."""
    dataset = opts.train_tokenizer or lookup.guess_dataset()
    elsewhere = ["--cache-dir", str(opts.cache_dir)] if opts.cache_dir != Path(".cache") else []
    trust = ["--trust-remote-code"] if opts.trust_remote_code else []  # it was typed here, too
    return commands.train(
        "-e", paths.model_dir_name(name), "-d", dataset, "-m", name, *elsewhere, *trust
    )


if __name__ == "__main__":
    stage.run(main, network=True)
