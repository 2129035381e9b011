"""Carry out the command of a curation: check the options, print the plan, run the passes, publish.

No step is named here: options, plan, summary and report loop over the steps of table.py.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lib.core import commands, declared, log, manifest, options, publish, units
from lib.core.data_names import TRAIN
from lib.core.declared import CommonOptions, option
from lib.core.errors import Problems, UsageError, name_full_disk
from lib.curate import machines, pipeline, reader, report, sample, schema
from lib.curate.machines import MachinePart
from lib.curate.output import WORK, DatasetOutput
from lib.curate.pipeline import FIRST_PASS, Curation
from lib.curate.reader import SourceDataset, Unit
from lib.curate.report import CurationFacts, RuleFacts
from lib.curate.schema import RowSchema
from lib.curate.step import Counts, CurationStep, list_rules
from lib.curate.table import STEPS
from lib.curate.unit_files import UnitRecord
from lib.tokens.dataset import find_dataset

KIND = "dataset/1"
_COMMAND = "lib.curate"
# Bytes on disk while a dataset is built, per byte of the input; steps may need more.
_OVERHEAD = 1.3


@dataclass(frozen=True)
class CurateOptions(CommonOptions):
    """Contains the options of the command; each step declares its own."""

    dataset: str = option(help="", group="options")
    save_dir: Path = option(
        Path("hf_datasets/corpus"), parse=Path, help="dataset directory to create"
    )
    part: MachinePart | None = option(
        None,
        parse=machines.parse_part,
        metavar="K/N",
        help="read only the K-th of N parts of the rows, on one of N machines, for a later --merge "
        "(default: all)",
    )
    merge: bool = option(
        False,
        help="merge the parts of all machines; the dataset is byte for byte the same as one built "
        "on a single machine",
    )
    sample_dropped: int = option(
        0,
        parse=options.count,
        metavar="N",
        help="before the build or with --dry-run, print up to N rows that each rule drops in a "
        "sample of the input (64 MB); a sample shows no duplicates",
    )
    num_workers: int = option(1)


def make_parser(description: str | None) -> options.Parser:
    """Return the parser of the command line."""
    parser = options.Parser(description, "DATASET [options]")
    parser.add_argument("dataset", help="dataset of stage 02 or of save_to_disk")
    declared.add_options(parser, CurateOptions)
    for step in STEPS:
        declared.add_options(parser, step.options)
    parser.add_common("read and write rows")
    return parser


def make_steps(parsed: Any) -> list[CurationStep]:
    """Return the steps that the options ask for. Raises one error for all that is wrong."""
    problems = Problems()
    steps: list[CurationStep] = []

    def add(kind: type[CurationStep]) -> None:
        chosen: Any = declared.drop_repeats(declared.read_options(kind.options, parsed))
        if step := kind.from_options(chosen):
            steps.append(step)

    for kind in STEPS:
        problems.collect(partial(add, kind))
    rules = [rule for step in steps for rule in step.list_rules()]
    for rule in sorted({rule for rule in rules if rules.count(rule) > 1}):
        problems.add(
            f"two rules have the name {rule!r}", expected="another NAME in the --step file"
        )
    problems.raise_if_any()
    return steps


def require_options(
    opts: CurateOptions, source: SourceDataset, steps: Sequence[CurationStep]
) -> None:
    """Raise one UsageError for options that contradict each other or do not fit the dataset."""
    problems = Problems()
    if opts.merge and (opts.part or opts.sample_dropped):
        other = "--part" if opts.part else "--sample-dropped"
        problems.add(f"--merge and {other} exclude each other", expected="--merge alone")
    save_dir = opts.save_dir.resolve()
    folder = source.dataset.path.resolve()
    if save_dir.is_relative_to(folder) or folder.is_relative_to(save_dir):
        problems.add(
            f"--save-dir {opts.save_dir} and the input {source.dataset.path} contain each other",
            expected="a directory beside the input",
        )
    changing = [step for step in steps if step.start_rewriting()]
    for step in steps:
        problems.collect(partial(step.require_source, source))
        problems.collect(partial(step.require_command, save_dir, changing))
    problems.raise_if_any()


def run_command(description: str | None, argv: list[str]) -> None:
    """Run the command. description: for --help."""
    began = time.monotonic()
    parsed = make_parser(description).parse(argv)
    opts = declared.read_options(CurateOptions, parsed)
    steps = make_steps(parsed)
    source = reader.open_source(find_dataset(opts.dataset))
    require_options(opts, source, steps)
    curation = Curation(source, steps, opts.num_workers, not opts.no_progress)
    identity = make_identity(source, steps)
    if opts.sample_dropped:
        sample.print_examples(curation, opts.sample_dropped)
    if opts.part:
        read_part(opts, parsed, curation, identity, opts.part)
        return
    if publish.is_done(opts.save_dir, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {opts.save_dir} contains these rows")
        return
    row_schema = schema.make_schema(source, steps)
    of_parts = make_identity(source, steps, first_pass=True)
    parts = machines.find_parts(opts.save_dir, of_parts) if opts.merge else []
    print_plan(opts, curation, row_schema)
    of_steps = sum(step.estimate_disk(source) for step in steps)
    publish.require_space(opts.save_dir, int(_OVERHEAD * source.bytes) + of_steps, "the dataset")
    if opts.dry_run:
        log.info("dry run: nothing was written")
        return
    with (
        name_full_disk(opts.save_dir.parent, "choose another --save-dir"),
        publish.Build(opts.save_dir, KIND, identity, opts.overwrite, resumable=True) as build,
    ):
        first = build.dir / FIRST_PASS
        source.dataset.check_content()
        curation.prepare(build.dir)
        if parts:
            find_directory = machines.make_finder(opts.save_dir, parts)
        else:
            for _ in curation.judge(source.units, first):
                pass
            find_directory = lambda unit: first  # noqa: E731
        files, summary = write_dataset(
            curation, row_schema, build.dir, find_directory, identity, opts.save_dir
        )
        if refusal := find_refusal(summary) or find_change(parsed, source, identity):
            build.resumable = False  # the next run needs other options or inputs
            raise refusal
        build.publish(
            stage=_COMMAND,
            options=options.to_plain_values(parsed),
            files=files,
            summary=summary,
        )
    if parts:
        machines.delete_parts(opts.save_dir, parts)
    log.info(f"done in {units.duration(time.monotonic() - began)}")
    log.info(f"next: {commands.train('-e', 'first', '-d', opts.save_dir)}")


def make_identity(
    source: SourceDataset, steps: Sequence[CurationStep], first_pass: bool = False
) -> dict[str, Any]:
    """Return what determines the content of the result: the input and the steps.

    first_pass: only what determines the files of the first pass.
    """
    chosen: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for step in steps:
        values = step.identify_first_pass() if first_pass else step.identify()
        chosen |= values
        if values:  # otherwise the step has no part in the first pass
            versions |= step.list_versions()
    inputs = {"dataset": source.dataset.fingerprint, "rows": source.rows}
    return {"options": chosen, "inputs": inputs, "versions": versions}


def print_plan(opts: CurateOptions, curation: Curation, row_schema: RowSchema) -> None:
    """Print what is read, what each step does and what is written."""
    source = curation.source
    log.info(f"curate {source.dataset.path} → {opts.save_dir}")
    rows = {
        "read": f"{units.counted(source.rows, 'row')}, {units.size(source.bytes)}, in "
        f"{units.counted(len(source.units), 'unit')} by "
        f"{units.counted(min(opts.num_workers, len(source.units)), 'worker')}",
        "columns": ", ".join(row_schema.output.names),
    }
    if row_schema.left_out:
        rows["left out"] = (
            f"columns {', '.join(row_schema.left_out)}, which are neither numbers nor strings, or "
            "have several types"
        )
    for step in curation.steps:
        rows |= step.describe()
    log.table(rows)


def read_part(
    opts: CurateOptions,
    parsed: Any,
    curation: Curation,
    identity: dict[str, Any],
    part: MachinePart,
) -> None:
    """Run the first pass on the units of one machine, and print the next command."""
    target = machines.locate_parts(opts.save_dir) / part.directory
    of_first_pass = make_identity(curation.source, curation.steps, first_pass=True)
    part_identity = machines.make_identity(of_first_pass, part)
    chosen = part.select(curation.source)
    log.info(f"read part {part.number} of {part.total}: {units.counted(len(chosen), 'unit')}")
    if publish.is_done(target, machines.KIND, part_identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {target}")
    elif opts.dry_run:
        log.info("dry run: nothing was written")
        return
    else:
        with (
            name_full_disk(opts.save_dir.parent, "choose another --save-dir"),
            publish.Build(
                target, machines.KIND, part_identity, opts.overwrite, resumable=True
            ) as build,
        ):
            curation.prepare(build.dir)
            for _ in curation.judge(chosen, build.dir):
                pass
            if refusal := find_change(parsed, curation.source, identity):
                build.resumable = False
                raise refusal
            shutil.rmtree(build.dir / WORK, ignore_errors=True)
            build.publish(
                stage=_COMMAND,
                options=options.to_plain_values(parsed),
                files=[manifest.file_entry(build.dir, path) for path in build.files()],
                summary={"units": len(chosen), "rows": sum(unit.rows for unit in chosen)},
            )
    merge = commands.as_typed("--merge", drop=["--part", "--sample-dropped"])
    log.info(f"next, after all {part.total} parts are done: {merge}")


def write_dataset(
    curation: Curation,
    row_schema: RowSchema,
    directory: Path,
    find_directory: Callable[[Unit], Path],
    identity: Mapping[str, Any],
    save_dir: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Decide and write; return the manifest entries of all files, and the summary.

    find_directory: returns where the files of a unit of the first pass are.
    """
    records = pipeline.read_records(curation.source, find_directory)
    dataset = curation.decide(directory, records)
    with DatasetOutput(directory, curation.source.splits, row_schema, curation.steps) as output:
        curation.write(output, dataset, row_schema, directory, records)
        curation.source.dataset.require_same()
        files = output.finish()
        summary = output.summarize_splits() | {"dropped": dict(output.dropped)}
    counts = curation.add_up(dataset, output, records)
    facts = collect_facts(curation, output, summary, counts, records, identity)
    lines = report.format_lines(facts, save_dir)
    paths = [report.write_page(directory, facts)]
    for step in curation.steps:
        paths += step.write_files(directory, dataset, counts[step.name])
        summary |= step.summarize(counts[step.name])
        lines |= step.format_lines(counts[step.name])
    files += [manifest.file_entry(directory, path) for path in paths]
    log.table(lines)
    shutil.rmtree(directory / WORK)
    return files, summary


