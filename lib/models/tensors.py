"""The tensors of a model directory's safetensors files, read in part and nothing else."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.core import records
from lib.core.errors import ArtifactError, is_of_disk
from lib.models import resolve
from lib.models.identity import INDEX, WEIGHTS
from lib.models.recipes import Part, Shape
from lib.models.safetensors_file import DTYPES

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_BLOCK = 16 << 20  # bytes


@dataclass(frozen=True)
class _Place:
    descriptor: int
    path: Path
    offset: int


class Checkpoint:
    """Tensors by Hub name. shapes, dtypes: of each. problems: one sentence per unreadable file.

    Read by `pread`, not through mapped memory: mapped pages would count as this rank's memory on
    top of its shard, and some parallel file systems map slowly. Several threads may read at once.
    """

    def __init__(self, model_dir: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[str] = []
        self._places: dict[str, _Place] = {}
        self._open = ExitStack()
        file_of = _index(model_dir)
        whole = {name: self._add(model_dir / name)
                 for name in sorted(set(file_of.values()) or {WEIGHTS})}
        self.problems += [f"missing: {key} is not in {file}, where {INDEX} says it is"
                          for key, file in file_of.items()
                          if whole[file] and key not in self.shapes]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, key: str, part: Part | None = None) -> Tensor:
        """Return a tensor, or only the part of it.

        Of the first dimension only what is asked for is read; rows are read whole, in blocks, when
        only some of their columns are wanted.
        """
        place, shape, dtype = self._places[key], self.shapes[key], _DTYPES[self.dtypes[key]]
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
        length = int.from_bytes(file.read(8), "little")
        for key, entry in records.parse_json(file.read(length)).items():
            if key != "__metadata__":
                self.shapes[key], self.dtypes[key] = tuple(entry["shape"]), entry["dtype"]
                self._places[key] = _Place(file.fileno(), path,
                                           8 + length + entry["data_offsets"][0])
        return True


def _read(place: _Place, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the tensor of a shape that begins at a byte of a tensor's data."""
    tensor = torch.empty(shape, dtype=dtype)
    read_into(tensor, place.descriptor, place.offset + offset, place.path,
              **resolve.remedy(place.path.parent, "--overwrite"))
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


def _index(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor as the index says, empty when there is but one file."""
    path = model_dir / INDEX
    if (model_dir / WEIGHTS).is_file() or not path.is_file():
        return {}
    try:
        weight_map = records.read_json(path)["weight_map"]
        if any(map(records.leads_out, weight_map.values())):
            raise ValueError("it names files elsewhere")
        return {str(key): str(file) for key, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArtifactError(f"{path} is damaged",
                            expected="a JSON object with a weight_map") from None
