"""Fill in the options of a job that were left open: context, instance type and devices."""

from __future__ import annotations

from dataclasses import replace

from launch.cloud.kube import aws, nodes
from launch.cloud.kube.cluster import find_eks
from launch.cloud.kube.job_options import JobOptions, read_instances
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from lib.core import log
from lib.core.errors import UsageError


def choose_context(
    job_options: JobOptions, cluster_name: str, dry_run: bool = False, only_plans: bool = False
) -> JobOptions:
    """Return the options with the context of the cluster. Raises UsageError if there is none.

    only_plans: accept a cluster that has no context, since no call needs one.
    """
    if cluster_name and job_options.context:
        raise UsageError(
            f"--cluster-name {cluster_name} and --context {job_options.context} both name a "
            "cluster",
            expected="one of them",
        )
    if not cluster_name:
        if job_options.context and job_options.region:
            aws.require_same_cluster(job_options.context, "", job_options.region)
        return job_options
    try:
        return replace(
            job_options,
            context=aws.find_context(cluster_name, job_options.region, fetch=not dry_run),
        )
    except UsageError as error:
        if not only_plans:
            raise
        log.info(f"cluster: {cluster_name}, which has no context yet: {error.problem}")
        return job_options


def fill_open_options(
    job_options: JobOptions, kubectl: Kubectl, queries_cluster: bool = True
) -> JobOptions:
    """Return the options with the instance type and the devices of the nodes filled in.

    queries_cluster: whether to query the cluster. Raises UsageError if several instance types are
    possible.
    """
    if not queries_cluster or job_options.gpus_per_node == 0:
        return job_options
    try:
        cluster_nodes = nodes.parse_nodes(kubectl.items("nodes"), [])
    except KubectlError:
        if job_options.instance_type and (
            job_options.node or job_options.gpus_per_node is not None
        ):
            return job_options  # the instance type is known without the cluster
        raise
    if not job_options.instance_type and not any(node.gpus for node in cluster_nodes):
        job_options = replace(job_options, instance_type=_find_node_group_type(kubectl))
    return nodes.fill_from_nodes(job_options, cluster_nodes, kubectl.cluster)


def _find_node_group_type(kubectl: Kubectl) -> str:
    """Return the only instance type with GPUs of an EKS cluster's node groups; empty if unknown."""
    cluster, region = find_eks(kubectl)
    types = (
        [name for name in aws.list_node_types(cluster, region) if name in read_instances()]
        if cluster
        else []
    )
    if len(types) == 1:
        log.info(f"from EKS: its node groups start {types[0]}")
    return types[0] if len(types) == 1 else ""
