# covers: launch/cloud/kube/kubeconfig.py, launch/cloud/kube/aws.py, launch/cloud/kube/kubectl.py
"""Test which AWS region is asked, and that every command and error names its cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.cloud.images import docker as image_docker
from launch.cloud.kube import kubeconfig
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from launch.cloud.kube.open_options import choose_context
from launch.kubernetes import deploy_training_job, manage_eks_cluster
from lib.core.errors import UsageError
from tests.cloud.kube_cluster import JOB_OPTIONS, TRAIN_OPTIONS, run_launcher
from tests.cloud.kube_server import Cluster
from tests.conftest import run_stage

ARN = "arn:aws:eks:us-west-2:1:cluster/eks"
AWS = """#!/bin/sh
echo "$*" >> "$AWS_CALLS"
case "$1 $2" in
"configure get") echo "$CONFIGURED";;
"sts get-caller-identity") echo '{"Account": "123456789012"}';;
"eks list-clusters") echo '{"clusters": ["eks"]}';;
*) echo '{}';;
esac
"""


def write_kubeconfig(path: Path, *contexts: tuple[str, str]) -> None:
    """Write contexts, each with the name of its cluster; the first is the current one."""
    entries = [{"name": name, "context": {"cluster": entry}} for name, entry in contexts]
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": contexts[0][0],
                "contexts": entries,
                "clusters": [
                    {"name": entry, "cluster": {"server": "http://127.0.0.1:9"}}
                    for _, entry in contexts
                ],
            }
        )
    )


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for the AWS command line on the PATH; return the file with its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "aws").write_text(AWS)
    (folder / "aws").chmod(0o755)
    file = tmp_path / "aws-calls"
    file.touch()
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "AWS_CALLS": file,
        "CONFIGURED": "ap-south-1",
        "KUBECONFIG": tmp_path / "config",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return file


def test_the_region_is_that_of_the_option_the_context_and_the_settings(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(
        tmp_path / "config",
        ("prod", ARN),
        ("me@small.eu-west-1.eksctl.io", "small.eu-west-1.eksctl.io"),
        ("kind", "kind"),
    )
    find = kubeconfig.find_cluster
    assert find().region == "us-west-2"
    assert find(region="eu-central-1").region == "eu-central-1"
    assert find("me@small.eu-west-1.eksctl.io").eks == "small"
    assert find("me@small.eu-west-1.eksctl.io").region == "eu-west-1"
    assert str(find("kind")) == "kind (context kind)" and not calls.read_text()
    assert find("kind", "other").region == "ap-south-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    assert find("kind", "other").region == "us-east-2"
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert str(find("kind", "other")) == "other (context kind, region us-east-1)"
    assert str(find()) == "eks (context prod, region us-west-2)"


def test_without_a_region_the_error_says_where_one_is_taken_from(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIGURED", "")
    with pytest.raises(UsageError, match="no AWS region") as caught:
        kubeconfig.require_region("")
    assert "--region us-west-2" in caught.value.run and "AWS_REGION" in caught.value.expected


@pytest.mark.parametrize("region", ["eu-west-1", ""])
def test_each_command_asks_aws_in_its_region(
    calls: Path, tmp_path: Path, region: str, kube: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EKS cluster whose context is missing is looked for in the region of the option."""
    option = ("--region", region) if region else ()
    words_of_region = f"--region {region}" if region else "--name far --output json\n"
    words = ("--cluster-name", "far", *option)
    for command in ("status", "logs", "stop", "validate"):
        result = run_launcher(command, *JOB_OPTIONS, *words, expect=2)
        assert "has no cluster far" in result.stderr
        if region:
            assert f"in {region}" in result.stderr and f"--region {region}" in result.stderr
    for command in ("prepare", "apply", "deploy", "render"):
        run_launcher(command, *JOB_OPTIONS, *words, *TRAIN_OPTIONS, expect=2)
    asks = [line for line in calls.read_text().splitlines() if "update-kubeconfig" in line]
    assert len(asks) == 8
    assert all(words_of_region in f"{line}\n" for line in asks)
    with pytest.raises(UsageError, match="has no cluster far"):
        deploy_training_job(cluster_name="far", region=region, job_name="j", image="r/i:1")
    assert words_of_region in calls.read_text().splitlines(keepends=True)[-1]
    with pytest.raises(UsageError, match="no EKS cluster far"):
        manage_eks_cluster("far", region, create_if_missing=True)
    result = run_stage("launch/kubernetes.py", "cluster", *words, cwd=tmp_path, expect=2)
    assert "has no cluster far" in result.stderr


def test_a_region_that_contradicts_the_context_is_refused(calls: Path, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "config", ("prod", ARN))
    job = JobOptions(job_name="j", context="prod", region="eu-west-1")
    with pytest.raises(UsageError, match="--region eu-west-1, but --context prod"):
        choose_context(job, "")
    result = run_stage(
        "launch/kubernetes.py",
        "cluster",
        "--cluster-name",
        "eks",
        "--context",
        "prod",
        "--region",
        "eu-west-1",
        cwd=tmp_path,
        expect=2,
    )
    assert "belongs to us-west-2" in result.stderr


def test_the_registry_of_the_account_is_in_the_region(calls: Path) -> None:
    assert (
        image_docker.resolve_registry("ecr/llm", "eu-west-1")
        == "123456789012.dkr.ecr.eu-west-1.amazonaws.com/llm"
    )
    assert "--region eu-west-1" in calls.read_text()
    registry = "1.dkr.ecr.us-west-2.amazonaws.com/llm"
    assert image_docker.resolve_registry(registry, "") == registry
    assert image_docker.resolve_registry("ecr/llm", "", queries_aws=False).startswith(
        "ACCOUNT.dkr.ecr.ap-south-1"
    )
    with pytest.raises(UsageError, match="registry in us-west-2"):
        image_docker.resolve_registry(registry, "eu-west-1")


@pytest.mark.parametrize("command", ["status", "logs", "stop", "validate", "prepare", "deploy"])
def test_the_first_line_and_the_errors_name_the_cluster(kube: Cluster, command: str) -> None:
    kube.objects.clear()
    train = TRAIN_OPTIONS if command in ("prepare", "deploy") else ()
    result = run_launcher(command, *JOB_OPTIONS, *train, expect=None)
    output = result.stderr if command == "logs" else result.stdout
    assert output.splitlines()[0] == "cluster: c (context test)"
    assert result.returncode and "cluster c" in result.stderr


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, calls: Path) -> None:
    write_kubeconfig(tmp_path / "config", ("prod", ARN))
    with pytest.raises(KubectlError, match="does not answer"):
        Kubectl("default").items("pods")
    result = run_launcher("run", "--image", "i:1", "--", "true", expect=None)
    assert result.returncode and "does not answer" in result.stderr
    assert "warning" not in result.stderr and "validate" not in result.stderr


def test_a_refused_call_of_aws_names_its_cluster(tmp_path: Path, calls: Path) -> None:
    write_kubeconfig(tmp_path / "config", ("prod", ARN))
    (tmp_path / "bin" / "aws").write_text("#!/bin/sh\necho no credentials >&2\nexit 255\n")
    result = run_launcher("status", "--job-name", "x", "--cluster-name", "other", expect=2)
    assert "update-kubeconfig --name other` failed" in result.stderr
