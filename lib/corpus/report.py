"""Says in words what stage 02 made of its input: why it is refused, what is odd, what it gave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lib.core import commands, units
from lib.core.errors import UsageError
from lib.corpus.dataset import DatasetWriter
from lib.corpus.tally import CHAT, ERRORS, TRAIN, RowOptions, Tally

_NAMED = 5
_MOST_VALIDATION = 50  # percent


def find_refusal(
    dataset: DatasetWriter, row_options: RowOptions, folder: Path, files: int, max_error_rate: float
) -> UsageError | None:
    """Return why a dataset is not published: it is empty, or too many of the files failed."""
    tally = dataset.tally
    chat = dataset.tally.chat
    problems = ", ".join(f"{n:,} {kind}" for kind, n in tally.problems.most_common()) or "none"
    found = (
        f"{units.counted(tally.short, 'row')} below --min-chars; problems: {problems}"
        f"{describe_other_fields(tally)}"
    )
    if error := chat.find_mixture():
        return error
    if row_options.format == CHAT and not chat.formats:
        return UsageError(
            f"no record of {folder} is a conversation",
            found="\n".join([*chat.others, f"problems: {problems}"]),
            expected="messages, conversations (ShareGPT), prompt and completion, or instruction "
            "and output (alpaca) among the keys of a record",
            hint="rename the keys, or leave --format chat out: then each becomes plain text",
        )
    if not dataset.rows[TRAIN]:
        gave = "gave a conversation" if row_options.format == CHAT else "gave text"
        return UsageError(f"no document of {folder} {gave} for the split `train`", found=found)
    if row_options.fields and not tally.fields_seen and tally.problems["no string"]:
        return UsageError(
            f"no document of {folder} has --fields {','.join(row_options.fields)}", found=found
        )
    if len(tally.failed) > max_error_rate * files:
        return UsageError(
            f"{len(tally.failed):,} of {files:,} files failed, more than "
            f"--max-error-rate {max_error_rate:g}",
            found=found,
        )
    return None


def format_summary(
    dataset: DatasetWriter, row_options: RowOptions, save_dir: Path, files: int, total: int
) -> dict[str, str]:
    """Return what went in and what came out, a line each. total: bytes of the files."""
    summary = dataset.summary()
    tally = dataset.tally
    rows = ", ".join(f"{count:,} {split}" for split, count in dataset.rows.items())
    lines = {
        "in": f"{units.counted(files, 'file')}, {units.size(total)}, "
        f"{units.counted(tally.documents, _name_records(row_options))}",
        **(tally.chat.in_lines() if row_options.format == CHAT else {}),
        "out": f"{rows} rows, {units.size(summary['text_bytes'])} of text",
    }
    if tally.short:
        lines["short"] = (
            f"{units.counted(tally.short, 'row')} below --min-chars {row_options.min_chars} dropped"
        )
    if dataset.duplicates:
        lines["dedup"] = (
            f"{units.counted(dataset.duplicates, 'row')} with the text of an earlier one dropped"
        )
    if tally.problems:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in tally.problems.most_common())
        lines["problems"] = (
            f"{counts} ({units.counted(len(tally.failed), 'file')} failed), "
            f"listed in {save_dir}/{ERRORS}"
        )
    return lines


def _name_records(row_options: RowOptions) -> str:
    return "conversation" if row_options.format == CHAT else "document"


def list_warnings(
    tally: Tally,
    row_options: RowOptions,
    rows_of: Mapping[str, int],
    duplicates: int,
    save_dir: Path,
) -> list[str]:
    """Return what is odd about a dataset, a sentence each: options that found little text, say.

    rows_of: by split. duplicates: rows that --dedup dropped. save_dir: where the dataset lies.
    """
    rows = sum(rows_of.values())
    found = []
    if missing := sorted({*row_options.fields} - tally.fields_seen):
        found.append(
            f"--fields: no document has {' or '.join(map(repr, missing))}"
            + (describe_other_fields(tally) or "\nthere is no other field with text")
        )
    if row_options.fields and (without := tally.problems["no string"]) > tally.documents:
        total = tally.documents + without
        found.append(
            f"--fields {','.join(row_options.fields)} found text in only {tally.documents:,} of "
            f"{total:,} documents ({100 * tally.documents / total:.1f} %)"
            + describe_other_fields(tally)
        )
    if names := [name for name, count in tally.as_text.most_common() if count]:
        command = commands.as_typed(
            "--format",
            "chat",
            "--save-dir",
            f"{save_dir}-chat",
            drop=["--format", "--save-dir", "--merge", "--overwrite", "--strings"],
        )
        found.append(
            f"the input holds conversations ({', '.join(names)}), which became plain text "
            f"without turns and roles; to train on their answers:\n  {command}"
        )
    if tally.lines_lost:
        found.append(
            f"{units.counted(tally.lines_lost, 'line')} of CSV are lost behind quotes "
            f"that are not closed; {ERRORS} says in which files and lines"
        )
    if maybe := tally.problems["quote"]:
        found.append(
            f"{units.counted(maybe, 'row')} of CSV may hold many rows, as a quote is not "
            f"closed; {ERRORS} says in which files and lines"
        )
    if tally.short > rows:
        found.append(
            f"--min-chars {row_options.min_chars:,} dropped {tally.short:,} of "
            f"{tally.short + rows + duplicates:,} rows"
        )
    if row_options.validation_percent and not all(rows_of.values()):
        found.append(
            "the validation split is empty: the corpus is small for --validation-percent "
            f"{row_options.validation_percent:g}"
        )
    elif row_options.validation_percent > _MOST_VALIDATION:
        found.append(
            f"--validation-percent {row_options.validation_percent:g} leaves "
            f"{units.counted(rows_of[TRAIN], 'row')} to train on; 0.1 to 5 is usual"
        )
    return found


def describe_other_fields(tally: Tally) -> str:
    """Return a line with the fields that --fields might have meant, "" when there are none."""
    often = sorted(tally.other_fields.items(), key=lambda item: (-item[1], item[0]))
    seen = ", ".join(f"{name} ({count:,})" for name, count in often[:_NAMED])
    return f"\nother fields with text, the most frequent first: {seen}" if seen else ""
