"""Find the nodes of a cluster that can run a pod of the job, with their GPUs and EFA adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from launch.checks.findings import ERROR, INFO, WARNING, Finding
from launch.cloud.kube import remedies
from launch.cloud.kube.job_options import JobNeeds, Needs
from launch.cloud.kube.kinds import HYPERPOD_PREFIX, KINDS
from launch.cloud.kube.kubeconfig import ClusterName
from launch.cloud.kube.kubectl import Kubectl
from lib.core import log, units
from lib.core.errors import UsageError

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_NODE_GROUP = "eks.amazonaws.com/nodegroup"
_HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
_TOLERATED_TAINTS = {GPU}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
HUGE_PAGES_NEEDED = 5 << 30  # the request of a pod in launch/cloud/kube/templates/pod.yaml


@dataclass
class ClusterNode:
    """A node.

    unfit: why it accepts no pods, empty if it does. driver, group: the version of the driver and
    the node group of EKS, empty if unknown.
    """

    name: str
    instance_type: str
    unfit: str
    gpus: int
    efa: int
    huge_pages: int
    driver: str
    group: str = ""
    gpus_used: int = 0

    @property
    def gpus_free(self) -> int:
        return self.gpus - self.gpus_used


def parse_quantity(text: str) -> int:
    """Return a Kubernetes quantity as a number: `8`, `500m`, `5120Mi`, `1k`."""
    for suffixes in (_BINARY, _DECIMAL):
        for suffix, factor in suffixes.items():
            if text.endswith(suffix):
                return int(float(text.removesuffix(suffix)) * factor)
    return int(float(text.removesuffix("m")) / 1000) if text.endswith("m") else int(float(text))


def parse_nodes(nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> list[ClusterNode]:
    """Return nodes from the output of `kubectl get`, with the GPUs that active pods use."""
    by_name = {item["metadata"]["name"]: _parse_node(item) for item in nodes}
    for pod in pods:
        if (node := by_name.get(pod["spec"].get("nodeName", ""))) and pod.get("status", {}).get(
            "phase"
        ) not in ("Succeeded", "Failed"):
            node.gpus_used += sum(
                parse_quantity(container.get("resources", {}).get("limits", {}).get(GPU, "0"))
                for container in pod["spec"]["containers"]
            )
    return list(by_name.values())


def _parse_node(item: dict[str, Any]) -> ClusterNode:
    labels = item["metadata"].get("labels", {})
    allocatable = item.get("status", {}).get("allocatable", {})
    return ClusterNode(
        name=item["metadata"]["name"],
        instance_type=labels.get(INSTANCE_TYPE, "unknown"),
        unfit=_describe_unfit(item, labels),
        gpus=parse_quantity(allocatable.get(GPU, "0")),
        efa=parse_quantity(allocatable.get(EFA, "0")),
        huge_pages=parse_quantity(allocatable.get(HUGE_PAGES, "0")),
        driver=_find_driver(labels),
        group=labels.get(_NODE_GROUP, ""),
    )


def _find_driver(labels: dict[str, str]) -> str:
    """Return the driver version in the labels of NVIDIA's feature discovery."""
    if full := labels.get("nvidia.com/cuda.driver-version.full"):
        return full
    parts = [labels.get(f"nvidia.com/cuda.driver.{part}", "") for part in ("major", "minor", "rev")]
    return ".".join(filter(None, parts))


def _describe_unfit(item: dict[str, Any], labels: dict[str, str]) -> str:
    states = {
        condition["type"]: condition["status"]
        for condition in item.get("status", {}).get("conditions", [])
    }
    pressures = [kind for kind, status in states.items() if kind != "Ready" and status == "True"]
    taints = [
        taint["key"]
        for taint in item.get("spec", {}).get("taints", [])
        if taint["effect"] in ("NoSchedule", "NoExecute") and taint["key"] not in _TOLERATED_TAINTS
    ]
    reasons = [
        *(["not ready"] if states.get("Ready") != "True" else []),
        *pressures,
        *(["cordoned"] if item.get("spec", {}).get("unschedulable") else []),
        *(
            [f"HyperPod health: {labels[_HEALTH_LABEL]}"]
            if labels.get(_HEALTH_LABEL, "Schedulable") != "Schedulable"
            else []
        ),
        *(f"taint {key}" for key in taints if not key.startswith("node.kubernetes.io/")),
    ]
    return ", ".join(reasons)


