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
_SLOW_SHARE = 0.75
_FAILING_SHARE = 0.5
_SLOW_COMPUTE_SHARE = 0.85
_SKEW_WARNING_S = 0.5
_SKEW_ERROR_S = 60.0
_SHM_ERROR = 64 << 20
_SHM_WARNING = 1 << 30
_KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather"}
_FREE_WARNING = 50 * 10**9
_HOT_C = 87.0
_USED_GIB = 2.0
Facts = dict[int, dict[str, Any]]
NodeName = Callable[[int], str]


def find_problems(
    facts: Facts, speed: dict[str, Any], name: NodeName, min_bandwidth: float | None
) -> list[Finding]:
    """Return all findings about nodes and the network between them.

    name: function that returns the name of a node for messages. min_bandwidth: GB/s of an
    all-reduce over all ranks, None for any.
    """
    all_findings = [
        *_check_nodes(facts, name),
        *_find_differences(facts, name),
        *check_network(speed, name, min_bandwidth),
        *_check_compute(facts, name),
        *_check_disk_speed(facts, name),
    ]
    return all_findings or [Finding(INFO, "all", "nothing to report")]


def _check_nodes(facts: Facts, name: NodeName) -> Iterable[Finding]:
    """Yield the findings about each node alone, and one for each check that was impossible."""
    unchecked: dict[tuple[str, str], list[str]] = {}
    for node, node_facts in facts.items():
        for group in node_facts.values():
            for check, why in (
                group.get("not_checked", {}).items() if isinstance(group, dict) else ()
            ):
                unchecked.setdefault((check, why), []).append(name(node))
        is_same_disk = node_facts["shared"] and node != min(facts)  # a full disk is reported once
        yield from (
            replace(finding, node=node)
            for finding in _check_node(node_facts, name(node), is_same_disk)
        )
    for (check, why), names in unchecked.items():
        is_everywhere = len(names) == len(facts)
        yield not_checked(check, why if is_everywhere else f"{why} ({', '.join(names)})")


def _check_node(node_facts: dict[str, Any], place: str, is_same_disk: bool) -> Iterable[Finding]:
    if unusable := node_facts["gpu"].get("unusable"):
        problem, found, hint = unusable
        yield Finding(ERROR, "torch", f"{place}: {problem} ({found})", hint)
    for gpu in node_facts["gpu"]["gpus"]:
        yield from _check_gpu(gpu, f"{place}, GPU {gpu['index']}")
    yield from _check_efa(node_facts["efa"], node_facts["locked_memory"], place)
    yield from _check_shm(node_facts["shm"], place)
    yield from _check_disk(node_facts["disk"], place, is_same_disk)
    yield from _check_clock(node_facts["clock"], place)
    for path, artifact in node_facts["artifacts"].items():
        for damage in artifact["damages"]:
            yield Finding(
                ERROR, "artifacts", f"{place}: {damage}", f"copy {path} to that node again"
            )


def _check_gpu(gpu: dict[str, Any], place: str) -> Iterable[Finding]:
    if gpu.get("ecc_errors"):
        yield Finding(
            ERROR,
            "GPU ECC",
            f"{place}: {gpu['ecc_errors']:.0f} uncorrected errors",
            "take the node out, and reset the GPU (nvidia-smi --gpu-reset) or reboot; "
            "have the GPU replaced if the errors come back",
        )
    if gpu.get("remap_failed"):
        yield Finding(
            ERROR,
            "GPU memory rows",
            f"{place}: a bad row could not be remapped",
            "take the node out and have the GPU replaced",
        )
    elif gpu.get("remap_pending"):
        yield Finding(
            WARNING,
            "GPU memory rows",
            f"{place}: a row waits to be remapped",
            "reset the GPU: nvidia-smi --gpu-reset",
        )
    if gpu.get("throttled"):
        yield Finding(
            WARNING,
            "GPU clocks",
            f"{place} is slowed down: {gpu['throttled']}",
            "check the cooling and power of that node",
        )
    if (gpu["temperature_c"] or 0) >= _HOT_C:
        yield Finding(
            WARNING,
            "GPU temperature",
            f"{place}: {gpu['temperature_c']:.0f} °C",
            "check the cooling of that node",
        )
    if gpu["used_gib"] > _USED_GIB:
        yield Finding(
            WARNING,
            "GPU memory",
            f"{place}: {gpu['used_gib']:.1f} GiB are in use",
            "find the process that uses it: nvidia-smi",
        )
    if gpu.get("nvlinks_down") and gpu.get("nvlinks"):
        yield Finding(
            ERROR,
            "NVLink",
            f"{place}: {gpu['nvlinks_down']} links are down",
            "reset the GPUs or reboot; have the node replaced if they stay down",
        )


