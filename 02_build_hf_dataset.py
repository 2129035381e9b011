#!/usr/bin/env python3
"""Stage 02: turn files into an Arrow dataset, one row of text per document, or per conversation.

  python 02_build_hf_dataset.py
  python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/corpus
  python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/chats --format chat
  python 02_build_hf_dataset.py --fields text,meta.title --validation-percent 1 --dedup exact
  python 02_build_hf_dataset.py --only-splits 0-4   (on each of several machines, other numbers)
  python 02_build_hf_dataset.py --merge             (on one of them, when all are done)

Reads the splits of stage 01, or any directory. Plain text of any suffix is one document; JSON is
one per element of a top-level list (or per value), JSON Lines one per line, YAML one per YAML
document, CSV and TSV one per row; each also as .gz .bz2 .xz .zst. The text of a structured document
is every string value in it, joined by newlines. With --format chat a record is a conversation:
messages, prompt and completion, ShareGPT's conversations, or alpaca's instruction and output.
Writes a directory for datasets.load_from_disk, and in it errors.jsonl with everything that failed
or gave nothing. Never goes online.
"""

from __future__ import annotations

import argparse
import codecs
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lib.core import commands, log, options, publish, stage, units
from lib.core.errors import Problems
from lib.core.progress import Progress
from lib.corpus import inputs, pool, report, split_parts, work_units
from lib.corpus.chat_tally import ChatTally
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.inputs import InputFile
from lib.corpus.pool import Pool
from lib.corpus.scan import identify_files
from lib.corpus.tally import CHAT, ERRORS, FORMATS, TEXT, RowOptions

STAGE = "02_build_hf_dataset.py"
KIND = "dataset/1"


def parse(argv: Sequence[str]) -> options.Options:
    """Return the options of this stage."""
    parser = options.Parser(__doc__)
    add = parser.add_argument
    add(
        "--data-folder",
        type=Path,
        default=Path("splits"),
        metavar="DIR",
        help="splits made by stage 01, or any directory of files",
    )
    add(
        "--save-dir",
        type=Path,
        default=Path("hf_datasets/corpus"),
        metavar="DIR",
        help="dataset directory to create",
    )
    add(
        "--format",
        choices=FORMATS,
        default="text",
        help="`text`: one row of text per document; `chat`: one conversation per record "
        "(messages, prompt/completion, ShareGPT, alpaca), with its turns kept apart",
    )
    add(
        "--fields",
        type=_parse_names,
        action="extend",
        default=[],
        metavar="A,B.C",
        help="of structured documents keep only these (dotted) keys (default: every string)",
    )
    add(
        "--strings",
        choices=("joined", "rows"),
        default="joined",
        help="join the strings of a document by newlines, or make each a row of its own",
    )
    add(
        "--min-chars",
        type=options.count,
        default=0,
        metavar="N",
        help="drop rows of fewer characters, counted in all turns of a conversation",
    )
    add(
        "--fallback-encoding",
        type=_parse_encoding,
        metavar="NAME",
        help="how to read what is neither UTF-8 nor UTF-16 with a byte order mark, cp1252 for "
        "example (default: replace what is not text by U+FFFD)",
    )
    add(
        "--dedup",
        choices=("none", "exact"),
        default="none",
        help="drop rows whose text, or turns and tools, are those of an earlier row (about 25 "
        "bytes of memory per row)",
    )
    add(
        "--validation-percent",
        type=options.percent,
        default=0.0,
        metavar="P",
        help="percentage of the rows that become a validation split, drawn by a hash of their "
        "text (0: none)",
    )
    add(
        "--keep-source",
        action="store_true",
        help="add a column `source` with the relative path of the file (with --format chat it is "
        "always there)",
    )
    add(
        "--max-error-rate",
        type=options.fraction,
        default=1.0,
        metavar="F",
        help="fail when more than this fraction of the files could not be read in full (1: never)",
    )
    add(
        "--only-splits",
        type=split_parts.parse_numbers,
        metavar="0-4",
        help="build only the parts of these splits of stage 01 (`0-4,7`), for --merge "
        "(default: all splits, in one go)",
    )
    add(
        "--merge",
        action="store_true",
        help="put the parts of all splits together; the result is that of one machine, byte for "
        "byte",
    )
    parser.add_common("read files")
    return parser.parse(argv)


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between, got {text!r}")
    return names


def _parse_encoding(text: str) -> str:
    """Return the usual name of an encoding of text."""
    try:
        "".encode(text)
        return codecs.lookup(text).name
    except (LookupError, ValueError):
        raise argparse.ArgumentTypeError(f"no encoding of text is called {text!r}") from None


