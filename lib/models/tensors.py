"""Reads the tensors of safetensors files in part, and writes such files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.core import hashing, records
from lib.core.errors import ArtifactError, is_of_disk
from lib.models import directory
from lib.models.directory import INDEX, WEIGHTS

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
          torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
          torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
FLOATING = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()
            if dtype.is_floating_point}  # names in files → names in configs
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_BLOCK = 16 << 20  # bytes

Shape = tuple[int, ...]
TensorPart = tuple[slice, ...]


@dataclass(frozen=True)
class _Place:
    descriptor: int
    path: Path
    offset: int


class HubTensors:
    """Reads the tensors of a model directory by Hub name.

    shapes, dtypes: of each. problems: one sentence per unreadable file.

    They are read by `pread`, not through mapped memory: mapped pages would count as this rank's
    memory on top of its shard, and some parallel file systems map slowly. Several threads may read
    at once.
    """

    def __init__(self, model_dir: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[str] = []
        self._places: dict[str, _Place] = {}
        self._open = ExitStack()
        file_of = _read_index(model_dir)
        whole = {name: self._add(model_dir / name)
                 for name in sorted(set(file_of.values()) or {WEIGHTS})}
        self.problems += [f"missing: {key} is not in {file}, where {INDEX} says it is"
                          for key, file in file_of.items()
                          if whole[file] and key not in self.shapes]

    def __enter__(self) -> HubTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, key: str, part: TensorPart | None = None) -> Tensor:
        """Return a tensor, or only the part of it.

        Of the first dimension only what is asked for is read; rows are read whole, in blocks, when
        only some of their columns are wanted.
        """
        place, shape, dtype = self._places[key], self.shapes[key], _BY_NAME[self.dtypes[key]]
        if not part:
            return _read(place, 0, shape, dtype)
        rows, inner = part[0], part[1:]
        row = math.prod(shape[1:]) * dtype.itemsize
        sizes = tuple(one.stop - one.start for one in part)
        if sizes[1:] == tuple(shape[1:]):
            return _read(place, rows.start * row, sizes, dtype)
        found = torch.empty(sizes, dtype=dtype)
        step = max(1, _BLOCK // max(row, 1))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            block = _read(place, first * row, (last - first, *shape[1:]), dtype)
            found[first - rows.start:last - rows.start] = block[(slice(None), *inner)]
        return found

    def _add(self, path: Path) -> bool:
        """Take in a file's tensors; False, with a problem noted, when that is impossible."""
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # which checks that header and size fit each other
            file = self._open.enter_context(path.open("rb", buffering=0))
        except FileNotFoundError:
            self.problems.append(f"missing: the file {path.name}")
            return False
        except (SafetensorError, OSError) as error:
            if is_of_disk(error):
                raise
            self.problems.append(f"damaged: the file {path.name} ({error})")
            return False
        header, start = directory.read_header(path, path.stat().st_size)
        for key, entry in header.items():
            self.shapes[key], self.dtypes[key] = tuple(entry["shape"]), entry["dtype"]
            self._places[key] = _Place(file.fileno(), path, start + entry["data_offsets"][0])
        return True


def _read(place: _Place, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the tensor of a shape that begins at a byte of a tensor's data."""
    tensor = torch.empty(shape, dtype=dtype)
    read_into(tensor, place.descriptor, place.offset + offset, place.path,
              **directory.remedy(place.path.parent, "--overwrite"))
    return tensor


def read_into(tensor: Tensor, descriptor: int, offset: int, path: Path, **remedy: str) -> None:
    """Fill a contiguous tensor with the bytes of a file from an offset on.

    path, remedy: for the ArtifactError when the file ends before.
    """
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise ArtifactError(f"{path} ends at byte {offset}, in the middle of a tensor",
                                **remedy)
        view, offset = view[count:], offset + count


def _read_index(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor as the index says, empty when there is but one file."""
    path = model_dir / INDEX
    if (model_dir / WEIGHTS).is_file() or not path.is_file():
        return {}
    try:
        file_of = directory.read_index(path)
        if any(map(records.leads_out, file_of.values())):
            raise ValueError("it names files elsewhere")
    except ValueError:
        raise ArtifactError(f"{path} is damaged",
                            expected="a JSON object with a weight_map") from None
    return file_of


def make_header(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> bytes:
    """Return what a file begins with for tensors (name, shape, dtype) in this order.

    `format: pt` is what transformers looks for.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, shape, dtype in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        content[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors on the CPU in their order; return the manifest entry (SHA-256)."""
    begin = make_header((key, tensor.shape, tensor.dtype) for key, tensor in tensors.items())
    hasher = hashing.new("sha256")
    with path.open("wb") as file:
        hasher.update(begin)
        file.write(begin)
        for tensor in tensors.values():
            content: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            hasher.update(content)
            file.write(content)
    return {"path": path.name, "bytes": path.stat().st_size,
            "digest": hashing.digest(hasher, "sha256")}
