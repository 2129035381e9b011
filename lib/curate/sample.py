"""Print what the rules drop in a sample of a dataset, before anything is built."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lib.core import log, units
from lib.core.errors import MOVE_TEMPORARY, name_full_disk, one_line
from lib.curate import row_tally, unit_files
from lib.curate.pipeline import Curation
from lib.curate.reader import UNIT_BYTES, Unit
from lib.curate.row_tally import READ_CHARACTERS, DroppedSample, RowTally
from lib.curate.row_texts import list_sources, read_beginning
from lib.curate.step import CurationStep, list_rules
from lib.curate.unit_files import UnitRecord

SAMPLE_BYTES = 64_000_000


class _Sample(NamedTuple):
    """Contains the rows that the rules dropped in the sampled units."""

    tally: RowTally
    alone: Counter[str]
    dropped: Counter[str]


def print_examples(curation: Curation, most: int) -> None:
    """Print examples of the rows that the rules drop in a sample of the dataset.

    most: the most examples of each rule. The sample depends on the dataset only.
    """
    source = curation.source
    steps = curation.steps
    decided = [rule for step in steps for rule in step.list_decisions()]
    rules = [rule for rule in list_rules(steps) if rule not in decided]
    if decided:
        log.info(
            f"a sample cannot show what {' and '.join(decided)} drops: that depends on all rows"
        )
    if not rules:
        log.info("no other rule is on, so --sample-dropped has no examples")
        return
    chosen = choose_units(source.units)
    with (
        name_full_disk(Path(tempfile.gettempdir()), MOVE_TEMPORARY),
        tempfile.TemporaryDirectory() as scratch,
    ):
        curation.prepare(Path(scratch))
        records = curation.judge(chosen, Path(scratch) / "sample")
        sample = _collect_drops(zip(chosen, records, strict=True), steps, most)
    rows = sum(unit.rows for unit in chosen)
    log.info(
        "rows that each rule drops in a sample of "
        f"{units.size(sum(unit.bytes for unit in chosen))} from {units.size(source.bytes)} of "
        f"input ({units.counted(rows, 'row')}):"
    )
    dropping = [rule for rule in rules if sample.alone[rule]]
    for rule in dropping:
        log.info("\n".join(_format_rule(rule, sample, rows)))
    if others := len(rules) - len(dropping):
        log.info(f"{units.counted(others, 'rule')} would drop no row of the sample")


def choose_units(all_units: Sequence[Unit]) -> list[Unit]:
    """Return units that are spread evenly over the dataset, of at most SAMPLE_BYTES or one unit."""
    count = min(len(all_units), SAMPLE_BYTES // UNIT_BYTES)
    spread = [all_units[(2 * n + 1) * len(all_units) // (2 * count)] for n in range(count)]
    chosen = spread[:1]
    for unit in spread[1:]:
        if sum(other.bytes for other in chosen) + unit.bytes <= SAMPLE_BYTES:
            chosen.append(unit)
    return chosen


def _collect_drops(
    judged: Iterator[tuple[Unit, UnitRecord]], steps: Sequence[CurationStep], most: int
) -> _Sample:
    """Return what the rules dropped in some units, with at most `most` examples of each rule."""
    rules = ["", *list_rules(steps)]
    rewriting = [changes for step in steps if (changes := step.start_rewriting())]
    sample = _Sample(RowTally(most_samples=most), Counter(), Counter())
    for unit, record in judged:
        sample.alone.update(record.alone)
        fates = record.read_arrays()[unit_files.FATES]
        values = record.read_drops()
        first = 0
        for batch in unit.read():
            sources = list_sources(batch)
            for place in fates[first : first + batch.num_rows].nonzero()[0].tolist():
                rule = rules[fates[first + place]]
                sample.dropped[rule] += 1
                number = unit.first + first + place
                key = row_tally.make_key(unit.split, number)
                if sample.tally.takes_sample(rule, key):
                    text = read_beginning(batch, place, READ_CHARACTERS)
                    for changes in rewriting:
                        text = changes.show(text)
                    where = sources[place] or unit.split
                    value = values[first + place]
                    sample.tally.add_sample(rule, key, where, number, value, text)
            first += batch.num_rows
    return sample


def _format_rule(rule: str, sample: _Sample, rows: int) -> list[str]:
    """Return the lines about one rule: its counts, and its examples."""
    dropped = sample.dropped[rule]
    lines = [
        f"{rule}: {units.counted(dropped, 'row')} ({100 * dropped / max(1, rows):.1f} %), "
        f"alone {sample.alone[rule]:,}"
    ]
    for example in sample.tally.samples.get(rule, []):
        lines += _format_example(example)
    return lines


def _format_example(example: DroppedSample) -> list[str]:
    value = f" ({one_line(str(example.value))})" if example.value else ""
    place = one_line(example.path)
    return [
        f"  {place}, row {example.position:,}{value}",
        f"      {one_line(example.text)}",
    ]
