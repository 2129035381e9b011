"""From a sharded checkpoint to safetensors files, one group of tensors in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import PreTrainedModel

from lib.checkpoints import commit, contents
from lib.checkpoints.storage import ShardFile, StrictReader
from lib.checkpoints.tensor_file import Entry, TensorFile, not_as_written
from lib.core import manifest, units
from lib.core.errors import ArtifactError
from lib.models import adapters, keys
from lib.models.adapters import ModelAdapter
from lib.models.architecture import ROUTER_BIASES
from lib.models.directory import INDEX, WEIGHTS
from lib.models.stored import StoredModel

Described = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ExportPlan:
    """What will be read together, and what each file will hold, both in the order of writing.

    groups: of the module's names. files: entries by file name.
    """

    groups: list[tuple[str, ...]]
    files: dict[str, list[Entry]]

    @property
    def entries(self) -> list[Entry]:
        return [entry for entries in self.files.values() for entry in entries]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def plan(model: PreTrainedModel, dtype: torch.dtype, max_shard_bytes: int) -> ExportPlan:
    """Return what is to be written.

    model: on meta. dtype: of floating-point tensors; others keep theirs, and the biases of routers
    stay float32, whose steps would vanish in half precision. A tensor larger than max_shard_bytes
    gets a file of its own.
    """
    tensors = model.state_dict(keep_vars=True)
    groups = keys.group_for_export(model)
    shards: list[list[Entry]] = [[]]
    size = 0
    for group in groups:
        meta = {name: tensors[name].detach() for name in group}
        for key, tensor in keys.convert_to_hub(model, meta):
            is_cast = tensor.is_floating_point() and not key.endswith(ROUTER_BIASES)
            stored = dtype if is_cast else tensor.dtype
            entry = Entry(key, tuple(tensor.shape), stored)
            if shards[-1] and size + entry.bytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.bytes
    return ExportPlan(groups, dict(zip(_file_names(len(shards)), shards, strict=True)))


def write(
    model: PreTrainedModel,
    checkpoint: commit.Checkpoint,
    planned: ExportPlan,
    out: Path,
    advance: Callable[[int], None],
    folded: Sequence[ModelAdapter] = (),
    base: StoredModel | None = None,
) -> list[dict[str, Any]]:
    """Write the planned files into `out`, read them back, and return their manifest entries.

    advance: called with the bytes of each tensor written. folded: the adapters of the run. base:
    what they were trained beside, where the checkpoint holds nothing else. Raises ArtifactError
    when the checkpoint is of another model, or what is on disk is not what was written.
    """
    files = []
    # A conversion (experts) copies: with a tensor read ahead that would be one too many.
    converts = len(planned.entries) > len(planned.groups)
    with (
        closing(PieceReader(checkpoint.path / commit.TENSORS, not converts)) as reader,
        ThreadPoolExecutor(1) as checker,
    ):
        tensors = _hub_tensors(model, planned.groups, reader, checkpoint.path, folded, base)
        for name, entries in planned.files.items():
            with TensorFile(out / name, entries) as file:
                for entry in entries:
                    key, tensor = next(tensors)
                    assert (key, tuple(tensor.shape)) == (entry.key, entry.shape)
                    file.add(tensor, entry.dtype)
                    advance(entry.bytes)
            files.append((file, checker.submit(file.reads_back)))  # while the next is written
        if bad := [file.path for file, reads_back in files if not reads_back.result()]:
            raise not_as_written(bad[0])
    written = [file.manifest_entry() for file, _ in files]
    if len(files) > 1:
        _write_index(model, planned, out / INDEX)
        written.append(manifest.file_entry(out, out / INDEX, "sha256"))
    return written


def verify(model: PreTrainedModel, out: Path) -> None:
    """Compare names and shapes in the files that were written with the model's.

    Raises ArtifactError when anything differs.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = list(file.keys())  # the file is no mapping
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    expected = keys.list_expected(model)
    problems = [
        f"{key}: expected {expected.get(key)}, written {found.get(key)}"
        for key in sorted(found.keys() | expected.keys())
        if found.get(key) != expected.get(key)
    ]
    if problems:
        raise ArtifactError(
            "the export holds other tensors than the model", found="\n".join(problems[:8])
        )


def _file_names(shards: int) -> list[str]:
    """Return the file names that `from_pretrained` expects for a number of files."""
    if shards == 1:
        return [WEIGHTS]
    return [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]


