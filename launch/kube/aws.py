"""Asks AWS about EKS and HyperPod clusters, where its command line is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import partial
from typing import Any

from launch.checks.findings import ERROR, INFO, WARNING, Finding, not_checked
from lib.core import commands
from lib.core.errors import UsageError

_TIMEOUT_S = 60
_ARN = re.compile(r"arn:aws[\w-]*:eks:(?P<region>[\w-]+):\d+:cluster/(?P<name>[\w-]+)")
_ADDONS = {
    "aws-fsx-csi-driver": "storage on FSx for Lustre",
    "eks-pod-identity-agent": "rights of pods",
}


class AwsError(UsageError):
    """Says which call AWS refused or did not answer."""


def text(*arguments: str, region: str = "") -> str:
    """Return what a call of the AWS command line says; AwsError when it fails."""
    where = ["--region", region] if region else []
    call = f"aws {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(
            ["aws", *arguments, *where], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise AwsError(
            "the AWS command line (aws) is not installed",
            expected="aws on the PATH, and credentials",
        ) from None
    except subprocess.TimeoutExpired:
        raise AwsError(f"no answer of `{call}` in {_TIMEOUT_S} s") from None
    if done.returncode:
        raise AwsError(
            f"`{call}` failed",
            found=(done.stderr or done.stdout).strip()[-500:],
            hint="`aws sts get-caller-identity` shows who you are",
        )
    return done.stdout


def aws(*arguments: str, region: str = "") -> Any:
    """Return what a call says, read as JSON; AwsError when it fails."""
    said = text(*arguments, "--output", "json", region=region)
    return json.loads(said) if said.strip() else {}


def cluster_of(context: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster that a kubectl context names, else empty ones."""
    match = _ARN.search(context)
    return (match["name"], match["region"]) if match else ("", "")


def connect(cluster: str, region: str = "") -> None:
    """Write a kubectl context for a cluster and make it the current one; AwsError when refused."""
    aws("eks", "update-kubeconfig", "--name", cluster, region=region)


def context_of(cluster: str, region: str = "", fetch: bool = True) -> str:
    """Return the context of a cluster.

    fetch: whether to run `aws eks update-kubeconfig` if the kubeconfig lacks the cluster; that also
    switches the current context.
    Raises UsageError where there is none, or where clusters of several regions bear the name.
    """
    if not (found := _contexts_of(cluster, region)) and fetch and shutil.which("aws"):
        connect(cluster, region)
        found = _contexts_of(cluster, region)
    if not found:
        where = ["--region", region] if region else []
        called = f"{cluster} in {region}" if region else cluster
        raise UsageError(
            f"the kubeconfig has no cluster {called}",
            run=commands.shell("aws", "eks", "update-kubeconfig", "--name", cluster, *where),
        )
    if len(set(found.values())) > 1:
        raise UsageError(
            f"the kubeconfig has several clusters called {cluster}",
            found="\n".join(found),
            expected="--context, one of them",
        )
    return next(iter(found))


def require_same_cluster(context: str, cluster: str) -> None:
    """Raise UsageError for a context that names another EKS cluster."""
    of_context = cluster_of(context)[0] or cluster_of(_clusters().get(context, ""))[0]
    if cluster and of_context and of_context != cluster:
        raise UsageError(
            f"--cluster-name {cluster}, but --context {context} is of the cluster {of_context}",
            expected="one of the two, or both of the same cluster",
        )


def _contexts_of(cluster: str, region: str) -> dict[str, str]:
    """Return the contexts of a cluster, each with what the kubeconfig calls that cluster."""
    every = _clusters()
    if cluster in every and not cluster_of(every[cluster])[0]:
        return {cluster: every[cluster]}  # a context of that very name, which AWS did not write
    return {
        context: named
        for context, named in every.items()
        for name, place in [_named(context, named)]
        if cluster in (context, name) and region in ("", place)
    }


