"""kubectl: the only way in which these tools talk to a cluster."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from lib.core.errors import StageError, UsageError

_TIMEOUT_S = 120
# What the next call may well not meet again.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|i/o timeout|TLS handshake timeout|deadline exceeded|"
    r"EOF|no such host|server is currently unable|ServiceUnavailable|TooManyRequests|"
    r"etcdserver|Internal ?Error|Unable to connect|the object has been modified", re.IGNORECASE)


class KubectlError(StageError):
    """A call that the cluster refused or did not answer; text: what kubectl said."""

    def __init__(self, arguments: list[str], text: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments[:3])} failed", found=text.strip()[-2000:])
        self.text = text
        self.is_transient = bool(_TRANSIENT.search(text))
        self.is_missing = "(NotFound)" in text
        self.is_unknown_type = "doesn't have a resource type" in text
        self.is_forbidden = "Forbidden" in text or "forbidden" in text


class Kubectl:
    """Calls kubectl in one namespace. context: of the kubeconfig, empty for the current one."""

    def __init__(self, namespace: str, context: str = "") -> None:
        self.namespace, self.context = namespace, context

    def command(self, *arguments: str) -> list[str]:
        """Return a command line."""
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "--namespace", self.namespace, *arguments]

    def run(self, *arguments: str, given: str = "", timeout: float = _TIMEOUT_S) -> str:
        """Return what a call printed; given: its input. KubectlError when it failed."""
        try:
            done = subprocess.run(self.command(*arguments), input=given, capture_output=True,
                                  text=True, timeout=timeout, errors="replace")
        except FileNotFoundError:
            raise UsageError("kubectl is not installed",
                             expected="kubectl 1.25 or newer on the PATH, and a kubeconfig"
                             ) from None
        except subprocess.TimeoutExpired:
            raise KubectlError(list(arguments), f"no answer in {timeout:.0f} s (i/o timeout)"
                               ) from None
        if done.returncode:
            raise KubectlError(list(arguments), done.stderr or done.stdout)
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object or a list of objects."""
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def find(self, *arguments: str) -> dict[str, Any] | None:
        """Return an object, None when there is none."""
        try:
            return self.get(*arguments)
        except KubectlError as error:
            if error.is_missing:
                return None
            raise

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects of a list."""
        return self.get(*arguments).get("items", [])

    def apply(self, manifests: str) -> str:
        """Create or change objects; the cluster refuses fields that it does not know."""
        return self.run("apply", "--validate=strict", "-f", "-", given=manifests)

    def put(self, manifest: str) -> None:
        """Create or replace an object without noting its content in an annotation."""
        self.run("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-",
                 given=manifest)

    def stream(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a call whose output goes where this program's goes."""
        return subprocess.Popen(self.command(*arguments), stdin=subprocess.DEVNULL)
