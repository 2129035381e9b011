"""Make Arrow arrays without `pa.array`.

The first call of `pa.array` in a process imports pandas, if it is installed, which takes longer
than a small build. Each worker of stage 02 is a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def wrap_numbers(numbers: np.ndarray) -> pa.Array:
    """Return numbers ([count], one of NumPy's numeric types) as an Arrow array, not copied."""
    import numpy as np
    import pyarrow as pa

    numbers = np.ascontiguousarray(numbers)
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def pack_flags(flags: np.ndarray) -> pa.Array:
    """Return flags (bool [count]) as an Arrow array."""
    import numpy as np
    import pyarrow as pa

    bits = np.packbits(flags, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(bits)])


def join_texts(texts: Sequence[bytes]) -> pa.Array:
    """Return texts as a large_string array, without validating them: a codec has produced each."""
    return _join_buffers(texts, is_large=True)


def make_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values of a column. kind: string or a number type; None is a missing value."""
    import numpy as np
    import pyarrow as pa

    if None in values:
        return pa.array(values, kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = [value.encode() for value in values]
        return _join_buffers(texts, pa.types.is_large_string(kind))
    return wrap_numbers(np.array(values, kind.to_pandas_dtype()))


def _join_buffers(texts: Sequence[bytes], is_large: bool) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    kind, offset = (pa.large_string(), np.int64) if is_large else (pa.string(), np.int32)
    offsets = np.zeros(len(texts) + 1, offset)
    np.cumsum(np.fromiter(map(len, texts), offset, len(texts)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(texts), buffers)
