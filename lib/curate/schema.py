"""Decide which columns a curated dataset has, and convert rows of the input to them.

The columns of text or conversations get the types that stage 02 writes. Further columns of numbers
and strings stay, and those of other types are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lib.core.conversation import TEMPLATE_KWARGS
from lib.corpus import chat_rows, parts
from lib.curate.reader import SourceDataset
from lib.curate.step import CurationStep
from lib.tokens import columns
from lib.tokens.columns import CHAT

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_PLAIN = (*_NUMBERS, "halffloat", "float", "double", "string", "large_string")


@dataclass(frozen=True)
class RowSchema:
    """The columns of a curated dataset.

    kept: of the input. added: by the steps, with their kinds; they replace columns of these names.
    left_out: columns of the input with a type that cannot be kept, or with several types.
    """

    kept: pa.Schema
    added: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def output(self) -> pa.Schema:
        """Return all columns in order."""
        return add_columns(self.kept, self.added)

    def convert(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the kept columns of rows of the input, with the types of the output."""
        import pyarrow as pa

        arrays = []
        for field in self.kept:
            if rows.schema.get_field_index(field.name) < 0:
                arrays.append(pa.nulls(rows.num_rows, field.type))
            elif field.name == "messages":
                arrays.append(_convert_messages(rows, field.type))
            else:
                arrays.append(rows.column(field.name).cast(field.type))
        return pa.record_batch(arrays, schema=self.kept)


def add_columns(schema: pa.Schema, columns: Mapping[str, str]) -> pa.Schema:
    """Return a schema with columns of steps added. columns: the kind of each, by name."""
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int64(), "float": pa.float32()}
    for name, kind in columns.items():
        schema = schema.append(pa.field(name, types[kind]))
    return schema


def make_schema(source: SourceDataset, steps: Sequence[CurationStep]) -> RowSchema:
    """Return the columns of a curated dataset."""
    import pyarrow as pa

    added: dict[str, str] = {}
    for step in steps:
        added |= step.list_columns() | step.list_late_columns()

    types = dict[str, pa.DataType]()
    mixed = set[str]()
    for shards in source.dataset.splits.values():
        for shard in shards:
            for field in columns.read_schema(shard):
                if types.setdefault(field.name, field.type) != field.type:
                    mixed.add(field.name)
    is_chat = source.dataset.format == CHAT
    known = chat_rows.make_schema() if is_chat else parts.make_text_schema(keep_source=False)
    names = [field.name for field in known if field.name in types or field.name != TEMPLATE_KWARGS]
    known = pa.schema([known.field(name) for name in names])
    others = {name: kind for name, kind in types.items() if name not in {*names, *added}}
    plain = {
        name: kind for name, kind in others.items() if str(kind) in _PLAIN and name not in mixed
    }
    kept_schema = pa.schema([*known, *(pa.field(name, kind) for name, kind in plain.items())])
    return RowSchema(kept_schema, added, tuple(name for name in others if name not in plain))


def _convert_messages(rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
    """Return the messages with all fields of stage 02, null where the input has no such field."""
    import numpy as np
    import pyarrow as pa

    messages = columns.flatten_messages(rows)
    fields = list(kind.value_type)
    arrays = [columns.read_field(messages, field.name).cast(field.type) for field in fields]
    turns = pa.StructArray.from_arrays(arrays, fields=fields)
    edges = pa.py_buffer(np.array(columns.find_conversation_edges(rows), np.int64))
    return pa.Array.from_buffers(kind, rows.num_rows, [None, edges], children=[turns])
