"""Find problems in the facts of all nodes: faults of a node, and nodes that differ from the others.

facts[node]: the facts of a node, from machine.py. speed: the result of bandwidth.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from launch.checks.findings import ERROR, INFO, WARNING, Finding, not_checked
from lib.core import units

# A node below these shares of the other nodes' speed is slow (warning), or failing (error).
_SLOW = 0.75
_FAILING = 0.5
_SLOW_COMPUTE = 0.85
_SKEW_WARNING_S = 0.5
_SKEW_ERROR_S = 60.0
_SHM_ERROR = 64 << 20
_SHM_WARNING = 1 << 30
_KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather"}
_FREE_WARNING = 50 * 10**9
_HOT_C = 87.0
_USED_GIB = 2.0
Facts = dict[int, dict[str, Any]]
Name = Callable[[int], str]


def find_problems(
    facts: Facts, speed: dict[str, Any], name: Name, min_bandwidth: float | None
) -> list[Finding]:
    """Return all findings about nodes and the network between them.

    name: returns the name of a node in messages. min_bandwidth: GB/s of an all-reduce over all
    ranks, None for any.
    """
    found = [
        *_nodes(facts, name),
        *_differences(facts, name),
        *network_findings(speed, name, min_bandwidth),
        *_slow_compute(facts, name),
        *_slow_disk(facts, name),
    ]
    return found or [Finding(INFO, "all", "nothing to report")]


def _nodes(facts: Facts, name: Name) -> Iterable[Finding]:
    """Yield the findings about each node alone, and once for all nodes what was not checked."""
    gaps: dict[tuple[str, str], list[str]] = {}
    for node, own in facts.items():
        for part in own.values():
            for check, why in part.get("not_checked", {}).items() if isinstance(part, dict) else ():
                gaps.setdefault((check, why), []).append(name(node))
        is_same_disk = own["shared"] and node != min(facts)  # a full disk is reported once
        yield from (replace(found, node=node) for found in _node(own, name(node), is_same_disk))
    for (check, why), where in gaps.items():
        everywhere = len(where) == len(facts)
        yield not_checked(check, why if everywhere else f"{why} ({', '.join(where)})")


def _node(own: dict[str, Any], where: str, is_same_disk: bool) -> Iterable[Finding]:
    if unusable := own["gpu"].get("unusable"):
        problem, found, hint = unusable
        yield Finding(ERROR, "torch", f"{where}: {problem} ({found})", hint)
    for gpu in own["gpu"]["gpus"]:
        yield from _gpu(gpu, f"{where}, GPU {gpu['index']}")
    yield from _efa(own["efa"], own["locked_memory"], where)
    yield from _shm(own["shm"], where)
    yield from _disk(own["disk"], where, is_same_disk)
    yield from _clock(own["clock"], where)
    for path, artifact in own["artifacts"].items():
        for damage in artifact["damages"]:
            yield Finding(
                ERROR, "artifacts", f"{where}: {damage}", f"copy {path} to that node again"
            )


def _gpu(gpu: dict[str, Any], where: str) -> Iterable[Finding]:
    if gpu.get("ecc_errors"):
        yield Finding(
            ERROR,
            "GPU ECC",
            f"{where}: {gpu['ecc_errors']:.0f} uncorrected errors",
            "take the node out, and reset the GPU (nvidia-smi --gpu-reset) or reboot; "
            "have the GPU replaced if the errors come back",
        )
    if gpu.get("remap_failed"):
        yield Finding(
            ERROR,
            "GPU memory rows",
            f"{where}: a bad row could not be remapped",
            "take the node out and have the GPU replaced",
        )
    elif gpu.get("remap_pending"):
        yield Finding(
            WARNING,
            "GPU memory rows",
            f"{where}: a row waits to be remapped",
            "reset the GPU: nvidia-smi --gpu-reset",
        )
    if gpu.get("throttled"):
        yield Finding(
            WARNING,
            "GPU clocks",
            f"{where} is slowed down: {gpu['throttled']}",
            "check the cooling and power of that node",
        )
    if (gpu["temperature_c"] or 0) >= _HOT_C:
        yield Finding(
            WARNING,
            "GPU temperature",
            f"{where}: {gpu['temperature_c']:.0f} °C",
            "check the cooling of that node",
        )
    if gpu["used_gib"] > _USED_GIB:
        yield Finding(
            WARNING,
            "GPU memory",
            f"{where}: {gpu['used_gib']:.1f} GiB are in use",
            "find the process that uses it: nvidia-smi",
        )
    if gpu.get("nvlinks_down") and gpu.get("nvlinks"):
        yield Finding(
            ERROR,
            "NVLink",
            f"{where}: {gpu['nvlinks_down']} links are down",
            "reset the GPUs or reboot; have the node replaced if they stay down",
        )


def _efa(rdma: dict[str, Any], locked_memory: int, where: str) -> Iterable[Finding]:
    ours = [device for device in rdma["devices"] if device["efa"]]
    for device in rdma["devices"]:
        if not device["active"]:
            yield Finding(
                ERROR if device["efa"] else WARNING,
                "EFA" if ours else "RDMA",
                f"{where}: {device['name']} has no active port",
                "check the security group (all traffic within itself) and the driver",
            )
    if rdma.get("libfabric") is False:
        yield Finding(
            ERROR,
            "EFA",
            f"{where}: libfabric does not see the EFA provider",
            "build the image with --efa; on Kubernetes request vpc.amazonaws.com/efa",
        )
    if ours and 0 <= locked_memory < 1 << 30:
        yield Finding(
            ERROR,
            "locked memory",
            f"{where}: at most {units.size(locked_memory)}, which is too little for RDMA",
            "ulimit -l unlimited",
        )


def _shm(memory: dict[str, Any], where: str) -> Iterable[Finding]:
    if (total := memory.get("total")) is not None and total < _SHM_WARNING:
        yield Finding(
            ERROR if total <= _SHM_ERROR else WARNING,
            "/dev/shm",
            f"{where}: {units.size(total)} in all",
            "docker run --shm-size 8g or --ipc=host; on Kubernetes an emptyDir with "
            "medium: Memory on /dev/shm",
        )


def _disk(disk: dict[str, Any], where: str, is_same_disk: bool) -> Iterable[Finding]:
    if "error" in disk:
        yield Finding(
            ERROR,
            "disk",
            f"{where}: {disk['error']}",
            "make that user the owner of the directory, or choose another --save-dir",
        )
    elif disk["free"] < _FREE_WARNING and not is_same_disk:
        yield Finding(
            WARNING,
            "disk",
            f"{where}: {units.size(disk['free'])} free in {disk['directory']}",
            "free space, or choose another --save-dir",
        )


def _clock(clock: dict[str, float], where: str) -> Iterable[Finding]:
    skew = abs(clock["offset_s"])
    if skew - clock["uncertainty_s"] > _SKEW_WARNING_S:
        yield Finding(
            ERROR if skew > _SKEW_ERROR_S else WARNING,
            "clock",
            f"{where}: {clock['offset_s']:+.1f} s from node 0",
            "chronyc makestep; check that chronyd or ntpd runs there",
        )


def _differences(facts: Facts, name: Name) -> Iterable[Finding]:
    """Yield a finding for each fact that should be equal on all nodes and is not."""
    for prefix, severity, pick, remedy in (
        (
            "version of ",
            ERROR,
            lambda own: own["versions"],
            "use the same image, or the same requirements.txt and checkout, everywhere",
        ),
        ("", ERROR, _devices, "take the node that differs out, or repair it"),
        ("", WARNING, _gpu_kind, "use nodes of one kind: the slowest sets the pace"),
        ("setting ", WARNING, lambda own: own["settings"], "set it equally on all nodes"),
        (
            "artifact ",
            ERROR,
            lambda own: {path: artifact["digest"] for path, artifact in own["artifacts"].items()},
            "copy it to the node that differs again, or put it on a shared file system",
        ),
    ):
        values = {node: pick(own) for node, own in facts.items()}
        yield from _unlike(prefix, severity, values, name, remedy)
    sees = {node for node, own in facts.items() if own["shared"]}
    if len(facts) > 1 and len(sees) < len(facts):
        lacking = sorted(set(facts) - sees)
        yield Finding(
            ERROR,
            "shared directory",
            f"{', '.join(map(name, lacking))} cannot see what node 0 writes to the experiments' "
            "directory",
            "mount one file system everywhere and give it as --save-dir",
            _only(lacking),
        )


def _devices(own: dict[str, Any]) -> dict[str, Any]:
    links = sorted({gpu["nvlinks"] for gpu in own["gpu"]["gpus"] if "nvlinks" in gpu})
    return {
        "number of GPUs": len(own["gpu"]["gpus"]),
        "ranks": own["ranks"],
        "NVLinks per GPU": "/".join(map(str, links)) or "none",
        "number of RDMA devices": len(own["efa"]["devices"]),
    }


def _gpu_kind(own: dict[str, Any]) -> dict[str, Any]:
    def kinds(key: str) -> str:
        return ", ".join(sorted({str(gpu[key]) for gpu in own["gpu"]["gpus"]})) or "none"

    return {
        "GPU": kinds("name"),
        "driver": kinds("driver"),
        "maximum clock": kinds("max_clock_mhz"),
    }


def _unlike(
    prefix: str, severity: str, values: dict[int, dict[str, Any]], name: Name, remedy: str
) -> Iterable[Finding]:
    """Return a finding for each key whose value is not the same on all nodes."""
    keys = dict.fromkeys(key for own in values.values() for key in own)
    for key in keys:
        shown = {
            node: json.dumps(own.get(key, "missing"), ensure_ascii=False).strip('"')
            for node, own in values.items()
        }
        (usual, times), *others = Counter(shown.values()).most_common()
        if not others:
            continue
        odd = [node for node, value in shown.items() if value != usual]
        if times == others[0][1]:  # no majority, so no node is blamed
            odd = []
            text = "; ".join(f"{value} on {name(node)}" for node, value in shown.items())
        else:
            those = ", ".join(f"{shown[node]} on {name(node)}" for node in odd)
            text = f"{those}; {usual} on the other {times}"
        yield Finding(severity, f"{prefix}{key}", text, remedy, _only(odd))


def _only(nodes: list[int]) -> int | None:
    return nodes[0] if len(nodes) == 1 else None


def network_findings(
    speed: dict[str, Any], name: Name, min_bandwidth: float | None
) -> Iterable[Finding]:
    """Yield findings about the network: failures, bandwidth below the minimum, and slow nodes."""
    world = speed["world"]
    if "error" in world:
        yield Finding(
            ERROR,
            "network",
            f"all ranks together: {world['error']}",
            "look at the pairs of nodes below; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, "
            "and check the firewall between nodes",
        )
    elif min_bandwidth and world["all_reduce"] < min_bandwidth:
        yield Finding(
            ERROR,
            "network",
            f"all-reduce over all ranks: {world['all_reduce']:.3g} "
            f"GB/s, expected {min_bandwidth:g}",
            "NCCL_DEBUG=INFO shows which transport is used",
        )
    for node, result in speed["nodes"].items():
        if "error" in result:
            yield Finding(
                ERROR,
                "network",
                f"ranks of {name(int(node))}: {result['error']}",
                "check that node's GPUs, NVLink and /dev/shm",
                int(node),
            )
    failed = {pair: result for pair, result in speed["pairs"].items() if "error" in result}
    for pair, result in failed.items():
        a, b = map(int, pair.split("-"))
        yield Finding(
            ERROR,
            "network",
            f"{name(a)} and {name(b)} cannot communicate: {result['error']}",
            "check routes, firewall and security group between these two nodes",
        )
    yield from _odd_nodes(speed, name)
    if left_out := speed["rounds_left_out"]:
        yield not_checked("network", f"{left_out} rounds of pairs, since time was up (--seconds)")


def _odd_nodes(speed: dict[str, Any], name: Name) -> Iterable[Finding]:
    """Compare each node's best pair with the pairs without it, and the speeds within nodes."""
    remedy = "take the node out, or check its link, cables and switch port"
    measured = {
        tuple(map(int, pair.split("-"))): result
        for pair, result in speed["pairs"].items()
        if "error" not in result
    }
    odd = set()
    for node in sorted({node for pair in measured for node in pair}):
        own = [result for pair, result in measured.items() if node in pair]
        others = [result for pair, result in measured.items() if node not in pair]
        share = 1.0
        text = []
        for kind, label in _KINDS.items() if others else ():
            best = max(result[kind] for result in own)
            usual = median(result[kind] for result in others)
            share = min(share, best / usual)
            text.append(f"{label} {best:.3g} GB/s at best ({usual:.3g} without it)")
        if share < _SLOW:
            odd.add(node)
            yield _slow("network", f"{name(node)}: {', '.join(text)}", share, remedy, node)
    for kind, label in _KINDS.items() if len(measured) > 2 else ():
        usual = median(result[kind] for result in measured.values())
        for (a, b), result in measured.items():
            if result[kind] < _FAILING * usual and not odd & {a, b}:
                yield Finding(
                    WARNING,
                    "network",
                    f"{name(a)} to {name(b)}: {label} at "
                    f"{result[kind]:.3g} GB/s, {usual:.3g} is usual",
                    "check the path between these two nodes",
                )
    inner = {
        int(node): result["all_reduce"]
        for node, result in speed["nodes"].items()
        if "error" not in result
    }
    yield from _slow_nodes("network", inner, name, _SLOW, "GB/s all-reduce within the node", remedy)


