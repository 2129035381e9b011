"""The work of stage 02, cut into units that depend on the input alone, never on the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lib.core.errors import DiskFullError, from_os_error
from lib.corpus import kinds
from lib.corpus.documents import SKIPPED_FILE, Documents, Shape, Tally
from lib.corpus.inflate import SUFFIXES
from lib.corpus.inputs import InputFile
from lib.corpus.parts import Part
from lib.corpus.source import Source

UNIT_BYTES = 16_000_000
_FILE_OVERHEAD = 16_000  # opening a file costs about as much as reading this many bytes

_INFLATED, _ARROW_OVERHEAD, _IN_FLIGHT = 4, 1.05, 64_000_000  # estimates of how much is written


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or of a large JSON Lines file the lines that start in [start, stop)."""

    path: str
    source: str
    bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its file."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True)
class Unit:
    """What one worker reads at a time.

    folder: the data folder. out: where its parts go. avoid: files that ended a worker process.
    """

    number: int
    pieces: tuple[Piece, ...]
    folder: str
    out: str
    shape: Shape
    avoid: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Return how many bytes of input it reads."""
        return sum(piece.bytes for piece in self.pieces)

    def part(self, name: str) -> Path:
        """Return the path of its part of a split, or of `errors`."""
        return Path(self.out) / f"{self.number:08d}.{name}"


@dataclass
class Done:
    """What a unit gave. rows, text_bytes: by split. lines: see Documents."""

    unit: Unit
    rows: dict[str, int] = field(default_factory=dict)
    text_bytes: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    lines: int = 0


def room(files: Sequence[InputFile]) -> int:
    """Return about how many bytes a dataset of some files takes while it is built."""
    compressed = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    text = sum(file.bytes * (_INFLATED if file.path.lower().endswith(compressed) else 1)
               for file in files)
    return int(text * _ARROW_OVERHEAD) + _IN_FLIGHT


def units(folder: Path, files: Sequence[InputFile], out: Path, shape: Shape) -> list[Unit]:
    """Cut files into units of about 16 MB, in order; a larger file is a unit of its own."""
    grouped: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    cost = 0
    for file in files:
        pieces = list(_pieces(folder, file))
        file_cost = file.bytes + _FILE_OVERHEAD
        if group and (cost + file_cost > UNIT_BYTES or len(pieces) > 1):
            grouped.append(tuple(group))
            group, cost = [], 0
        if len(pieces) > 1:
            grouped += [(piece,) for piece in pieces]
        else:
            group += pieces
            cost += file_cost
    if group:
        grouped.append(tuple(group))
    return [Unit(number, pieces, str(folder), str(out), shape)
            for number, pieces in enumerate(grouped)]


def _pieces(folder: Path, file: InputFile) -> Iterator[Piece]:
    """Yield a file as one piece, or a large JSON Lines file as pieces of 16 MB."""
    if file.bytes < 2 * UNIT_BYTES or not _can_be_cut(f"{folder}/{file.path}"):
        yield Piece(file.path, file.source, file.bytes)
        return
    for start in range(0, file.bytes, UNIT_BYTES):
        stop = start + UNIT_BYTES
        yield Piece(file.path, file.source, min(UNIT_BYTES, file.bytes - start), start,
                    stop if stop < file.bytes else None)


def _can_be_cut(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            head = file.read(kinds.HEAD_BYTES)
    except OSError:
        return False  # whoever reads it will note why
    return kinds.sniff(path, head) == "jsonl" and not kinds.is_utf16(head)


def process(unit: Unit) -> Done:
    """Read a unit and write its parts: batch messages per split, and lines of errors.jsonl."""
    done = Done(unit)
    with ExitStack() as stack:
        def create(name: str) -> BinaryIO:
            return stack.enter_context(unit.part(name).open("wb"))
        parts = {split: Part(create(split), unit.shape.keep_source) for split in unit.shape.splits}
        documents = Documents(unit.shape, parts, create("errors"))
        for piece in unit.pieces:
            _read(unit, piece, documents)
        for split, part in parts.items():
            part.flush()
            done.rows[split], done.text_bytes[split] = part.rows, part.text_bytes
    done.tally, done.lines = documents.tally, documents.lines
    return done


def _read(unit: Unit, piece: Piece, documents: Documents) -> None:
    """Hand on the documents of one file, or note why it cannot be read."""
    from lib.corpus import readers
    documents.begin(piece.path, piece.source)
    if piece.path in unit.avoid:
        documents.problem("crash", "reading it ended the worker process twice", SKIPPED_FILE)
        return
    try:
        with Source(f"{unit.folder}/{piece.path}", piece.start, piece.stop) as source:
            readers.read(source, documents)
    except OSError as error:
        if isinstance(from_os_error(error), DiskFullError):
            raise  # a part could not be written: no fault of the input
        documents.problem("unreadable", error.strerror or str(error), SKIPPED_FILE)
    except MemoryError:
        documents.problem("unreadable", "too large for the memory of this machine", SKIPPED_FILE)
    documents.end(piece.is_whole)
