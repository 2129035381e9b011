"""Query AWS about EKS and HyperPod clusters, if its command line is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from functools import partial
from typing import Any

from launch.checks.findings import ERROR, INFO, WARNING, Finding, not_checked
from launch.cloud.kube.kubeconfig import parse_context, read_kubeconfig
from launch.cloud.kube.quotas import quota_commands
from lib.core import commands
from lib.core.errors import UsageError

_TIMEOUT_S = 60
_ADDONS = {
    "aws-fsx-csi-driver": "storage on FSx for Lustre",
    "eks-pod-identity-agent": "rights of pods",
}


class AwsError(UsageError):
    """AWS refused a call or did not answer."""


def run_aws(*arguments: str, region: str = "") -> str:
    """Return the output of a call of the AWS command line. Raises AwsError if it fails."""
    # With the name of the cluster, if the call is about one.
    named = 4 if arguments[2:3] in (("--name",), ("--cluster-name",)) else 2
    command = " ".join(["aws", *arguments[:named], *_region_words(region)])
    try:
        process = subprocess.run(
            ["aws", *arguments, *_region_words(region)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise AwsError(
            "the AWS command line (aws) is not installed",
            expected="aws on the PATH, and credentials",
        ) from None
    except subprocess.TimeoutExpired:
        raise AwsError(f"`{command}` did not answer within {_TIMEOUT_S} s") from None
    if process.returncode:
        raise AwsError(
            f"`{command}` failed",
            found=(process.stderr or process.stdout).strip()[-500:],
            hint="`aws sts get-caller-identity` shows who you are",
        )
    return process.stdout


def query_json(*arguments: str, region: str = "") -> Any:
    """Return the output of a call, parsed as JSON. Raises AwsError if it fails."""
    output = run_aws(*arguments, "--output", "json", region=region)
    return json.loads(output) if output.strip() else {}


def connect_kubectl(cluster: str, region: str = "") -> None:
    """Write a kubectl context for a cluster and make it the current one. Raises AwsError."""
    query_json("eks", "update-kubeconfig", "--name", cluster, region=region)


def find_context(cluster: str, region: str = "", fetch: bool = True) -> str:
    """Return the context of a cluster.

    fetch: whether to run `aws eks update-kubeconfig` if the kubeconfig lacks the cluster; that also
    switches the current context. Raises UsageError if there is no context, or if clusters of
    several regions have this name.
    """
    if not (contexts := _find_contexts(cluster, region)) and fetch and shutil.which("aws"):
        connect_kubectl(cluster, region)
        contexts = _find_contexts(cluster, region)
    if not contexts:
        name = f"{cluster} in {region}" if region else cluster
        raise UsageError(
            f"the kubeconfig has no cluster {name}",
            run=commands.shell(
                "aws", "eks", "update-kubeconfig", "--name", cluster, *_region_words(region)
            ),
        )
    if len(set(contexts.values())) > 1:
        raise UsageError(
            f"the kubeconfig has several clusters called {cluster}",
            found="\n".join(contexts),
            expected="--context with one of them",
        )
    return next(iter(contexts))


def require_same_cluster(context: str, cluster: str, region: str = "") -> None:
    """Raise UsageError if a context belongs to another EKS cluster or region."""
    own_name, own_region = parse_context(context, _list_contexts().get(context, ""))
    for option, value, context_value in (
        ("--cluster-name", cluster, own_name),
        ("--region", region, own_region),
    ):
        if value and context_value and context_value != value:
            raise UsageError(
                f"{option} {value}, but --context {context} belongs to {context_value}",
                expected="one of the two, or both for the same cluster",
            )


def _find_contexts(cluster: str, region: str) -> dict[str, str]:
    """Return the contexts of a cluster, each with the cluster's name in the kubeconfig."""
    contexts = _list_contexts()
    if cluster in contexts and not parse_context("", contexts[cluster])[0]:
        return {cluster: contexts[cluster]}  # a context of this name that AWS did not write
    return {
        context: entry
        for context, entry in contexts.items()
        for name, cluster_region in [parse_context(context, entry)]
        if cluster in (context, name) and region in ("", cluster_region)
    }


def _list_contexts() -> dict[str, str]:
    """Return the contexts of the kubeconfig, each with the name of its cluster.

    Raises UsageError without kubectl.
    """
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl is not installed")
    return read_kubeconfig()[0]


def find_only_cluster(region: str) -> str:
    """Return the only EKS cluster of the account and region. Raises UsageError if none or many."""
    clusters = query_json("eks", "list-clusters", region=region).get("clusters", [])
    if len(clusters) != 1:
        raise UsageError(
            "there are several EKS clusters" if clusters else "there is no EKS cluster",
            expected="--cluster-name",
            found=", ".join(clusters) or f"none in {region or 'the region of the AWS settings'}",
            run="" if clusters else _setup_command("llm-training", region),
        )
    return clusters[0]


def list_node_types(cluster: str, region: str) -> list[str]:
    """Return the instance types of an EKS cluster's node groups, including empty ones.

    The result is empty if AWS does not answer.
    """
    query_eks = partial(query_json, "eks", region=region)
    types = set[str]()
    try:
        for group in query_eks("list-nodegroups", "--cluster-name", cluster).get("nodegroups", []):
            types |= {
                *query_eks(
                    "describe-nodegroup", "--cluster-name", cluster, "--nodegroup-name", group
                )["nodegroup"].get("instanceTypes", [])
            }
    except AwsError:
        return []
    return sorted(types)


