"""Find the cluster that a command queries: its context, its name and its AWS region."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from lib.core import commands
from lib.core.errors import UsageError

# How `aws eks update-kubeconfig` and eksctl name a cluster in the kubeconfig.
_ARN = re.compile(r"arn:aws[\w-]*:eks:(?P<region>[\w-]+):\d+:cluster/(?P<name>[\w-]+)")
_EKSCTL = re.compile(r"(?:.*@)?(?P<name>[\w-]+)\.(?P<region>[\w-]+)\.eksctl\.io")
_TIMEOUT_S = 60


@dataclass(frozen=True)
class ClusterName:
    """The cluster that a command queries.

    name: the name of the EKS cluster, or else of the kubeconfig's entry. eks: the same name, only
    for EKS. region: the AWS region, only for EKS. context: the context in the kubeconfig. An
    unknown value is empty.
    """

    name: str
    eks: str
    region: str
    context: str

    def __str__(self) -> str:
        places = (("context", self.context), ("region", self.region))
        details = ", ".join(f"{label} {value}" for label, value in places if value)
        return f"{self.name or 'unknown'} ({details or 'no context'})"

    @property
    def title(self) -> str:
        """Return the name of the cluster for use in a sentence."""
        return f"cluster {self.name}" if self.name else "the cluster"

    @property
    def context_words(self) -> tuple[str, ...]:
        """Return the options of kubectl that choose this cluster."""
        return ("--context", self.context) if self.context else ()

    @property
    def aws_words(self) -> tuple[str, ...]:
        """Return the options of the AWS command line and of eksctl that choose this cluster."""
        region = ("--region", self.region) if self.region else ()
        return ("--cluster-name", self.eks or "CLUSTER", *region)


def find_cluster(context: str = "", cluster_name: str = "", region: str = "") -> ClusterName:
    """Return the cluster of a context (empty: the current one), with the region of its AWS calls.

    cluster_name, region: as given on the command line, or empty.
    """
    contexts, current = read_kubeconfig()
    context = context or current
    entry = contexts.get(context, "")
    eks, own_region = parse_context(context, entry)
    eks = cluster_name or eks
    return ClusterName(
        name=eks or entry or context,
        eks=eks,
        region=(region or own_region or find_default_region()) if eks else region,
        context=context,
    )


def find_default_region() -> str:
    """Return the region of the AWS settings, empty if they name none."""
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if value := os.environ.get(variable):
            return value
    try:
        process = subprocess.run(
            ["aws", "configure", "get", "region"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    name = process.stdout.strip()
    return name if re.fullmatch(r"[a-z]+(-[a-z]+)+-\d+", name) else ""


def require_region(region: str) -> str:
    """Return the region of an option or of the AWS settings. Raises UsageError without one."""
    if default := region or find_default_region():
        return default
    raise UsageError(
        "no AWS region is known",
        expected="--region, or AWS_REGION",
        run=commands.as_typed("--region", "us-west-2"),
    )


def parse_context(context: str, entry: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster of a context, which may have an alias.

    entry: the name of the context's cluster in the kubeconfig. Both are empty for other clusters.
    """
    for text in (entry, context):
        if match := _ARN.search(text) or _EKSCTL.fullmatch(text):
            return match["name"], match["region"]
    return "", ""


def read_kubeconfig() -> tuple[dict[str, str], str]:
    """Return the contexts, each with the name of its cluster, and the current context."""
    if shutil.which("kubectl") is None:
        return {}, ""
    process = subprocess.run(
        ["kubectl", "config", "view", "-o", "json"], capture_output=True, text=True
    )
    try:
        config = json.loads(process.stdout)
        entries = config["contexts"] or []
        contexts = {entry["name"]: entry["context"]["cluster"] for entry in entries}
        return contexts, config.get("current-context") or ""
    except (ValueError, KeyError, TypeError):
        return {}, ""
