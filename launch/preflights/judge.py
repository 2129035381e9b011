"""From what all nodes told to findings: what is bad on a node, and which node is unlike the others.

`facts[node]` is what a node told of itself, `speed` what bandwidth.py measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from launch.common.findings import ERROR, INFO, WARNING, Finding, not_checked
from lib.core import units

# Shares of what the other nodes reach, under which a node is called slow, and a failure.
_SLOW, _FAILING = 0.75, 0.5
_SLOW_COMPUTE = 0.85
_SKEW_WARNING_S, _SKEW_ERROR_S = 0.5, 60.0
_SHM_ERROR, _SHM_WARNING = 64 << 20, 1 << 30
_KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather"}
_FREE_WARNING = 50 * 10 ** 9
_HOT_C, _USED_GIB = 87.0, 2.0
Facts = dict[int, dict[str, Any]]
Name = Callable[[int], str]


def judge(facts: Facts, speed: dict[str, Any], name: Name, min_bandwidth: float | None,
          ) -> list[Finding]:
    found = [*_nodes(facts, name), *_differences(facts, name), *network(speed, name, min_bandwidth),
             *_slow_compute(facts, name), *_slow_disk(facts, name)]
    return found or [Finding(INFO, "all", "nothing to report")]


def _nodes(facts: Facts, name: Name) -> Iterable[Finding]:
    """Judge each node by itself; what was not checked is told once for all nodes."""
    gaps: dict[tuple[str, str], list[str]] = {}
    for node, told in facts.items():
        for part in told.values():
            for check, why in part.get("not_checked", {}).items() \
                    if isinstance(part, dict) else ():
                gaps.setdefault((check, why), []).append(name(node))
        is_same_disk = told["shared"] and node != min(facts)  # told once
        yield from (replace(found, node=node) for found in _node(told, name(node), is_same_disk))
    for (check, why), where in gaps.items():
        everywhere = len(where) == len(facts)
        yield not_checked(check, why if everywhere else f"{why} ({', '.join(where)})")


def _node(told: dict[str, Any], where: str, is_same_disk: bool) -> Iterable[Finding]:
    for gpu in told["gpu"]["gpus"]:
        yield from _gpu(gpu, f"{where}, GPU {gpu['index']}")
    yield from _efa(told["efa"], told["locked_memory"], where)
    yield from _shm(told["shm"], where)
    yield from _disk(told["disk"], where, is_same_disk)
    yield from _clock(told["clock"], where)
    for path, artifact in told["artifacts"].items():
        for damage in artifact["damages"]:
            yield Finding(ERROR, "artifacts", f"{where}: {damage}",
                          f"copy {path} to that node again")


def _gpu(gpu: dict[str, Any], where: str) -> Iterable[Finding]:
    if gpu.get("ecc_errors"):
        yield Finding(ERROR, "GPU ECC", f"{where}: {gpu['ecc_errors']:.0f} uncorrected errors",
                      "take the node out, reset the GPU (nvidia-smi --gpu-reset) or reboot; "
                      "replace it when they come back")
    if gpu.get("remap_failed"):
        yield Finding(ERROR, "GPU memory rows", f"{where}: a bad row could not be remapped",
                      "take the node out and have the GPU replaced")
    elif gpu.get("remap_pending"):
        yield Finding(WARNING, "GPU memory rows", f"{where}: a row is to be remapped",
                      "reset the GPU: nvidia-smi --gpu-reset")
    if gpu.get("throttled"):
        yield Finding(WARNING, "GPU clocks", f"{where} is slowed down: {gpu['throttled']}",
                      "check cooling and power of that node")
    if (gpu["temperature_c"] or 0) >= _HOT_C:
        yield Finding(WARNING, "GPU temperature", f"{where}: {gpu['temperature_c']:.0f} °C",
                      "check cooling of that node")
    if gpu["used_gib"] > _USED_GIB:
        yield Finding(WARNING, "GPU memory", f"{where}: {gpu['used_gib']:.1f} GiB are in use",
                      "find the process that has it: nvidia-smi")
    if gpu.get("nvlinks_down") and gpu.get("nvlinks"):
        yield Finding(ERROR, "NVLink", f"{where}: {gpu['nvlinks_down']} links are down",
                      "reset the GPUs or reboot; have the node replaced when they stay down")


def _efa(told: dict[str, Any], locked_memory: int, where: str) -> Iterable[Finding]:
    ours = [device for device in told["devices"] if device["efa"]]
    for device in told["devices"]:
        if not device["active"]:
            yield Finding(ERROR if device["efa"] else WARNING, "EFA" if ours else "RDMA",
                          f"{where}: {device['name']} has no active port",
                          "check the security group (all traffic within itself) and the driver")
    if told.get("libfabric") is False:
        yield Finding(ERROR, "EFA", f"{where}: libfabric does not see the EFA provider",
                      "build the image with --efa; on Kubernetes request vpc.amazonaws.com/efa")
    if ours and 0 <= locked_memory < 1 << 30:
        yield Finding(ERROR, "locked memory", f"{where}: {units.size(locked_memory)} at most, "
                      "which RDMA does not work with", "ulimit -l unlimited")


def _shm(told: dict[str, Any], where: str) -> Iterable[Finding]:
    if (total := told.get("total")) is not None and total < _SHM_WARNING:
        yield Finding(ERROR if total <= _SHM_ERROR else WARNING, "/dev/shm",
                      f"{where}: {units.size(total)} in all",
                      "docker run --shm-size 8g or --ipc=host; on Kubernetes an emptyDir with "
                      "medium: Memory on /dev/shm")


def _disk(told: dict[str, Any], where: str, is_same_disk: bool) -> Iterable[Finding]:
    if "error" in told:
        yield Finding(ERROR, "disk", f"{where}: {told['error']}",
                      "give that user the directory, or choose another --save-dir")
    elif told["free"] < _FREE_WARNING and not is_same_disk:
        yield Finding(WARNING, "disk", f"{where}: {units.size(told['free'])} free in "
                      f"{told['directory']}", "make room, or choose another --save-dir")


def _clock(told: dict[str, float], where: str) -> Iterable[Finding]:
    skew = abs(told["offset_s"])
    if skew - told["uncertainty_s"] > _SKEW_WARNING_S:
        yield Finding(ERROR if skew > _SKEW_ERROR_S else WARNING, "clock",
                      f"{where}: {told['offset_s']:+.1f} s from node 0",
                      "chronyc makestep, and see that chronyd or ntpd runs there")


def _differences(facts: Facts, name: Name) -> Iterable[Finding]:
    """Tell in what nodes differ that should be equal, and which is the odd one out."""
    def each(of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {node: of(told) for node, told in facts.items()}

    yield from _unlike("version of ", ERROR, each(lambda told: told["versions"]), name,
                       "use the same image, or the same requirements.txt and checkout, everywhere")
    yield from _unlike("", ERROR, each(_devices), name, "take the odd node out, or repair it")
    yield from _unlike("", WARNING, each(_gpu_kind), name,
                       "use nodes of one kind: the slowest sets the pace")
    yield from _unlike("setting ", WARNING, each(lambda told: told["settings"]), name,
                       "set it equally on all nodes")
    yield from _unlike("artifact ", ERROR,
                       each(lambda told: {path: artifact["digest"] for path, artifact
                                          in told["artifacts"].items()}), name,
                       "copy it to the odd node again, or put it on a shared file system")
    sees = {node for node, told in facts.items() if told["shared"]}
    if len(facts) > 1 and len(sees) < len(facts):
        lacking = sorted(set(facts) - sees)
        yield Finding(ERROR, "shared directory", "what node 0 writes to the experiments' "
                      f"directory is not seen by {', '.join(map(name, lacking))}",
                      "mount one file system everywhere and give it as --save-dir", _only(lacking))


def _devices(told: dict[str, Any]) -> dict[str, Any]:
    links = sorted({gpu["nvlinks"] for gpu in told["gpu"]["gpus"] if "nvlinks" in gpu})
    return {"number of GPUs": len(told["gpu"]["gpus"]), "ranks": told["ranks"],
            "NVLinks per GPU": "/".join(map(str, links)) or "none",
            "number of RDMA devices": len(told["efa"]["devices"])}


def _gpu_kind(told: dict[str, Any]) -> dict[str, Any]:
    def kinds(key: str) -> str:
        return ", ".join(sorted({str(gpu[key]) for gpu in told["gpu"]["gpus"]})) or "none"
    return {"GPU": kinds("name"), "driver": kinds("driver"),
            "maximum clock": kinds("max_clock_mhz")}


def _unlike(prefix: str, severity: str, values: dict[int, dict[str, Any]], name: Name, remedy: str,
            ) -> Iterable[Finding]:
    """Return a finding for each key whose value is not the same on all nodes."""
    keys = dict.fromkeys(key for told in values.values() for key in told)
    for key in keys:
        of = {node: json.dumps(told.get(key, "missing"), ensure_ascii=False).strip('"')
              for node, told in values.items()}
        (usual, times), *others = Counter(of.values()).most_common()
        if not others:
            continue
        odd = [node for node, value in of.items() if value != usual]
        if times == others[0][1]:  # no majority, so nobody is odd
            odd = []
            text = "; ".join(f"{value} on {name(node)}" for node, value in of.items())
        else:
            text = f"{', '.join(f'{of[node]} on {name(node)}' for node in odd)}; {usual} on the " \
                   f"other {times}"
        yield Finding(severity, f"{prefix}{key}", text, remedy, _only(odd))


def _only(nodes: list[int]) -> int | None:
    return nodes[0] if len(nodes) == 1 else None


def network(speed: dict[str, Any], name: Name, min_bandwidth: float | None) -> Iterable[Finding]:
    """Judge bandwidths: what failed, what is below the minimum, and which node is the odd one."""
    world = speed["world"]
    if "error" in world:
        yield Finding(ERROR, "network", f"all ranks together: {world['error']}",
                      "see the pairs of nodes below; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME "
                      "and check the firewall between nodes")
    elif min_bandwidth and world["all_reduce"] < min_bandwidth:
        yield Finding(ERROR, "network", f"all-reduce over all ranks: {world['all_reduce']:.3g} "
                      f"GB/s, expected {min_bandwidth:g}",
                      "NCCL_DEBUG=INFO tells which transport is used")
    for node, told in speed["nodes"].items():
        if "error" in told:
            yield Finding(ERROR, "network", f"ranks of {name(int(node))}: {told['error']}",
                          "check that node's GPUs, NVLink and /dev/shm", int(node))
    failed = {pair: told for pair, told in speed["pairs"].items() if "error" in told}
    for pair, told in failed.items():
        a, b = map(int, pair.split("-"))
        yield Finding(ERROR, "network", f"{name(a)} and {name(b)} do not talk: {told['error']}",
                      "check routes, firewall and security group between these two")
    yield from _odd_nodes(speed, name)
    if left_out := speed["rounds_left_out"]:
        yield not_checked("network", f"{left_out} rounds of pairs, for want of time (--seconds)")


def _odd_nodes(speed: dict[str, Any], name: Name) -> Iterable[Finding]:
    """Compare each node's best pair with the pairs it has no part in, and nodes' inner speeds."""
    remedy = "take the node out, or look at its link, cables and switch port"
    whole = {tuple(map(int, pair.split("-"))): told for pair, told in speed["pairs"].items()
             if "error" not in told}
    odd = set()
    for node in sorted({node for pair in whole for node in pair}):
        own = [told for pair, told in whole.items() if node in pair]
        others = [told for pair, told in whole.items() if node not in pair]
        share, text = 1.0, []
        for kind, label in _KINDS.items() if others else ():
            best, usual = max(told[kind] for told in own), median(told[kind] for told in others)
            share = min(share, best / usual)
            text.append(f"{label} {best:.3g} GB/s at best ({usual:.3g} without it)")
        if share < _SLOW:
            odd.add(node)
            yield _slow("network", f"{name(node)}: {', '.join(text)}", share, remedy, node)
    for kind, label in _KINDS.items() if len(whole) > 2 else ():
        usual = median(told[kind] for told in whole.values())
        for (a, b), told in whole.items():
            if told[kind] < _FAILING * usual and not odd & {a, b}:
                yield Finding(WARNING, "network", f"{name(a)} to {name(b)}: {label} at "
                              f"{told[kind]:.3g} GB/s, {usual:.3g} is usual",
                              "look at the path between these two nodes")
    inner = {int(node): told["all_reduce"] for node, told in speed["nodes"].items()
             if "error" not in told}
    yield from _slow_nodes("network", inner, name, _SLOW,
                           "GB/s all-reduce within the node", remedy)


def _slow_compute(facts: Facts, name: Name) -> Iterable[Finding]:
    slowest = {node: min(told["compute"].values()) for node, told in facts.items()
               if told["compute"]}
    on_gpu = any(told["gpu"]["gpus"] for told in facts.values())
    yield from _slow_nodes("compute", slowest, name, _SLOW_COMPUTE if on_gpu else _FAILING,
                           "TFLOP/s of its slowest rank", "look at clocks and heat of that node: "
                           "every step waits for it")
    for node, told in facts.items():
        for gpu, why in told["throttled"].items():
            yield Finding(WARNING, "GPU clocks", f"{name(node)}, GPU {gpu} slows down under load: "
                          f"{why}", "check cooling and power of that node", node)


def _slow_disk(facts: Facts, name: Name) -> Iterable[Finding]:
    rates = {node: told["disk"]["write"] / 1e9 for node, told in facts.items()
             if "write" in told["disk"]}
    for found in _slow_nodes("disk", rates, name, _FAILING, "GB/s written",
                             "look at that node's disk or mount"):
        yield replace(found, severity=WARNING)


def _slow_nodes(check: str, values: dict[int, float], name: Name, least: float, unit: str,
                remedy: str) -> Iterable[Finding]:
    for node, value in values.items():
        others = [other for key, other in values.items() if key != node]
        if others and (share := value / median(others)) < least:
            yield _slow(check, f"{name(node)}: {value:.3g} {unit}, {median(others):.3g} on the "
                        "others", share, remedy, node)


def _slow(check: str, text: str, share: float, remedy: str, node: int) -> Finding:
    return Finding(ERROR if share < _FAILING else WARNING, check, f"{text} ({share:.0%})", remedy,
                   node)