def fill_from_nodes(needs: Needs, nodes: list[ClusterNode], cluster: ClusterName) -> Needs:
    """Return options with the instance type and devices filled in from the nodes with GPUs.

    Raises UsageError if no node has GPUs, or if they are of several types.
    """
    kinds: dict[str, ClusterNode] = {}
    for node in nodes:
        if node.gpus and (node.instance_type not in kinds or kinds[node.instance_type].unfit):
            kinds[node.instance_type] = node
    kind = needs.instance_type or (next(iter(kinds)) if len(kinds) == 1 else "")
    # The types of HyperPod's nodes have a prefix, others do not, and --instance-type accepts both.
    kind = next(
        (
            name
            for name in kinds
            if kind and name.removeprefix(HYPERPOD_PREFIX) == kind.removeprefix(HYPERPOD_PREFIX)
        ),
        kind,
    )
    if not kind and needs.gpus_per_node is None:
        raise UsageError(
            f"the nodes with GPUs of {cluster.title} are of several instance types"
            if kinds
            else f"no node of {cluster.title} has GPUs",
            expected="--instance-type",
            found=", ".join(kinds)
            or ", ".join(sorted({n.instance_type for n in nodes}))
            or "no nodes",
            run="" if kinds else remedies.add_nodes(cluster, "", needs.nodes),
        )
    devices = kinds.get(kind)
    if devices is None or (needs.instance_type and needs.node):
        return replace(needs, instance_type=kind)
    gpus = devices.gpus if needs.gpus_per_node is None else needs.gpus_per_node
    efa = devices.efa if needs.efa_per_node is None else needs.efa_per_node
    log.info(
        f"from the cluster: {kind}, {units.counted(devices.gpus, 'GPU')} and {devices.efa} EFA "
        "per node"
    )
    return replace(needs, instance_type=kind, gpus_per_node=gpus, efa_per_node=efa)


def check_capacity(
    nodes: list[ClusterNode], needs: JobNeeds, has_autoscaler: bool, cluster: ClusterName
) -> Iterable[Finding]:
    """Yield whether the nodes suffice for a job.

    needs: the needs of the job, after `with_defaults`. has_autoscaler: whether nodes can be added.
    cluster: the cluster with these nodes.
    """
    gpus = needs.gpus_per_node or 0
    efa = needs.efa_per_node or 0
    candidates = [
        node
        for node in nodes
        if needs.instance_type in ("", node.instance_type)
        and (node.gpus or needs.instance_type or not gpus)
    ]
    label = needs.instance_type or ("nodes with GPUs" if gpus else "nodes")
    for node in candidates:
        if node.unfit:
            yield Finding(
                WARNING,
                "nodes",
                f"{node.name} accepts no pods: {node.unfit}",
                Kubectl(needs.namespace, needs.context).format("describe", "node", node.name),
            )
    usable = [node for node in candidates if not node.unfit]
    suitable = [node for node in usable if node.gpus >= gpus and node.efa >= efa]
    yield from _check_devices(usable, gpus, efa, cluster)
    free = [node for node in suitable if node.gpus_free >= gpus]
    requirement = f"{needs.nodes} with {gpus} GPUs and {efa} EFA each"
    if len(suitable) < needs.nodes:
        yield Finding(
            WARNING if has_autoscaler else ERROR,
            "capacity",
            f"{len(suitable)} of {len(candidates)} {label} can run a pod, the job needs "
            f"{requirement}" + (" (an autoscaler may add some)" if has_autoscaler else ""),
            "add nodes, or use fewer --nodes or --gpus-per-node",
            run=""
            if KINDS[needs.kind].on_hyperpod
            else remedies.add_nodes(
                cluster, candidates[0].group if candidates else "", needs.nodes
            ),
        )
    elif len(free) < needs.nodes:
        yield Finding(
            WARNING,
            "capacity",
            f"{len(free)} {label} are free now, the job needs {requirement}",
            "it will wait; `kubectl get pods -A -o wide` shows which pods use them",
        )
    else:
        yield Finding(
            INFO, "capacity", f"{len(free)} {label} are free, the job needs {requirement}"
        )


def _check_devices(
    nodes: list[ClusterNode], gpus: int, efa: int, cluster: ClusterName
) -> Iterable[Finding]:
    """Yield the nodes that lack devices."""
    if gpus and (lacking := [node.name for node in nodes if not node.gpus]):
        yield Finding(
            ERROR,
            "GPUs",
            f"no {GPU} on {units.join_names(lacking, 4)}",
            "install NVIDIA's device plugin or GPU operator; "
            "kubectl get daemonsets -A | grep nvidia",
            run=remedies.install_nvidia_plugin(cluster),
        )
    if efa and (lacking := [node.name for node in nodes if node.efa < efa]):
        yield Finding(
            ERROR,
            "EFA",
            f"fewer than {efa} {EFA} on {units.join_names(lacking, 4)}",
            "install the EFA device plugin (aws-efa-k8s-device-plugin), and launch the "
            "nodes with EFA interfaces",
            run=remedies.install_efa_plugin(cluster),
        )
    if efa and (with_few_pages := [node for node in nodes if node.huge_pages < HUGE_PAGES_NEEDED]):
        yield Finding(
            WARNING,
            "huge pages",
            f"{units.size(with_few_pages[0].huge_pages)} on "
            f"{units.join_names([n.name for n in with_few_pages], 4)}; EFA pods request 5120Mi",
            "use an EKS accelerated AMI, or reserve them: sysctl vm.nr_hugepages=5128",
        )