def collect_facts(
    curation: Curation,
    output: DatasetOutput,
    summary: Mapping[str, Any],
    counts: Mapping[str, Counts],
    records: Sequence[tuple[Unit, UnitRecord]],
    identity: Mapping[str, Any],
) -> CurationFacts:
    """Return the facts for the page about the dataset."""
    alone: Counter[str] = Counter()
    for _, record in records:
        alone.update(record.alone)
    decided = {rule for step in curation.steps for rule in step.list_decisions()}
    tally = output.tally
    rules = [
        RuleFacts(
            rule,
            typed,
            output.dropped[rule],
            tally.dropped_bytes[rule],
            None if rule in decided else alone[rule],
            tally.samples.get(rule, ()),
        )
        for rule, typed in list_rules(curation.steps).items()
    ]
    sections = [
        section for step in curation.steps for section in step.list_sections(counts[step.name])
    ]
    return CurationFacts(
        tally, rules, output.rows, summary["text_bytes"], sections, identity["options"]
    )


def find_change(
    parsed: Any, source: SourceDataset, identity: Mapping[str, Any]
) -> UsageError | None:
    """Return the error if a file that an option names has changed since the command began.

    identity: of the dataset, computed then. Raises UsageError if the input has changed.
    """
    source.dataset.require_same()
    if make_identity(source, make_steps(parsed)) == identity:
        return None
    return UsageError(
        "a file that an option names changed while it was in use, so nothing was published",
        hint="run the same command again:",
        run=commands.as_typed(),
    )


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