def _check_efa(rdma: dict[str, Any], locked_memory: int, place: str) -> Iterable[Finding]:
    efa_devices = [device for device in rdma["devices"] if device["efa"]]
    for device in rdma["devices"]:
        if not device["active"]:
            yield Finding(
                ERROR if device["efa"] else WARNING,
                "EFA" if efa_devices else "RDMA",
                f"{place}: {device['name']} has no active port",
                "check the security group (all traffic within itself) and the driver",
            )
    if rdma.get("libfabric") is False:
        yield Finding(
            ERROR,
            "EFA",
            f"{place}: libfabric does not see the EFA provider",
            "build the image with --efa; on Kubernetes request vpc.amazonaws.com/efa",
        )
    if efa_devices and 0 <= locked_memory < 1 << 30:
        yield Finding(
            ERROR,
            "locked memory",
            f"{place}: at most {units.size(locked_memory)}, which is too little for RDMA",
            "ulimit -l unlimited",
        )


def _check_shm(memory: dict[str, Any], place: str) -> Iterable[Finding]:
    if (total := memory.get("total")) is not None and total < _SHM_WARNING:
        yield Finding(
            ERROR if total <= _SHM_ERROR else WARNING,
            "/dev/shm",
            f"{place}: {units.size(total)} in all",
            "docker run --shm-size 8g or --ipc=host; on Kubernetes an emptyDir with "
            "medium: Memory on /dev/shm",
        )


def _check_disk(disk: dict[str, Any], place: str, is_same_disk: bool) -> Iterable[Finding]:
    if "error" in disk:
        yield Finding(
            ERROR,
            "disk",
            f"{place}: {disk['error']}",
            "make that user the owner of the directory, or choose another --save-dir",
        )
    elif disk["free"] < _FREE_WARNING and not is_same_disk:
        yield Finding(
            WARNING,
            "disk",
            f"{place}: {units.size(disk['free'])} free in {disk['directory']}",
            "free space, or choose another --save-dir",
        )


def _check_clock(clock: dict[str, float], place: str) -> Iterable[Finding]:
    skew = abs(clock["offset_s"])
    if skew - clock["uncertainty_s"] > _SKEW_WARNING_S:
        yield Finding(
            ERROR if skew > _SKEW_ERROR_S else WARNING,
            "clock",
            f"{place}: {clock['offset_s']:+.1f} s from node 0",
            "chronyc makestep; check that chronyd or ntpd runs there",
        )


def _find_differences(facts: Facts, name: NodeName) -> Iterable[Finding]:
    """Yield a finding for each fact that should be equal on all nodes and is not."""
    for prefix, severity, select, remedy in (
        (
            "version of ",
            ERROR,
            lambda node_facts: node_facts["versions"],
            "use the same image, or the same requirements.txt and checkout, everywhere",
        ),
        ("", ERROR, _list_devices, "take the node that differs out, or repair it"),
        ("", WARNING, _list_gpu_kinds, "use nodes of one kind: the slowest sets the pace"),
        (
            "setting ",
            WARNING,
            lambda node_facts: node_facts["settings"],
            "set it equally on all nodes",
        ),
        (
            "artifact ",
            ERROR,
            lambda node_facts: {
                path: artifact["digest"] for path, artifact in node_facts["artifacts"].items()
            },
            "copy it to the node that differs again, or put it on a shared file system",
        ),
    ):
        values = {node: select(node_facts) for node, node_facts in facts.items()}
        yield from _compare_values(prefix, severity, values, name, remedy)
    nodes_that_see = {node for node, node_facts in facts.items() if node_facts["shared"]}
    if len(facts) > 1 and len(nodes_that_see) < len(facts):
        blind_nodes = sorted(set(facts) - nodes_that_see)
        yield Finding(
            ERROR,
            "shared directory",
            f"{', '.join(map(name, blind_nodes))} cannot see files that node 0 writes to the "
            "experiments' directory",
            "mount one file system everywhere and give it as --save-dir",
            _single_node(blind_nodes),
        )


def _list_devices(node_facts: dict[str, Any]) -> dict[str, Any]:
    links = sorted({gpu["nvlinks"] for gpu in node_facts["gpu"]["gpus"] if "nvlinks" in gpu})
    return {
        "number of GPUs": len(node_facts["gpu"]["gpus"]),
        "ranks": node_facts["ranks"],
        "NVLinks per GPU": "/".join(map(str, links)) or "none",
        "number of RDMA devices": len(node_facts["efa"]["devices"]),
    }


def _list_gpu_kinds(node_facts: dict[str, Any]) -> dict[str, Any]:
    def join_values(key: str) -> str:
        return ", ".join(sorted({str(gpu[key]) for gpu in node_facts["gpu"]["gpus"]})) or "none"

    return {
        "GPU": join_values("name"),
        "driver": join_values("driver"),
        "maximum clock": join_values("max_clock_mhz"),
    }


