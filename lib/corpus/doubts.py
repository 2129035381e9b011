"""What is odd about what a dataset was made of: options that found little text, or dropped much."""

from __future__ import annotations

from lib.core import units
from lib.corpus.dataset import ERRORS, Dataset
from lib.corpus.documents import TRAIN, Shape, Tally

_NAMED = 5
_MOST_VALIDATION = 50  # percent


def of(dataset: Dataset, shape: Shape) -> list[str]:
    """Return what is odd about a dataset of this shape, a sentence each."""
    tally, rows, found = dataset.tally, sum(dataset.rows.values()), []
    if missing := sorted({*shape.fields} - tally.fields_seen):
        found.append(f"--fields: no document has {' or '.join(map(repr, missing))}"
                     + (other_fields(tally) or "\nthere is no other field with text"))
    if shape.fields and (without := tally.problems["no string"]) > tally.documents:
        total = tally.documents + without
        found.append(f"--fields {','.join(shape.fields)} found text in only {tally.documents:,} of "
                     f"{total:,} documents ({100 * tally.documents / total:.1f} %)"
                     + other_fields(tally))
    if tally.lines_lost:
        found.append(f"{units.counted(tally.lines_lost, 'line')} of CSV are lost behind quotes "
                     f"that are not closed; {ERRORS} says in which files and lines")
    if maybe := tally.problems["quote"]:
        found.append(f"{units.counted(maybe, 'row')} of CSV may hold many rows, as a quote is not "
                     f"closed; {ERRORS} says in which files and lines")
    if tally.short > rows:
        found.append(f"--min-chars {shape.min_chars:,} dropped {tally.short:,} of "
                     f"{tally.short + rows + dataset.duplicates:,} rows")
    if shape.validation_percent and not all(dataset.rows.values()):
        found.append("the validation split is empty: the corpus is small for --validation-percent "
                     f"{shape.validation_percent:g}")
    elif shape.validation_percent > _MOST_VALIDATION:
        found.append(f"--validation-percent {shape.validation_percent:g} leaves "
                     f"{units.counted(dataset.rows[TRAIN], 'row')} to train on; 0.1 to 5 is usual")
    return found


def other_fields(tally: Tally) -> str:
    """Return a line with the fields that --fields might have meant, "" when there are none."""
    often = sorted(tally.other_fields.items(), key=lambda item: (-item[1], item[0]))
    seen = ", ".join(f"{name} ({count:,})" for name, count in often[:_NAMED])
    return f"\nother fields with text, the most frequent first: {seen}" if seen else ""
