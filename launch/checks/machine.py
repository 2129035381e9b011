"""Collect the facts of a node: GPUs, RDMA, /dev/shm, disk, versions, settings, artifacts."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from lib.core import hashing, manifest
from lib.core.nvidia import ToolError, parse_number, query_driver, run_tool
from lib.core.paths import MANIFEST, models_root, tokens_root
from lib.parallel.gpus import find_unusable

_BLOCK = 8 << 20
_DISK_BYTES = 512 << 20
_DISK_SECONDS = 2.0
SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
_AMAZON = "0x1d0f"
_CODE = (".py", ".j2", ".css")  # suffixes of the files that must be equal on all nodes
_SETTINGS = ("NCCL_", "FI_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
_DIFFERENT_PER_NODE = ("SOCKET_IFNAME", "NCCL_HOSTID", "TORCH_NCCL_BLOCKING_WAIT", "_FILE")

_GPU_FIELDS = "index,name,driver_version,memory.total,memory.used,clocks.max.sm,temperature.gpu"
# Bits of clocks_throttle_reasons.active (NVML, nvmlClocksEventReasons) that indicate a problem.
_THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def collect_facts(
    save_dir: Path, cache_dir: Path, artifacts: list[Path], root: Path
) -> dict[str, Any]:
    """Return the facts of this node.

    artifacts: the directories to compare; if empty, all prepared artifacts. root: the directory of
    the code.
    """
    unusable = find_unusable()
    reasons = {"unusable": [unusable.problem, unusable.found, unusable.hint]} if unusable else {}
    return {
        "gpu": query_gpus() | reasons,
        "efa": query_rdma(),
        "shm": measure_shm(),
        "disk": measure_disk(save_dir),
        "versions": list_versions(root),
        "settings": list_settings(),
        "locked_memory": read_memlock_limit(),
        "artifacts": digest_artifacts(artifacts, cache_dir),
    }


def query_gpus() -> dict[str, Any]:
    """Return `{"gpus": [a dict per GPU]}`, and under `not_checked` the reasons for missing facts.

    A GPU has `index name driver memory_gib used_gib max_clock_mhz temperature_c`, and if known also
    `throttled` (reasons), `ecc_errors`, `remap_pending`, `remap_failed`, `nvlinks`, `nvlinks_down`.
    """
    not_checked: dict[str, str] = {}
    try:
        gpus = [_parse_gpu(*row) for row in query_driver(_GPU_FIELDS)]
    except ToolError as error:
        return {"gpus": [], "not_checked": {"GPUs": str(error)}}
    # One query per group, since nvidia-smi refuses a whole query because of one unknown field.
    for check, query in (
        ("GPU clocks", lambda: [{"throttled": why} for why in _query_slowdowns().values()]),
        ("GPU ECC", _query_ecc),
        ("GPU memory rows", _query_remapped_rows),
        ("NVLink", lambda: _count_nvlinks(gpus)),
    ):
        try:
            for gpu, facts in zip(gpus, query(), strict=False):
                gpu |= facts
        except ToolError as error:
            not_checked[check] = str(error)
    return {"gpus": gpus, "not_checked": not_checked}


def query_throttled() -> dict[str, str]:
    """Return why GPUs (by index) are slowed down now; empty if none is, or if it is unknown."""
    try:
        return {index: why for index, why in _query_slowdowns().items() if why}
    except ToolError:
        return {}


def query_rdma(root: Path = INFINIBAND) -> dict[str, Any]:
    """Return `devices`, the RDMA devices, or the reason why there is none as `not_checked`.

    Each device has a `name`, and the flags `efa` and `active`. If some are EFA devices, `libfabric`
    says whether `fi_info` lists the EFA provider; `not_checked` is the reason if that is unknown.
    """
    devices = []
    for path in sorted(root.glob("*")) if root.is_dir() else []:
        states = [_read_text(port) for port in path.glob("ports/*/state")]
        devices.append(
            {
                "name": path.name,
                "efa": _read_text(path / "device/vendor") == _AMAZON,
                "active": any("ACTIVE" in state for state in states),
            }
        )
    if not devices:
        return {"devices": [], "not_checked": {"EFA": f"no RDMA device in {root}"}}
    facts: dict[str, Any] = {"devices": devices, "not_checked": {}}
    if any(device["efa"] for device in devices):
        try:
            facts["libfabric"] = "provider: efa" in run_tool("fi_info", "-p", "efa")
        except ToolError as error:
            facts["not_checked"]["libfabric"] = str(error)
    return facts


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse_gpu(
    index: str, name: str, driver: str, total: str, used: str, clock: str, temperature: str
) -> dict[str, Any]:
    return {
        "index": index,
        "name": name,
        "driver": driver,
        "memory_gib": (parse_number(total) or 0) / 1024,
        "used_gib": (parse_number(used) or 0) / 1024,
        "max_clock_mhz": parse_number(clock),
        "temperature_c": parse_number(temperature),
    }


def _query_slowdowns() -> dict[str, str]:
    """Return the reasons why each GPU (by index) is slowed down; empty if it is not."""
    reasons = {}
    for index, mask in query_driver("index,clocks_throttle_reasons.active"):
        try:
            bits = int(mask, 16)
        except ValueError:
            raise ToolError(f"clocks_throttle_reasons is {mask!r}") from None
        reasons[index] = ", ".join(why for bit, why in _THROTTLES.items() if bits & bit)
    return reasons


def _query_ecc() -> list[dict[str, Any]]:
    counts = [
        parse_number(count)
        for _, count in query_driver("index,ecc.errors.uncorrected.volatile.total")
    ]
    if all(count is None for count in counts):
        raise ToolError("these GPUs have no ECC, or it is off")
    return [{"ecc_errors": count or 0} for count in counts]


def _query_remapped_rows() -> list[dict[str, Any]]:
    rows = query_driver("gpu_bus_id,remapped_rows.pending,remapped_rows.failure", "remapped-rows")
    return [
        {
            "remap_pending": pending.lower() in ("yes", "1"),
            "remap_failed": failed.lower() in ("yes", "1"),
        }
        for _, pending, failed in rows
    ]


def _count_nvlinks(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the links of each GPU in `nvidia-smi nvlink --status`, which has a block per GPU."""
    status = run_tool("nvidia-smi", "nvlink", "--status")
    blocks = re.split(r"^GPU (\d+):", status, flags=re.MULTILINE)
    by_gpu = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    if not any("Link " in block for block in by_gpu.values()):
        raise ToolError("these GPUs have no NVLink")
    return [
        {
            "nvlinks": len(re.findall(r"Link \d+: [\d.]+ GB/s", block)),
            "nvlinks_down": len(re.findall(r"Link \d+: <inactive>", block)),
        }
        for block in (by_gpu.get(gpu["index"], "") for gpu in gpus)
    ]


