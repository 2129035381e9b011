"""What a node says of itself: memory file system, disk, versions, settings, prepared artifacts."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from lib.core import hashing, manifest
from lib.core.paths import MANIFEST, models_root, tokens_root

_BLOCK = 8 << 20
_DISK_BYTES, _DISK_SECONDS = 512 << 20, 2.0
SHM = Path("/dev/shm")
_SETTINGS = ("NCCL_", "FI_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
_OWN_PER_NODE = ("SOCKET_IFNAME", "NCCL_HOSTID", "TORCH_NCCL_BLOCKING_WAIT", "_FILE")


def existing(directory: Path) -> Path:
    """Return the nearest directory that is there, of one that a run would make."""
    directory = directory.absolute()
    while not directory.is_dir():
        directory = directory.parent
    return directory


def shm() -> dict[str, Any]:
    """Return size and free space of /dev/shm in bytes; `not_checked` without one."""
    if not SHM.is_dir():
        return {"not_checked": {"/dev/shm": "this machine has none"}}
    usage = shutil.disk_usage(SHM)
    return {"total": usage.total, "free": usage.free}


def disk(directory: Path) -> dict[str, Any]:
    """Return free bytes of a directory and its bytes/s written (with fsync) and read again."""
    there = existing(directory)
    told: dict[str, Any] = {"directory": str(there), "free": shutil.disk_usage(there).free}
    probe = there / f".preflight-{platform.node()}-{os.getpid()}"
    try:
        written, seconds = _write(probe, min(_DISK_BYTES, told["free"] // 4))
        told["write"] = written / seconds
        told["read"] = written / _read(probe)
    except OSError as error:
        told["error"] = f"{error.strerror}: {error.filename or there}"
    finally:
        probe.unlink(missing_ok=True)
    return told


def _write(probe: Path, most: int) -> tuple[int, float]:
    """Write incompressible bytes for a while; return how many, and the seconds with the fsync."""
    block = os.urandom(_BLOCK)
    written, began = 0, time.perf_counter()
    with probe.open("wb", buffering=0) as file:
        while written < most and time.perf_counter() - began < _DISK_SECONDS:
            written += file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return written, seconds


def _read(probe: Path) -> float:
    began = time.perf_counter()
    with probe.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass
    return time.perf_counter() - began


def versions(root: Path) -> dict[str, str]:
    """Return the versions that must not differ between nodes; `code` is a digest of the stages."""
    sources = [*sorted(root.glob("*.py")), *sorted((root / "lib").rglob("*.py"))]
    digests = {path.relative_to(root).as_posix(): hashing.file_digest(path, "sha256")
               for path in sources}
    found = {**manifest.versions(), "cuda": torch.version.cuda or "none",
             "code": hashing.fingerprint(digests)}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def settings() -> dict[str, str]:
    """Return the environment that steers communication, without what is each node's own."""
    return {key: value for key, value in sorted(os.environ.items())
            if key.startswith(_SETTINGS) and not key.endswith(_OWN_PER_NODE)}


def locked_memory() -> int:
    """Return the bytes that a process may pin; -1 without a limit (RDMA needs that)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def artifacts(named: list[Path], cache_dir: Path) -> dict[str, dict[str, Any]]:
    """Return a digest and the damages (sizes only) of each artifact, by path.

    named: directories to look at; without any, all finished ones of stages 02, 03 and 04.
    """
    roots = (Path("hf_datasets"), models_root(cache_dir), tokens_root(cache_dir))
    found = named or [path.parent for root in roots for path in sorted(root.glob(f"*/{MANIFEST}"))
                      if ".partial-" not in path.parent.name]
    return {str(path): _artifact(path) for path in found}


def _artifact(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return {"digest": "missing", "damages": []}
    content = manifest.read_if_any(path)
    if content:
        return {"digest": hashing.fingerprint(content["files"]),
                "damages": manifest.damages(path, content, deep=False)[:5]}
    sizes = {file.relative_to(path).as_posix(): file.stat().st_size
             for file in path.rglob("*") if file.is_file()}
    return {"digest": hashing.fingerprint(sizes), "damages": []}
