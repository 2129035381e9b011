"""A cluster for tests of launch/kubernetes.py: the real kubectl with a server on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.kube_server import Cluster, Object, Server
from tests.conftest import ROOT, run_stage

SCRIPT = ROOT / "launch" / "kubernetes.py"
PLURALS = {"pytorchjob": "pytorchjobs", "trainjob": "trainjobs", "hyperpod": "hyperpodpytorchjobs"}
JOB_OPTIONS = (
    "--job-name",
    "exp",
    "--nodes",
    "2",
    "--instance-type",
    "p5.48xlarge",
    "--image",
    "registry/train:1",
)
TRAIN_OPTIONS = ("--", "-d", "c4", "-m", "org/model", "--max-steps", "10")


def run_launcher(
    *arguments: object,
    expect: int | None = 0,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run launch/kubernetes.py, assert its exit code (None: any) and return its result."""
    return run_stage(
        "launch/kubernetes.py", *arguments, cwd=Path.cwd(), expect=expect, env=env, timeout=timeout
    )


@pytest.fixture(scope="session")
def kube_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server of all tests; each test has its own cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    printed = subprocess.run(
        ["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True, check=True
    ).stdout
    version = json.loads(printed)["clientVersion"]
    if int(version["minor"].rstrip("+")) < 25:
        pytest.skip(
            f"needs kubectl 1.25, which can refuse unknown fields; this is {version['gitVersion']}"
        )
    server = Server(Cluster())
    server.home = tmp_path_factory.mktemp("kube")
    yield server
    server.close()


@pytest.fixture
def kube(kube_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return the cluster of this test's kubeconfig, with a volume and two nodes."""
    cluster = kube_server.serve(Cluster())
    cluster.add(
        "persistentvolumeclaims", {"metadata": {"name": "fsx-claim"}, "status": {"phase": "Bound"}}
    )
    for number in (1, 2):
        cluster.add(
            "nodes",
            {
                "metadata": {
                    "name": f"node-{number}",
                    "labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
                }
            },
        )
    monkeypatch.setenv("KUBECONFIG", str(kube_server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("GOGC", "off")  # a fifth less time for each of many short kubectl
    monkeypatch.setenv("KUBECACHEDIR", str(kube_server.home / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return cluster


def make_pod(
    job: str,
    name: str,
    phase: str = "Running",
    *,
    state: Object | None = None,
    restarts: int = 0,
    **status: Any,
) -> Object:
    """Return a pod of a job as the API shows it. state: of its container."""
    statuses = (
        []
        if state is None
        else [
            {
                "name": "pytorch",
                "restartCount": restarts,
                "state": state,
                "started": "running" in state,
                **({"lastState": status.pop("last_state")} if "last_state" in status else {}),
            }
        ]
    )
    return {
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/name": "llm-training", "app.kubernetes.io/instance": job},
        },
        "spec": {"containers": [{"name": "pytorch", "image": "registry/train:1"}]},
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def make_condition(type_: str, message: str = "") -> Object:
    """Return a condition whose status is True."""
    return {
        "type": type_,
        "status": "True",
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def make_ended_state(code: int, reason: str = "Error") -> Object:
    """Return the state of a container that has ended."""
    return {"terminated": {"exitCode": code, "reason": reason}}