def find_existing_parent(directory: Path) -> Path:
    """Return the nearest existing directory on the path to a directory."""
    directory = directory.absolute()
    while not directory.is_dir():
        directory = directory.parent
    return directory


def measure_shm() -> dict[str, Any]:
    """Return size and free space of /dev/shm in bytes; `not_checked` if it does not exist."""
    if not SHM.is_dir():
        return {"not_checked": {"/dev/shm": "this machine has none"}}
    usage = shutil.disk_usage(SHM)
    return {"total": usage.total, "free": usage.free}


def measure_disk(directory: Path) -> dict[str, Any]:
    """Return the free bytes of a directory, and the bytes/s to write (with fsync) and to read."""
    existing = find_existing_parent(directory)
    facts: dict[str, Any] = {"directory": str(existing), "free": shutil.disk_usage(existing).free}
    probe = existing / f".check-{platform.node()}-{os.getpid()}"
    try:
        size, seconds = _write_probe(probe, min(_DISK_BYTES, facts["free"] // 4))
        facts["write"] = size / seconds
        facts["read"] = size / _time_read(probe)
    except OSError as error:
        facts["error"] = f"{error.strerror}: {error.filename or existing}"
    finally:
        probe.unlink(missing_ok=True)
    return facts


def _write_probe(probe: Path, limit: int) -> tuple[int, float]:
    """Write incompressible bytes for a while; return how many, and the seconds with fsync."""
    block = os.urandom(_BLOCK)
    written = 0
    began = time.perf_counter()
    with probe.open("wb", buffering=0) as file:
        while written < limit and time.perf_counter() - began < _DISK_SECONDS:
            written += file.write(block)
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return written, seconds


def _time_read(probe: Path) -> float:
    began = time.perf_counter()
    with probe.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass
    return time.perf_counter() - began


def list_versions(root: Path) -> dict[str, str]:
    """Return the versions that must be equal on all nodes; `code` is a digest of the stages."""
    sources = [*root.glob("*.py"), *(root / "lib").rglob("*")]
    digests = {
        path.relative_to(root).as_posix(): hashing.file_digest(path, "sha256")
        for path in sources
        if path.suffix in _CODE
    }
    versions = {
        **manifest.package_versions(),
        "cuda": torch.version.cuda or "none",
        "code": hashing.fingerprint(digests),
    }
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def list_settings() -> dict[str, str]:
    """Return the environment variables for communication that must be equal on all nodes."""
    return {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(_SETTINGS) and not key.endswith(_DIFFERENT_PER_NODE)
    }


def read_memlock_limit() -> int:
    """Return the bytes that a process may pin; -1 without a limit, which RDMA needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def digest_artifacts(artifacts: list[Path], cache_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the digest of each artifact and its damaged files (by size only), by path.

    artifacts: the directories; if empty, all finished artifacts of stages 02, 03 and 04.
    """
    roots = (Path("hf_datasets"), models_root(cache_dir), tokens_root(cache_dir))
    paths = artifacts or [
        path.parent
        for root in roots
        for path in sorted(root.glob(f"*/{MANIFEST}"))
        if ".partial-" not in path.parent.name
    ]
    return {str(path): _digest_artifact(path) for path in paths}


def _digest_artifact(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return {"digest": "missing", "damages": []}
    content = manifest.read_if_any(path)
    if content:
        return {
            "digest": hashing.fingerprint(content["files"]),
            "damages": manifest.find_damage(path, content, deep=False)[:5],
        }
    sizes = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in path.rglob("*")
        if file.is_file()
    }
    return {"digest": hashing.fingerprint(sizes), "damages": []}
