"""Print what a build drops or does not use in a sample of the input, before it begins."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lib.core import declared, log, run_records, units
from lib.core.errors import MOVE_TEMPORARY, name_full_disk
from lib.corpus import selection, work_units
from lib.corpus.inputs import InputFile
from lib.corpus.pool import UnitPool
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.tally import Tally
from lib.corpus.work_units import UNIT_BYTES, FileSpan, WorkUnit
from lib.curate.row_tally import RowTally

SAMPLE_BYTES = 64_000_000
_HEADS = 3  # files whose beginnings are read for the plan
_HEAD_BYTES = 1_000_000


def print_examples(
    folder: Path, files: Sequence[InputFile], row_options: RowOptions, most: int, workers: int
) -> None:
    """Print examples of the rows that the rules drop in a sample of the input.

    most: the most examples of each rule. The sample depends on the input only.
    """
    rules = selection.list_rules(row_options)
    decisions = selection.list_decisions_on(row_options)
    if decisions:
        options = {declared.flag(selection.get_decision(name).option) for name in decisions}
        log.info(
            f"a sample cannot show what {' and '.join(sorted(options))} drops: that depends on "
            "all rows"
        )
    if not rules:
        log.info("no rule is on, so --sample-dropped has no examples")
        return
    defaults = RowOptions()
    off = {selection.get_decision(name).option for name in decisions}
    only_rules = dataclasses.replace(
        row_options, **{name: getattr(defaults, name) for name in (*off, "near_against")}
    )
    with (
        name_full_disk(Path(tempfile.gettempdir()), MOVE_TEMPORARY),
        tempfile.TemporaryDirectory() as scratch,
    ):
        tasks = work_units.cut_splits(folder, files, Path(scratch), only_rules)
        chosen = [dataclasses.replace(unit, samples=most) for unit in choose_units(tasks)]
        if not chosen:
            log.info(f"every file is larger than {units.size(SAMPLE_BYTES)}, so there is no sample")
            return
        tally = Tally(row_counts=RowTally(most_samples=most))
        with UnitPool(min(workers, len(chosen))) as pool:
            for result in pool.run(chosen):
                if not result.unit.begins:
                    _mark_later_part(result.tally.row_counts)
                tally.add(result.tally)
    total = sum(unit.bytes for unit in tasks)
    log.info(
        "rows that each rule drops in a sample of "
        f"{units.size(sum(unit.bytes for unit in chosen))} from {units.size(total)} of input "
        f"({units.counted(tally.row_counts.rows, 'row')}):"
    )
    dropping_rules = [kind for kind in rules if tally.alone[kind]]
    for kind in dropping_rules:
        log.info("\n".join(_format_rule(kind, tally)))
    if others := len(rules) - len(dropping_rules):
        log.info(f"{units.counted(others, 'rule')} would drop no row of the sample")


def describe_unused(folder: Path, files: Sequence[InputFile]) -> dict[str, str]:
    """Return the line of the plan about keys of conversations that are not used, {} without any.

    They are counted at the beginning of a few files.
    """
    spans: list[FileSpan] = []
    for file in files:
        is_long = file.bytes > _HEAD_BYTES
        if len(spans) < _HEADS and not (file.role or (is_long and not _is_of_lines(file))):
            size = min(file.bytes, _HEAD_BYTES)
            spans.append(FileSpan(file, size, 0, _HEAD_BYTES if is_long else None))
    if not spans:
        return {}
    tally = Tally()
    options = RowOptions(format=CHAT)
    with (
        name_full_disk(Path(tempfile.gettempdir()), MOVE_TEMPORARY),
        tempfile.TemporaryDirectory() as scratch,
        UnitPool(1) as pool,
    ):
        units_of = [
            WorkUnit(number, (span,), str(folder), scratch, options)
            for number, span in enumerate(spans)
        ]
        for result in pool.run(units_of):
            tally.add(result.tally)
    unused = tally.chat.format_unused()
    read = units.size(sum(span.bytes for span in spans))
    return {label: f"{text} in the first {read}" for label, text in unused.items()}


def _is_of_lines(file: InputFile) -> bool:
    return file.path.lower().endswith((".jsonl", ".ndjson"))


def choose_units(tasks: Sequence[WorkUnit]) -> list[WorkUnit]:
    """Return work units that are spread evenly over the input, of at most SAMPLE_BYTES."""
    small = [unit for unit in tasks if unit.bytes <= SAMPLE_BYTES]
    count = min(len(small), SAMPLE_BYTES // UNIT_BYTES)
    chosen: list[WorkUnit] = []
    total = 0
    for number in range(count):
        unit = small[(2 * number + 1) * len(small) // (2 * count)]
        if total + unit.bytes <= SAMPLE_BYTES:
            chosen.append(unit)
            total += unit.bytes
    return chosen


def _mark_later_part(counts: RowTally) -> None:
    """Note in the path of each sample that its position does not count from the file's start."""
    for samples in counts.samples.values():
        samples[:] = [sample._replace(path=f"{sample.path} (a later part)") for sample in samples]


def _format_rule(kind: str, tally: Tally) -> list[str]:
    """Return the lines about one rule: its counts, and its examples."""
    rows = max(1, tally.row_counts.rows)
    dropped = tally.dropped[kind]
    lines = [
        f"{kind}: {units.counted(dropped, 'row')} ({100 * dropped / rows:.1f} %), "
        f"alone {tally.alone[kind]:,}"
    ]
    for sample in tally.row_counts.samples.get(kind, []):
        value = f" ({sample.value})" if sample.value else ""
        place = run_records.one_line(sample.path)
        lines.append(f"  {place}, row {sample.position:,}{value}")
        lines.append(f"      {run_records.one_line(sample.text)}")
    return lines
