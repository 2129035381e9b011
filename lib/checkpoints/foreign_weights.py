"""Read the weights of another trainer's checkpoint, by their names in a model.

A tensor is put together from the shards of all ranks that saved it.
"""

from __future__ import annotations

import errno
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import PreTrainedModel

from lib.checkpoints.storage import ALLOWED, ShardFile, load_metadata
from lib.core import log, placeholders, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import DCP_METADATA
from lib.models import keys
from lib.models.tensors import DTYPES, Shape, TensorPart
from lib.models.weights import plan_stored, warn_of_unused_tensors

# The state of an optimizer contains pickled numbers. Their descriptions may be loaded; the numbers
# themselves are never read. torch up to 2.2 described tensors with the last two classes.
_FOREIGN_ALLOWED = {
    **ALLOWED,
    "torch.distributed.checkpoint.metadata": ALLOWED["torch.distributed.checkpoint.metadata"]
    | {"BytesStorageMetadata"},
    "torch": ALLOWED["torch"] | {"int8", "int16", "float8_e4m3fn", "float8_e5m2", "complex64"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
}
# Keys under which trainers store the model in the dictionary that they save. With "", the tensors
# of the model are at the top level, perhaps beside the states in _OTHER_STATES.
_CONTAINERS = ("model.", "app.model.", "state_dict.", "model_state_dict.", "")
_OTHER_STATES = {
    *("optimizer", "optim", "app", "lr_scheduler", "scheduler", "train_state", "dataloader"),
    *("rng", "rng_state", "extra_state", "ema"),
}
# Parts of names that wrappers add: torch.compile, DDP, FSDP1, activation checkpointing.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FLAT = ("_flat_param", "flat_param")
_PARSER_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError),
    *(LookupError, RuntimeError),
)
_CLOCKS_DIFFER_S = 60.0  # clocks of the machines that save may differ by this
_SHOWN = 40


class _Shard(NamedTuple):
    """A shard of a tensor. part: its position in the tensor."""

    place: _StorageInfo
    part: TensorPart


class ForeignTensors:
    """Reads tensors of another trainer's checkpoint by their names in a model.

    Has the attributes of StoredTensors in lib/models/tensors.py.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        """Read the descriptions of all tensors, and find the ones of the model.

        directory: contains `.metadata`. model: may be on the meta device. Raises ArtifactError
        if the checkpoint is damaged or incomplete, or if `.metadata` contains other Python objects.
        """
        self.directory = directory
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[str] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._shards: dict[str, list[_Shard]] = {}
        self._open = ExitStack()
        self._files: dict[str, ShardFile] = {}
        self._lock = Lock()
        with _report_damage(directory / DCP_METADATA):
            metadata = load_metadata(directory, _FOREIGN_ALLOWED)
            places: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
            self._add_tensors(metadata.state_dict_metadata, places, _list_names(model))
            _require_complete_files(directory, places)

    def _add_tensors(
        self,
        entries: Mapping[str, object],
        places: Mapping[MetadataIndex, _StorageInfo],
        expected: Set[str],
    ) -> None:
        tensors = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        by_key = _match_names(tensors, expected)
        for key, names in by_key.items():
            name = names[0]
            if names[1:]:
                self.problems.append(f"ambiguous: {' and '.join(names)} both match {key}")
            dtype = tensors[name].properties.dtype
            self.shapes[key] = tuple(tensors[name].size)
            self.dtypes[key] = DTYPES.get(dtype, str(dtype))
            self._dtypes[key] = dtype
            self._shards[key] = list(_list_shards(name, tensors[name], places))
            parts = [shard.part for shard in self._shards[key]]
            if problem := _find_misplaced(parts, self.shapes[key]):
                self.problems.append(f"incomplete: the shards of {name} {problem}")

    def __enter__(self) -> ForeignTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, key: str, part: TensorPart | None = None) -> Tensor:
        """Return a tensor, or only a part of it; reads only the rows of the part."""
        if part is None:
            part = tuple(slice(0, size) for size in self.shapes[key])
        tensor = torch.empty([one.stop - one.start for one in part], dtype=self._dtypes[key])
        for shard in self._shards[key]:
            common = _intersect(part, shard.part)
            if _count_elements(common):
                name = shard.place.relative_path
                with _report_damage(self.directory / name):
                    self._get_file(name).read(
                        shard.place,
                        tensor[_shift_part(part, common)],
                        [one.start for one in _shift_part(shard.part, common)],
                    )
        return tensor

    def _get_file(self, name: str) -> ShardFile:
        with self._lock:
            if name not in self._files:
                path = self.directory / name
                self._files[name] = self._open.enter_context(ShardFile(path))
            return self._files[name]


def _shift_part(outer: TensorPart, inner: TensorPart) -> TensorPart:
    return tuple(
        slice(b.start - a.start, b.stop - a.start) for a, b in zip(outer, inner, strict=True)
    )


def _find_misplaced(parts: Sequence[TensorPart], shape: Shape) -> str:
    """Return what is wrong with the shards of a tensor: "" if each element is in exactly one.

    If no shard leaves the tensor and none overlaps another, their sizes add up to that of the
    tensor only if they leave no gap.
    """
    if any(
        one.start < 0 or one.stop > size
        for part in parts
        for one, size in zip(part, shape, strict=True)
    ):
        return "reach beyond it"
    neighbours: list[TensorPart] = []  # the earlier shards that reach into the rows of this one
    for part in sorted(parts, key=lambda part: [one.start for one in part]):
        neighbours = [other for other in neighbours if not part or other[0].stop > part[0].start]
        if any(_count_elements(_intersect(part, other)) for other in neighbours):
            return "overlap"
        neighbours.append(part)
    return "" if sum(map(_count_elements, parts)) == math.prod(shape) else "do not cover it"


def _intersect(one: TensorPart, other: TensorPart) -> TensorPart:
    """Return the part of a tensor that is in two parts; one of its slices is empty if none is."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(a, max(a, b)) for a, b in zip(starts, stops, strict=True))


