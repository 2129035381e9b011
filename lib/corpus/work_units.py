"""Divide the input of stage 02 into work units, and process one unit in a worker.

The division depends on the input and the options only, not on the number of workers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lib.core import commands, hashing, publish, reading
from lib.core.data_names import TEST
from lib.core.errors import ArtifactError, DiskFullError, UsageError, from_os_error
from lib.corpus import chat_rows, columnar_reader, inputs, kinds, parts, row_tally, selection
from lib.corpus.chat_documents import ChatDocuments
from lib.corpus.chat_rows import ChatPartWriter
from lib.corpus.documents import SKIPPED_FILE, TEST_DATA, Documents
from lib.corpus.inputs import InputFile
from lib.corpus.masks import part_masker
from lib.corpus.masks.mask_options import make_masker
from lib.corpus.parts import PartWriter
from lib.corpus.raw_file import RawFile
from lib.corpus.row_options import CHAT, RowOptions
from lib.corpus.scan import escape_path
from lib.corpus.tally import Tally
from lib.corpus.text_documents import TextDocuments

if TYPE_CHECKING:
    import pyarrow as pa

UNIT_BYTES = 16_000_000
RECORD = "json"  # the part with the result of a unit, see split_parts.py
_FREE = "free"  # directory for parts whose files can be reused
_FILE_OVERHEAD = 16_000  # opening a file takes about as long as reading this many bytes

# Assumptions for the estimate of the disk space.
_INFLATED = 4  # bytes of text per byte of a compressed file
_ARROW_OVERHEAD = 1.05  # bytes in a dataset per byte of text
_NEAR_OVERHEAD = 0.5  # bytes of signatures and n-grams per byte of text (see data.md)
_IN_FLIGHT = 64_000_000  # bytes in parts that are not yet added


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Describes a file to read, or the span [start, stop) of a large file (see RawFile).

    bytes: estimated size of the span.
    """

    file: InputFile
    bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the span is the complete file."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True)
class WorkUnit:
    """Describes the input that a worker reads in one task.

    number: index of the unit in its split of the data folder. folder: the data folder. out:
    directory for the parts of the unit. avoid: files that have crashed a worker process. samples:
    the most samples of dropped rows to keep for each rule. is_trial: the unit only shows whether a
    file crashes the worker, so its result is discarded.
    """

    number: int
    spans: tuple[FileSpan, ...]
    folder: str
    out: str
    row_options: RowOptions
    avoid: frozenset[str] = frozenset()
    samples: int = row_tally.SAMPLES
    is_trial: bool = False

    @property
    def begins(self) -> bool:
        """Return whether the unit contains the beginning of its first file."""
        return self.spans[0].start == 0

    @property
    def bytes(self) -> int:
        """Return the number of input bytes."""
        return sum(span.bytes for span in self.spans)

    def part(self, name: str) -> Path:
        """Return the path of a file of this unit.

        name: a split, `SPLIT.SIDECAR`, `errors` or `dropped`.
        """
        return Path(self.out) / f"{self.number:08d}.{name}"

    def parts(self) -> list[Path]:
        """Return the paths of all files of this unit."""
        splits = self.row_options.splits
        sidecars = selection.list_sidecars(self.row_options)
        names = [f"{split}.{sidecar}" for split in splits for sidecar in sidecars]
        return [self.part(name) for name in (*splits, *names, "errors", *self._dropped)]

    @property
    def _dropped(self) -> list[str]:
        """Return the name of the part with the dropped rows, if any can be dropped."""
        return ["dropped"] if selection.list_rules(self.row_options) else []


@dataclass
class UnitResult:
    """Describes the result of a unit.

    rows, text_bytes: numbers by split. lines: see Documents. rows_read: number of rows of the last
    span, including dropped rows (if anything can drop rows). rows_of: by split, the number of rows
    after each span (if a decision is on). digests: digests of the parts by file name, if the parts
    are kept for a merge. changed: path of the first file that changed since it was listed, and a
    description of the change. masked: by split, the fields of MaskedMatches.
    """

    unit: WorkUnit
    rows: dict[str, int] = field(default_factory=dict)
    text_bytes: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    lines: int = 0
    rows_of: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    changed: tuple[str, str] | None = None
    rows_read: int = 0
    masked: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def rows_of_part(self) -> int:
        """Return the number of rows read if the unit is a span of a larger file, otherwise 0."""
        return 0 if self.unit.spans[0].is_whole else self.rows_read

    @property
    def lines_of_part(self) -> int:
        """Return the number of lines read if the unit is a span of a larger file, otherwise 0."""
        return 0 if self.unit.spans[0].is_whole else self.lines


