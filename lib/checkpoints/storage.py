"""Extend DCP's storage: hash while writing, and unpickle only allowlisted classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from lib.checkpoints import commit, contents
from lib.core import commands, hashing, paths, records, workers
from lib.core.errors import ArtifactError, StageError, from_os_error
from lib.models.tensors import read_into

_READERS = 4  # files that a rank reads in parallel

Allowlist = Mapping[str, Set[str]]  # names by module

# All classes in the `.metadata` of a checkpoint of tensors. BytesStorageMetadata is not allowed, so
# pickled objects among the tensors are refused; DCP would unpickle them without any check.
ALLOWED: Allowlist = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath"},
}
# Names under which other versions pickled the same things: paths (Python 3.13), and the properties
# of a tensor (torch up to 2.2).
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
_NEW_PROPERTIES = "torch.distributed.checkpoint.metadata"
_SAME: Mapping[tuple[str, str], tuple[str, str]] = {
    ("pathlib._local", "PosixPath"): ("pathlib", "PosixPath"),
    (_OLD_PROPERTIES, "TensorProperties"): (_NEW_PROPERTIES, "TensorProperties"),
    (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING"): (_NEW_PROPERTIES, "_MEM_FORMAT_ENCODING"),
}


@contextmanager
def unwrap_dcp_errors() -> Iterator[None]:
    """Re-raise the file or disk error that DCP has wrapped in its CheckpointException.

    That exception is a BaseException (torch 2.11 to 2.13) and hides the errno.
    """
    try:
        yield
    except CheckpointException as failure:
        for error, _ in failure.failures.values():
            cause: BaseException | None = error
            while cause is not None:
                known = from_os_error(cause) if isinstance(cause, OSError) else cause
                if isinstance(cause, FileNotFoundError):
                    known = ArtifactError(
                        f"{cause.filename} was deleted while it was in use", run=commands.as_typed()
                    )
                if isinstance(known, StageError):
                    raise known from failure
                cause = cause.__cause__ or cause.__context__
        raise


class _ShardStream(hashing.HashedFile):
    """Remembers the error of a write, because torch's zip writer replaces it with its own."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _HashingFileSystem(FileSystem):
    """Records the size and digest of every file that is written."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        # `.metadata` is unpickled, so it gets a cryptographic digest.
        algorithm = "sha256" if Path(path).name.startswith(paths.DCP_METADATA) else hashing.FAST
        with _ShardStream(Path(path), algorithm) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise stream.error or error from None
            self.entries[Path(path).name] = (stream.bytes, stream.digest())

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """Writes two fsynced files per rank, with their digests.

    The optimizer state has its own file, so that an export need neither read nor verify it.

    The writer uses one thread: with more, an exception in a writer thread is lost and the save
    "succeeds" (torch up to 2.13, pytorch 191391). It copies no tensor ahead of its write: torch
    would copy on the thread's CUDA stream, but wait for another stream before the bytes are hashed.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory, sync_files=True, thread_count=1, per_thread_copy_ahead=0, overwrite=False
        )
        self.fs = _HashingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        results: list[Any] = []
        # torch (2.11 to 2.13) never checks these CRCs, and they cost several times our digest.
        checksums = get_crc32_options()
        set_crc32_options(False)
        try:
            for mark in ("", commit.OPTIMIZER):
                items = [
                    item
                    for item in plan.items
                    if item.index.fqn.startswith(contents.OPTIMIZER) == bool(mark)
                ]
                if items:
                    prefix = plan.storage_data.prefix + mark
                    storage_data = replace(plan.storage_data, prefix=prefix)
                    part = replace(plan, items=items, storage_data=storage_data)
                    results += super().write_data(part, planner).wait()
        finally:
            set_crc32_options(checksums)
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done

    def entries(self, under: str) -> list[dict[str, Any]]:
        """Return the manifest entries of this rank's files, with paths below `under`."""
        return [
            {"path": f"{under}/{name}", "bytes": size, "digest": digest}
            for name, (size, digest) in sorted(self.fs.entries.items())
        ]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], allowed: Allowlist) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if name in self._allowed.get(module, ()):
            return super().find_class(*_SAME.get((module, name), (module, name)))
        raise ArtifactError(
            f"the checkpoint's .metadata would load {module}.{name}",
            expected="only descriptions of tensors; do not use this file",
        )