def _count_elements(part: TensorPart) -> int:
    return math.prod(one.stop - one.start for one in part)


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Raise ArtifactError with the name of the file, instead of an error of its parser."""
    try:
        yield
    except (OSError, *_PARSER_ERRORS) as error:
        # torch seeks to a negative position in a damaged archive. Other errors come from the disk.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        placeholder = placeholders.find_in_file(path)
        raise ArtifactError(
            f"{path} is damaged",
            found=f"it is {placeholder}" if placeholder else reason,
            hint="copy it again, or use an older checkpoint of that run",
        ) from error


def _require_complete_files(directory: Path, places: Mapping[MetadataIndex, _StorageInfo]) -> None:
    """Raise ArtifactError if files are missing, truncated or compressed."""
    ends: dict[str, int] = {}
    for place in places.values():
        name = place.relative_path
        ends[name] = max(ends.get(name, 0), place.offset + place.length)
        if getattr(place, "transform_descriptors", None):
            raise ArtifactError(
                f"the tensors in {directory} are compressed",
                expected="files that DCP wrote without extensions",
            )
    problems = []
    for name, end in sorted(ends.items()):
        path = directory / name
        if records.leads_out(name):
            problems.append(f"{DCP_METADATA} names a file outside this directory: {name!r}")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size < end:
            found = placeholders.find_in_file(path)
            size = f"has {path.stat().st_size:,} bytes, expected {end:,}"
            problems.append(f"{name} {f'is {found}' if found else size}")
    if problems:
        raise ArtifactError(
            f"{directory} is incomplete",
            found=units.join_lines(problems, _SHOWN),
            hint="copy it again, or use an older checkpoint of that run",
        )


def _warn_if_mixed(directory: Path) -> None:
    """Warn if a file of tensors is newer than `.metadata`, which a save writes last.

    DCP overwrites older checkpoints, so an interrupted save leaves weights of two steps.
    """
    latest = (directory / DCP_METADATA).stat().st_mtime + _CLOCKS_DIFFER_S
    newer = [path for path in directory.glob("*.distcp") if path.stat().st_mtime > latest]
    if newer:
        log.warn(
            f"{min(newer)} is newer than {DCP_METADATA}, which a save writes last: unless a copy "
            "changed the times, a save was interrupted and weights of two steps are mixed"
        )


def _match_names(names: Mapping[str, object], expected: Set[str]) -> dict[str, list[str]]:
    """Return a mapping from names in the model to names in the checkpoint.

    The model is in the container that contains most of the expected names; all tensors of that
    container are returned, so unexpected ones are found.
    """
    parts = {part for name in expected for part in name.split(".")}

    def clean(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS or part in parts)

    def select(container: str) -> dict[str, list[str]]:
        by_key: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(container) and (
                container or name.partition(".")[0] not in _OTHER_STATES
            ):
                by_key.setdefault(clean(name.removeprefix(container)), []).append(name)
        return by_key

    return max(
        (select(container) for container in _CONTAINERS),
        key=lambda by_key: (len(by_key.keys() & expected), len(by_key)),
    )


def _list_shards(
    name: str, tensor: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> Iterator[_Shard]:
    for chunk in tensor.chunks:
        part = tuple(
            slice(first, first + size)
            for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        if _count_elements(part):
            yield _Shard(places[MetadataIndex(name, chunk.offsets)], part)


def _list_names(model: PreTrainedModel) -> Set[str]:
    """Return the names that the tensors of a model have in its modules and on the Hub."""
    return model.state_dict().keys() | keys.list_expected(model).keys()


def require_fits(model: PreTrainedModel, directory: Path, model_dir: Path) -> None:
    """Raise UsageError with the names of all weights that do not fit; reads no weights.

    model: on the meta device. directory: contains `.metadata`. model_dir: directory of its config.
    Raises ArtifactError if the checkpoint is damaged or incomplete.
    """
    with ForeignTensors(directory, model) as stored:
        _, problems = plan_stored(model, stored)
        _raise_if_any(directory, model_dir, problems)
        warn_of_unused_tensors(model, stored, directory)
    _warn_if_mixed(directory)


def _raise_if_any(directory: Path, model_dir: Path, problems: list[str]) -> None:
    if not problems:
        return
    is_flat = any(part in problem for problem in problems for part in _FLAT)
    raise UsageError(
        f"the weights in {directory} do not fit the model {model_dir} "
        f"({units.counted(len(problems), 'difference')})",
        found=units.join_lines(problems, _SHOWN),
        expected="the weights of that model, under the names that transformers gives them",
        hint="FSDP1 saved parts of joined parameters without their names (LOCAL_STATE_DICT); save "
        "again with SHARDED_STATE_DICT"
        if is_flat
        else "-m names the model that the checkpoint was trained from",
    )