def require_cluster(cluster: str, region: str) -> None:
    """Raise UsageError, with the command that creates it, if a cluster does not exist."""
    clusters = query_json("eks", "list-clusters", region=region).get("clusters", [])
    if cluster not in clusters:
        raise UsageError(
            f"there is no EKS cluster {cluster}",
            found=", ".join(clusters) or f"none in {region or 'the region of the AWS settings'}",
            hint="a cluster costs money, so this prints the commands and costs and creates nothing",
            run=_setup_command(cluster, region),
        )


def _setup_command(cluster: str, region: str, kind: str = "eks") -> str:
    """Return the command that prints how to create a cluster. It creates nothing itself."""
    words = ("--kind", kind, "--cluster-name", cluster, *_region_words(region))
    return commands.script("launch/kubernetes.py", "setup", *words)


def _region_words(region: str) -> list[str]:
    return ["--region", region] if region else []


def check_eks(cluster: str, region: str, on_hyperpod: bool) -> list[Finding]:
    """Return the findings of AWS about a cluster, or why it was not checked."""
    if not shutil.which("aws"):
        return [not_checked("EKS", "the AWS command line is not installed")]
    if not cluster:
        return [not_checked("EKS", "the context names no EKS cluster; --cluster-name can name it")]
    try:
        return [
            *_check_eks_cluster(cluster, region),
            *(_check_hyperpod(cluster, region) if on_hyperpod else ()),
        ]
    except AwsError as error:
        return [
            not_checked(
                "EKS",
                f"{error.problem}: {error.found.splitlines()[-1]}"
                if error.found
                else error.problem,
            )
        ]


def _check_eks_cluster(cluster: str, region: str) -> Iterable[Finding]:
    query_eks = partial(query_json, "eks", region=region)
    info = query_eks("describe-cluster", "--name", cluster)["cluster"]
    status = info.get("status")
    yield Finding(
        INFO if status == "ACTIVE" else ERROR,
        "EKS",
        f"{cluster} is {status}, Kubernetes {info.get('version')}",
        "" if status == "ACTIVE" else "wait until it is ACTIVE",
    )
    for group in query_eks("list-nodegroups", "--cluster-name", cluster).get("nodegroups", []):
        info = query_eks(
            "describe-nodegroup", "--cluster-name", cluster, "--nodegroup-name", group
        )["nodegroup"]
        for issue in info.get("health", {}).get("issues", []):
            yield Finding(
                WARNING,
                "EKS node group",
                f"{group}: {issue.get('code')}: {issue.get('message')}",
                "look at the node group in the EKS console",
            )
    addons = query_eks("list-addons", "--cluster-name", cluster).get("addons", [])
    for addon, purpose in _ADDONS.items():
        if addon not in addons:
            yield Finding(
                INFO,
                "EKS add-on",
                f"{addon} is not installed ({purpose})",
                run=commands.shell(
                    *("aws", "eks", "create-addon", "--cluster-name", cluster),
                    *("--addon-name", addon, *_region_words(region)),
                ),
            )


def _check_hyperpod(cluster: str, region: str) -> Iterable[Finding]:
    """Yield findings about the HyperPod cluster that an EKS cluster orchestrates."""
    query_sagemaker = partial(query_json, "sagemaker", region=region)
    for summary in query_sagemaker("list-clusters").get("ClusterSummaries", []):
        info = query_sagemaker("describe-cluster", "--cluster-name", summary["ClusterName"])
        arn = info.get("Orchestrator", {}).get("Eks", {}).get("ClusterArn", "")
        if arn.endswith(f"/{cluster}"):
            yield from _check_instance_groups(info, region)
            return
    yield Finding(
        ERROR,
        "HyperPod",
        f"no HyperPod cluster runs on the EKS cluster {cluster}",
        "choose --kind pytorchjob or trainjob, or name the cluster with --cluster-name",
        run=_setup_command(cluster, region, "hyperpod"),
    )


def _check_instance_groups(info: dict[str, Any], region: str) -> Iterable[Finding]:
    status = info.get("ClusterStatus")
    is_usable = status == "InService"
    yield Finding(
        INFO if is_usable else WARNING,
        "HyperPod",
        f"{info.get('ClusterName')} is {status}",
        "" if is_usable else "wait until it is InService",
    )
    if info.get("NodeRecovery") == "None":
        yield Finding(
            WARNING,
            "HyperPod",
            "broken nodes are not replaced (NodeRecovery is None)",
            "let HyperPod replace them",
            run=commands.shell(
                *("aws", "sagemaker", "update-cluster", "--node-recovery", "Automatic"),
                *("--cluster-name", info.get("ClusterName", ""), *_region_words(region)),
            ),
        )
    for group in info.get("InstanceGroups", []):
        current = group.get("CurrentCount")
        target = group.get("TargetCount")
        if current != target:
            yield Finding(
                WARNING,
                "HyperPod",
                f"{group.get('InstanceGroupName')}: {current} of "
                f"{target} {group.get('InstanceType')} are there",
                "wait, or ask for a larger quota of the account",
                run=quota_commands(group.get("InstanceType", ""), target, region, True)[1],
            )
