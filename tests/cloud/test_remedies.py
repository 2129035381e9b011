# covers: launch/cloud/kube/remedies.py, launch/cloud/kube/kinds.py
"""Test that errors about missing things end with commands that create them, by typing these."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cloud.kube import cluster_state, deploy, remedies
from launch.cloud.kube.cluster import check_cluster
from launch.cloud.kube.failure_causes import REMEDIES, Cause
from launch.cloud.kube.job import plan_job
from launch.cloud.kube.job_options import JobNeeds, JobOptions
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubeconfig import ClusterName
from launch.cloud.kube.kubectl import Kubectl
from lib.core.errors import StageError
from tests.cloud.kube_server import CORE_TYPES, CUSTOM_TYPES, Cluster, Server, Type
from tests.cloud.test_setup import AWS
from tests.conftest import ROOT

ARN = "arn:aws:eks:us-west-2:123456789012:cluster/llm-training"
TYPES = [
    *CORE_TYPES,
    *CUSTOM_TYPES,
    Type("v1", "serviceaccounts", "ServiceAccount"),
    Type("v1", "resourcequotas", "ResourceQuota"),
    Type("v1", "persistentvolumes", "PersistentVolume", False),
    Type("storage.k8s.io/v1", "storageclasses", "StorageClass", False),
]
TRAIN = ("-d", "c4", "-m", "org/model", "--max-steps", "10")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return an EKS cluster without volumes, secrets and accounts, and put `aws` on the PATH."""
    types = {(item.group_version, item.plural): item for item in TYPES}
    cluster = Cluster(types=[*types.values()])
    cluster.add("namespaces", {"metadata": {"name": "default"}})
    cluster.add("storageclasses", {"metadata": {"name": "l"}, "provisioner": "fsx.csi.aws.com"})
    server = Server(cluster)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aws").write_text(AWS)
    (tmp_path / "bin" / "aws").chmod(0o755)
    python = Path(shutil.which("python") or "python").parent
    for name, value in {
        "KUBECONFIG": server.kubeconfig(tmp_path / "kubeconfig", ARN),
        "KUBECACHEDIR": tmp_path / "kube-cache",
        "PATH": f"{tmp_path / 'bin'}:{python}:{os.environ['PATH']}",
        "AWS_CALLS": tmp_path / "aws-calls",
        "HF_TOKEN": "hf_abcdefghij",
        "REGISTRY_PASSWORD": "word",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(ROOT)
    yield cluster
    server.close()


def type_in(commands: str) -> None:
    """Run commands in a shell as a person would.

    `kubectl create` sends protobuf, which the stand-in server does not read, so kubectl makes the
    object here and then applies it.
    """
    for line in commands.splitlines():
        if re.search(r"^kubectl .* create ", line):
            commands = commands.replace(
                line, f"{line} --dry-run=client -o json | kubectl apply -f -"
            )
    subprocess.run(["bash", "-o", "pipefail", "-ec", commands], check=True, timeout=120)


def find_missing(job_options: JobOptions) -> list[StageError]:
    """Return what `deploy` would refuse."""
    kubectl = Kubectl(job_options.namespace, job_options.context)
    try:
        deploy.require_needs(plan_job(job_options, [*TRAIN, "--streaming", "--online"]), kubectl)
    except StageError as error:
        return error.several or [error]
    return []


@pytest.mark.parametrize(
    ("claim", "namespace"), [("fsx-claim", "default"), ("data", "default"), ("fsx-claim", "mine")]
)
def test_typing_the_commands_of_deploy_creates_everything(
    empty: Cluster, claim: str, namespace: str
) -> None:
    """Each error ends with commands; after they have been typed, nothing is missing."""
    job = JobOptions(
        job_name="j",
        image="registry.example.com/train:1",
        instance_type="g5.8xlarge",
        pvc=claim,
        namespace=namespace,
        service_account="training",
        image_pull_secret="pull",
        token_secret="hub",
    )
    errors = find_missing(job)
    assert [error.problem.split(":")[0] for error in errors] == [
        *(["--namespace"] if namespace == "mine" else []),
        "--pvc",
        "--image-pull-secret",
        "--service-account",
        "--token-secret",
    ]
    for error in errors:
        assert "cluster llm-training" in error.problem
        assert error.render().splitlines()[-1].strip().startswith("run:"), error.render()
        type_in(error.run)
    assert not find_missing(job)
    claim_object = empty.objects["persistentvolumeclaims", namespace, claim]
    assert claim_object["spec"]["accessModes"] == ["ReadWriteMany"]
    assert ("jobs", namespace, f"{claim}-owner") in empty.objects


def test_elsewhere_the_claim_uses_a_storage_class(empty: Cluster, tmp_path: Path) -> None:
    """On a cluster that is not EKS, the command uses a storage class and asks nothing of AWS."""
    config = (tmp_path / "kubeconfig").read_text().replace(ARN, "on-site")
    (tmp_path / "kubeconfig").write_text(config)
    (error,) = find_missing(JobOptions(job_name="j", image="i:1", instance_type="g5.8xlarge"))
    assert "--storage-class l" in error.run and not (tmp_path / "aws-calls").exists()
    type_in(error.run)
    assert ("persistentvolumeclaims", "default", "fsx-claim") in empty.objects


def test_a_missing_bucket_claim_names_what_to_fill_in(empty: Cluster) -> None:
    job = JobOptions(
        job_name="j", image="i:1", instance_type="g5.8xlarge", bucket_pvc="raw", namespace="default"
    )
    error = next(error for error in find_missing(job) if "--bucket-pvc" in error.problem)
    type_in(error.run.replace("BUCKET", "a-bucket"))
    volume = empty.objects["persistentvolumes", "", "raw"]
    assert volume["spec"]["csi"]["volumeAttributes"]["bucketName"] == "a-bucket"
    assert ("persistentvolumeclaims", "default", "raw") in empty.objects


@pytest.mark.slow
def test_a_check_of_the_cluster_ends_with_the_same_commands(empty: Cluster) -> None:
    """Namespace, account, secret and quota: the commands of the findings create them as well."""
    del empty.objects["namespaces", "", "default"]
    empty.add(
        "resourcequotas",
        {
            "metadata": {"name": "team"},
            "status": {"hard": {"requests.nvidia.com/gpu": "4"}, "used": {}},
        },
    )
    needs = JobNeeds(
        nodes=2,
        instance_type="p5.48xlarge",
        service_account="training",
        image_pull_secret="pull",
        image="registry.example.com/train:1",
    )
    kube = Kubectl("default")
    findings = {finding.check: finding for finding in check_cluster(kube, needs, ("", ""))}
    for check in ("namespace", "service account", "image pull secret", "quota", "storage"):
        assert findings[check].severity == "error"
        type_in(findings[check].run)
    assert empty.objects["resourcequotas", "default", "team"]["spec"]["hard"] == {
        "requests.nvidia.com/gpu": "16"
    }
    for key in (
        ("namespaces", "", "default"),
        ("serviceaccounts", "default", "training"),
        ("secrets", "default", "pull"),
        ("persistentvolumeclaims", "default", "fsx-claim"),
    ):
        assert key in empty.objects
    assert "eksctl scale nodegroup --cluster llm-training" in findings["capacity"].run


EKS = ClusterName("eks", "eks", "us-west-2", "prod")


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_and_its_version_agree_everywhere(kind: str) -> None:
    """The table, the commands and the documentation name one version and one command."""
    row = KINDS[kind]
    lines = remedies.install_operator(EKS, kind).splitlines()
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "launch/cloud/kube/templates").rglob("*.yaml"),
    ]
    docs = "\n".join(path.read_text() for path in pages)
    flat = re.sub(r"\s*\\\n\s*|\s+", " ", docs)
    for command in row.install_commands():
        assert command in flat, command
    assert row.product in flat
    if row.release:
        assert f"ref=v{row.release}" in lines[0] and "--context prod" in lines[0]
        pinned = {*re.findall(r"overlays/(?:standalone|manager)\?ref=v([\d.]+\d)", docs)}
        assert pinned == {other.release for other in KINDS.values() if other.release}
        named = {*re.findall(rf"{row.title} \D{{0,10}}(\d[\d.]*\d)", docs)}
        assert named == {row.release}
    else:
        assert all("--region us-west-2" in line for line in lines)
        assert all("eks" in shlex.split(line) for line in lines)


