# covers: launch/cloud/kube/setup.py, launch/cloud/kube/setup_steps.py
"""Test the first day on EKS: the steps of `setup`, typed as they stand, lead to a trained run.

kubectl is real and talks to the stand-in server. eksctl, docker, AWS's command line and the
installation of the operator are stand-ins, so what they do at AWS remains untested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cloud import kube_server
from tests.cloud.kube_server import Object, Server
from tests.cloud.test_cluster import KINDS, TYPES, ReviewingCluster, _Answers, node
from tests.cloud.test_image import Machine
from tests.cloud.test_kubernetes_deploy import complete_job
from tests.cloud.test_setup import AWS
from tests.conftest import run_stage

ARN = "arn:aws:eks:us-west-2:123456789012:cluster/llm-training"
MORE_AWS = """case "$1 $2" in
"service-quotas get-service-quota") echo 384; exit;;
"eks update-kubeconfig"|"ecr create-repository") echo '{}'; exit;;
"ecr get-login-password") echo word; exit;;
"eks list-nodegroups") echo '{"nodegroups": []}'; exit;;
"eks list-addons") echo '{"addons": ["aws-fsx-csi-driver", "eks-pod-identity-agent"]}'; exit;;
esac
"""
# Without a network, kubectl cannot fetch the operator's manifests.
KUBECTL = """#!/bin/sh
case "$*" in *"-k https"*) echo "$*" >> "$AWS_CALLS"; exit;; esac
exec %s "$@"
"""


class NewCluster(ReviewingCluster):
    """A cluster whose claims are bound as soon as they exist, as by a driver."""

    def add(self, plural: str, item: Object, namespace: str = "default") -> Object:
        if plural == "persistentvolumeclaims":
            item["status"] = {"phase": "Bound", "capacity": {"storage": "1200Gi"}}
        return super().add(plural, item, namespace)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewCluster]:
    """Return the cluster that the stand-in of eksctl has created, with two nodes."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    cluster = NewCluster()
    assert {type_.plural for type_ in TYPES} == {type_.plural for type_ in cluster.types}
    crd, version, controller = KINDS["pytorchjob"]
    cluster.add(
        "customresourcedefinitions",
        {"metadata": {"name": crd}, "spec": {"versions": [{"name": version, "served": True}]}},
    )
    cluster.add(
        "deployments",
        {"metadata": {"name": controller}, "status": {"availableReplicas": 1}},
        "kubeflow",
    )
    cluster.add("namespaces", {"metadata": {"name": "default"}})
    for number in (1, 2):
        cluster.add("nodes", node(f"node-{number}"))
    cluster.on_create = partial(complete_job, seconds=0.2)
    monkeypatch.setattr(kube_server, "_Handler", _Answers)
    server = Server(cluster)
    machine = Machine(tmp_path)
    kubectl = shutil.which("kubectl")
    programs = {
        "aws": AWS.replace('case "$1 $2" in', MORE_AWS + 'case "$1 $2" in', 1),
        "eksctl": '#!/bin/sh\necho "eksctl $*" >> "$AWS_CALLS"\n',
        "kubectl": KUBECTL % kubectl,
    }
    for name, text in programs.items():
        (machine.bin / name).write_text(text)
        (machine.bin / name).chmod(0o755)
    for name, value in {
        "PATH": f"{machine.bin}:{os.environ['PATH']}",
        "CALLS": machine.log,
        "FAILURES": machine.failures,
        "DOCKER_CONFIG": tmp_path,
        "AWS_CALLS": tmp_path / "aws-calls",
        "KUBECONFIG": server.kubeconfig(tmp_path / "kubeconfig", ARN),
        "KUBECACHEDIR": tmp_path / "kube-cache",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield cluster
    server.close()


@pytest.mark.slow
def test_the_steps_lead_from_nothing_to_a_trained_run(account: NewCluster, tmp_path: Path) -> None:
    options: tuple[Any, ...] = ("--instance-type", "p5.48xlarge", "--nodes", 2)
    words = ("--region", "us-west-2", *options, "--out", "new")
    run_stage("launch/kubernetes.py", "setup", *words, cwd=tmp_path)
    result = subprocess.run(
        ["bash", "new/steps.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "cluster llm-training is ready" in output
    assert output.count("is complete") >= 2  # the preparation and the run
    assert "cluster: llm-training (context arn:aws:eks:us-west-2" in output
    calls = (tmp_path / "aws-calls").read_text()
    assert "eksctl create cluster -f new/cluster.yaml" in calls
    assert "overlays/standalone?ref=v" in calls
    assert yaml.safe_load((tmp_path / "new" / "cluster.yaml").read_text())["kind"]
    objects = {(plural, name) for plural, _, name in account.objects}
    assert {("persistentvolumeclaims", "fsx-claim"), ("jobs", "fsx-claim-owner")} <= objects
    assert ("pytorchjobs", "first") in objects
