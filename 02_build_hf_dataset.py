#!/usr/bin/env python3
"""Stage 02: convert files to an Arrow dataset with one row per document or conversation.

  python 02_build_hf_dataset.py
  python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/corpus
  python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/chats --format chat
  python 02_build_hf_dataset.py --fields text,meta.title --validation-percent 1 --dedup exact
  python 02_build_hf_dataset.py --extract html,pdf,docx,epub
  python 02_build_hf_dataset.py --only-splits 0-4   (on several machines, with different numbers)
  python 02_build_hf_dataset.py --merge             (on one machine, after all splits are built)

Reads the splits of stage 01, or any directory. A plain-text file is one document. A JSON file
gives one document per element if its top level is a list, and otherwise one per value. JSON Lines
gives one per line, YAML one per YAML document, and CSV, TSV, Parquet and Arrow one per row. Files
may be compressed (.gz .bz2 .xz .zst). The text of a structured document is all its string values,
joined by newlines. With --format chat each record is a conversation in one of four formats:
`messages`, `prompt`/`completion`, ShareGPT (`conversations`) or alpaca (`instruction`/`output`).
Writes a directory that datasets.load_from_disk opens. errors.jsonl in it lists every document and
file that was skipped or repaired. `python -m lib.curate` then selects rows by near duplicates,
language and quality, and masks personal data. This stage needs no network.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lib.core import commands, declared, log, options, publish, stage, units
from lib.core.declared import CommonOptions, option
from lib.core.errors import Problems, name_full_disk
from lib.core.progress import Progress
from lib.corpus import extraction, field_sample, inputs, pool, report, split_parts, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.extract import table
from lib.corpus.inputs import InputFile
from lib.corpus.pool import UnitPool
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.tally import ERRORS, ChatTally

STAGE = "02_build_hf_dataset.py"
KIND = "dataset/1"


@dataclass(frozen=True)
class BuildOptions(RowOptions, CommonOptions):
    """Contains the options of this stage."""

    data_folder: Path = option(
        Path("splits"),
        group="options",
        parse=Path,
        help="splits of stage 01, or any directory of files",
    )
    save_dir: Path = option(
        Path("hf_datasets/corpus"), parse=Path, help="dataset directory to create"
    )
    splits_by_name: str = option(
        "on",
        choices=("on", "off"),
        quiet=True,
        help="on: files that are named as validation data (`valid.jsonl`, `dev/`) beside training "
        "or test data become the validation split, and test data is left out; off: every file is "
        "for training",
    )
    max_error_rate: float = option(
        1.0,
        parse=options.fraction,
        metavar="F",
        help="fail if more than this fraction of the files is unreadable, wholly or in part "
        "(1: never fail)",
    )
    only_splits: list[int] | None = option(
        None,
        parse=split_parts.parse_numbers,
        metavar="0-4",
        help="convert only these splits of stage 01 (`0-4,7`), for a later --merge (default: "
        "build the dataset from all splits)",
    )
    merge: bool = option(
        False,
        help="merge the results of all --only-splits runs; the dataset is byte for byte the "
        "same as one built on a single machine",
    )
    num_workers: int = option(1)


def parse(argv: Sequence[str]) -> BuildOptions:
    """Return the options of this stage."""
    parser = options.Parser(__doc__)
    declared.add_options(parser, BuildOptions)
    parser.add_common("read files")
    opts = declared.drop_repeats(declared.read_options(BuildOptions, parser.parse(argv)))
    # The order of kinds must not affect the identity of a dataset.
    return replace(opts, extract=table.sort_kinds(opts.extract))


def check_options(opts: BuildOptions) -> None:
    """Raise UsageError if options contradict each other, or if input and output overlap."""
    folder = opts.data_folder
    save_dir = opts.save_dir
    problems = Problems()
    inputs.require_raw(folder, "--data-folder")
    if opts.merge and opts.only_splits is not None:
        problems.add(
            "--only-splits and --merge exclude each other",
            expected="--only-splits on each machine, then --merge on one",
        )
    problems.collect(opts.require_consistent)
    problems.collect(partial(extraction.require_extraction, opts))
    if save_dir.resolve().is_relative_to(folder.resolve()):
        problems.add(
            f"--save-dir {save_dir} is inside --data-folder {folder}",
            expected="a directory outside the input",
        )
    elif folder.resolve().is_relative_to(save_dir.resolve()):
        problems.add(f"--save-dir {save_dir} contains --data-folder {folder}")
    problems.raise_if_any()


def print_plan(opts: BuildOptions, files: Sequence[InputFile], count: int, needed: int) -> None:
    """Print the planned dataset, and how many documents need --extract."""
    if not opts.merge:
        extraction.warn_about_documents(opts, opts.data_folder, files)
        field_sample.warn_about_fields(opts, opts.data_folder, files)
    if opts.format == CHAT:
        rows = "one per conversation"
        fields = {} if opts.merge else field_sample.describe_unused(opts.data_folder, files)
    else:
        rows = "one per document" if opts.strings == "joined" else "one per string"
        fields = {"fields": ", ".join(opts.fields) or "every string value"}
    log.info(f"build {opts.data_folder} → {opts.save_dir}")
    log.table(
        {
            "read": f"{inputs.describe_size(files)}, in {units.counted(count, 'unit')} by "
            f"{units.counted(min(opts.num_workers, count), 'worker')}",
            "rows": rows,
            **fields,
            **inputs.describe_splits(files, opts.validation_percent),
            **extraction.describe_extraction(opts),
            "disk space": f"about {units.size(needed)}",
        }
    )


def make_identity(opts: BuildOptions, files: Sequence[InputFile]) -> dict:
    """Return the identity of the dataset: the options and input files that determine its content.

    It does not depend on the number of machines that build the dataset.
    """
    chosen = declared.identify_artifact(opts, "data_folder", "save_dir", "only_splits", "merge")
    chosen |= extraction.identify_extraction(opts)
    return {"options": chosen, "inputs": inputs.identify_inputs(files)}


def build_splits(opts: BuildOptions, files: Sequence[InputFile], row_options: RowOptions) -> None:
    """Build the parts of the selected splits and print the next command."""
    began = time.monotonic()
    root = split_parts.locate_parts(opts.save_dir)
    by_split = inputs.group_by_split(files)
    names = split_parts.select_splits(list(by_split), opts.only_splits or [])
    needed = work_units.estimate_room([file for name in names for file in by_split[name]])
    extraction.warn_about_documents(opts, opts.data_folder, files)
    log.info(f"build the parts of {', '.join(names)} → {root}, about {units.size(needed)}")
    log.table(inputs.describe_splits(files, opts.validation_percent))
    publish.require_space(root, needed, "the parts")
    full_identity = make_identity(opts, files)
    for name in names:
        identity = split_parts.make_parts_identity(full_identity, by_split[name])
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
        f"next, after all {len(by_split)} splits are built: "
        + commands.as_typed("--merge", drop=["--only-splits"])
    )


def build_split(
    opts: BuildOptions, build: publish.Build, files: Sequence[InputFile], row_options: RowOptions
) -> None:
    """Build the parts of one split; after a kill, a later run reuses the finished units."""
    with name_full_disk(build.partial.parent, "choose another --save-dir"), build:
        tasks = work_units.cut_files(opts.data_folder, files, build.dir, row_options)
        total = sum(file.bytes for file in files)
        rows = 0
        listed = []
        chat = ChatTally()
        lines_before = 0
        with (
            UnitPool(min(opts.num_workers, len(tasks)), split_parts.process_unit) as workers,
            Progress(build.target.name, total, "B", not opts.no_progress) as bar,
        ):
            for result in workers.run(tasks):
                work_units.require_unchanged(result)
                listed += split_parts.list_files(result)
                rows += sum(result.rows.values())
                lines_before = 0 if result.unit.begins else lines_before
                chat.add(result.tally.chat, lines_before)
                lines_before += result.lines_of_part
                bar.advance(result.unit.bytes)
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
    opts: BuildOptions, dataset: DatasetWriter, tasks: Sequence[work_units.WorkUnit]
) -> int:
    """Add the remaining work units to a dataset: read their files, or parts that are built.

    Returns the input bytes of these work units.
    """
    if dataset.units:
        log.info(
            f"continuing after unit {dataset.units} of {len(tasks)}, where an earlier run stopped"
        )
    total = sum(task.bytes for task in tasks)
    remaining = tasks[dataset.units :]
    with (
        UnitPool(1 if opts.merge else min(opts.num_workers, len(tasks))) as workers,
        Progress("merge" if opts.merge else "build", total, "B", not opts.no_progress) as bar,
    ):
        bar.skip(total - sum(task.bytes for task in remaining))
        for result in split_parts.read_results(remaining) if opts.merge else workers.run(remaining):
            work_units.require_unchanged(result)
            dataset.add(result)
            bar.advance(result.unit.bytes)
    return sum(task.bytes for task in remaining)


def check_result(
    opts: BuildOptions,
    row_options: RowOptions,
    dataset: DatasetWriter,
    files: int,
    build: publish.Build,
) -> None:
    """Raise UsageError if the dataset must not be published; print warnings otherwise."""
    if error := report.find_refusal(
        dataset, row_options, opts.data_folder, files, opts.max_error_rate
    ):
        copy = opts.save_dir.with_name(f"{opts.save_dir.name}.{ERRORS}")
        shutil.copyfile(dataset.errors, copy)
        build.resumable = False  # the next run needs other options or inputs, so it starts anew
        error.found += f"\nlisted in {copy}; nothing was published"
        raise error
    for text in report.list_warnings(
        dataset.tally, row_options, dataset.rows, dataset.duplicates, opts.save_dir
    ):
        log.warn(text)


def delete_parts(opts: BuildOptions, files: Sequence[InputFile]) -> None:
    """Delete the parts of a dataset after a merge."""
    if opts.merge and not opts.dry_run:
        split_parts.delete_parts(opts.save_dir, inputs.group_by_split(files))


def main(argv: list[str]) -> None:
    """Run the stage."""
    opts = parse(argv)
    began = time.monotonic()
    progress = not opts.no_progress

    # Check the inputs.
    check_options(opts)
    if not (opts.dry_run or opts.merge or opts.save_dir.exists()):
        pool.start_server()  # it starts while this process scans the input
    files, skipped = inputs.find_inputs(opts.data_folder, progress, opts.splits_by_name == "on")
    row_options: RowOptions = inputs.add_validation(declared.read_options(RowOptions, opts), files)
    if opts.only_splits is not None:
        build_splits(opts, files, row_options)
        return
    identity = make_identity(opts, files)
    if publish.is_done(opts.save_dir, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {opts.save_dir} contains these files")
        delete_parts(opts, files)
        report.print_next(opts.save_dir, row_options)
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

    with (
        name_full_disk(build.partial.parent, "choose another --save-dir"),
        build,
        DatasetWriter(build.dir, row_options) as dataset,
    ):
        # Build.
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

    delete_parts(opts, files)
    seconds = time.monotonic() - began
    report.print_summary(opts.save_dir, row_options, dataset, files, read, seconds)


if __name__ == "__main__":
    stage.run_main(main)
