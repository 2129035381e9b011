"""Carry out the command of a curation: check the options, print the plan, run the passes, publish.

No step is named here: options, plan, report and summary loop over the steps of table.py.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lib.core import commands, declared, log, manifest, options, publish, units
from lib.core.data_names import TRAIN
from lib.core.declared import CommonOptions, option
from lib.core.errors import Problems, UsageError, name_full_disk
from lib.curate import pipeline, reader, schema
from lib.curate.output import WORK, DatasetOutput
from lib.curate.reader import Source, Unit
from lib.curate.schema import RowSchema
from lib.curate.step import Step
from lib.curate.table import STEPS
from lib.tokens.dataset import find_dataset

KIND = "dataset/1"
_COMMAND = "lib.curate"


@dataclasses.dataclass(frozen=True)
class CurateOptions(CommonOptions):
    """Contains the options of the command; each step declares its own."""

    dataset: str = option(help="", group="options")
    save_dir: Path = option(
        Path("hf_datasets/corpus"), parse=Path, help="dataset directory to create"
    )
    num_workers: int = option(1)


def make_parser() -> options.Parser:
    """Return the parser of the command line."""
    from lib.curate import __main__ as entry

    parser = options.Parser(entry.__doc__, "DATASET [options]")
    parser.add_argument("dataset", help="dataset of stage 02 or of save_to_disk")
    declared.add_options(parser, CurateOptions)
    for step in STEPS:
        declared.add_options(parser, step.options)
    parser.add_common("read and write rows")
    return parser


def make_steps(parsed: Any) -> list[Step]:
    """Return the steps that the options ask for. Raises one error for all that is wrong."""
    problems = Problems()
    steps: list[Step] = []

    def add(kind: type[Step]) -> None:
        chosen = declared.drop_repeats(declared.read_options(kind.options, parsed))
        if step := kind.from_options(chosen):
            steps.append(step)

    for kind in STEPS:
        problems.collect(partial(add, kind))
    problems.raise_if_any()
    return steps


def require_source(steps: Sequence[Step], source: Source) -> None:
    """Raise one UsageError if steps cannot work on a dataset."""
    problems = Problems()
    for step in steps:
        problems.collect(partial(step.require_source, source))
    problems.raise_if_any()


def main(argv: list[str]) -> None:
    """Run the command."""
    began = time.monotonic()
    parsed = make_parser().parse(argv)
    opts = declared.read_options(CurateOptions, parsed)
    steps = make_steps(parsed)
    source = reader.open_source(find_dataset(opts.dataset))
    require_source(steps, source)
    identity = make_identity(source, steps)
    if publish.is_done(opts.save_dir, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {opts.save_dir} contains these rows")
        return
    added = {
        name: kind
        for step in steps
        for name, kind in (step.list_columns() | step.list_late_columns()).items()
    }
    row_schema = schema.make_schema(source, added)
    print_plan(opts, source, steps, row_schema)
    if opts.dry_run:
        log.info("dry run: nothing was written")
        return
    with (
        name_full_disk(opts.save_dir.parent, "choose another --save-dir"),
        publish.Build(opts.save_dir, KIND, identity, opts.overwrite, resumable=True) as build,
    ):
        files, summary = run_passes(opts, source, steps, row_schema, build.dir)
        if refusal := find_refusal(summary):
            build.resumable = False  # the next run needs other options or inputs
            raise refusal
        build.publish(
            stage=_COMMAND,
            options=options.to_plain_values(parsed),
            files=files,
            summary=summary,
        )
    log.info(f"done in {units.duration(time.monotonic() - began)}")
    log.info(f"next: {commands.train('-e', 'first', '-d', opts.save_dir)}")


def find_refusal(summary: Mapping[str, Any]) -> UsageError | None:
    """Return the error if the steps have dropped all rows of the training split."""
    if summary["splits"][TRAIN]["rows"]:
        return None
    found = [
        f"{units.counted(count, 'row')} dropped by {rule}"
        for rule, count in summary["dropped"].items()
    ]
    return UsageError(
        f"no row is left for the split `{TRAIN}`, so nothing was published",
        found=", ".join(found) or "the split has no rows",
    )


def make_identity(source: Source, steps: Sequence[Step]) -> dict[str, Any]:
    """Return what determines the content of the result: the input and the steps."""
    chosen: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for step in steps:
        chosen |= step.identify()
        versions |= step.list_versions()
    inputs = {"dataset": source.dataset.fingerprint, "rows": source.rows}
    return {"options": chosen, "inputs": inputs, "versions": versions}


def print_plan(
    opts: CurateOptions, source: Source, steps: Sequence[Step], row_schema: RowSchema
) -> None:
    """Print what is read, what each step does and what is written."""
    log.info(f"curate {source.dataset.path} → {opts.save_dir}")
    rows = {
        "read": f"{units.counted(source.rows, 'row')}, {units.size(source.bytes)}, in "
        f"{units.counted(len(source.units), 'unit')} by "
        f"{units.counted(opts.num_workers, 'worker')}",
        "columns": ", ".join(row_schema.output.names),
    }
    if row_schema.left_out:
        rows["left out"] = ", ".join(row_schema.left_out)
    for step in steps:
        rows |= step.describe()
    log.table(rows)


def run_passes(
    opts: CurateOptions,
    source: Source,
    steps: Sequence[Step],
    row_schema: RowSchema,
    directory: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run both passes; return the manifest entries of all files, and the summary."""
    progress = not opts.no_progress
    first = directory / pipeline.FIRST_PASS

    def find_directory(unit: Unit) -> Path:
        return first

    pipeline.prepare_steps(source, steps, directory, progress)
    for _ in pipeline.judge_units(source.units, steps, first, opts.num_workers, progress):
        pass
    whole = pipeline.decide_rows(
        source, steps, directory, find_directory, opts.num_workers, progress
    )
    with DatasetOutput(directory, source.splits, row_schema, steps) as output:
        pipeline.write_units(
            output, whole, steps, row_schema, directory, find_directory, opts.num_workers, progress
        )
        source.dataset.require_same()
        files = output.finish()
        summary = output.summarize_splits() | {"dropped": dict(output.dropped)}
        counts = pipeline.add_up_counts(whole, steps, find_directory, output)
    lines: dict[str, str] = {}
    for step in steps:
        paths = step.write_files(directory, whole, counts[step.name])
        files += [manifest.file_entry(directory, path) for path in paths]
        lines |= step.format_lines(counts[step.name])
    log.table(lines)
    shutil.rmtree(directory / WORK)
    return files, summary
