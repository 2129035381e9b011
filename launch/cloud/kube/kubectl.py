"""Call kubectl, the only connection of these tools to a cluster."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cached_property
from typing import Any

from launch.cloud.kube.kubeconfig import ClusterName, find_cluster, parse_context
from lib.core import commands
from lib.core.errors import StageError, UsageError

_TIMEOUT_S = 120
# Errors that the next call may not meet.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|i/o timeout|TLS handshake timeout|deadline exceeded|"
    r"EOF|no such host|server is currently unable|ServiceUnavailable|TooManyRequests|"
    r"etcdserver|Internal ?Error|Unable to connect|the object has been modified",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(
    r"connection refused|was refused|i/o timeout|no such host|Unable to connect|"
    r"no route to host",
    re.IGNORECASE,
)
_KUBECTL_LOG = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d")  # of each attempt, above what it says
_DEFAULT_SERVER = "localhost:8080"  # where kubectl looks without a kubeconfig


class KubectlError(StageError):
    """The cluster refused a call or did not answer. text: the output of kubectl."""

    def __init__(self, arguments: list[str], text: str, cluster: str = "the cluster") -> None:
        output = (
            "\n".join(line for line in text.splitlines() if not _KUBECTL_LOG.match(line)) or text
        )
        is_away = bool(_UNREACHABLE.search(text))
        super().__init__(
            f"{cluster} does not answer"
            if is_away
            else f"kubectl {' '.join(arguments[:3])} failed on {cluster}",
            found=output.strip()[-2000:],
            hint="`kubectl config get-contexts` lists the clusters that are configured "
            "here; --context chooses one"
            if is_away
            else "",
        )
        self.text = output
        self.last_line = output.strip().rpartition("\n")[2]
        self.is_transient = bool(_TRANSIENT.search(text))
        self.is_missing = "(NotFound)" in text
        self.is_unknown_type = "doesn't have a resource type" in text
        self.is_forbidden = "Forbidden" in text or "forbidden" in text


class Kubectl:
    """Calls kubectl in a namespace.

    context: a kubeconfig context, empty for the current one. cluster_name, region: EKS cluster and
    AWS region as they were given, if they were.
    """

    def __init__(
        self, namespace: str, context: str = "", cluster_name: str = "", region: str = ""
    ) -> None:
        self.namespace = namespace
        self.context = context
        self._given = (cluster_name, region)

    @cached_property
    def cluster(self) -> ClusterName:
        """Return the cluster that the calls query."""
        return find_cluster(self.context, *self._given)

    def command(self, *arguments: str) -> list[str]:
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "--namespace", self.namespace, *arguments]

    def format(self, *arguments: str) -> str:
        """Return a call as a command to type."""
        return commands.shell(*self.command(*arguments))

    def run(self, *arguments: str, stdin: str = "", timeout: float = _TIMEOUT_S) -> str:
        """Return the output of a call. stdin: its input. Raises KubectlError if it fails."""
        try:
            process = subprocess.run(
                self.command(*arguments),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout,
                errors="replace",
            )
        except FileNotFoundError:
            raise UsageError(
                "kubectl is not installed",
                expected="kubectl 1.25 or newer on the PATH, and a kubeconfig",
            ) from None
        except subprocess.TimeoutExpired:
            raise KubectlError(
                list(arguments),
                f"no answer within {timeout:.0f} s (i/o timeout)",
                self.cluster.title,
            ) from None
        if process.returncode:
            _require_configured(process.stderr, self.context)
            raise KubectlError(
                list(arguments), process.stderr or process.stdout, self.cluster.title
            )
        return process.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def find(self, *arguments: str) -> dict[str, Any] | None:
        """Return an object, None if it does not exist."""
        try:
            return self.get(*arguments)
        except KubectlError as error:
            if error.is_missing:
                return None
            raise

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        return self.get(*arguments).get("items", [])

    def apply(self, manifests: str) -> str:
        """Create or change objects; the cluster refuses unknown fields."""
        return self.run("apply", "--validate=strict", "-f", "-", stdin=manifests)

    def put(self, manifest: str) -> None:
        """Create or replace an object, without a copy of its content in an annotation."""
        self.run(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--validate=strict",
            "-f",
            "-",
            stdin=manifest,
        )

    def stream(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a call that prints to this program's output."""
        return subprocess.Popen(self.command(*arguments), stdin=subprocess.DEVNULL)


def _connect_command(context: str) -> str:
    """Return the command that makes the context of an EKS cluster; empty for other contexts."""
    name, region = parse_context(context, "")
    words = ("--name", name, "--region", region)
    return commands.shell("aws", "eks", "update-kubeconfig", *words) if name else ""


def _require_configured(output: str, context: str) -> None:
    """Raise UsageError if kubectl's output means that no cluster is configured."""
    if _DEFAULT_SERVER in output and _UNREACHABLE.search(output):
        raise UsageError(
            "no cluster is configured here: kubectl has no kubeconfig",
            expected="KUBECONFIG=FILE, or for EKS `aws eks update-kubeconfig --name CLUSTER`; "
            "`setup` prints how to create a cluster",
            run=commands.script("launch/kubernetes.py", "setup"),
        )
    if "context was not found" in output or f'context "{context}" does not exist' in output:
        raise UsageError(
            f"the kubeconfig has no context {context}",
            hint="`kubectl config get-contexts` lists all contexts",
            run=_connect_command(context),
        )
