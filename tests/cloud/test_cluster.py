# covers: launch/cloud/kube/cluster.py, launch/cloud/kube/cluster_checks.py
# covers: launch/cloud/kube/aws.py, launch/cloud/kube/kubeconfig.py
"""Test `kubernetes.py cluster` with the real kubectl, a small API server, and another AWS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.checks.findings import Finding
from launch.cloud.kube import cluster
from launch.cloud.kube import nodes as cluster_nodes
from launch.cloud.kube.job_options import JobNeeds
from launch.cloud.kube.kubeconfig import ClusterName
from lib.core.errors import UsageError
from tests.cloud import kube_server
from tests.cloud.kube_server import CORE_TYPES, CUSTOM_TYPES, Cluster, RequestError, Server, Type
from tests.conftest import run_stage

TYPES = [
    *CORE_TYPES,
    *CUSTOM_TYPES,
    Type("v1", "resourcequotas", "ResourceQuota"),
    Type("v1", "serviceaccounts", "ServiceAccount"),
    Type("apps/v1", "deployments", "Deployment"),
    Type("authorization.k8s.io/v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False),
    Type("storage.k8s.io/v1", "storageclasses", "StorageClass", False),
    Type("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", False),
]
KINDS = {
    "pytorchjob": ("pytorchjobs.kubeflow.org", "v1", "training-operator"),
    "trainjob": (
        "trainjobs.trainer.kubeflow.org",
        "v1alpha1",
        "kubeflow-trainer-controller-manager",
    ),
    "hyperpod": (
        "hyperpodpytorchjobs.sagemaker.amazonaws.com",
        "v1",
        "hp-training-operator-hp-training-controller-manager",
    ),
}
P5 = ("--instance-type", "p5.48xlarge", "--nodes", 2)


class ReviewingCluster(Cluster):
    """A cluster that also answers access reviews; `denied` are the forbidden calls."""

    def __init__(self) -> None:
        super().__init__(types=[*TYPES])
        self.denied: set[str] = set()


class _Answers(kube_server._Handler):
    def _answer(self, path: str, query: dict[str, str], body: bytes) -> dict[str, Any]:
        if self.command == "POST" and path.endswith("selfsubjectaccessreviews"):
            review = json.loads(body)
            attributes = review["spec"]["resourceAttributes"]
            name = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
            review["status"] = {
                "allowed": f"{attributes['verb']} {name}" not in self.cluster.denied
            }
            return review
        if (plural := path.rpartition("/")[2]) in self.cluster.denied:
            raise RequestError(
                403, "Forbidden", f"{plural} is forbidden: User cannot list {plural}"
            )
        query.pop(
            "fieldSelector", None
        )  # only selectors with != occur here; the caller filters too
        return super()._answer(path, query, body)


def node(name: str, **changes: Any) -> dict[str, Any]:
    """Return a healthy p5 node, with changes if any are given."""
    has = {
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
        "hugepages-2Mi": "5120Mi",
        **changes.get("allocatable", {}),
    }
    return {
        "metadata": {
            "name": name,
            "labels": {
                "node.kubernetes.io/instance-type": "p5.48xlarge",
                **changes.get("labels", {}),
            },
        },
        "spec": changes.get("spec", {}),
        "status": {
            "allocatable": {key: value for key, value in has.items() if value},
            "conditions": changes.get("conditions", [{"type": "Ready", "status": "True"}]),
        },
    }


@pytest.fixture
def p5_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReviewingCluster]:
    """Return a cluster that is ready for a job on two p5 nodes, of each kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    new_cluster = ReviewingCluster()
    for crd, version, controller in KINDS.values():
        new_cluster.add(
            "customresourcedefinitions",
            {"metadata": {"name": crd}, "spec": {"versions": [{"name": version, "served": True}]}},
        )
        new_cluster.add(
            "deployments",
            {"metadata": {"name": controller}, "status": {"availableReplicas": 1}},
            "operators",
        )
    for name in ("default", "operators"):
        new_cluster.add("namespaces", {"metadata": {"name": name}})
    new_cluster.add(
        "storageclasses", {"metadata": {"name": "fsx-sc"}, "provisioner": "fsx.csi.aws.com"}
    )
    new_cluster.add(
        "persistentvolumeclaims",
        {
            "metadata": {"name": "fsx-claim"},
            "spec": {"accessModes": ["ReadWriteMany"]},
            "status": {"phase": "Bound", "capacity": {"storage": "1200Gi"}},
        },
    )
    for number in (1, 2):
        new_cluster.add("nodes", node(f"node-{number}"))
    monkeypatch.setattr(kube_server, "_Handler", _Answers)
    server = Server(new_cluster)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "kube-cache"))
    monkeypatch.setenv("PATH", f"{no_aws(tmp_path)}")
    yield new_cluster
    server.close()


