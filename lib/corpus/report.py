"""Report the result of stage 02: errors that refuse a dataset, warnings and a printed summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.core import commands, log, paths, units
from lib.core.errors import UsageError
from lib.corpus import conversations, inputs
from lib.corpus.dataset import DatasetWriter
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import CHAT, TRAIN, RowOptions
from lib.corpus.tally import ERRORS, Tally

_NAMED = 5
_MUCH = 0.1  # of the rows; if one reason drops more, that causes a warning
_MOST_VALIDATION = 50  # percent; a larger validation split causes a warning


def find_refusal(
    dataset: DatasetWriter, row_options: RowOptions, folder: Path, files: int, max_error_rate: float
) -> UsageError | None:
    """Return the error if a dataset must not be published, None otherwise.

    A dataset is refused if it is empty, if one of the files mixes conversation formats, if no
    document contains a key in --fields, or if more files failed than --max-error-rate allows.
    """
    tally = dataset.tally
    chat = dataset.tally.chat
    problems = ", ".join(f"{n:,} {kind}" for kind, n in tally.problems.most_common()) or "none"
    dropped = describe_dropped(dataset, row_options)
    found = "; ".join([*dropped.values(), f"problems: {problems}{describe_other_fields(tally)}"])
    found = "\n".join([found, *tally.explain_failures()])
    if error := chat.find_mixture():
        return error
    if row_options.format == CHAT and not chat.formats:
        return UsageError(
            f"no record in {folder} is a conversation",
            found="\n".join([*chat.others, found]),
            expected="records with the key messages or conversations (ShareGPT), or with the keys "
            "prompt and completion, or instruction and output (alpaca)",
            hint="rename the keys, or omit --format chat to read the records as plain text",
        )
    if not dataset.rows[TRAIN]:
        content = "a conversation" if row_options.format == CHAT else "text"
        problem = f"no document in {folder} contains {content} for the split `train`"
        if dropped:
            number = units.counted(tally.short + dataset.duplicates, "row")
            problem = f"no row is left for the split `train`, since the options dropped {number}"
        return UsageError(problem, found=found)
    if row_options.fields and not tally.fields_seen and tally.problems["no string"]:
        return UsageError(
            f"no document in {folder} has the --fields {','.join(row_options.fields)}", found=found
        )
    if len(tally.failed) > max_error_rate * files:
        return UsageError(
            f"{len(tally.failed):,} of {units.counted(files, 'file')} failed, more than "
            f"--max-error-rate {max_error_rate:g}",
            found=found,
        )
    return None


def format_summary(
    dataset: DatasetWriter, row_options: RowOptions, save_dir: Path, files: int, total: int
) -> dict[str, str]:
    """Return the lines of the printed summary by label. total: bytes of the input files."""
    summary = dataset.summary()
    tally = dataset.tally
    *others, (split, count) = dataset.rows.items()
    counts_of = [f"{number:,} {name}" for name, number in others]
    rows = ", ".join([*counts_of, units.counted(count, f"{split} row")])
    lines = {
        "in": f"{units.counted(files, 'file')}, {units.size(total)}, "
        f"{units.counted(tally.documents, _name_records(row_options))}",
        **(tally.chat.format_lines() if row_options.format == CHAT else {}),
        "out": f"{rows}, {units.size(summary['text_bytes'])} of text",
    }
    lines |= describe_dropped(dataset, row_options)
    if tally.table_formats:
        lines["tables"] = "; ".join(
            f"{units.counted(count, f'{kind.upper()} file')} with {text}"
            for name, count in tally.table_formats.most_common()
            for kind, text in [name.split(": ", 1)]
        )
    if tally.extracted:
        lines["extracted"] = _count_documents(tally.extracted)
    if tally.without_text:
        failed = [
            f"{count:,} {kind.upper()} {problem}"
            for name, count in sorted(tally.without_text.items())
            for kind, problem in [name.split(": ", 1)]
        ]
        lines["without text"] = ", ".join(failed)
    if tally.not_extracted and row_options.format != CHAT:
        lines["not extracted"] = f"{_count_documents(tally.not_extracted)}; --extract reads them"
    if tally.problems:
        problems = ", ".join(f"{count:,} {kind}" for kind, count in tally.problems.most_common())
        lines["problems"] = (
            f"{problems} ({units.counted(len(tally.failed), 'file')} failed), "
            f"listed in {save_dir}/{ERRORS}"
        )
    return lines


def describe_dropped(dataset: DatasetWriter, row_options: RowOptions) -> dict[str, str]:
    """Return a text about the rows that each option has dropped, by kind; {} without any."""
    counts = {
        "short": (dataset.tally.short, f"--min-chars {row_options.min_chars}"),
        "duplicates": (dataset.duplicates, f"--dedup {row_options.dedup}"),
    }
    return {
        kind: f"{units.counted(count, 'row')} dropped by {option}"
        for kind, (count, option) in counts.items()
        if count
    }


def _count_documents(counts: Mapping[str, int]) -> str:
    """Return a text with the number of documents by kind, such as `12 PDF, 3 DOCX`."""
    return ", ".join(f"{count:,} {kind.upper()}" for kind, count in sorted(counts.items()))


def _name_records(row_options: RowOptions) -> str:
    return "conversation" if row_options.format == CHAT else "document"


def list_warnings(
    tally: Tally,
    row_options: RowOptions,
    rows_of: Mapping[str, int],
    duplicates: int,
    save_dir: Path,
) -> list[str]:
    """Return warnings about a dataset, such as options that match little text.

    rows_of: number of rows by split. duplicates: number of rows dropped because they equal an
    earlier one. save_dir: directory of the dataset.
    """
    total = sum(rows_of.values()) + duplicates + tally.short
    warnings = tally.explain_failures()
    if missing := sorted({*row_options.fields} - tally.fields_seen):
        warnings.append(
            f"--fields: no document has {' or '.join(map(repr, missing))}"
            + (describe_other_fields(tally) or "\nno other field contains text")
        )
    if row_options.fields and (without := tally.problems["no string"]) > tally.documents:
        documents = tally.documents + without
        warnings.append(
            f"--fields {','.join(row_options.fields)} found text in only {tally.documents:,} of "
            f"{units.counted(documents, 'document')} ({100 * tally.documents / documents:.1f} %)"
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
        warnings.append(
            f"the input contains conversations ({', '.join(names)}), which were read as plain text "
            f"without turns and roles; to train on their answers, run:\n  {command}"
        )
    if tally.lines_lost:
        warnings.append(
            f"{units.counted(tally.lines_lost, 'line')} of CSV lost because of unclosed quotes; "
            f"{ERRORS} lists the files and lines"
        )
    if tally.long_rows:
        warnings.append(
            f"{units.counted(tally.long_rows, 'row')} of CSV with more cells than the header has "
            "columns; a value that contains the separator must be enclosed in quotes"
        )
    if suspicious := tally.problems["quote"]:
        warnings.append(
            f"{units.counted(suspicious, 'row')} of CSV may contain several rows because of an "
            f"unclosed quote; {ERRORS} lists the files and lines"
        )
    if tally.short > _MUCH * total:
        warnings.append(
            f"--min-chars {row_options.min_chars} dropped {tally.short:,} of "
            f"{units.counted(total, 'row')} ({100 * tally.short / total:.0f} %)"
        )
    warnings += _list_losses(tally, row_options, total, save_dir)
    if len(rows_of) > 1 and not all(rows_of.values()):
        cause = (
            f"the corpus is too small for --validation-percent {row_options.validation_percent:g}"
            if row_options.validation_percent
            else "the files that are named as validation data give no row"
        )
        warnings.append(f"the validation split is empty: {cause}")
    elif row_options.validation_percent > _MOST_VALIDATION:
        warnings.append(
            f"--validation-percent {row_options.validation_percent:g} leaves "
            f"{units.counted(rows_of[TRAIN], 'row')} for training; 0.1 to 5 is usual"
        )
    return warnings


def _list_losses(tally: Tally, row_options: RowOptions, total: int, save_dir: Path) -> list[str]:
    """Return a warning for each reason that dropped many conversations.

    total: rows before any is dropped. save_dir: directory of the dataset.
    """
    refused = {kind: tally.problems[kind] for kind in conversations.KINDS}
    records = total + sum(refused.values()) if row_options.format == CHAT else 0
    return [
        f"{count:,} of {units.counted(records, 'record')} ({100 * count / records:.0f} %) were "
        f"dropped as `{kind}`; {ERRORS} in {save_dir} lists each with its reason"
        for kind, count in refused.items()
        if records and count > _MUCH * records
    ]


def describe_other_fields(tally: Tally) -> str:
    """Return a line with the most frequent fields that --fields does not select, or ""."""
    frequent = sorted(tally.other_fields.items(), key=lambda item: (-item[1], item[0]))
    names = ", ".join(f"{name} ({count:,})" for name, count in frequent[:_NAMED])
    return f"\nother fields with text, the most frequent first: {names}" if names else ""


def print_summary(
    save_dir: Path,
    row_options: RowOptions,
    dataset: DatasetWriter,
    files: Sequence[InputFile],
    read: int,
    seconds: float,
) -> None:
    """Print the summary of the input, the dataset and the problems, and the next command.

    files: the input. read: bytes of it that this launch processed in `seconds`.
    """
    total = sum(file.bytes for file in files)
    earlier = f"; {units.size(total - read)} were done by an earlier run" if read < total else ""
    log.info(
        f"done in {units.duration(seconds)}, {units.size(read / max(seconds, 1e-9))}/s{earlier}"
    )
    summary = format_summary(dataset, row_options, save_dir, len(files), total)
    log.table(summary | inputs.describe_left_out(files))
    print_next(save_dir, row_options)


def _find_prepared_model() -> str:
    """Return the name of the only model that stage 03 has prepared here, "" for none or several."""
    root = paths.models_root(Path(".cache"))
    names = [
        path.parent.name
        for path in root.glob(f"*/{paths.MANIFEST}")
        if path.parent.name not in paths.TRIAL_NAMES
    ]
    return names[0].replace("--", "/", 1) if len(names) == 1 else ""


def print_next(save_dir: Path, row_options: RowOptions) -> None:
    """Print the commands after stage 02: curate, get a model unless one is prepared, then train."""
    curated = f"{save_dir}-curated"
    curate = commands.module("lib.curate", save_dir, "--save-dir", curated, "--dedup", "near")
    log.info(f"next, for raw data: drop near duplicates, filter and mask rows: {curate}")
    if model := _find_prepared_model():
        words = ("-e", "first", "-d", save_dir, "-m", model)
        if row_options.format == CHAT:
            check = commands.train(*words, "--prepare-only")
            log.info(f"next: check the trained tokens of some samples: {check}")
        log.info(f"next: train the prepared model {model}: {commands.train(*words)}")
        return
    fetch = commands.script("03_download_model.py", "--model-name", "ORG/NAME")
    if row_options.format == CHAT:
        log.info(f"next: download a model, preferably with a chat template: {fetch}")
        log.info(
            "then: check the trained tokens of some samples: "
            + commands.train("-e", "first", "-d", save_dir, "--prepare-only")
            + "\n      and train: "
            + commands.train("-e", "first", "-d", save_dir)
        )
        return
    initialise = commands.script(
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--train-tokenizer",
        save_dir,
    )
    log.info(
        f"next: download a model: {fetch}\n      or create a small one from scratch: {initialise}"
    )
    log.info("then: " + commands.train("-e", "first", "-d", save_dir))