def _slow_compute(facts: Facts, name: Name) -> Iterable[Finding]:
    slowest = {node: min(own["compute"].values()) for node, own in facts.items() if own["compute"]}
    on_gpu = any(own["gpu"]["gpus"] for own in facts.values())
    yield from _slow_nodes(
        "compute",
        slowest,
        name,
        _SLOW_COMPUTE if on_gpu else _FAILING,
        "TFLOP/s of its slowest rank",
        "check clocks and temperatures of that node: every step waits for it",
    )
    for node, own in facts.items():
        for gpu, why in own["throttled"].items():
            yield Finding(
                WARNING,
                "GPU clocks",
                f"{name(node)}, GPU {gpu} slows down under load: {why}",
                "check the cooling and power of that node",
                node,
            )


def _slow_disk(facts: Facts, name: Name) -> Iterable[Finding]:
    rates = {
        node: own["disk"]["write"] / 1e9 for node, own in facts.items() if "write" in own["disk"]
    }
    for found in _slow_nodes(
        "disk", rates, name, _FAILING, "GB/s written", "check that node's disk or mount"
    ):
        yield replace(found, severity=WARNING)


def _slow_nodes(
    check: str, values: dict[int, float], name: Name, least: float, unit: str, remedy: str
) -> Iterable[Finding]:
    for node, value in values.items():
        others = [other for key, other in values.items() if key != node]
        if others and (share := value / median(others)) < least:
            yield _slow(
                check,
                f"{name(node)}: {value:.3g} {unit}, {median(others):.3g} on the others",
                share,
                remedy,
                node,
            )


def _slow(check: str, text: str, share: float, remedy: str, node: int) -> Finding:
    return Finding(
        ERROR if share < _FAILING else WARNING, check, f"{text} ({share:.0%})", remedy, node
    )