def test_causes_of_failures_print_their_commands(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipeline")
    job = JobOptions(job_name="j", image="1.dkr.ecr.r.amazonaws.com/t:1", nodes=4)
    commands = {
        "image missing": "launch/build_image.py --push 1.dkr.ecr.r.amazonaws.com/t:1",
        "image forbidden": "create secret docker-registry",
        "missing token": "create secret generic j-hub-token",
        "no EFA": "helm upgrade --install aws-efa-k8s-device-plugin",
        "no capacity": "eksctl scale nodegroup --cluster eks --region us-west-2 --name gpu",
        "operator missing": "kubectl --context prod apply --server-side -k",
        "quota": "edit resourcequota",
        "storage": "describe pvc fsx-claim",
    }
    for name in REMEDIES:
        run = remedies.find_remedy(Cause(name, "", ""), job, EKS)
        assert commands.get(name, "") in run and bool(run) == (name in commands), name
        cluster_state.print_cause(Cause(name, "", "text"), run)
    assert caplog.text.count("  run: ") == len(commands)
    quota = (
        'pods "j-worker-1" is forbidden: exceeded quota: team, requested: '
        "requests.nvidia.com/gpu=8, used: pods=1,requests.nvidia.com/gpu=8, "
        "limited: requests.nvidia.com/gpu=8"
    )
    run = remedies.find_remedy(Cause("quota", "", quota), job, EKS)
    assert "patch resourcequota team" in run and '"requests.nvidia.com/gpu": "40"' in run
    account = 'error looking up service account default/a: serviceaccount "a" not found'
    run = remedies.find_remedy(Cause("pods refused", "", account), job, EKS)
    assert run.endswith("create serviceaccount a")


def test_device_plugins_and_addons_have_one_command_each() -> None:
    for command in (
        remedies.install_nvidia_plugin(EKS),
        remedies.install_efa_plugin(EKS),
        remedies.create_addon(EKS, "aws-efs-csi-driver"),
        remedies.connect("eks", "us-west-2"),
    ):
        assert len(command.splitlines()) == 1
        assert "prod" in command or "us-west-2" in command
