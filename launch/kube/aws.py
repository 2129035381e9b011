"""Query AWS about EKS and HyperPod clusters, if its command line is installed."""

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
    """AWS refused a call or did not answer."""


def call(*arguments: str, region: str = "") -> str:
    """Return the output of a call of the AWS command line. Raises AwsError if it fails."""
    where = ["--region", region] if region else []
    shown = f"aws {' '.join(arguments[:2])}"
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
        raise AwsError(f"`{shown}` did not answer within {_TIMEOUT_S} s") from None
    if done.returncode:
        raise AwsError(
            f"`{shown}` failed",
            found=(done.stderr or done.stdout).strip()[-500:],
            hint="`aws sts get-caller-identity` shows who you are",
        )
    return done.stdout


def query(*arguments: str, region: str = "") -> Any:
    """Return the output of a call, parsed as JSON. Raises AwsError if it fails."""
    output = call(*arguments, "--output", "json", region=region)
    return json.loads(output) if output.strip() else {}


def cluster_of(context: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster in the ARN of a context; empty without an ARN."""
    match = _ARN.search(context)
    return (match["name"], match["region"]) if match else ("", "")


def connect(cluster: str, region: str = "") -> None:
    """Write a kubectl context for a cluster and make it the current one. Raises AwsError."""
    query("eks", "update-kubeconfig", "--name", cluster, region=region)


def context_of(cluster: str, region: str = "", fetch: bool = True) -> str:
    """Return the context of a cluster.

    fetch: whether to run `aws eks update-kubeconfig` if the kubeconfig lacks the cluster; that also
    switches the current context. Raises UsageError if there is no context, or if clusters of
    several regions have this name.
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
            expected="--context with one of them",
        )
    return next(iter(found))


def require_same_cluster(context: str, cluster: str) -> None:
    """Raise UsageError if a context belongs to another EKS cluster."""
    of_context = cluster_of(context)[0] or cluster_of(_clusters().get(context, ""))[0]
    if cluster and of_context and of_context != cluster:
        raise UsageError(
            f"--cluster-name {cluster}, but --context {context} belongs to {of_context}",
            expected="one of the two, or both for the same cluster",
        )


def _contexts_of(cluster: str, region: str) -> dict[str, str]:
    """Return the contexts of a cluster, each with the cluster's name in the kubeconfig."""
    every = _clusters()
    if cluster in every and not cluster_of(every[cluster])[0]:
        return {cluster: every[cluster]}  # a context of this name that AWS did not write
    return {
        context: named
        for context, named in every.items()
        for name, place in [_named(context, named)]
        if cluster in (context, name) and region in ("", place)
    }


def _named(context: str, named: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster of a context, which may have an alias."""
    return cluster_of(named) if cluster_of(named)[0] else cluster_of(context)


def _clusters() -> dict[str, str]:
    """Return the contexts of the kubeconfig, each with the name of its cluster.

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


def find_only_cluster(region: str) -> str:
    """Return the only EKS cluster of the account and region. Raises UsageError if none or many."""
    found = query("eks", "list-clusters", region=region).get("clusters", [])
    if len(found) != 1:
        raise UsageError(
            "there are several EKS clusters" if found else "there is no EKS cluster",
            expected="--cluster-name",
            found=", ".join(found) or "none in this region",
            hint="" if found else _creation_hint("NAME", region),
        )
    return found[0]


def node_types(cluster: str, region: str) -> list[str]:
    """Return the instance types of an EKS cluster's node groups, including empty ones.

    The result is empty if AWS does not answer.
    """
    ask = partial(query, "eks", region=region)
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
    """Raise UsageError, with the command that creates it, if a cluster does not exist."""
    there = query("eks", "list-clusters", region=region).get("clusters", [])
    if cluster not in there:
        raise UsageError(
            f"there is no EKS cluster {cluster}",
            found=", ".join(there) or "none in this region",
            hint=_creation_hint(cluster, region),
        )


def _creation_hint(cluster: str, region: str) -> str:
    """Return a hint how to create a cluster. It is no `run:` line, since a cluster costs money."""
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
    return f"a cluster costs money, so create it yourself; for example: {command}"


def check_eks(cluster: str, region: str, on_hyperpod: bool) -> list[Finding]:
    """Return the findings of AWS about a cluster, or why it was not checked."""
    if not shutil.which("aws"):
        return [not_checked("EKS", "the AWS command line is not installed")]
    if not cluster:
        return [not_checked("EKS", "the context names no EKS cluster; --cluster-name can name it")]
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
    ask = partial(query, "eks", region=region)
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
                "look at the node group in the EKS console",
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
    """Yield findings about the HyperPod cluster that an EKS cluster orchestrates."""
    ask = partial(query, "sagemaker", region=region)
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