def require_unchanged(result: UnitResult) -> None:
    """Raise UsageError if a file has changed since it was listed.

    The dataset would not match its recorded inputs, and could lack the end of the file.
    """
    if result.changed:
        path, change = result.changed
        raise UsageError(
            f"{escape_path(path)} changed while it was read; nothing was published",
            found=change,
            hint=f"when no other process writes to {result.unit.folder}:",
            run=commands.as_typed(),
        )


def estimate_room(files: Sequence[InputFile], drops_near: bool = False) -> int:
    """Return the estimated disk space in bytes for building a dataset from some files.

    drops_near: the build compares rows on disk.
    """
    compressed = tuple(reading.COMPRESSIONS)
    text = sum(
        file.bytes * (_INFLATED if file.path.lower().endswith(compressed) else 1) for file in files
    )
    largest = max((file.bytes for file in files), default=0)  # stored in its unit's part as well
    overhead = _ARROW_OVERHEAD + (_NEAR_OVERHEAD if drops_near else 0)
    return int(text * overhead) + _IN_FLIGHT + largest


def cut_splits(
    folder: Path, files: Sequence[InputFile], out: Path, row_options: RowOptions
) -> list[WorkUnit]:
    """Return the units of all splits.

    A unit belongs to one split, so each split can be built alone.
    """
    return [
        unit
        for split, members in inputs.group_by_split(files).items()
        for unit in cut_files(folder, members, out / split, row_options)
    ]


def cut_files(
    folder: Path, files: Sequence[InputFile], out: Path, row_options: RowOptions
) -> list[WorkUnit]:
    """Return units of about 16 MB from files in order; a larger file is a separate unit."""
    grouped: list[list[FileSpan]] = []
    cost = UNIT_BYTES
    for file in files:
        spans = list(_cut_file(folder, file))
        if len(spans) > 1:
            grouped += [[span] for span in spans]
            cost = UNIT_BYTES
            continue
        if cost + file.bytes + _FILE_OVERHEAD > UNIT_BYTES:
            grouped.append([])
            cost = 0
        grouped[-1] += spans
        cost += file.bytes + _FILE_OVERHEAD
    return [
        WorkUnit(number, tuple(spans), str(folder), str(out), row_options)
        for number, spans in enumerate(grouped)
    ]


def _cut_file(folder: Path, file: InputFile) -> Iterator[FileSpan]:
    """Yield a file as one span, or as spans of 16 MB if it is large and its format allows it."""
    is_whole = file.bytes < 2 * UNIT_BYTES or file.role == TEST
    starts = [0] if is_whole else _find_cuts(f"{folder}/{file.path}", file.bytes)
    size = file.bytes // len(starts)
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        yield FileSpan(file, size if stop else file.bytes - size * (len(starts) - 1), start, stop)