def check_options(opts: options.Options) -> None:
    """Raise UsageError when options contradict each other or input and output overlap."""
    folder = opts.data_folder
    save_dir = opts.save_dir
    problems = Problems()
    inputs.require_raw(folder, "--data-folder")
    if opts.merge and opts.only_splits is not None:
        problems.add(
            "--only-splits and --merge exclude each other",
            expected="--only-splits on each machine, then --merge on one",
        )
    if opts.format == CHAT:
        for option, is_given in (("--fields", opts.fields), ("--strings", opts.strings == "rows")):
            if is_given:
                problems.add(
                    f"{option} and --format chat exclude each other",
                    expected=f"no {option}: a conversation is taken whole",
                )
    if save_dir.resolve().is_relative_to(folder.resolve()):
        problems.add(
            f"--save-dir {save_dir} lies in --data-folder {folder}",
            expected="a place where the dataset is not read as input again",
        )
    elif folder.resolve().is_relative_to(save_dir.resolve()):
        problems.add(f"--save-dir {save_dir} contains --data-folder {folder}")
    problems.raise_if_any()


def print_plan(opts: options.Options, files: Sequence[InputFile], count: int, needed: int) -> None:
    """Print what will be made."""
    total = sum(file.bytes for file in files)
    if opts.format == CHAT:
        rows = "one per conversation"
    else:
        rows = "one per document" if opts.strings == "joined" else "one per string"
    log.info(f"build {opts.data_folder} → {opts.save_dir}")
    log.table(
        {
            "read": f"{units.counted(len(files), 'file')}, {units.size(total)}, "
            f"in {units.counted(count, 'unit')} by "
            f"{units.counted(min(opts.num_workers, count), 'worker')}",
            "rows": rows,
            **(
                {}
                if opts.format == CHAT
                else {"fields": ", ".join(opts.fields) or "every string value"}
            ),
            "splits": f"train, validation ({opts.validation_percent:g} % of the rows)"
            if opts.validation_percent
            else "train",
            "room": f"about {units.size(needed)}",
        }
    )


def make_identity(opts: options.Options, files: Sequence[InputFile]) -> dict:
    """Return what decides the content of the dataset, on however many machines it is built."""
    since_chat = ["format"] if opts.format == TEXT else []  # datasets of text have no such option
    chosen = options.identity(opts, "data_folder", "save_dir", "only_splits", "merge", *since_chat)
    return {"options": chosen, "inputs": identify_files(files)}


def build_splits(
    opts: options.Options, files: Sequence[InputFile], row_options: RowOptions
) -> None:
    """Build the parts of some splits, each an artifact of its own, and say what comes next."""
    began = time.monotonic()
    root = split_parts.locate_parts(opts.save_dir)
    by_split = inputs.group_by_split(files)
    names = split_parts.select_splits(list(by_split), opts.only_splits)
    needed = work_units.estimate_room([file for name in names for file in by_split[name]])
    log.info(f"build the parts of {', '.join(names)} → {root}, about {units.size(needed)}")
    publish.require_space(root, needed, "the parts")
    for name in names:
        identity = split_parts.make_parts_identity(make_identity(opts, files), by_split[name])
        if publish.is_done(
            root / name, split_parts.KIND, identity, opts.overwrite, dry_run=opts.dry_run
        ):
            log.info(f"already done: {root / name}")
        elif not opts.dry_run:
            build_split(
                opts,
                publish.Build(
                    root / name, split_parts.KIND, identity, opts.overwrite, resumable=True
                ),
                by_split[name],
                row_options,
            )
    if opts.dry_run:
        log.info("dry run: nothing was written")
        return
    log.info(f"done in {units.duration(time.monotonic() - began)}")
    log.info(
        f"next, when all {len(by_split)} splits are built: "
        + commands.as_typed("--merge", drop=["--only-splits"])
    )


def build_split(
    opts: options.Options, build: publish.Build, files: Sequence[InputFile], row_options: RowOptions
) -> None:
    """Build the parts of one split; a run that was killed goes on after its finished units."""
    with build:
        tasks = work_units.cut_files(opts.data_folder, files, build.dir, row_options)
        total = sum(file.bytes for file in files)
        rows = 0
        listed = []
        chat = ChatTally()
        lines_before = 0
        with (
            Pool(min(opts.num_workers, len(tasks)), split_parts.process_unit) as workers,
            Progress(build.target.name, total, "B", not opts.no_progress) as bar,
        ):
            for done in workers.run(tasks):
                work_units.require_unchanged(done)
                listed += split_parts.list_files(done)
                rows += sum(done.rows.values())
                lines_before = 0 if done.unit.begins else lines_before
                chat.add(done.tally.chat, lines_before)
                lines_before += done.lines_of_part
                bar.advance(done.unit.bytes)
        if error := chat.find_mixture():
            build.resumable = False
            raise error
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(opts),
            files=listed,
            summary={"files": len(files), "bytes": total, "rows": rows},
        )
    log.info(
        f"{build.target.name}: {units.counted(rows, 'row')} of {units.counted(len(files), 'file')}"
    )


def add_units(
    opts: options.Options, dataset: DatasetWriter, tasks: Sequence[work_units.WorkUnit]
) -> int:
    """Add what the units give that are not in a dataset yet: read now, or kept for the merge.

    Returns the bytes of these units.
    """
    if dataset.units:
        log.info(
            f"going on after unit {dataset.units} of {len(tasks)}, where a run before this "
            "one was stopped"
        )
    total = sum(task.bytes for task in tasks)
    left = tasks[dataset.units :]
    with (
        Pool(min(opts.num_workers, len(tasks))) as workers,
        Progress("merge" if opts.merge else "build", total, "B", not opts.no_progress) as bar,
    ):
        bar.skip(total - sum(task.bytes for task in left))
        for done in split_parts.read_results(left) if opts.merge else workers.run(left):
            work_units.require_unchanged(done)
            dataset.add(done)
            bar.advance(done.unit.bytes)
    return sum(task.bytes for task in left)