def _compare_values(
    prefix: str, severity: str, values: dict[int, dict[str, Any]], name: NodeName, remedy: str
) -> Iterable[Finding]:
    """Return a finding for each key whose value is not the same on all nodes."""
    keys = dict.fromkeys(key for node_values in values.values() for key in node_values)
    for key in keys:
        texts = {
            node: json.dumps(node_values.get(key, "missing"), ensure_ascii=False).strip('"')
            for node, node_values in values.items()
        }
        (usual, count), *others = Counter(texts.values()).most_common()
        if not others:
            continue
        odd_nodes = [node for node, value in texts.items() if value != usual]
        if count == others[0][1]:  # no majority, so no node is blamed
            odd_nodes = []
            text = "; ".join(f"{value} on {name(node)}" for node, value in texts.items())
        else:
            differing = ", ".join(f"{texts[node]} on {name(node)}" for node in odd_nodes)
            text = f"{differing}; {usual} on the other {count}"
        yield Finding(severity, f"{prefix}{key}", text, remedy, _single_node(odd_nodes))


def _single_node(nodes: list[int]) -> int | None:
    return nodes[0] if len(nodes) == 1 else None


def check_network(
    speed: dict[str, Any], name: NodeName, min_bandwidth: float | None
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
        first, second = map(int, pair.split("-"))
        yield Finding(
            ERROR,
            "network",
            f"{name(first)} and {name(second)} cannot communicate: {result['error']}",
            "check routes, firewall and security group between these two nodes",
        )
    yield from _find_slow_links(speed, name)
    if skipped_rounds := speed["rounds_left_out"]:
        yield not_checked(
            "network", f"{skipped_rounds} rounds of pairs, since time was up (--seconds)"
        )


def _find_slow_links(speed: dict[str, Any], name: NodeName) -> Iterable[Finding]:
    """Yield the nodes and pairs of nodes whose links are slow, compared to the other ones."""
    remedy = "take the node out, or check its link, cables and switch port"
    results = {
        tuple(map(int, pair.split("-"))): result
        for pair, result in speed["pairs"].items()
        if "error" not in result
    }
    slow_nodes = set()
    for node in sorted({node for pair in results for node in pair}):
        with_node = [result for pair, result in results.items() if node in pair]
        without_node = [result for pair, result in results.items() if node not in pair]
        share = 1.0
        texts = []
        for kind, label in _KINDS.items() if without_node else ():
            best = max(result[kind] for result in with_node)
            usual = median(result[kind] for result in without_node)
            share = min(share, best / usual)
            texts.append(f"{label} {best:.3g} GB/s at best ({usual:.3g} without it)")
        if share < _SLOW_SHARE:
            slow_nodes.add(node)
            yield _make_slow_finding(
                "network", f"{name(node)}: {', '.join(texts)}", share, remedy, node
            )
    for kind, label in _KINDS.items() if len(results) > 2 else ():
        usual = median(result[kind] for result in results.values())
        for (first, second), result in results.items():
            if result[kind] < _FAILING_SHARE * usual and not slow_nodes & {first, second}:
                yield Finding(
                    WARNING,
                    "network",
                    f"{name(first)} to {name(second)}: {label} at "
                    f"{result[kind]:.3g} GB/s, {usual:.3g} is usual",
                    "check the path between these two nodes",
                )
    within_nodes = {
        int(node): result["all_reduce"]
        for node, result in speed["nodes"].items()
        if "error" not in result
    }
    yield from _find_slow_nodes(
        "network", within_nodes, name, _SLOW_SHARE, "GB/s all-reduce within the node", remedy
    )


def _check_compute(facts: Facts, name: NodeName) -> Iterable[Finding]:
    slowest = {
        node: min(node_facts["compute"].values())
        for node, node_facts in facts.items()
        if node_facts["compute"]
    }
    on_gpu = any(node_facts["gpu"]["gpus"] for node_facts in facts.values())
    yield from _find_slow_nodes(
        "compute",
        slowest,
        name,
        _SLOW_COMPUTE_SHARE if on_gpu else _FAILING_SHARE,
        "TFLOP/s of its slowest rank",
        "check clocks and temperatures of that node: every step waits for it",
    )
    for node, node_facts in facts.items():
        for gpu, why in node_facts["throttled"].items():
            yield Finding(
                WARNING,
                "GPU clocks",
                f"{name(node)}, GPU {gpu} slows down under load: {why}",
                "check the cooling and power of that node",
                node,
            )


def _check_disk_speed(facts: Facts, name: NodeName) -> Iterable[Finding]:
    rates = {
        node: node_facts["disk"]["write"] / 1e9
        for node, node_facts in facts.items()
        if "write" in node_facts["disk"]
    }
    for finding in _find_slow_nodes(
        "disk", rates, name, _FAILING_SHARE, "GB/s written", "check that node's disk or mount"
    ):
        yield replace(finding, severity=WARNING)


def _find_slow_nodes(
    check: str, values: dict[int, float], name: NodeName, least: float, unit: str, remedy: str
) -> Iterable[Finding]:
    for node, value in values.items():
        others = [other for key, other in values.items() if key != node]
        if others and (share := value / median(others)) < least:
            yield _make_slow_finding(
                check,
                f"{name(node)}: {value:.3g} {unit}, {median(others):.3g} on the others",
                share,
                remedy,
                node,
            )


def _make_slow_finding(check: str, text: str, share: float, remedy: str, node: int) -> Finding:
    return Finding(
        ERROR if share < _FAILING_SHARE else WARNING, check, f"{text} ({share:.0%})", remedy, node
    )