def _named(context: str, named: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster of a context; its alias may hide them."""
    return cluster_of(named) if cluster_of(named)[0] else cluster_of(context)


def _clusters() -> dict[str, str]:
    """Return the contexts of the kubeconfig, and what it calls the cluster of each.

    Raises UsageError without kubectl.
    """
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "config", "view", "-o", "json"], capture_output=True, text=True
    )
    try:
        listed = json.loads(done.stdout)["contexts"] or []
        return {entry["name"]: entry["context"]["cluster"] for entry in listed}
    except (ValueError, KeyError, TypeError):
        return {}


def discover(region: str) -> str:
    """Return the only EKS cluster of the account and region; UsageError when there is not one."""
    found = aws("eks", "list-clusters", region=region).get("clusters", [])
    if len(found) != 1:
        raise UsageError(
            "which cluster?" if found else "there is no EKS cluster here",
            expected="--cluster-name",
            found=", ".join(found) or "none in this region",
            hint="" if found else _creation("NAME", region),
        )
    return found[0]


def node_types(cluster: str, region: str) -> list[str]:
    """Return the instance types of an EKS cluster's node groups, also of those without nodes.

    Empty where AWS cannot be asked.
    """
    ask = partial(aws, "eks", region=region)
    types = set[str]()
    try:
        for group in ask("list-nodegroups", "--cluster-name", cluster).get("nodegroups", []):
            types |= {
                *ask("describe-nodegroup", "--cluster-name", cluster, "--nodegroup-name", group)[
                    "nodegroup"
                ].get("instanceTypes", [])
            }
    except AwsError:
        return []
    return sorted(types)


def require_cluster(cluster: str, region: str) -> None:
    """Raise UsageError that says how a cluster is made where there is none of that name."""
    there = aws("eks", "list-clusters", region=region).get("clusters", [])
    if cluster not in there:
        raise UsageError(
            f"there is no EKS cluster {cluster}",
            found=", ".join(there) or "none in this region",
            hint=_creation(cluster, region),
        )


def _creation(cluster: str, region: str) -> str:
    """Return how a cluster is made, as a hint: it costs money, and its nodes are a choice."""
    command = commands.shell(
        "eksctl",
        "create",
        "cluster",
        "--name",
        cluster,
        *(["--region", region] if region else []),
        "--node-type",
        "g5.8xlarge",
        "--nodes",
        4,
    )
    return f"a cluster costs money, so nothing here makes one; for example: {command}"


def check(cluster: str, region: str, on_hyperpod: bool) -> list[Finding]:
    """Return what AWS says of a cluster, or why it was not asked."""
    if not shutil.which("aws"):
        return [not_checked("EKS", "the AWS command line is not installed")]
    if not cluster:
        return [not_checked("EKS", "the context names no EKS cluster (--cluster-name does)")]
    try:
        return [*_eks(cluster, region), *(_hyperpod(cluster, region) if on_hyperpod else ())]
    except AwsError as error:
        return [
            not_checked(
                "EKS",
                f"{error.problem}: {error.found.splitlines()[-1]}"
                if error.found
                else error.problem,
            )
        ]


def _eks(cluster: str, region: str) -> Iterable[Finding]:
    ask = partial(aws, "eks", region=region)
    info = ask("describe-cluster", "--name", cluster)["cluster"]
    status = info.get("status")
    yield Finding(
        INFO if status == "ACTIVE" else ERROR,
        "EKS",
        f"{cluster} is {status}, Kubernetes {info.get('version')}",
        "" if status == "ACTIVE" else "wait until it is ACTIVE",
    )
    for group in ask("list-nodegroups", "--cluster-name", cluster).get("nodegroups", []):
        info = ask("describe-nodegroup", "--cluster-name", cluster, "--nodegroup-name", group)[
            "nodegroup"
        ]
        for issue in info.get("health", {}).get("issues", []):
            yield Finding(
                WARNING,
                "EKS node group",
                f"{group}: {issue.get('code')}: {issue.get('message')}",
                "see the node group in the EKS console",
            )
    there = ask("list-addons", "--cluster-name", cluster).get("addons", [])
    for addon, purpose in _ADDONS.items():
        if addon not in there:
            yield Finding(
                INFO,
                "EKS add-on",
                f"{addon} is not installed ({purpose})",
                f"aws eks create-addon --cluster-name {cluster} --addon-name {addon}",
            )


def _hyperpod(cluster: str, region: str) -> Iterable[Finding]:
    """Find the HyperPod cluster that an EKS cluster orchestrates, and judge its instance groups."""
    ask = partial(aws, "sagemaker", region=region)
    for summary in ask("list-clusters").get("ClusterSummaries", []):
        info = ask("describe-cluster", "--cluster-name", summary["ClusterName"])
        arn = info.get("Orchestrator", {}).get("Eks", {}).get("ClusterArn", "")
        if arn.endswith(f"/{cluster}"):
            yield from _instance_groups(info)
            return
    yield Finding(
        ERROR,
        "HyperPod",
        f"no HyperPod cluster runs on the EKS cluster {cluster}",
        "choose --kind pytorchjob or trainjob, or name the cluster with --cluster-name",
    )


def _instance_groups(info: dict[str, Any]) -> Iterable[Finding]:
    status = info.get("ClusterStatus")
    usable = status == "InService"
    yield Finding(
        INFO if usable else WARNING,
        "HyperPod",
        f"{info.get('ClusterName')} is {status}",
        "" if usable else "wait until it is InService",
    )
    if info.get("NodeRecovery") == "None":
        yield Finding(
            WARNING,
            "HyperPod",
            "broken nodes are not replaced (NodeRecovery is None)",
            "aws sagemaker update-cluster --node-recovery Automatic",
        )
    for group in info.get("InstanceGroups", []):
        now = group.get("CurrentCount")
        target = group.get("TargetCount")
        if now != target:
            yield Finding(
                WARNING,
                "HyperPod",
                f"{group.get('InstanceGroupName')}: {now} of "
                f"{target} {group.get('InstanceType')} are there",
                "wait, or check the account's quota",
            )
