"""Write a sharded checkpoint as safetensors files, one group of tensors at a time."""

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
from transformers import PreTrainedModel

from lib.checkpoints import commit, contents
from lib.core import manifest
from lib.core.errors import ArtifactError
from lib.export.stored_model import StoredModel
from lib.export.tensor_reader import FullTensorReader
from lib.models import keys, model_changes
from lib.models.architecture import ROUTER_BIASES
from lib.models.directory import INDEX, WEIGHTS
from lib.models.model_changes import ModelChange
from lib.models.tensor_file import Entry, TensorFile, make_read_back_error


@dataclass(frozen=True)
class ExportPlan:
    """The groups of tensors to read together and the content of each file, in writing order.

    groups: names of the tensors in the module, group by group. files: entries by file name.
    """

    groups: list[tuple[str, ...]]
    files: dict[str, list[Entry]]

    @property
    def entries(self) -> list[Entry]:
        return [entry for entries in self.files.values() for entry in entries]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def plan_export(model: PreTrainedModel, dtype: torch.dtype, max_shard_bytes: int) -> ExportPlan:
    """Return the plan of an export.

    model: on meta. dtype: dtype for floating-point tensors. Other tensors keep their dtype, and the
    biases of routers stay float32, because half precision would lose their small steps. A tensor
    larger than max_shard_bytes gets its own file.
    """
    tensors = model.state_dict(keep_vars=True)
    groups = keys.group_for_export(model)
    shards: list[list[Entry]] = [[]]
    size = 0
    for group in groups:
        meta = {name: tensors[name].detach() for name in group}
        # By their names in the module: some families have another name for them on the Hub.
        has_bias = any(name.endswith(ROUTER_BIASES) for name in group)
        for key, tensor in keys.convert_to_hub(model, meta):
            is_cast = tensor.is_floating_point() and not has_bias
            stored = dtype if is_cast else tensor.dtype
            entry = Entry(key, tuple(tensor.shape), stored)
            if shards[-1] and size + entry.bytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.bytes
    return ExportPlan(groups, dict(zip(_file_names(len(shards)), shards, strict=True)))


def write_model(
    model: PreTrainedModel,
    checkpoint: commit.Checkpoint,
    plan: ExportPlan,
    out: Path,
    advance: Callable[[int], None],
    changes: Sequence[ModelChange] = (),
    base: StoredModel | None = None,
) -> list[dict[str, Any]]:
    """Write the planned files into `out`, read them back, and return their manifest entries.

    advance: called with the bytes of each written tensor. changes: model changes of the run,
    which are merged. base: the base model of a LoRA run, whose checkpoint contains only adapters.
    Raises ArtifactError if the checkpoint belongs to another model, or if a file does not read back
    as it was written.
    """
    # Converting experts copies them; reading ahead as well would need memory for a third group.
    converts = len(plan.entries) > len(plan.groups)
    with closing(FullTensorReader(checkpoint.path / commit.TENSORS, not converts)) as reader:
        tensors = _hub_tensors(model, plan.groups, reader, checkpoint.path, changes, base)
        return _write_files(model, plan, out, tensors, advance)


