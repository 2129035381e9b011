"""The work of stage 02, cut into units that depend on the input alone, never on the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lib.core import commands
from lib.core.errors import DiskFullError, UsageError, from_os_error
from lib.corpus import columnar_reader, inputs, kinds
from lib.corpus.documents import SKIPPED_FILE, Documents, Shape, Tally
from lib.corpus.inflate import SUFFIXES
from lib.corpus.inputs import InputFile
from lib.corpus.parts import Part
from lib.corpus.scan import shown
from lib.corpus.source import Source

UNIT_BYTES = 16_000_000
_FREE = "free"  # a directory beside the parts
_FILE_OVERHEAD = 16_000  # opening a file costs about as much as reading this many bytes

_INFLATED, _ARROW_OVERHEAD, _IN_FLIGHT = 4, 1.05, 64_000_000  # estimates of how much is written


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or of a large one a part: [start, stop) as Source has it.

    bytes: of the part. size, mtime_ns: of the file when it was listed.
    """

    path: str
    source: str
    bytes: int
    size: int
    mtime_ns: int
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its file."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True)
class Unit:
    """What one worker reads at a time.

    number: from 0 in its split of the data folder. folder: the data folder. out: where its parts
    go. avoid: files that ended a worker process.
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
        """Return the path of its part of a split, of that part's `digests`, or of `errors`."""
        return Path(self.out) / f"{self.number:08d}.{name}"

    def parts(self) -> list[Path]:
        """Return the paths of all its parts."""
        splits = self.shape.splits
        digests = [f"{split}.digests" for split in splits if self.shape.dedup != "none"]
        return [self.part(name) for name in (*splits, *digests, "errors")]