ARN = "arn:aws:eks:us-west-2:1:cluster/my-eks"
MY_EKS = ClusterName("my-eks", "my-eks", "us-west-2", ARN)


def contexts(tmp_path: Path, *more: tuple[str, str]) -> None:
    """Add contexts to the kubeconfig: what each is called, and what its cluster is called there.

    The cluster of the current one answers; nobody listens at that of the others.
    """
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    for name, named in more:
        config["contexts"].append(
            {
                "name": name,
                "context": {
                    "cluster": named,
                    "user": config["contexts"][0]["context"].get("user", ""),
                },
            }
        )
        config["clusters"].append(
            {
                "name": named,
                "cluster": {
                    "server": "http://127.0.0.1:9"
                    if named != ARN
                    else config["clusters"][0]["cluster"]["server"]
                },
            }
        )
    path.write_text(yaml.safe_dump(config))


@pytest.mark.slow
def test_only_the_named_cluster_is_queried(p5_cluster: ReviewingCluster, tmp_path: Path) -> None:
    """The nodes of the current context do not appear beside AWS's facts about the named one."""
    contexts(tmp_path, ("prod", ARN), ("b", "arn:aws:eks:us-west-2:1:cluster/b"))
    all_findings, _ = check_cluster(tmp_path, *P5, "--cluster-name", "my-eks")
    assert not [finding for finding in all_findings if finding.severity == "error"]
    all_findings, _ = check_cluster(tmp_path, *P5, "--cluster-name", "b", expect=6)
    assert only(all_findings, "API server").severity == "error"
    refused = [
        ("--cluster-name", "c", "the kubeconfig has no cluster c"),
        ("--cluster-name", "b", "--context", "prod", "belongs to my-eks"),
    ]
    for *words, says in refused:
        result = run_stage("launch/kubernetes.py", "cluster", *P5, *words, cwd=tmp_path, expect=2)
        assert says in result.stderr and "Traceback" not in result.stderr
    contexts(tmp_path, ("two", "arn:aws:eks:eu-west-1:1:cluster/my-eks"))
    result = run_stage(
        "launch/kubernetes.py", "cluster", *P5, "--cluster-name", "my-eks", cwd=tmp_path, expect=2
    )
    assert "several clusters called my-eks" in result.stderr and "two" in result.stderr
    all_findings, _ = check_cluster(
        tmp_path, *P5, "--cluster-name", "my-eks", "--region", "us-west-2"
    )
    assert not [finding for finding in all_findings if finding.severity == "error"]
    job = ("--job-name", "exp", "--image", "r/i:1")
    result = run_stage(
        "launch/kubernetes.py", "stop", *job, "--cluster-name", "b", "--dry-run", cwd=tmp_path
    )
    assert "--context b " in result.stdout


def test_a_dry_run_needs_no_context_of_the_cluster(tmp_path: Path) -> None:
    job = (
        "--job-name",
        "exp",
        "--image",
        "r/i:1",
        "--nodes",
        1,
        "--instance-type",
        "p5.48xlarge",
        "--cluster-name",
        "far",
        "--dry-run",
    )
    (tmp_path / "kubeconfig").write_text("{}")
    for place in (str(tmp_path), no_aws(tmp_path)):
        env = {"PATH": place, "KUBECONFIG": str(tmp_path / "kubeconfig")}
        for command in ("render", "deploy"):
            result = run_stage(
                "launch/kubernetes.py",
                command,
                *job,
                "--",
                "-e",
                "exp",
                "-d",
                "c4",
                "-m",
                "org/model",
                cwd=tmp_path,
                env=env,
            )
            assert "kind: " in result.stdout and "cluster: far" in result.stderr
        run_stage("launch/kubernetes.py", "stop", *job, cwd=tmp_path, env=env, expect=2)


