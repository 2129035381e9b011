# covers: lib/corpus/arrow_arrays.py
"""Arrays equal those of `pa.array` to the bit, and a process that writes rows needs no pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from lib.corpus import arrow_arrays
from tests.conftest import ROOT

_WRITE_AND_SELECT = """
import io, pathlib, sys
import numpy as np
from lib.corpus import parts

schema = parts.make_text_schema(keep_source=True)
with open(sys.argv[1], "w+b") as file:
    writer = parts.PartWriter(file, True)
    for row in range(3):
        writer.add(b"text", "a.txt")
    writer.add_file(open(sys.argv[2], "r+b"), 4000, "b.txt")
    writer.finish()
is_kept = np.array([True, False, True, True])
messages = list(parts.rewrite_part(pathlib.Path(sys.argv[1]), schema, is_kept, 0))
assert [size for _, size in messages] == [8, 4000]
assert "pandas" not in sys.modules, "pandas was imported"
"""


def _serialize(array: pa.Array) -> bytes:
    return pa.record_batch([array], names=["column"]).serialize().to_pybytes()


@pytest.mark.parametrize("count", [0, 1, 8, 9, 64, 1000])
def test_arrays_equal_those_of_pyarrow(count):
    draw = np.random.default_rng(count)
    for dtype in (np.int64, np.uint64, np.int32, np.float32):
        numbers = draw.integers(0, 100, 2 * count).astype(dtype)[::2]
        assert _serialize(arrow_arrays.wrap_numbers(numbers)) == _serialize(pa.array(numbers))
    flags = draw.random(count) < 0.5
    assert _serialize(arrow_arrays.pack_flags(flags)) == _serialize(pa.array(flags))
    texts = draw.choice(["", "é", "éa", "text"], count).tolist()
    joined = arrow_arrays.join_texts([text.encode() for text in texts])
    assert _serialize(joined) == _serialize(pa.array(texts, pa.large_string()))
    for values, kind in (
        (texts, pa.string()),
        (texts, pa.large_string()),
        ([*texts, None], pa.string()),
        (list(range(count)), pa.int64()),
        ([*range(count), None], pa.int64()),
        ([0.1] * count, pa.float32()),
    ):
        column = arrow_arrays.make_column(values, kind)
        assert _serialize(column) == _serialize(pa.array(values, kind))


def test_rows_are_written_and_selected_without_pandas(tmp_path):
    (tmp_path / "large").write_bytes(b"long" * 1000)
    command = [sys.executable, "-c", _WRITE_AND_SELECT, tmp_path / "part", tmp_path / "large"]
    subprocess.run(command, cwd=ROOT, check=True)
