#!/usr/bin/env python3
"""Stage 03: download a model or raw text from the Hugging Face Hub, or create a model from scratch.

  python 03_download_model.py --model-name ORG/NAME
  python 03_download_model.py --model-name ORG/NAME --revision v1.0 --dry-run
  python 03_download_model.py --dataset-name ORG/NAME --include 'en/part.0000*.json.gz'
  python 03_download_model.py --from-scratch --model-size tiny --train-tokenizer hf_datasets/corpus
  python 03_download_model.py --from-scratch --config-json FILE --tokenizer .cache/models/ORG--NAME
  python 03_download_model.py --verify

A model is written to .cache/models/ORG--NAME/ (or .cache/models/scratch-tiny/): config, tokenizer
and, from the Hub, safetensors weights. `from_pretrained` loads this plain directory, which can be
copied to a machine without a network. Raw text is written to raw_text/ORG--NAME/, for stage 01.
Each file is checked against the digest that the Hub declares. Files in the Hugging Face cache of
this machine (HF_HOME) are not downloaded again. Pickled weights are downloaded only with
--allow-pickle, and code only with --trust-remote-code. A model from scratch has no weights; stage
04 initialises them from its seed. HF_TOKEN, --token or a login gives access to gated repositories,
and HF_ENDPOINT names a mirror. --verify and --from-scratch never use the network.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lib.core import artifact_checks as checks
from lib.core import commands, declared, log, manifest, options, paths, publish, stage, units
from lib.core.declared import CommonOptions, option
from lib.core.errors import Problems
from lib.hub import raw_text, repository
from lib.models import directory, lookup, scratch, scratch_sizes, tokenizer
from lib.models.scratch import Design

STAGE = "03_download_model.py"
KIND = directory.KIND
_MODES = {  # the options that each mode accepts
    "--model-name": {"model_name", "revision", "token", "allow_pickle", "trust_remote_code"},
    "--dataset-name": {"dataset_name", "revision", "token", "include", "dst_root"},
    "--from-scratch": {
        "from_scratch",
        "model_name",
        "model_size",
        "config_json",
        "vocab_size",
        "train_tokenizer",
        "tokenizer_kind",
        "tokenizer",
    },
    "--verify": {"verify", "dst_root"},
}


@dataclass(frozen=True)
class DownloadOptions(CommonOptions):
    """Contains the options of this stage."""

    model_name: str | None = option(
        None,
        aliases=("hf_model", "model_name_or_path", "base_model"),
        metavar="ORG/NAME",
        help="model to download; with --from-scratch, the name of the new model (default: "
        "scratch-<size>)",
    )
    cache_dir: Path = option(Path(".cache"), parse=Path, help="write models to DIR/models/")
    verify: bool = option(
        False,
        help="check the hash of every file under --cache-dir, and under --dst-root if it is given, "
        "and report damaged files; needs no network",
    )
    revision: str | None = option(
        None,
        aliases=("model_revision", "revision_of_model"),
        group="from the Hub",
        metavar="R",
        help="branch, tag or commit to download (default: main)",
    )
    token: str | None = option(
        None,
        aliases=("hub_token", "hf_token"),
        metavar="TOKEN",
        help="access token for gated and private repositories (default: HF_TOKEN, or a login)",
    )
    allow_pickle: bool = option(
        False,
        help="if a model has only pickled weights, convert them to safetensors; only tensors are "
        "read, no code runs",
    )
    trust_remote_code: bool = option(
        False,
        help="if transformers does not know the model's type, download the code in its repository "
        "and run it; stages 04 and 05 need this option too",
    )
    dataset_name: str | None = option(
        None,
        metavar="ORG/NAME",
        help="download the raw files of this dataset instead of a model (default: none)",
    )
    include: list[str] = option(
        [],
        metavar="GLOB",
        help="files of the dataset to download, by path; `*` also matches `/`; may be repeated. "
        "Without --overwrite, files of earlier downloads stay (required with --dataset-name; '*' "
        "takes all)",
    )
    dst_root: Path | None = option(
        None, parse=Path, help="write the files to DIR/ORG--NAME/ (default: raw_text)"
    )
    from_scratch: bool = option(
        False, group="from scratch", help="create a model without weights; no network"
    )
    model_size: str | None = option(
        None,
        choices=tuple(scratch_sizes.SIZES),
        help="approximate number of parameters (default: none; required without --config-json)",
    )
    config_json: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="instead of a size, a config.json of any architecture that transformers supports "
        "(default: none)",
    )
    vocab_size: int | None = option(
        None,
        parse=options.positive_int,
        help="tokens in the vocabulary; the model's embedding is padded to a multiple of "
        f"{scratch_sizes.VOCABULARY_MULTIPLE} (default: as in --tokenizer or --config-json; "
        "otherwise 1,024 for 1M, 4,096 for tiny, 32,000 for the other sizes)",
    )
    train_tokenizer: Path | None = option(
        None,
        parse=Path,
        metavar="DATASET",
        help="train a BPE tokenizer on the train split of this dataset directory "
        "(default: none; required without --tokenizer)",
    )
    tokenizer_kind: str | None = option(
        None,
        choices=tokenizer.KINDS,
        help="kind of the trained tokenizer; llama.cpp's converter reads only sentencepiece, which "
        "decodes the character ▁ as a space (default: byte-level)",
    )
    tokenizer: Path | None = option(
        None, parse=Path, help="directory with a tokenizer to copy (default: none)"
    )
    num_workers: int = option(1)


def parse(argv: Sequence[str]) -> DownloadOptions:
    """Return the options of this stage. Raises UsageError if they contradict each other."""
    parser = options.Parser(__doc__)
    declared.add_options(parser, DownloadOptions)
    parser.add_common("train a tokenizer, or threads that hash; downloads use at most 8")
    opts = declared.drop_repeats(declared.read_options(DownloadOptions, parser.parse(argv)))
    check_combination(opts)
    return opts


def choose_mode(opts: DownloadOptions) -> str:
    """Return the option that selects the mode of this run."""
    for mode in ("--verify", "--from-scratch", "--dataset-name"):
        if getattr(opts, mode[2:].replace("-", "_")):
            return mode
    return "--model-name"


def check_combination(opts: DownloadOptions) -> None:
    """Raise one UsageError with all contradictions among the options."""
    problems = Problems()
    mode = choose_mode(opts)
    for key in sorted(set.union(*_MODES.values()) - _MODES[mode]):
        if getattr(opts, key):
            places = " or ".join(place for place, keys in _MODES.items() if key in keys)
            problems.add(f"--{key.replace('_', '-')} is an option of {places}, not of {mode}")
    if mode == "--model-name" and not opts.model_name:
        problems.add(
            "no model or dataset is named",
            run=commands.help_of(),
            expected="--model-name ORG/NAME, or "
            + ", ".join(other for other in _MODES if other != mode),
        )
    if mode == "--dataset-name" and not opts.include:
        expected = "paths of files to download, such as 'en/*.json.gz', or '*' for all files"
        problems.add("--dataset-name needs --include GLOB", expected=expected)
    if mode == "--from-scratch":
        for problem in scratch.find_option_problems(
            (opts.model_size, opts.config_json),
            (opts.train_tokenizer, opts.tokenizer),
            opts.vocab_size,
        ):
            problems.add(problem)
    if opts.tokenizer_kind and opts.tokenizer:
        problems.add("--tokenizer DIR is only copied, so it cannot have a --tokenizer-kind")
    for key in ("model_name", "dataset_name"):
        if name := getattr(opts, key):
            problems.collect(partial(repository.check_name, name, f"--{key.replace('_', '-')}"))
    problems.raise_if_any()


def main(argv: list[str]) -> None:
    """Run the stage."""
    opts = parse(argv)
    modes: dict[str, Callable[[DownloadOptions], None]] = {
        "--verify": verify_all,
        "--from-scratch": create_from_scratch,
        "--dataset-name": download_dataset,
        "--model-name": download_model,
    }
    modes[choose_mode(opts)](opts)


def download_model(opts: DownloadOptions) -> None:
    """Download a model from the Hub."""
    # Check the inputs. An earlier run's result is recognised without the Hub and its library.
    name = opts.model_name or ""
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
            "download": f"model {name} at {revision} from {repository.name_hub()}",
            "files": "config, tokenizer, safetensors weights, licence and model card",
            "to": target,
        },
    )
    if opts.dry_run:
        return

    # Ask the Hub, and refuse models that cannot be trained before large files are downloaded.
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
            from lib.models import check  # after RemoteModel has set the library's variables
            from lib.planning.training_memory import TrainingMemory

            facts = check.check_build(build, weights=True, name=name, trust_code=bool(model.code))
            training = TrainingMemory.estimate(build.dir, bool(model.code))
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
    facts.print(target, training.table_rows())
    log.info(f"next: {next_command(opts, name)}")


def download_dataset(opts: DownloadOptions) -> None:
    """Download raw files of a dataset for stage 01."""
    # Check the inputs.
    name = opts.dataset_name or ""
    revision = opts.revision or "main"
    began = time.monotonic()
    target = raw_text.locate_record(root := opts.dst_root or Path("raw_text"), name)
    globs, is_more = raw_text.merge_globs(target, revision, opts.include, opts.overwrite)
    names = {"dataset_name": name, "revision": revision, "include": globs}
    identity = {"options": names, "inputs": {}}
    next_stage = commands.script("01_organize_data.py", "--src-dir", root)
    with raw_text.rename_paths_in_errors(target):
        if not is_more and already_done(target, raw_text.KIND, identity, opts, next_stage):
            return

    # Plan.
    print_plan(
        opts,
        {
            "download": f"dataset {name} at {revision} from {repository.name_hub()}",
            "files": " or ".join(globs) + (", with earlier files" if is_more else ""),
            "to": target.parent,
        },
    )
    if opts.dry_run:
        return

    from lib.hub.fetch import find_raw_files

    dataset = find_raw_files(name, revision, globs, token=opts.token or "")
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
        raw_text.warn_about_placeholders(build.dir, entries)

        # Publish: move the complete files to their places, then write the manifest.
        before = raw_text.list_fetched(target)
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(replace(opts, include=globs)),
            files=raw_text.move_into_place(build.dir, target, entries),
            summary=dataset.summary(),
        )
        raw_text.delete_outdated(target, before)

    log.info(
        f"done in {units.duration(time.monotonic() - began)}: {dataset.describe_source()} in "
        f"{target.parent}; {dataset.describe_checks()}\nnext: {next_stage}"
    )


def create_from_scratch(opts: DownloadOptions) -> None:
    """Create the config and the tokenizer of a model without weights."""
    from lib.core import offline  # the other modes use the network

    offline.enable_offline_mode()
    # Check the inputs.
    began = time.monotonic()
    design = Design(
        opts.model_size,
        opts.config_json,
        opts.vocab_size,
        (opts.train_tokenizer,) if opts.train_tokenizer else (),
        opts.tokenizer,
        tokenizer_kind=opts.tokenizer_kind or tokenizer.BYTE_LEVEL,
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
            "to": target,
        },
    )
    if opts.dry_run:
        return

    from lib.models import check
    from lib.planning.training_memory import TrainingMemory

    with publish.Build(target, KIND, identity, opts.overwrite) as build:
        # Work.
        design.write_tokenizer(build.dir, opts.num_workers, not opts.no_progress)
        config_facts = design.write_configs(build.dir, vocabulary)

        # Verify and publish.
        facts = check.check_build(build, weights=False, name=name)
        design.require_same(identity, name)
        training = TrainingMemory.estimate(build.dir)
        origin = {"source": "scratch", "commit": None}
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(opts),
            files=[manifest.file_entry(build.dir, path, "sha256") for path in build.files()],
            summary={**facts.summary(), "memory": training.summary(), **origin, **config_facts},
        )

    log.info(f"done in {units.duration(time.monotonic() - began)}")
    facts.print(target, training.table_rows())
    log.info(f"next: {next_command(opts, name)}")


def verify_all(opts: DownloadOptions) -> None:
    """Check the hash of every prepared file. Raises ArtifactError with all damaged files."""
    began = time.monotonic()
    places = (opts.cache_dir, opts.dst_root)
    artifacts = checks.find_artifacts(*places, directory.list_strays, lookup.model_remedy)
    size = units.size(sum(artifact.bytes for artifact in artifacts))
    summary = f"{units.counted(len(artifacts), 'artifact')}, {size}"
    print_plan(opts, {"verify": summary})
    if opts.dry_run:
        return
    checks.hash_artifacts(artifacts, opts.num_workers, not opts.no_progress)
    for path in checks.list_unfinished(opts.cache_dir):
        log.warn(f"not verified: {path} has no manifest (unfinished, or made elsewhere)")
    checks.require_intact_artifacts(artifacts)
    log.info(f"done in {units.duration(time.monotonic() - began)}: {summary}, no damage found")


def already_done(target: Path, kind: str, identity: dict, opts: DownloadOptions, hint: str) -> bool:
    """Return whether the artifact is complete; if so, print that and the next command (hint)."""
    if not publish.is_done(target, kind, identity, opts.overwrite, dry_run=opts.dry_run):
        return False
    target = target.parent if kind == raw_text.KIND else target
    log.info(f"already done: {target} (--overwrite repeats it)\nnext: {hint}")
    return True


def print_plan(opts: DownloadOptions, rows: dict[str, object]) -> None:
    """Print the rows of the plan and, for a dry run, that nothing was done."""
    log.info("plan")
    log.table(rows)
    if opts.dry_run:
        log.info("dry run: no request was sent and nothing was written")


def next_command(opts: DownloadOptions, name: str) -> str:
    """Return the command of stage 04 that trains this model."""
    dataset = opts.train_tokenizer or lookup.guess_dataset()
    words = ["-e", paths.model_dir_name(name), "-d", dataset, "-m", name]
    words += ["--cache-dir", str(opts.cache_dir)] if opts.cache_dir != Path(".cache") else []
    words += ["--trust-remote-code"] if opts.trust_remote_code else []
    return commands.train(*words)


if __name__ == "__main__":
    stage.run_main(main, network=True)