@pytest.mark.slow
def test_make_checks_the_cluster(p5_cluster: ReviewingCluster, tmp_path: Path) -> None:
    """All options of `make run` are accepted, also those that no check needs."""
    job = (
        "--kind",
        "pytorchjob",
        "--job-name",
        "exp",
        *P5,
        "--image",
        "r/i:1",
        "--max-restarts",
        "3",
        "--token-secret",
        "hub",
    )
    result = run_stage("launch/kubernetes.py", "validate", *job, cwd=tmp_path)
    assert "cluster c is ready" in result.stdout
    p5_cluster.objects = {
        key: item for key, item in p5_cluster.objects.items() if key[0] != "nodes"
    }
    result = run_stage("launch/kubernetes.py", "validate", *job, cwd=tmp_path, expect=6)
    assert "not ready" in result.stdout + result.stderr


def no_aws(root: Path) -> str:
    """Return a PATH with kubectl and without an AWS command line that this machine may have."""
    folder = root / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("kubectl", "git", "sh", "cat", "grep"):
        if (program := shutil.which(name)) and not (folder / name).exists():
            (folder / name).symlink_to(program)
    return str(folder)


def check_cluster(
    tmp_path: Path, *arguments: object, expect: int = 0
) -> tuple[list[Finding], subprocess.CompletedProcess]:
    """Run `kubernetes.py cluster` and return its findings."""
    file = tmp_path / "found.json"
    result = run_stage(
        "launch/kubernetes.py", "cluster", *arguments, "--json", file, cwd=tmp_path, expect=expect
    )
    return [Finding(**f) for f in json.loads(file.read_text())["findings"]], result


def only(all_findings: list[Finding], check: str) -> Finding:
    """Return the only finding of a check; an error or a warning must have a remedy."""
    (one,) = [finding for finding in all_findings if finding.check == check]
    assert one.remedy or one.severity == "info", one
    return one


@pytest.mark.parametrize("kind", KINDS)
def test_a_ready_cluster_has_no_errors(p5_cluster: ReviewingCluster, tmp_path: Path, kind: str):
    if kind == "hyperpod":  # its instance types have a prefix, which is added
        for number in (1, 2):
            p5_cluster.add(
                "nodes",
                node(
                    f"node-{number}",
                    labels={
                        "node.kubernetes.io/instance-type": "ml.p5.48xlarge",
                        "sagemaker.amazonaws.com/node-health-status": "Schedulable",
                    },
                ),
            )
    all_findings, result = check_cluster(tmp_path, "--kind", kind, *P5, "--fail-on", "warning")
    assert {finding.severity for finding in all_findings} == {"info"}
    assert {f.check for f in all_findings if "not checked" in f.text} == {"EKS", "driver"}
    assert "8 GPUs and 32 EFA" in only(all_findings, "capacity").text
    assert "cluster c is ready" in result.stdout
    assert not [
        request for request in p5_cluster.requests if request.startswith(("PATCH", "DELETE"))
    ]
    assert {r.split("?")[0] for r in p5_cluster.requests if r.startswith("POST")} == {
        "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    }


def test_everything_missing_is_reported_at_once(p5_cluster: ReviewingCluster, tmp_path: Path):
    for key in [
        key
        for key in p5_cluster.objects
        if key[0] in ("customresourcedefinitions", "persistentvolumeclaims", "nodes")
    ]:
        del p5_cluster.objects[key]
    p5_cluster.denied |= {"create pytorchjobs", "create pods/exec"}
    all_findings, result = check_cluster(
        tmp_path, "--namespace", "team", *P5, "--image-pull-secret", "pull", expect=6
    )
    errors = {finding.check for finding in all_findings if finding.severity == "error"}
    assert errors == {"namespace", "rights", "operator", "capacity", "storage", "image pull secret"}
    assert all(finding.remedy for finding in all_findings if finding.severity == "error")
    rights = [finding for finding in all_findings if finding.check == "rights"]
    assert {finding.severity for finding in rights} == {"error", "warning"}
    assert "pods/exec in team" in rights[-1].text
    assert "fsx-sc" in only(all_findings, "storage").text
    assert "not ready: 6 errors" in result.stderr and "Traceback" not in result.stderr
    first, *rest = result.stdout.splitlines()
    assert first == "cluster: c (context test)"
    severities = [line.split()[0] for line in rest if not line.startswith(" ")]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def judge_nodes(*nodes: dict[str, Any], grows: bool = False) -> list[Finding]:
    """Return the findings about nodes for a job on two p5 nodes."""
    expected = JobNeeds(nodes=2, gpus_per_node=8, efa_per_node=32, instance_type="p5.48xlarge")
    return list(
        cluster_nodes.check_capacity(
            cluster_nodes.parse_nodes([*nodes], []), expected, grows, MY_EKS
        )
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, "not ready"),
        ({"spec": {"unschedulable": True}}, "cordoned"),
        ({"spec": {"taints": [{"key": "team", "effect": "NoSchedule"}]}}, "taint team"),
        (
            {
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "DiskPressure", "status": "True"},
                ]
            },
            "DiskPressure",
        ),
        (
            {
                "labels": {
                    "sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"
                }
            },
            "UnschedulablePendingReboot",
        ),
    ],
)
def test_a_node_that_accepts_no_pods_is_a_warning(change: dict[str, Any], why: str):
    all_findings = judge_nodes(node("node-1"), node("node-2", **change))
    assert why in only(all_findings, "nodes").text and "node-2" in only(all_findings, "nodes").text
    assert only(all_findings, "capacity").severity == "error"
    assert "1 of 2" in only(all_findings, "capacity").text