def load_metadata(directory: Path, allowed: Allowlist = ALLOWED) -> Any:
    """Return the object in the `.metadata` of a checkpoint.

    Raises ArtifactError if it would load a class that is not allowed.
    """
    with (directory / paths.DCP_METADATA).open("rb") as file:
        return _Unpickler(file, allowed).load()


class ShardFile:
    """Reads shards from a file of DCP without extra copies. Verify the file's digest first.

    Several threads may read at the same time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._lock = Lock()  # of the file's position, which describing a shard moves
        self._fake = FakeTensorMode()
        self._described: dict[bytes, Tensor] = {}

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, place: _StorageInfo, target: Tensor, offsets: Sequence[int]) -> None:
        """Fill a tensor with the part of a shard that begins at `offsets`.

        Raises ArtifactError if the file is truncated.
        """
        with self._lock:
            saved, begin = self._describe(place)
        has_whole_rows = saved.is_contiguous() and saved.shape[1:] == target.shape[1:]
        if (
            has_whole_rows
            and target.is_cpu
            and target.is_contiguous()
            and target.dtype == saved.dtype
        ):
            first = saved.storage_offset() + (offsets[0] * saved.stride(0) if saved.dim() else 0)
            read_into(target, self._file.fileno(), begin + first * saved.itemsize, self._path)
            return
        values = torch.empty(saved.untyped_storage().nbytes() // saved.itemsize, dtype=saved.dtype)
        read_into(values, self._file.fileno(), begin, self._path)
        part = values.as_strided(saved.shape, saved.stride(), saved.storage_offset())
        for dimension, (offset, size) in enumerate(zip(offsets, target.shape, strict=True)):
            part = part.narrow(dimension, offset, size)
        target.copy_(part)

    def _describe(self, place: _StorageInfo) -> tuple[Tensor, int]:
        """Return a shard as a fake tensor, and the byte offset of its content."""
        archive = torch._C.PyTorchFileReader(
            _create_file_view(self._file, place.offset, place.length)
        )
        description = archive.get_record("data.pkl")
        if description not in self._described:  # most descriptions repeat, and a load takes 1 ms
            with self._fake:
                self._described[description] = torch.load(
                    _create_file_view(self._file, place.offset, place.length),
                    map_location="cpu",
                    weights_only=True,
                )
        return self._described[description], place.offset + archive.get_record_offset("data/0")


class StrictReader(FileSystemReader):
    """Reads `.metadata` once, with an allowlist of classes, and shards without extra copies.

    Verify the digests of the files first.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = load_metadata(Path(self.path))
            if getattr(self._metadata, "storage_meta", None) is None:
                self._metadata.storage_meta = StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with workers.thread_pool(_READERS, "reader") as readers:
            for _ in readers.map(lambda name: self._read(name, by_file[name], planner), by_file):
                pass  # raises the error of a thread
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # `no_grad` holds for one thread, so that of the caller has no effect here. If torch recorded
    # gradients, it could refuse to narrow a parameter that another thread writes to.
    @torch.no_grad()
    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        if records.leads_out(name):
            raise ArtifactError(
                f"the .metadata in {self.path} names a file outside this directory",
                found=repr(name),
                expected="a file beside it; do not use this checkpoint",
            )
        with ShardFile(Path(self.path) / name) as file:
            for item in items:
                target = planner.resolve_tensor(item).detach()
                file.read(self.storage_data[item.storage_index], target, item.storage_offsets)
                planner.commit_tensor(item, target)
