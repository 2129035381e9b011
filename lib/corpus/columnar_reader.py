"""Read Parquet and Arrow (IPC files and streams) in batches; each row is a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lib.corpus.documents import DROPPED, DROPPED_REST, SKIPPED_FILE, Documents
from lib.corpus.raw_file import RawFile

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 4_000_000
_BATCH_ROWS = 512
_READ_BUFFER = 1 << 20
_ARROW_FILE = b"ARROW1"


def read_parquet(raw: RawFile, documents: Documents) -> None:
    """Add one document per row; a row group that cannot be read is dropped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with raw.open_seekable() as content:
        try:
            # A row group may have any size, so the buffers are small.
            file = pq.ParquetFile(content, buffer_size=_READ_BUFFER, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            _note_error(documents, error, "Parquet", SKIPPED_FILE)
            return
        names = [field.name for field in file.schema_arrow if _is_wanted(field, documents)]
        before = sum(file.metadata.row_group(group).num_rows for group in range(raw.start))
        stop = file.num_row_groups if raw.stop is None else raw.stop
        for number in range(raw.start, stop):
            group = file.metadata.row_group(number)
            rows = _count_rows_at_once(group.total_byte_size, group.num_rows)
            try:
                # pyarrow yields no rows if no column is selected, but every row is counted.
                batches = (
                    file.iter_batches(rows, [number], names, use_threads=False)
                    if names
                    else [SimpleNamespace(num_rows=group.num_rows, nbytes=0)]
                )
                _add_batches(batches, file.schema_arrow, before, documents)
            except (pa.ArrowException, OSError) as error:
                _note_error(documents, error, f"Parquet (row group {number})", "row group dropped")
            before += group.num_rows


def read_arrow(raw: RawFile, documents: Documents) -> None:
    """Add one document per row, up to the first damaged batch."""
    import pyarrow as pa

    with raw.open_seekable() as content:
        rows = 0
        try:
            is_file = content.read(len(_ARROW_FILE)) == _ARROW_FILE
            content.seek(0)
            source = pa.PythonFile(content, "r")
            if is_file:
                reader = pa.ipc.open_file(source)
                stop = reader.num_record_batches if raw.stop is None else raw.stop
                rows = sum(reader.get_batch(i).num_rows for i in range(raw.start))
                batches = (reader.get_batch(i) for i in range(raw.start, stop))
            else:
                reader = pa.ipc.open_stream(source)
                batches = reader
            checked = (_check_batch(batch, documents) for batch in batches)
            _add_batches(checked, reader.schema, rows, documents)
        except (pa.ArrowException, OSError) as error:
            _note_error(documents, error, "Arrow", DROPPED_REST)
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST)


