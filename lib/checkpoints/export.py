"""From a sharded checkpoint to safetensors files, one group of tensors in memory at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from lib.checkpoints import commit, state
from lib.checkpoints.storage import StrictReader, plain_errors
from lib.core import hashing, manifest
from lib.core.errors import ArtifactError
from lib.models import keys
from lib.models.identity import INDEX, WEIGHTS

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
           torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
           torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Entry:
    """A tensor as it will be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def plan(model: PreTrainedModel, dtype: torch.dtype, max_shard_bytes: int) -> list[list[Entry]]:
    """Return what each file will hold, in the order of writing.

    model: on meta. dtype: of floating-point tensors; others keep theirs. A tensor larger than
    max_shard_bytes gets a file of its own.
    """
    tensors = model.state_dict(keep_vars=True)
    shards: list[list[Entry]] = [[]]
    size = 0
    for group in keys.export_groups(model):
        meta = {name: tensors[name].detach() for name in group}
        for key, tensor in keys.hub_tensors(model, meta):
            entry = Entry(key, tuple(tensor.shape), _stored_dtype(tensor, dtype))
            if shards[-1] and size + entry.bytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.bytes
    return shards


def write(model: PreTrainedModel, checkpoint: commit.Checkpoint, shards: list[list[Entry]],
          out: Path, dtype: torch.dtype, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """Write the planned files into `out` and return their manifest entries (sha256).

    advance: called with the bytes of each tensor written. Raises ArtifactError when the
    checkpoint is of another model.
    """
    tensors = _hub_tensors(model, checkpoint)
    names = file_names(len(shards))
    entries = []
    for name, shard in zip(names, shards, strict=True):
        entries.append(_write_file(out / name, shard, tensors, dtype, advance))
    if len(shards) > 1:
        _write_index(out / INDEX, names, shards)
        entries.append(manifest.file_entry(out, out / INDEX, "sha256"))
    return entries


def verify(model: PreTrainedModel, out: Path, entries: list[dict[str, Any]]) -> None:
    """Read back what was written: every byte, and names and shapes against the model's.

    Raises ArtifactError when anything differs.
    """
    problems = manifest.damages(out, {"files": entries}, deep=True)
    found: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        if entry["path"].endswith(".safetensors"):
            with safe_open(out / entry["path"], "pt") as file:
                found |= {key: tuple(file.get_slice(key).get_shape())
                          for key in file.keys()}  # noqa: SIM118 (no mapping, only has keys())
    expected = keys.expected_tensors(model)
    problems += [f"{key}: expected {expected.get(key)}, written {found.get(key)}"
                 for key in sorted(found.keys() | expected.keys())
                 if found.get(key) != expected.get(key)]
    if problems:
        raise ArtifactError("the export does not read back as it was written",
                            found="\n".join(problems[:8]))


def file_names(shards: int) -> list[str]:
    """Return the file names that `from_pretrained` expects for a number of files."""
    if shards == 1:
        return [WEIGHTS]
    return [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]


def _stored_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _hub_tensors(model: PreTrainedModel, checkpoint: commit.Checkpoint,
                 ) -> Iterator[tuple[str, Tensor]]:
    """Yield Hub names and full tensors in the planned order, reading group by group."""
    reader = StrictReader(checkpoint.path / commit.TENSORS)
    saved = reader.read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = model.state_dict(keep_vars=True)
    for group in keys.export_groups(model):
        wanted = {}
        for name in group:
            key = (state.MODEL if name in parameters else state.BUFFER) + name
            shape = tuple(tensors[name].shape)
            if key not in saved or tuple(saved[key].size) != shape:
                there = list(saved[key].size) if key in saved else "nothing"
                raise ArtifactError(f"checkpoint {checkpoint.path} is of another model",
                                    expected=f"{name} {list(shape)}", found=str(there))
            wanted[key] = torch.empty(shape, dtype=saved[key].properties.dtype)
        with warnings.catch_warnings(), plain_errors():  # it warns of what is meant: no group
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(wanted, storage_reader=reader, no_dist=True)
        full = dict(zip(group, wanted.values(), strict=True))
        yield from keys.hub_tensors(model, full)


def _write_file(path: Path, shard: list[Entry], tensors: Iterator[tuple[str, Tensor]],
                dtype: torch.dtype, advance: Callable[[int], None]) -> dict[str, Any]:
    """Write one safetensors file: length of the header, header (JSON), then the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in shard:
        header[entry.key] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape),
                             "data_offsets": [offset, offset + entry.bytes]}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    hasher = hashing.new("sha256")
    with path.open("wb") as file:
        _put(file, hasher, len(text).to_bytes(8, "little") + text)
        for entry in shard:
            key, tensor = next(tensors)
            assert (key, tuple(tensor.shape)) == (entry.key, entry.shape)
            stored = tensor.to(_stored_dtype(tensor, dtype)).contiguous()
            _put(file, hasher, stored.flatten().view(torch.uint8).numpy())
            advance(entry.bytes)
    return {"path": path.name, "bytes": path.stat().st_size,
            "digest": hashing.digest(hasher, "sha256")}


def _put(file: BinaryIO, hasher: hashing.Hasher, data: Any) -> None:
    hasher.update(data)
    file.write(data)


def _write_index(path: Path, names: list[str], shards: list[list[Entry]]) -> None:
    where = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.bytes for shard in shards for entry in shard)
    manifest.write_json(path, {"metadata": {"total_size": total}, "weight_map": where})