def write_stored(
    model: PreTrainedModel,
    stored: StoredModel,
    plan: ExportPlan,
    out: Path,
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Write the planned files from stored tensors, as `write_model` does from a checkpoint."""
    tensors = (
        hub_tensor
        for group in plan.groups
        for hub_tensor in keys.convert_to_hub(
            model, dict(zip(group, stored.read_all(group), strict=True))
        )
    )
    return _write_files(model, plan, out, tensors, advance)


def _write_files(
    model: PreTrainedModel,
    plan: ExportPlan,
    out: Path,
    tensors: Iterator[tuple[str, Tensor]],
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Write tensors into the planned files, read them back, and return their manifest entries.

    tensors: Hub names and full tensors, in the planned order.
    """
    files = []
    with ThreadPoolExecutor(1) as checker:
        for name, entries in plan.files.items():
            with TensorFile(out / name, entries) as file:
                for entry in entries:
                    key, tensor = next(tensors)
                    assert (key, tuple(tensor.shape)) == (entry.key, entry.shape)
                    file.add(tensor, entry.dtype)
                    advance(entry.bytes)
            files.append((file, checker.submit(file.reads_back)))  # while the next is written
        if bad := [file.path for file, reads_back in files if not reads_back.result()]:
            raise make_read_back_error(bad[0])
    written = [file.manifest_entry() for file, _ in files]
    if len(files) > 1:
        _write_index(model, plan, out / INDEX)
        written.append(manifest.file_entry(out, out / INDEX, "sha256"))
    return written


def verify_model(model: PreTrainedModel, out: Path) -> None:
    """Compare the names and shapes in the written files with the model's.

    Raises ArtifactError if anything differs.
    """
    written: dict[str, tuple[int, ...]] = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = list(file.keys())  # the file itself is not iterable
            written |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    expected = keys.list_expected(model)
    problems = [
        f"{key}: expected {expected.get(key)}, written {written.get(key)}"
        for key in sorted(written.keys() | expected.keys())
        if written.get(key) != expected.get(key)
    ]
    if problems:
        raise ArtifactError(
            "the exported tensors do not match the model", found="\n".join(problems[:8])
        )


def _file_names(shards: int) -> list[str]:
    """Return the file names that `from_pretrained` expects for a number of files."""
    if shards == 1:
        return [WEIGHTS]
    return [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]


def _hub_tensors(
    model: PreTrainedModel,
    groups: list[tuple[str, ...]],
    reader: FullTensorReader,
    path: Path,
    changes: Sequence[ModelChange],
    base: StoredModel | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hub names and full tensors in the planned order.

    A tensor is valid until the caller requests the next one. If the reader reads ahead, a thread
    reads the next group meanwhile. The tensors of adapters stay in memory.
    """
    saved, extra = _saved_names(model, groups, reader, path, changes, base is not None)
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
                name: model_changes.fold_tensor(changes, model, name, tensor, added)
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
    reader: FullTensorReader,
    path: Path,
    changes: Sequence[ModelChange],
    reads_base: bool,
) -> tuple[list[list[str]], list[str]]:
    """Return the saved names of the tensors in each group, and the names of adapter tensors.

    reads_base: the groups are read from the base model, because the checkpoint contains only an
    adapter. Raises ArtifactError if the checkpoint belongs to another model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = model.state_dict(keep_vars=True)
    saved = [
        list(group)
        if reads_base
        else [(contents.MODEL if name in parameters else contents.BUFFER) + name for name in group]
        for group in groups
    ]
    for names, group in zip(saved, groups, strict=True) if not reads_base else ():
        for key, name in zip(names, group, strict=True):
            shape = tuple(tensors[name].shape)
            saved_shape = reader.described.get(key, (None, None))[0]
            if saved_shape != shape:
                raise ArtifactError(
                    f"checkpoint {path} belongs to another model",
                    expected=f"{name} {list(shape)}",
                    found="nothing" if saved_shape is None else str(list(saved_shape)),
                )
    used = {key for names in saved for key in names}
    others = sorted(
        key
        for key in reader.described
        if key.startswith((contents.MODEL, contents.BUFFER)) and key not in used
    )
    added = [
        key
        for key in others
        if any(change.owns(key.removeprefix(contents.MODEL)) for change in changes)
    ]
    if unexpected := [key for key in others if key not in added]:
        raise ArtifactError(
            f"checkpoint {path} contains tensors that {path.parents[1]}/model does not have",
            found=", ".join(unexpected[:5]),
            expected="the config.json that the run was started with",
        )
    return saved, added


def _write_index(model: PreTrainedModel, plan: ExportPlan, path: Path) -> None:
    where = {entry.key: name for name, entries in plan.files.items() for entry in entries}
    manifest.write_json(
        path,
        {
            "metadata": {"total_parameters": model.num_parameters(), "total_size": plan.bytes},
            "weight_map": dict(sorted(where.items())),
        },
    )