@dataclass
class Done:
    """What a unit gave.

    rows, text_bytes: by split. rows_of: by split, how many each piece gave (for --dedup). lines:
    see Documents. digests: of its parts by file name, when they were kept for a merge. changed:
    what became of a file since it was listed, a sentence after its path, for the first of them.
    """

    unit: Unit
    rows: dict[str, int] = field(default_factory=dict)
    text_bytes: dict[str, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    lines: int = 0
    rows_of: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    changed: tuple[str, str] | None = None


def require_same(done: Done) -> None:
    """Raise UsageError when a file that a unit has read is not the one that was listed.

    What is published is then not what was identified: a file that shrank would lose its rest.
    """
    if done.changed:
        path, what = done.changed
        raise UsageError(f"{shown(path)} changed while it was read; nothing was published",
                         found=what, hint=f"once nothing writes to {done.unit.folder}:",
                         run=commands.again())


def room(files: Sequence[InputFile]) -> int:
    """Return about how many bytes a dataset of some files takes while it is built."""
    compressed = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    text = sum(file.bytes * (_INFLATED if file.path.lower().endswith(compressed) else 1)
               for file in files)
    largest = max((file.bytes for file in files), default=0)  # in the part of its unit, too
    return int(text * _ARROW_OVERHEAD) + _IN_FLIGHT + largest


def units_in_order(folder: Path, files: Sequence[InputFile], out: Path, shape: Shape) -> list[Unit]:
    """Return the units of all splits; none has files of two, so a split can be built by itself."""
    return [unit for split, members in inputs.by_split(files).items()
            for unit in units(folder, members, out / split, shape)]


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
    """Yield a file as one piece, or a large one of a kind that can be cut as pieces of 16 MB."""
    starts = [0] if file.bytes < 2 * UNIT_BYTES else _cuts(f"{folder}/{file.path}", file.bytes)
    size = file.bytes // len(starts)
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        yield Piece(file.path, file.source, size if stop else file.bytes - size * (len(starts) - 1),
                    file.bytes, file.mtime_ns, start, stop)


def _cuts(path: str, size: int) -> list[int]:
    """Return where to cut a large file: [0] for not at all."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(kinds.HEAD_BYTES)
    except OSError:
        return [0]  # whoever reads it will note why
    kind = kinds.sniff(path, head)
    if kind == "jsonl" and not kinds.is_utf16(head):
        return list(range(0, size, UNIT_BYTES))
    if kind in ("parquet", "arrow"):
        return columnar_reader.cuts(kind, path, UNIT_BYTES)
    return [0]


def built_again(directory: Path) -> str:
    """Return the commands that build the parts of one split again, and go on with the merge."""
    number = directory.name.rpartition("_")[2].lstrip("0") or "0"
    return "\n".join((commands.shell("rm", "-r", directory),
                      commands.again("--only-splits", number, drop=["--merge"]),
                      commands.again()))


def process(unit: Unit) -> Done:
    """Read a unit and write its parts: batch messages per split, and lines of errors.jsonl."""
    done = Done(unit)
    Path(unit.out).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        def create(name: str) -> BinaryIO:
            return stack.enter_context(unit.part(name).open("wb"))
        parts = {split: Part(stack.enter_context(_reused(unit.part(split))),
                             unit.shape.keep_source,
                             create(f"{split}.digests") if unit.shape.dedup != "none" else None)
                 for split in unit.shape.splits}
        documents = Documents(unit.shape, parts, create("errors"))
        for piece in unit.pieces:
            _read(unit, piece, documents)
            if what := _change(unit, piece):
                done.changed = piece.path, what
                break
            if unit.shape.dedup != "none":
                for split, part in parts.items():
                    done.rows_of.setdefault(split, []).append(part.rows)
        for split, part in parts.items():
            part.finish()
            done.rows[split], done.text_bytes[split] = part.rows, part.text_bytes
    done.tally, done.lines = documents.tally, documents.lines
    return done


def release(part: Path) -> None:
    """Give up a part whose content is in the dataset; the next unit may write over it.

    Its pages are in memory already, so that takes a quarter of the time of writing a new file.
    """
    if UNIT_BYTES // 4 < part.stat().st_size < 2 * UNIT_BYTES:
        free = part.parent / _FREE
        free.mkdir(exist_ok=True)
        part.rename(free / part.name)
    else:
        part.unlink()


def _reused(part: Path) -> BinaryIO:
    """Open a part for writing: a file that was given up, or a new one."""
    for free in (part.parent / _FREE).glob("*"):
        with suppress(FileNotFoundError):  # another worker was faster
            free.rename(part)
            return part.open("rb+")
    return part.open("wb")


def _change(unit: Unit, piece: Piece) -> str:
    """Return what became of a file since it was listed, empty when it is the same.

    After it was read, so that this holds for all that was read of it.
    """
    try:
        info = Path(unit.folder, piece.path).stat()
    except FileNotFoundError:
        return "it is gone"
    except OSError:
        return ""  # whoever read it has noted why
    if info.st_size != piece.size:
        return f"it held {piece.size:,} bytes when it was listed, and {info.st_size:,} now"
    return "it was written to" if info.st_mtime_ns != piece.mtime_ns else ""


def _read(unit: Unit, piece: Piece, documents: Documents) -> None:
    """Hand on the documents of one file, or note why it cannot be read."""
    from lib.corpus import readers
    documents.begin(piece.path, piece.source)
    if piece.path in unit.avoid:
        documents.problem("crash", "the worker process that read it crashed twice", SKIPPED_FILE)
        return
    try:
        with Source(f"{unit.folder}/{piece.path}", piece.start, piece.stop,
                    unit.out) as source:
            readers.read(source, documents)
    except OSError as error:
        if isinstance(from_os_error(error), DiskFullError):
            raise  # a part could not be written: no fault of the input
        documents.problem("unreadable", error.strerror or str(error), SKIPPED_FILE)
    except MemoryError:
        documents.problem("unreadable", "too large for the memory of this machine", SKIPPED_FILE)
    documents.end(piece.is_whole)