def _hub_tensors(
    model: PreTrainedModel,
    groups: list[tuple[str, ...]],
    reader: PieceReader,
    path: Path,
    folded: Sequence[ModelAdapter],
    base: StoredModel | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hub names and full tensors in the planned order, each valid until the next.

    A thread reads one group ahead if the reader does. What adapters have added stays in memory.
    """
    saved, extra = _saved_names(model, groups, reader, path, folded, base is not None)
    added = {
        name.removeprefix(contents.MODEL): tensor.clone()
        for name in extra
        for tensor in reader.read([name])
    }
    read: Callable[[Sequence[str]], list[Tensor]] = reader.read if base is None else base.read_all
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(read, saved[0])
        for group, following in zip(groups, [*saved[1:], []], strict=True):
            full = {
                name: adapters.fold(folded, model, name, tensor, added)
                for name, tensor in zip(group, coming.result(), strict=True)
            }
            if reader.reads_ahead:
                coming = ahead.submit(read, following)
            yield from keys.convert_to_hub(model, full)
            if not reader.reads_ahead:
                coming = ahead.submit(read, following)


def _saved_names(
    model: PreTrainedModel,
    groups: list[tuple[str, ...]],
    reader: PieceReader,
    path: Path,
    folded: Sequence[ModelAdapter],
    beside_base: bool,
) -> tuple[list[list[str]], list[str]]:
    """Return each group's names where it is read from, and those that adapters have added.

    beside_base: the checkpoint holds nothing but these. Raises ArtifactError when it is of another
    model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = model.state_dict(keep_vars=True)
    saved = [
        list(group)
        if beside_base
        else [(contents.MODEL if name in parameters else contents.BUFFER) + name for name in group]
        for group in groups
    ]
    for names, group in zip(saved, groups, strict=True) if not beside_base else ():
        for key, name in zip(names, group, strict=True):
            shape = tuple(tensors[name].shape)
            there = reader.described.get(key, (None, None))[0]
            if there != shape:
                raise ArtifactError(
                    f"checkpoint {path} is of another model",
                    expected=f"{name} {list(shape)}",
                    found="nothing" if there is None else str(list(there)),
                )
    used = {key for names in saved for key in names}
    others = sorted(
        key
        for key in reader.described
        if key.startswith((contents.MODEL, contents.BUFFER)) and key not in used
    )
    added = [
        key for key in others if any(each.owns(key.removeprefix(contents.MODEL)) for each in folded)
    ]
    if left := [key for key in others if key not in added]:
        raise ArtifactError(
            f"checkpoint {path} holds more than {path.parents[1]}/model",
            found=", ".join(left[:5]),
            expected="the config.json that the run was begun with",
        )
    return saved, added


def _write_index(model: PreTrainedModel, planned: ExportPlan, path: Path) -> None:
    where = {entry.key: name for name, entries in planned.files.items() for entry in entries}
    manifest.write_json(
        path,
        {
            "metadata": {"total_parameters": model.num_parameters(), "total_size": planned.bytes},
            "weight_map": dict(sorted(where.items())),
        },
    )


class PieceReader:
    """Reads full tensors out of the shards that ranks wrote; verify the digests before.

    `dcp.load` would hold a shard, its copy in the tensor and what unpickling needs at once. Here
    each shard goes from the file into its place, in memory that is used over and over.
    described: shape and dtype by name. reads_ahead: what was read is valid until the next but one
    call of `read`, at the cost of memory for two; else until the next.
    """

    def __init__(self, directory: Path, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead
        metadata = StrictReader(directory).read_metadata()
        self._tensors = metadata.state_dict_metadata
        self._places = metadata.storage_data
        self.described: dict[str, Described] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._tensors.items()
        }
        # Opened now, so that a run that goes on may delete the checkpoint while it is read.
        names = {place.relative_path for place in self._places.values()}
        self._files = {name: ShardFile(directory / name) for name in sorted(names)}
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(1 + reads_ahead)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Return full tensors; ArtifactError when a file is cut short."""
        spans = [
            _aligned(torch.Size(shape).numel() * dtype.itemsize)
            for shape, dtype in (self.described[name] for name in names)
        ]
        memory = self._memory.pop(0)
        if sum(spans) > len(memory):
            del memory  # before the larger one is there
            memory = torch.empty(sum(spans), dtype=torch.uint8)
        self._memory.append(memory)
        return [
            self._read(name, part)
            for name, part in zip(names, memory[: sum(spans)].split(spans), strict=True)
        ]

    def _read(self, name: str, memory: Tensor) -> Tensor:
        shape, dtype = self.described[name]
        full = memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for chunk in self._tensors[name].chunks:
            part = full[
                tuple(
                    slice(first, first + size)
                    for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
                )
            ]
            if part.numel():
                place = self._places[MetadataIndex(name, chunk.offsets)]
                self._files[place.relative_path].read(place, part, [0] * part.dim())
        return full


def _aligned(size: int) -> int:
    return units.ceil_div(size, 64) * 64