def test_an_autoscaler_may_add_nodes(p5_cluster: ReviewingCluster, tmp_path: Path):
    del p5_cluster.objects["nodes", "", "node-2"]
    p5_cluster.add(
        "customresourcedefinitions",
        {"metadata": {"name": "nodepools.karpenter.sh"}, "spec": {"versions": []}},
    )
    all_findings, _ = check_cluster(tmp_path, *P5)
    assert only(all_findings, "capacity").severity == "warning"
    check_cluster(tmp_path, *P5, "--fail-on", "warning", expect=5)


def test_the_taint_of_gpu_nodes_is_tolerated():
    tainted = node("node-2", spec={"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]})
    assert only(judge_nodes(node("node-1"), tainted), "capacity").severity == "info"


@pytest.mark.parametrize(
    ("lacking", "of"), [("nvidia.com/gpu", "GPUs"), ("vpc.amazonaws.com/efa", "EFA")]
)
def test_a_node_without_its_devices_is_named(lacking: str, of: str):
    all_findings = judge_nodes(node("node-1"), node("node-2", allocatable={lacking: ""}))
    assert only(all_findings, of).severity == "error"
    assert "node-2" in only(all_findings, of).text and "plugin" in only(all_findings, of).remedy


def test_missing_huge_pages_are_a_warning():
    all_findings = judge_nodes(node("node-1"), node("node-2", allocatable={"hugepages-2Mi": "0"}))
    assert only(all_findings, "huge pages").severity == "warning"


def pod(name: str, on: str, gpus: int, phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {}},
        "status": {"phase": phase},
        "spec": {
            "nodeName": on,
            "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}],
        },
    }


def test_gpus_in_use_are_counted_if_pods_may_be_listed(
    p5_cluster: ReviewingCluster, tmp_path: Path
):
    p5_cluster.add("pods", pod("other", "node-1", 4))
    p5_cluster.add("pods", pod("ended", "node-2", 8, "Succeeded"))
    all_findings, _ = check_cluster(tmp_path, *P5)
    assert (
        only(all_findings, "capacity").severity == "warning"
        and "1 p5" in only(all_findings, "capacity").text
    )
    p5_cluster.denied.add("pods")
    all_findings, _ = check_cluster(tmp_path, *P5)
    assert "not checked" in only(all_findings, "GPUs in use").text


def test_quota_storage_and_secret_are_checked(p5_cluster: ReviewingCluster, tmp_path: Path):
    p5_cluster.add(
        "resourcequotas",
        {
            "metadata": {"name": "team"},
            "status": {
                "hard": {"requests.nvidia.com/gpu": "16", "pods": "50"},
                "used": {"requests.nvidia.com/gpu": "8", "pods": "3"},
            },
        },
    )
    p5_cluster.add(
        "persistentvolumeclaims",
        {
            "metadata": {"name": "ebs"},
            "spec": {"accessModes": ["ReadWriteOnce"]},
            "status": {"phase": "Bound"},
        },
    )
    p5_cluster.add(
        "secrets",
        {"metadata": {"name": "pull"}, "type": "Opaque", "data": {"x": "c2VjcmV0LXZhbHVl"}},
    )
    all_findings, result = check_cluster(
        tmp_path, *P5, "--pvc", "ebs", "--image-pull-secret", "pull", expect=6
    )
    assert "leaves 8 of requests.nvidia.com/gpu" in only(all_findings, "quota").text
    assert "ReadWriteOnce" in only(all_findings, "storage").text
    assert "Opaque" in only(all_findings, "image pull secret").text
    assert "c2VjcmV0" not in result.stdout + result.stderr + (tmp_path / "found.json").read_text()


def test_an_operator_that_is_down_or_serves_another_version_is_an_error(
    p5_cluster: ReviewingCluster, tmp_path: Path
):
    p5_cluster.add(
        "deployments",
        {"metadata": {"name": "training-operator"}, "status": {"availableReplicas": 0}},
        "operators",
    )
    all_findings, _ = check_cluster(tmp_path, *P5, expect=6)
    finding = only(all_findings, "operator")
    assert "no available replica" in finding.text
    words = "--namespace operators describe deployment training-operator"
    assert finding.remedy.endswith(words)
    p5_cluster.add(
        "customresourcedefinitions",
        {
            "metadata": {"name": KINDS["trainjob"][0]},
            "spec": {"versions": [{"name": "v2", "served": True}]},
        },
    )
    all_findings, _ = check_cluster(tmp_path, "--kind", "trainjob", *P5, expect=6)
    assert any("as v2, not v1alpha1" in finding.text for finding in all_findings)


def test_a_driver_too_old_for_the_torch_of_the_image(p5_cluster: ReviewingCluster, tmp_path: Path):
    p5_cluster.add(
        "nodes",
        node(
            "node-2",
            labels={
                "nvidia.com/cuda.driver.major": "550",
                "nvidia.com/cuda.driver.minor": "54",
                "nvidia.com/cuda.driver.rev": "15",
            },
        ),
    )
    all_findings, _ = check_cluster(tmp_path, *P5, expect=6)
    assert "550.54.15 is too old" in only(all_findings, "driver").text
    assert "--driver-version 550.54.15" in only(all_findings, "driver").run


def test_forbidden_queries_are_not_checked(p5_cluster: ReviewingCluster, tmp_path: Path):
    p5_cluster.denied |= {"resourcequotas", "deployments", "nodes"}
    all_findings, _ = check_cluster(tmp_path, *P5)
    assert {finding.check for finding in all_findings if "not allowed" in finding.text} == {
        "quota",
        "operator",
        "nodes",
    }


def test_describe_prints_nodes_storage_and_operators(p5_cluster: ReviewingCluster, tmp_path: Path):
    p5_cluster.add("pods", pod("other", "node-1", 4))
    result = run_stage("launch/kubernetes.py", "cluster", "describe", cwd=tmp_path)
    assert (
        "p5.48xlarge: 2 nodes, 0 of them unusable; 16 nvidia.com/gpu, 12 of them free; "
        "64 vpc.amazonaws.com/efa"
    ) in result.stdout
    for shown in ("pytorchjobs.kubeflow.org (v1)", "fsx-sc", "fsx-claim: Bound"):
        assert shown in result.stdout


def test_a_cluster_that_does_not_answer_is_reported(p5_cluster: ReviewingCluster, tmp_path: Path):
    kubeconfig = Path(os.environ["KUBECONFIG"])
    content = json.loads(kubeconfig.read_text())
    content["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    kubeconfig.write_text(json.dumps(content))
    all_findings, result = check_cluster(tmp_path, expect=6)
    assert "refused" in only(all_findings, "API server").text and "Traceback" not in result.stderr
    run_stage("launch/kubernetes.py", "cluster", "describe", cwd=tmp_path, expect=6)


def test_kubectl_is_needed_except_for_a_dry_run(tmp_path: Path):
    result = run_stage(
        "launch/kubernetes.py", "cluster", cwd=tmp_path, expect=2, env={"PATH": str(tmp_path)}
    )
    assert "kubectl is not installed" in result.stderr
    run_stage(
        "launch/kubernetes.py", "cluster", "--dry-run", cwd=tmp_path, env={"PATH": str(tmp_path)}
    )
    result = run_stage(
        "launch/kubernetes.py",
        "cluster",
        "--cluster-name",
        "foo",
        "--context",
        "bar",
        cwd=tmp_path,
        expect=2,
        env={"PATH": str(tmp_path)},
    )
    assert "kubectl is not installed" in result.stderr and "Traceback" not in result.stderr
    result = run_stage("launch/kubernetes.py", "cluster", "validat", cwd=tmp_path, expect=2)
    assert "validate" in result.stderr


AWS = r"""#!/bin/sh
echo "$*" >> "$AWS_CALLS"
case "$1 $2" in
"eks list-clusters") echo '{"clusters": ["my-eks"]}';;
"eks describe-cluster") echo '{"cluster": {"status": "ACTIVE", "version": "1.32"}}';;
"eks list-nodegroups") echo '{"nodegroups": ["gpu"]}';;
"eks describe-nodegroup") echo '{"nodegroup": {"health": {"issues": [
  {"code": "AsgInstanceLaunchFailures", "message": "no p5 capacity"}]}}}';;
"eks list-addons") echo '{"addons": ["eks-pod-identity-agent"]}';;
"sagemaker list-clusters") echo '{"ClusterSummaries": [{"ClusterName": "pod"}]}';;
"sagemaker describe-cluster") echo '{"ClusterName": "pod", "ClusterStatus": "InService",
  "NodeRecovery": "None",
  "Orchestrator": {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:1:cluster/my-eks"}},
  "InstanceGroups": [{"InstanceGroupName": "workers", "InstanceType": "ml.p5.48xlarge",
                      "CurrentCount": 1, "TargetCount": 2}]}';;
"eks update-kubeconfig") ;;
*) echo "An error occurred (AccessDenied)" >&2; exit 254;;
esac
"""


@pytest.fixture
def aws(p5_cluster: ReviewingCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an AWS command line beside kubectl, and return the file with its calls."""
    tool = tmp_path / "bin" / "aws"
    tool.write_text(AWS)
    tool.chmod(0o755)
    monkeypatch.setenv("AWS_CALLS", str(tmp_path / "aws-calls"))
    return tmp_path / "aws-calls"


def test_aws_is_queried_if_it_is_installed(aws: Path, tmp_path: Path):
    contexts(tmp_path, ("prod", ARN))
    all_findings, _ = check_cluster(
        tmp_path, *P5, "--cluster-name", "my-eks", "--region", "us-west-2"
    )
    assert "my-eks is ACTIVE" in only(all_findings, "EKS").text
    assert "AsgInstanceLaunchFailures" in only(all_findings, "EKS node group").text
    assert "aws-fsx-csi-driver" in only(all_findings, "EKS add-on").run
    assert all("--region us-west-2" in line for line in aws.read_text().splitlines())


def test_hyperpod_is_found_by_its_eks_cluster(
    aws: Path, p5_cluster: ReviewingCluster, tmp_path: Path
):
    contexts(tmp_path, ("prod", ARN))
    all_findings, _ = check_cluster(
        tmp_path, "--kind", "hyperpod", "--cluster-name", "my-eks", expect=0
    )
    texts = [finding.text for finding in all_findings if finding.check == "HyperPod"]
    assert any("InService" in text for text in texts)
    assert any("NodeRecovery" in text for text in texts)
    assert any("1 of 2 ml.p5.48xlarge" in text for text in texts)


@pytest.mark.slow
def test_the_check_works_as_a_function(
    aws: Path, p5_cluster: ReviewingCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    all_findings = cluster.manage_eks_cluster(instance_type="p5.48xlarge", nodes=2)
    assert "eks update-kubeconfig --name my-eks" in aws.read_text()
    assert "error" not in {finding.severity for finding in all_findings}
    all_findings = cluster.manage_eks_cluster("my-eks", "us-west-2", namespace="team")
    assert only(all_findings, "namespace").severity == "error"
    cluster.manage_eks_cluster("my-eks", "us-west-2", namespace="team", auto_fix=True)
    assert ("namespaces", "", "team") in p5_cluster.objects


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("5120Mi", 5120 << 20), ("1k", 1000), ("1500m", 1), ("0", 0), ("2Ti", 2 << 40)],
)
def test_quantities_are_parsed(text: str, number: int):
    assert cluster_nodes.parse_quantity(text) == number


def test_impossible_names_are_refused_before_the_cluster_is_queried() -> None:
    with pytest.raises(UsageError) as caught:
        cluster.main(["--instance-type", "ml.p5.48xlrge", "--namespace", "A b", "--pvc", ""])
    assert len(caught.value.several) == 3
    assert "the nearest is p5.48xlarge" in caught.value.render()
