"""Read tensors, or parts of tensors, from safetensors files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lib.core import records
from lib.core.errors import ArtifactError
from lib.models import directory, lookup
from lib.models.directory import INDEX, WEIGHTS
from lib.models.options import FLOAT8_RECIPES

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Names of floating-point dtypes in safetensors files → in configs.
FLOATING = {
    name: str(dtype).removeprefix("torch.")
    for dtype, name in DTYPES.items()
    if dtype.is_floating_point
}
# With fp8, everything but the linear layers of the blocks computes in bf16: see float8.py.
COMPUTE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    **dict.fromkeys(FLOAT8_RECIPES, torch.bfloat16),
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_BLOCK = 16 << 20  # bytes of rows that are read at a time

Shape = tuple[int, ...]
TensorPart = tuple[slice, ...]


class StoredTensors(Protocol):
    """Tensors in files that can be read by name, completely or in part.

    dtypes: names of dtypes as in safetensors files. problems: one message per contradiction.
    """

    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    problems: list[str]

    def read(self, key: str, part: TensorPart | None = None) -> Tensor:
        """Return a tensor, or only a part of it. Several threads may call this."""


@dataclass
class Headers:
    """The contents of the headers of safetensors files, by tensor name.

    starts: offset in bytes of a tensor in its file. problems: one message per contradiction.
    damaged: names of files with problems.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    def add(self, path: Path, size: int) -> None:
        """Add the tensors of a file. size: bytes of the complete file; only its header is read."""
        before = len(self.problems)
        try:
            header, start = directory.read_header(path, size)
            self._add(path.name, header, start, size - start)
        except ValueError as error:
            self.problems.append(f"damaged: the file {path.name} ({error})")
        if self.problems[before:]:
            self.damaged.add(path.name)

    def compare(self, file_of: Mapping[str, str]) -> None:
        """Add a problem for each tensor that is not in the file that the index names.

        Damaged files are skipped, because they already have a problem.
        """
        self.problems += [
            f"missing: {key} is not in {file}, where {INDEX} says it is"
            for key, file in file_of.items()
            if self.files.get(key) != file and file not in self.damaged
        ]

    def _add(self, file: str, header: dict[str, Any], start: int, data_bytes: int) -> None:
        end = 0
        self.problems += directory.find_misplaced(header, _ITEM_BYTES, f" in {file}")
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if key in self.shapes:
                self.problems.append(f"{key} is in both {self.files[key]} and {file}")
            end = max(end, last)
            self.shapes[key] = tuple(entry["shape"])
            self.dtypes[key] = entry["dtype"]
            self.files[key] = file
            self.starts[key] = start + first
        if end != data_bytes:
            self.problems.append(
                f"damaged: the file {file} is "
                f"{'truncated' if data_bytes < end else 'too long'}: "
                f"{data_bytes} bytes of data, but its header says {end}"
            )


class HubTensors(Headers):
    """Reads the tensors in a model directory by their names in the checkpoint.

    `pread` is used instead of mmap: mapped pages would count as memory of this rank in addition to
    its shard, and some parallel file systems map slowly. Several threads may read at the same time.
    """

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        self._directory = model_dir
        self._remedy = lookup.model_remedy(model_dir, "--overwrite")
        self._open = ExitStack()
        self._descriptors: dict[str, int] = {}
        file_of = read_index(model_dir)
        for path in [model_dir / name for name in sorted(set(file_of.values()) or {WEIGHTS})]:
            try:
                file = self._open.enter_context(path.open("rb", buffering=0))
            except FileNotFoundError:
                self.problems.append(f"missing: the file {path.name}")
                self.damaged.add(path.name)
                continue
            self.add(path, path.stat().st_size)
            self._descriptors[path.name] = file.fileno()
        self.compare(file_of)

    def __enter__(self) -> HubTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, key: str, part: TensorPart | None = None) -> Tensor:
        """Return a tensor, or only a part of it.

        Reads only the rows of the part. If the part has only some columns, the rows are read
        completely, in blocks.
        """
        shape = self.shapes[key]
        dtype = _BY_NAME[self.dtypes[key]]
        if not part:
            return self._read(key, 0, shape)
        rows = part[0]
        inner = part[1:]
        row = math.prod(shape[1:]) * dtype.itemsize
        sizes = tuple(one.stop - one.start for one in part)
        if sizes[1:] == tuple(shape[1:]):
            return self._read(key, rows.start * row, sizes)
        tensor = torch.empty(sizes, dtype=dtype)
        step = max(1, _BLOCK // max(row, 1))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            block = self._read(key, first * row, (last - first, *shape[1:]))
            tensor[first - rows.start : last - rows.start] = block[(slice(None), *inner)]
        return tensor

    def _read(self, key: str, offset: int, shape: Shape) -> Tensor:
        """Return a tensor of a shape from the data of `key`, from byte `offset` on."""
        tensor = torch.empty(shape, dtype=_BY_NAME[self.dtypes[key]])
        file = self.files[key]
        read_into(
            tensor,
            self._descriptors[file],
            self.starts[key] + offset,
            self._directory / file,
            **self._remedy,
        )
        return tensor


def read_into(tensor: Tensor, descriptor: int, offset: int, path: Path, **remedy: str) -> None:
    """Fill a contiguous tensor with bytes of a file. offset: the first of these bytes.

    Raises ArtifactError, with `path` and `remedy`, if the file is too short.
    """
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise ArtifactError(
                f"{path} ends at byte {offset}, in the middle of a tensor", **remedy
            )
        view = view[count:]
        offset = offset + count


def read_index(model_dir: Path) -> dict[str, str]:
    """Return the file name of each tensor from the index, or {} if there is only one file.

    Raises ArtifactError if the index is damaged or names files outside of the directory.
    """
    path = model_dir / INDEX
    if (model_dir / WEIGHTS).is_file() or not path.is_file():
        return {}
    try:
        file_of = directory.read_index(path)
        if any(map(records.leads_out, file_of.values())):
            raise ValueError("it names files outside of the directory")
    except ValueError:
        raise ArtifactError(
            f"{path} is damaged", expected="a JSON object with a weight_map"
        ) from None
    return file_of