def find_cuts(kind: str, path: str, unit_bytes: int) -> list[int]:
    """Return the indices of the row groups (or record batches) at which the spans of a file start.

    A file that cannot be cut or read is a single span: [0].
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if kind == "parquet":
            meta = pq.ParquetFile(path).metadata
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            sizes = [
                sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                for group in groups
            ]
        else:
            with pa.memory_map(path) as file:
                count = pa.ipc.open_file(file).num_record_batches
                sizes = [file.size() // max(count, 1)] * count
    except (pa.ArrowException, OSError):
        return [0]
    starts = [0]
    size = 0
    for number, group_size in enumerate(sizes):
        if size and size + group_size > unit_bytes:
            starts.append(number)
            size = 0
        size += group_size
    return starts


def _add_batches(batches: Any, schema: pa.Schema, before: int, documents: Documents) -> None:
    """Add every row of some batches. before: number of rows in the file before them."""
    names = schema.names
    json_types = {field.name: field.type for field in schema if _has_json(field.type)}
    unread = [field.name for field in schema if not _is_wanted(field, documents)]
    for batch in batches:
        for name in unread:
            documents.note_unread(name, batch.num_rows)
        for start in range(
            0, batch.num_rows, rows := _count_rows_at_once(batch.nbytes, batch.num_rows)
        ):
            count = min(rows, batch.num_rows - start)
            for number, values in enumerate(_read_rows(batch, schema, start, count, documents)):
                place = before + start + number + 1
                if values is None:
                    documents.note(
                        "syntax", f"row {place}: a value does not fit its column's type", DROPPED
                    )
                else:
                    row = dict(zip(names, values, strict=True))
                    row = _drop_nulls(row) if documents.as_data else row
                    for name, kind in json_types.items():
                        row[name] = _decode_json(row[name], kind)
                    documents.add_value(row, number=place)
        before += batch.num_rows


def _check_batch(batch: Any, documents: Documents) -> Any:
    """Return a batch if its offsets and indices are valid; otherwise raise ArrowInvalid.

    Arrow does not check them when it reads a file. Damaged ones would crash the process, or give
    text from any place in memory. Invalid UTF-8 is not an error, because it is repaired later.
    """
    import pyarrow as pa

    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not _is_wanted(field, documents):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            if pa.types.is_string(column.type):
                column.view(pa.binary()).validate(full=True)
            elif pa.types.is_large_string(column.type):
                column.view(pa.large_binary()).validate(full=True)
    return batch


def _read_rows(
    batch: Any, schema: pa.Schema, start: int, count: int, documents: Documents
) -> Iterator[tuple | None]:
    """Yield the values of each row, or None for a row that cannot be converted.

    Values of columns that are not needed are None; such columns are not converted.
    """
    columns: list[Callable[[int], Any]] = []
    seen: Counter[str] = Counter()
    for field in schema:
        seen[field.name] += 1
        if not _is_wanted(field, documents):
            columns.append(lambda row: None)
            continue
        # A batch may lack columns of the schema, and several may have the same name.
        index = batch.schema.get_all_field_indices(field.name)[seen[field.name] - 1]
        column = batch.column(index).slice(start, count)
        try:
            columns.append(column.to_pylist(maps_as_pydicts="lossy").__getitem__)
        except (ValueError, OverflowError, ArithmeticError):
            columns.append(_make_repair(column, documents))
    for row in range(count):
        try:
            yield tuple(get_value(row) for get_value in columns)
        except (ValueError, OverflowError, ArithmeticError):
            yield None


def _make_repair(column: Any, documents: Documents) -> Callable[[int], Any]:
    """Return a function that reads a row (by index) of a column that contains invalid UTF-8."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        cells = column.cast(pa.large_binary())
        return lambda row: documents.decode(cells[row].as_py()) if cells[row].is_valid else None
    return lambda row: column[row].as_py(maps_as_pydicts="lossy")


def _drop_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the null fields of its structs.

    Arrow gives every struct of a column the same fields; the fields that a document lacks are null.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return list(map(clean, value)) if isinstance(value, list) else value

    return {name: clean(value) for name, value in row.items()}


def _decode_json(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with the JSON in it parsed: the feature Json() of `datasets`.

    Text that is not valid JSON stays as it is.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        try:
            return json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return [_decode_json(item, kind.value_type) for item in value]
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {name: _decode_json(item, kind.field(name).type) for name, item in value.items()}
    return value


def _has_json(kind: Any) -> bool:
    """Return whether an Arrow type contains values of the extension type `arrow.json`."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(_has_json(kind.field(i).type) for i in range(kind.num_fields))
    inner = getattr(kind, "value_type", None)
    return isinstance(kind, pa.JsonType) or (inner is not None and _has_json(inner))


def _is_wanted(column: pa.Field, documents: Documents) -> bool:
    return documents.is_column_wanted(column.name) if documents.as_data else _has_text(column.type)


def _has_text(kind: Any) -> bool:
    """Return whether values of an Arrow type may contain strings."""
    import pyarrow as pa

    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return True
    if types.is_map(kind):
        return _has_text(kind.item_type)
    if types.is_struct(kind) or types.is_union(kind):
        return any(_has_text(kind.field(i).type) for i in range(kind.num_fields))
    inner = getattr(kind, "storage_type", None) or getattr(kind, "value_type", None)
    return inner is not None and _has_text(inner)


def _count_rows_at_once(size: int, rows: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


def _note_error(documents: Documents, error: Exception, format_name: str, action: str) -> None:
    if getattr(error, "errno", None):
        raise error  # an error of the file system, not of the format
    documents.note("syntax", f"not valid {format_name}: {str(error).splitlines()[0]}", action)