def _find_cuts(path: str, size: int) -> list[int]:
    """Return the starts of the spans of a large file, [0] if it cannot be cut."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(kinds.HEAD_BYTES)
    except OSError:
        return [0]  # the worker reports the error
    kind = kinds.sniff_kind(path, head)
    if kind == "jsonl" and not kinds.is_utf16(kinds.mark_utf16(head)):
        return list(range(0, size, UNIT_BYTES))
    if kind in ("parquet", "arrow"):
        return columnar_reader.find_cuts(kind, path, UNIT_BYTES)
    return [0]


def format_rebuild_commands(directory: Path, work: Path | None) -> str:
    """Return the commands that rebuild the parts of one split and then merge.

    work: instead, delete this directory, in which a build in two passes keeps its own parts.
    """
    if work:
        return f"{commands.shell('rm', '-r', publish.find_kept(work))}\n{commands.as_typed()}"
    number = directory.name.rpartition("_")[2].lstrip("0") or "0"
    return "\n".join(
        (
            commands.shell("rm", "-r", directory),
            commands.as_typed("--only-splits", number, drop=["--merge"]),
            commands.as_typed(),
        )
    )


def require_undamaged(result: UnitResult, work: Path | None) -> None:
    """Raise ArtifactError if a kept part is damaged. work: see format_rebuild_commands."""
    for name, digest in result.digests.items():
        path = Path(result.unit.out) / name
        if not path.is_file() or not hashing.has_digest(path, digest):
            raise describe_damage(path, work)


def describe_damage(path: Path, work: Path | None) -> ArtifactError:
    """Return the error about a damaged part. work: see format_rebuild_commands."""
    return ArtifactError(
        f"{publish.find_kept(path)} is damaged or gone",
        expected="the content that was written",
        run=format_rebuild_commands(path.parent, work),
    )


def process_unit(unit: WorkUnit) -> UnitResult:
    """Read a unit and write its parts: batch messages per split, and lines of errors.jsonl."""
    result = UnitResult(unit)
    Path(unit.out).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def create(name: str) -> BinaryIO:
            return stack.enter_context(unit.part(name).open("wb"))

        sidecars = selection.list_sidecars(unit.row_options)
        writers = {
            split: _make_part(
                unit.row_options,
                stack.enter_context(_reuse_file(unit.part(split))),
                {name: create(f"{split}.{name}") for name in sidecars},
            )
            for split in unit.row_options.splits
        }
        documents: Documents = (
            ChatDocuments if unit.row_options.format == CHAT else TextDocuments
        )(
            unit.row_options,
            writers,
            create("errors"),
            create("dropped") if selection.list_rules(unit.row_options) else io.BytesIO(),
        )
        documents.tally.row_counts.most_samples = unit.samples
        for span in unit.spans:
            _read_span(unit, span, documents)
            if change := _find_change(unit, span.file):
                result.changed = span.file.path, change
                break
        documents.finish()
        for split, part in writers.items():
            result.rows[split] = part.rows
            result.text_bytes[split] = part.text_bytes
    result.tally = documents.tally
    result.lines = documents.lines
    masks = bool(unit.row_options.mask) and not unit.row_options.masks_later
    if masks:
        _mask_parts(result)
    if sidecars or masks:
        result.rows_of = documents.rows_of
    if selection.drops_rows(unit.row_options):
        result.rows_read = documents.rows
    return result


def _mask_parts(result: UnitResult) -> None:
    """Mask the rows in the parts of a unit."""
    unit = result.unit
    masker = make_masker(unit.row_options)
    schema = make_part_schema(unit.row_options)
    for split in unit.row_options.splits:
        part = unit.part(split)
        out = unit.part(f"{split}.masked")
        masked = part_masker.mask_part(part, out, schema, masker)
        if masked.path:
            masked.path.replace(part)
            result.text_bytes[split] += masked.text_bytes
            result.masked[split] = asdict(masked.hits)


def make_part_schema(row_options: RowOptions) -> pa.Schema:
    """Return the schema of the rows that workers write."""
    schema = (
        chat_rows.make_schema()
        if row_options.format == CHAT
        else parts.make_text_schema(row_options.keep_source)
    )
    return parts.add_columns(schema, selection.list_columns(row_options))


def _make_part(row_options: RowOptions, file: BinaryIO, sidecars: Mapping[str, BinaryIO]) -> Any:
    """Return the writer for the rows of a split."""
    columns = selection.list_columns(row_options)
    if row_options.format == CHAT:
        return ChatPartWriter(file, sidecars, columns)
    return PartWriter(file, row_options.keep_source, sidecars, columns)


def release_part(part: Path) -> None:
    """Release a part whose content is in the dataset, so that a later unit can overwrite it.

    The pages of the file are in memory, so overwriting it takes a quarter of the time of a new
    file.
    """
    if UNIT_BYTES // 4 < part.stat().st_size < 2 * UNIT_BYTES:
        free = part.parent / _FREE
        free.mkdir(exist_ok=True)
        part.rename(free / part.name)
    else:
        part.unlink()


def _reuse_file(part: Path) -> BinaryIO:
    """Open a part for writing: a released file, or a new one."""
    for free in (part.parent / _FREE).glob("*"):
        with suppress(FileNotFoundError):  # another worker has taken it
            free.rename(part)
            return part.open("rb+")
    return part.open("wb")


def _find_change(unit: WorkUnit, file: InputFile) -> str:
    """Return how a file has changed since it was listed, "" if it has not.

    Called after the file was read, so that a change during the reading is noticed.
    """
    try:
        info = Path(unit.folder, file.path).stat()
    except FileNotFoundError:
        return "the file no longer exists"
    except OSError:
        return ""  # _read_span has reported the error
    if info.st_size != file.bytes:
        return f"it contained {file.bytes:,} bytes when it was listed, now {info.st_size:,}"
    return "its modification time has changed" if info.st_mtime_ns != file.mtime_ns else ""


def _read_span(unit: WorkUnit, span: FileSpan, documents: Documents) -> None:
    """Add the documents of one span, or report why it cannot be read."""
    from lib.corpus import readers

    documents.begin(span.file.path, span.file.source, span.file.role)
    if span.file.role == TEST:
        documents.note(TEST_DATA, "its name says that it is test data", SKIPPED_FILE)
        documents.end(False)
        return
    if span.file.path in unit.avoid:
        documents.note("crash", "the worker process that read it crashed twice", SKIPPED_FILE)
        documents.end(False)
        return
    try:
        with RawFile(f"{unit.folder}/{span.file.path}", span.start, span.stop, unit.out) as raw:
            readers.read_documents(raw, documents)
    except reading.UndecodableData as error:
        documents.note("unsupported", str(error), SKIPPED_FILE)
    except OSError as error:
        if isinstance(from_os_error(error), DiskFullError):
            raise  # a part could not be written, which is not the fault of the input
        documents.note("unreadable", error.strerror or str(error), SKIPPED_FILE)
    except MemoryError:
        documents.note("unreadable", "too large for the memory of this machine", SKIPPED_FILE)
    documents.end(span.is_whole)
