"""Keep arrays in files, so that memory does not grow with the number of rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

BLOCK = 1 << 18  # entries to process at once


class DiskArray:
    """Maps a file as an array; `release` removes its pages from the memory of this process.

    shape: create a new file with this shape, filled with zeros (default: open an existing file).
    width: number of columns in an existing file, 0 for an array of one dimension. is_fixed: open
    the existing file for reading only.
    """

    def __init__(
        self,
        path: Path,
        dtype: Any,
        shape: tuple[int, ...] | None = None,
        width: int = 0,
        is_fixed: bool = False,
    ) -> None:
        import numpy as np

        kind = np.dtype(dtype)
        if shape is not None:
            with path.open("wb") as file:
                if length := kind.itemsize * int(np.prod(shape)):
                    # Without reserved space, a write to the map on a full disk kills the process.
                    os.posix_fallocate(file.fileno(), 0, length)
        size = path.stat().st_size
        self._map: mmap.mmap | None = None
        if size:
            access = mmap.ACCESS_READ if is_fixed else mmap.ACCESS_WRITE
            with path.open("rb" if is_fixed else "rb+") as file:
                self._map = mmap.mmap(file.fileno(), size, access=access)
        data: Any = self._map or b""
        values = np.frombuffer(data, kind)
        if shape is not None:
            values = values.reshape(shape)
        self.values = values.reshape(-1, width) if width and shape is None else values

    def __len__(self) -> int:
        return len(self.values)

    def release(self) -> None:
        """Remove the pages from memory; the kernel writes changed ones to the file."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index of the first entry and a copy of the values, block by block."""
        for first in range(0, len(self.values), BLOCK):
            yield first, self.values[first : first + BLOCK].copy()
            self.release()