def check_result(
    opts: options.Options,
    row_options: RowOptions,
    dataset: DatasetWriter,
    files: int,
    build: publish.Build,
) -> None:
    """Raise UsageError when there is no text, or too many files failed; warn of odd results."""
    if error := report.find_refusal(
        dataset, row_options, opts.data_folder, files, opts.max_error_rate
    ):
        left = opts.save_dir.with_name(f"{opts.save_dir.name}.{ERRORS}")
        shutil.copyfile(dataset.errors, left)
        build.resumable = False  # other options or inputs are needed, so nothing goes on from here
        error.found += f"\nlisted in {left}; nothing was published"
        raise error
    for text in report.list_warnings(
        dataset.tally, row_options, dataset.rows, dataset.duplicates, opts.save_dir
    ):
        log.warn(text)


def print_summary(
    opts: options.Options,
    row_options: RowOptions,
    dataset: DatasetWriter,
    files: int,
    total: int,
    read: int,
    seconds: float,
) -> None:
    """Print what went in, what came out, what did not, and what comes next.

    read: bytes that this launch took in `seconds`; the rest of `total` was done before.
    """
    earlier = f"; {units.size(total - read)} were done before" if read < total else ""
    log.info(
        f"done in {units.duration(seconds)}, {units.size(read / max(seconds, 1e-9))}/s{earlier}"
    )
    log.table(report.format_summary(dataset, row_options, opts.save_dir, files, total))
    print_next(opts)


def print_next(opts: options.Options) -> None:
    """Print the next command, with and without a model at hand."""
    fetch = commands.script("03_download_model.py", "--model-name", "ORG/NAME")
    if opts.format == CHAT:
        log.info(f"next: fetch a model, at best one with a chat template: {fetch}")
        log.info(
            "then: look at what of some samples is trained: "
            + commands.train(
                "-e", "first", "-d", opts.save_dir, "--prepare-only", "--show-samples", 3
            )
            + "\n      and train: "
            + commands.train("-e", "first", "-d", opts.save_dir)
        )
        return
    made = commands.script(
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--train-tokenizer",
        opts.save_dir,
    )
    log.info(f"next: fetch a model: {fetch}\n      or make a small one from scratch: {made}")
    log.info("then: " + commands.train("-e", "first", "-d", opts.save_dir))


def main(argv: list[str]) -> None:
    """Run the stage."""
    opts = parse(argv)
    began = time.monotonic()
    progress = not opts.no_progress

    # Check the inputs.
    check_options(opts)
    if not (opts.dry_run or opts.merge or opts.save_dir.exists()):
        pool.start_server()  # while this process still looks at its input
    files, skipped = inputs.find_inputs(opts.data_folder, progress)
    row_options = RowOptions(
        tuple(opts.fields),
        opts.strings,
        opts.min_chars,
        opts.validation_percent,
        opts.keep_source,
        opts.dedup,
        opts.fallback_encoding or "",
        opts.format,
    )
    if opts.only_splits is not None:
        build_splits(opts, files, row_options)
        return
    identity = make_identity(opts, files)
    if publish.is_done(opts.save_dir, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {opts.save_dir} holds these files")
        if opts.merge and not opts.dry_run:
            split_parts.delete_parts(opts.save_dir, inputs.group_by_split(files))
        print_next(opts)
        return

    # Plan.
    build = publish.Build(opts.save_dir, KIND, identity, opts.overwrite, resumable=True)
    parts = split_parts.locate_parts(opts.save_dir) if opts.merge else build.dir / PARTS
    tasks = work_units.cut_splits(opts.data_folder, files, parts, row_options)
    total = sum(file.bytes for file in files)
    needed = (
        split_parts.check_parts(opts.save_dir, identity, inputs.group_by_split(files))
        if opts.merge
        else work_units.estimate_room(files)
    )
    print_plan(opts, files, len(tasks), needed)
    publish.require_space(opts.save_dir, needed, "the dataset")
    if opts.dry_run:
        log.info("dry run: nothing was written")
        return

    with build, DatasetWriter(build.dir, row_options) as dataset:
        # Work.
        if not dataset.units:
            dataset.note_skipped(skipped)
        read = add_units(opts, dataset, tasks)

        # Verify and publish.
        check_result(opts, row_options, dataset, len(files), build)
        listed = dataset.finish()
        build.publish(
            stage=STAGE,
            options=options.to_plain_values(opts),
            files=listed,
            summary={"files": len(files), "bytes": total} | dataset.summary(),
        )

    if opts.merge:
        split_parts.delete_parts(opts.save_dir, inputs.group_by_split(files))
    print_summary(opts, row_options, dataset, len(files), total, read, time.monotonic() - began)


if __name__ == "__main__":
    stage.run(main)
