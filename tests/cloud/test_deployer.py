# covers: launch/kubernetes.py, launch/cloud/kubernetes.py, launch/cloud/prepare.py
# covers: launch/cloud/kube/raw_text.py, launch/cloud/kube/preparation.py
# covers: launch/cloud/kube/open_options.py
"""Test the calls and command lines in the documentation of an automated EKS deployer."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launch.build_image import build_docker_image
from launch.cloud import kubernetes, prepare
from launch.cloud.images import docker as image_docker
from launch.cloud.kube import aws
from launch.cloud.kube.deploy import Patience
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl
from launch.cloud.kube.open_options import fill_open_options
from launch.kubernetes import deploy_training_job, manage_eks_cluster
from lib.core import declared
from lib.core.errors import UsageError
from lib.train import command_line
from tests.cloud.kube_server import Cluster, Object, Server
from tests.cloud.test_image import ECR, Machine
from tests.cloud.test_kubernetes_deploy import complete_job, jobs
from tests.conftest import ROOT, run_stage
from tests.hub_server import HubServer, Repo

AWS = r"""#!/bin/sh
echo "$*" >> "$AWS_CALLS"
case "$1 $2" in
"eks list-clusters") echo '{"clusters": ["c"]}';;
"eks list-nodegroups") echo '{"nodegroups": ["gpu", "cpu"]}';;
"eks describe-nodegroup")
  case "$6" in gpu) type=g5.12xlarge;; *) type=m5.large;; esac
  echo "{\"nodegroup\": {\"instanceTypes\": [\"$type\"]}}";;
"eks describe-cluster") echo '{"cluster": {"status": "ACTIVE", "version": "1.32"}}';;
"ecr get-login-password") echo the-password;;
*) echo '{}';;
esac
"""
TOKEN = "hf_abcdefghij"


def gpu_node(name: str, kind: str = "ml.g5.8xlarge", gpus: int = 1, efa: int = 1) -> Object:
    """Return a node of a cluster with the devices that its plugins report."""
    return {
        "metadata": {"name": name, "labels": {"node.kubernetes.io/instance-type": kind}},
        "spec": {},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.fixture
def eks(
    kube: Cluster, kube_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """Return the EKS cluster `c` of four ml.g5.8xlarge, with docker and aws on the PATH."""
    machine = Machine(tmp_path)
    (machine.bin / "aws").write_text(AWS)
    for name, value in {
        "PATH": f"{machine.bin}:{os.environ['PATH']}",
        "CALLS": machine.log,
        "FAILURES": machine.failures,
        "AWS_CALLS": tmp_path / "aws-calls",
    }.items():
        monkeypatch.setenv(name, str(value))
    arn = "arn:aws:eks:us-west-2:1:cluster/c"
    monkeypatch.setenv("KUBECONFIG", str(kube_server.kubeconfig(tmp_path / "eks", arn)))
    monkeypatch.chdir(tmp_path)
    for key in [key for key in kube.objects if key[0] == "nodes"]:
        del kube.objects[key]
    kube.add(
        "persistentvolumeclaims",
        {
            "metadata": {"name": "fsx-claim"},
            "spec": {"accessModes": ["ReadWriteMany"]},
            "status": {"phase": "Bound"},
        },
    )
    for number in range(4):
        kube.add("nodes", gpu_node(f"node-{number}"))
    kube.on_create = partial(complete_job, seconds=0.2)
    monkeypatch.setattr(kubernetes, "Patience", partial(Patience, poll_seconds=0.05))
    return kube


def worker(cluster: Cluster) -> tuple[Object, dict[str, Any]]:
    """Return the newest job, and the container of its pods."""
    item = jobs(cluster)[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = item["template"]["spec"]["containers"]
    return item, container


def test_an_image_is_built_and_a_job_of_defaults_is_deployed(
    eks: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    assert build_docker_image(
        dockerfile="Dockerfile",
        context=str(ROOT),
        tag="auto",
        auto_fix=True,
        max_attempts=3,
        base_image=None,
    ).startswith("llm-training:")
    image = build_docker_image(auto_fix=True)
    assert "build_docker_image(auto_fix=True, push='REGISTRY/llm-training')" in caplog.text
    deploy_training_job(cluster_name="c", num_nodes=4, job_name="j")
    assert ("jobs", "default", "j-prepare") in eks.objects
    item, container = worker(eks)
    spec = item["template"]["spec"]
    assert item["replicas"] == 4 and container["image"] == image
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.g5.8xlarge"}
    assert (
        container["resources"]["limits"].items()
        >= {"nvidia.com/gpu": 1, "vpc.amazonaws.com/efa": 1}.items()
    )
    config = command_line.parse_options(container["args"])
    assert (
        config.model_name,
        config.dataset_name,
        config.experiment_name,
        config.batch_size,
    ) == (
        "scratch-1B",
        ["c4"],
        "j",
        2,
    )
    for words in (
        "the last one built",
        "was not pushed",
        "recipes/scratch-1b-g5.yaml",
        "from the cluster: ml.g5.8xlarge, 1 GPU and 1 EFA per node",
    ):
        assert words in caplog.text


def test_the_arguments_of_the_deployer_reach_the_job(eks: Cluster) -> None:
    deploy_training_job(
        cluster_name="c",
        num_nodes=4,
        job_name="j",
        image_uri=f"{ECR}/fsdp:1",
        gpu_per_node=2,
        instance_type="ml.g5.12xlarge",
        max_steps=1000,
        monitor=True,
    )
    item, container = worker(eks)
    assert (
        container["image"] == f"{ECR}/fsdp:1"
        and container["resources"]["limits"]["nvidia.com/gpu"] == 2
        and "--nproc-per-node=2" in container["command"]
    )
    assert item["template"]["spec"]["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "ml.g5.12xlarge"
    }
    assert command_line.parse_options(container["args"]).max_steps == 1000


def test_a_token_is_only_in_a_secret_and_the_prepared_tokenizer_is_used(
    eks: Cluster, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    image_docker.record_built_image(image_docker.BuiltImage(f"{ECR}/fsdp:1", is_pushed=True))
    deploy_training_job(
        cluster_name="c",
        num_nodes=4,
        job_name="j",
        hf_token=TOKEN,
        tokenizer="meta-llama/Llama-3.2-1B",
        instance_type="g5.8xlarge",
    )
    item, container = worker(eks)
    config = command_line.parse_options(container["args"])
    assert (config.from_scratch, config.model_size, config.model_name) == (True, "1B", None)
    assert config.tokenizer == Path(".cache/models/meta-llama--Llama-3.2-1B")
    assert item["template"]["spec"]["nodeSelector"] == {  # HyperPod's nodes have this label
        "node.kubernetes.io/instance-type": "ml.g5.8xlarge"
    }
    secret = eks.objects.pop(("secrets", "default", "j-prepare-hub-token"))
    assert secret["stringData"] == {"token": TOKEN}
    assert not [key for key in eks.objects if key[0] == "secrets"]
    assert "HF_TOKEN" not in {variable["name"] for variable in container["env"]}
    assert TOKEN not in json.dumps([*eks.objects.values()]) + caplog.text + "".join(
        capfd.readouterr()
    )
    assert not [
        path
        for path in Path().rglob("*")
        if path.is_file()
        and TOKEN in path.read_text(errors="replace")
        and "kube-cache" not in str(path)
    ]


def test_a_cluster_is_managed(eks: Cluster) -> None:
    findings = manage_eks_cluster(
        cluster_name="c",
        region="us-west-2",
        validate_components=True,
        auto_fix=True,
        create_if_missing=True,
        num_nodes=4,
        instance_type="ml.g5.8xlarge",
        gpu_per_node=1,
    )
    assert ("namespaces", "", "default") in eks.objects
    assert "4 ml.g5.8xlarge are free" in " ".join(finding.text for finding in findings)
    assert "eks update-kubeconfig --name c " in Path("aws-calls").read_text()
    assert manage_eks_cluster(validate_components=False)
    with pytest.raises(UsageError, match="create_if_missing") as caught:
        deploy_training_job(cluster_name="c", job_name="j", create_if_missing=True)
    assert "coming-from.md" in caught.value.hint
    for words in (
        ["launch/kubernetes.py", "deploy", "--job-name", "j"],
        ["launch/kubernetes.py", "cluster"],
    ):
        refused = run_stage(*words, "--create_if_missing", cwd=Path.cwd(), expect=2)
        assert "coming-from.md" in refused.stderr
    with pytest.raises(UsageError, match="EKS cluster other") as caught:
        manage_eks_cluster(cluster_name="other", create_if_missing=True)
    assert "costs money" in caught.value.hint and "creates nothing" in caught.value.hint
    assert "kubernetes.py setup --kind eks --cluster-name other" in caught.value.run


LINES = (
    "prepare --cluster_name c --job_name j",
    "deploy --cluster_name c --num_nodes 4 --job_name j",
    f"deploy --job_name j --image_uri {ECR}/fsdp:1 --num_nodes 4 --gpu_per_node 1 "
    f"--instance_type ml.g5.8xlarge --cluster_name c --monitor --hf_token {TOKEN} "
    "--max_steps 1000 --tokenizer meta-llama/Llama-3.2-1B",
    "render --cluster_name c --num_nodes 2 --job_name j --max_steps 1000",
    "render --kind hyperpod --job-name j --image i:1 --instance-type ml.p5.48xlarge "
    "--node-count 4 --accelerators 8 --service-account-name training --max-retry 3 -- "
    "-d c4 -m org/model --lr=1e-4",
)


@pytest.mark.parametrize("line", LINES)
def test_the_command_lines_of_the_deployer_run(line: str, eks: Cluster, tmp_path: Path) -> None:
    image_docker.record_built_image(image_docker.BuiltImage(f"{ECR}/fsdp:1", is_pushed=True))
    command, *words = shlex.split(line)
    result = run_stage(
        "launch/kubernetes.py", command, "--poll_seconds", "0.05", *words, cwd=tmp_path
    )
    output = result.stdout + result.stderr
    assert TOKEN not in output and "Traceback" not in output
    if line.startswith("render"):
        assert [item["metadata"]["name"] for item in yaml.safe_load_all(result.stdout)] == ["j"]
        assert ("the last one built" in result.stderr) == ("--image" not in line)
        return
    assert "is complete" in output
    manifests = {key: item for key, item in eks.objects.items() if key[0] != "secrets"}
    assert TOKEN not in json.dumps([*manifests.values()])
    assert bool(re.search(r"next: .*launch/kubernetes.py deploy", output)) == line.startswith(
        "prepare"
    )
    if "max_steps" in line:
        assert command_line.parse_options(worker(eks)[1]["args"]).max_steps == 1000
        assert ("secrets", "default", "j-prepare-hub-token") in eks.objects


def test_the_other_command_lines_run(eks: Cluster, tmp_path: Path) -> None:
    run_stage(
        "launch/build_image.py",
        "--dockerfile",
        "Dockerfile",
        "--tag",
        "llama32-1b-v1",
        "--auto_fix",
        "true",
        "--max_attempts",
        "3",
        cwd=tmp_path,
    )
    assert image_docker.find_last_built_image() == image_docker.BuiltImage(
        "llama32-1b-v1", is_pushed=False
    )
    run_stage(
        "launch/build_image.py", "--auto_fix", "--push", f"{ECR}/fsdp", "--tag", "x:2", cwd=tmp_path
    )
    assert image_docker.find_last_built_image() == image_docker.BuiltImage(
        f"{ECR}/fsdp:2", is_pushed=True
    )
    run_stage(
        "launch/kubernetes.py",
        "cluster",
        "--cluster_name",
        "c",
        "--validate_components",
        "--auto_fix",
        "--namespace",
        "default",
        cwd=tmp_path,
    )
    assert ("namespaces", "", "default") in eks.objects


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_node": 4}, "nearest is num_nodes"),
        ({"max_step": 4}, "nearest is max_steps"),
        ({"sharding_strategy": "full"}, "coming-from.md"),
        ({"use_hyperpod_cli": True}, "argument use_hyperpod_cli"),
        ({"num_nodes": 4, "nodes": 2}, "nodes=2 contradicts 4"),
        ({"max_lr": 1e-3, "lr": 1e-4}, "lr=0.0001 contradicts 0.001"),
        ({"num_nodes": 0}, "--nodes: expected"),
        ({"context": "other"}, "--cluster-name c and --context other"),
        ({"cluster_name": "d"}, "no cluster d"),
        ({"job_name": None}, "--job-name is missing"),
        ({"image_uri": None}, "no image was built"),
        ({"bucket_pvc": "none"}, "--bucket-pvc: no claim none"),
        ({"gpu_per_node": 3, "instance_type": "g5.8xlarge"}, "has 1 GPU"),
        ({"model_name": "org/model"}, "no dataset is given"),
    ],
)
def test_refusals_are_errors_without_a_traceback(
    changes: dict[str, Any], says: str, eks: Cluster
) -> None:
    arguments = {"cluster_name": "c", "job_name": "j", "image_uri": "registry/train:1", **changes}
    with pytest.raises(UsageError) as caught:
        deploy_training_job(**arguments)
    assert says in caught.value.render() and not jobs(eks)


def test_several_possible_instance_types_are_an_error(
    eks: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(**options: Any) -> tuple[str, int | None, int | None]:
        job = declared.from_values(JobOptions, job_name="j", image="registry/train:1", **options)
        completed_job = fill_open_options(job, Kubectl("default"))
        return completed_job.instance_type, completed_job.gpus_per_node, completed_job.efa_per_node

    def empty() -> None:
        for key in [key for key in eks.objects if key[0] == "nodes"]:
            del eks.objects[key]

    assert completed() == ("ml.g5.8xlarge", 1, 1)
    eks.add("nodes", gpu_node("large", "ml.p4d.24xlarge", 8, 4))
    with pytest.raises(UsageError, match="several instance types") as caught:
        completed()
    assert caught.value.found == "ml.p4d.24xlarge, ml.g5.8xlarge"
    assert completed(instance_type="p4d.24xlarge") == ("ml.p4d.24xlarge", None, None)
    assert completed(gpus_per_node=0) == ("", 0, None)
    empty()
    assert completed() == ("g5.12xlarge", None, None)  # its node groups have no nodes yet
    monkeypatch.setattr(aws, "list_node_types", lambda cluster, region: [])
    with pytest.raises(UsageError, match="has GPUs"):
        completed()
    eks.add("nodes", gpu_node("own", "own.type", 2, 0))
    assert completed(instance_type="own.type") == ("own.type", 2, 0)
    assert completed(instance_type="other") == ("other", None, None)


def test_a_cluster_accepts_the_preparation_job(tmp_path: Path) -> None:
    def prepared(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        return run_stage(
            "launch/kubernetes.py",
            "prepare",
            "--job-name",
            "j",
            "--image",
            "i:1",
            "--dry-run",
            *words,
            cwd=tmp_path,
            expect=expect,
        )

    result = prepared(
        "--data",
        "/bucket/raw",
        "--bucket-pvc",
        "training-data",
        "--token-secret",
        "hub",
        "--service-account",
        "training",
        "--fields",
        "text",
        "--num-nodes",
        "4",
        "--kind",
        "hyperpod",
        "--spares",
        "1",
        "--",
        "-d",
        "mine",
        "-m",
        "org/model",
    )
    item = yaml.safe_load(result.stdout)
    kubernetes_validate.validate(item, "1.34", strict=True)
    [container] = item["spec"]["template"]["spec"]["containers"]
    assert item["metadata"]["name"] == "j-prepare" and "resources" in container
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    assert container["command"][2:] == [
        "--data=/bucket/raw",
        "--fields=text",
        "--format=text",
        "--validation-percent=1.0",
        "--",
    ]
    assert container["args"] == [
        "--experiment-name=j",
        "--device=cpu",
        "-d",
        "mine",
        "-m",
        "org/model",
    ]
    assert "--bucket-pvc NAME" in prepared("--data", "/bucket/raw", expect=2).stderr
    assert "cannot name a job" in prepared("--job-name", "J", expect=2).stderr


@pytest.fixture
def steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., list[str]]:
    """Return a function that returns the commands that launch/cloud/prepare.py would run."""
    monkeypatch.chdir(tmp_path)

    def of(*words: str) -> list[str]:
        caplog.set_level("INFO", "pipeline")
        caplog.clear()
        prepare.main(["--dry-run", *words])
        return [text.removeprefix("$ python ") for text in caplog.messages if text[0] == "$"]

    return of


def test_the_commands_that_prepare_a_run(steps: Callable[..., list[str]], tmp_path: Path) -> None:
    fetch, organize, build, model, tokens = steps()
    assert "--dataset-name allenai/c4 --include=en/c4-train.00000-of" in fetch
    assert "--src-dir raw_text/allenai--c4 --dst-root splits/c4" in organize
    assert "--save-dir hf_datasets/c4 --fields text --validation-percent=1.0" in build
    assert "--model-size 1B --vocab-size 32000 --train-tokenizer hf_datasets/c4" in model
    assert tokens.startswith("04_train_fsdp.py") and tokens.endswith("--prepare-only")
    assert "03_download_model.py --model-name meta-llama/Llama-3.2-1B" in steps(
        "--", "--tokenizer", "meta-llama/Llama-3.2-1B"
    )
    assert steps("--", "-d", "c4", "-m", "org/model")[3].endswith("--model-name org/model")
    organize = steps("--data", "/bucket/raw", "--", "-d", "mine", "-m", "scratch-1M")[0]
    assert organize.endswith("--src-dir /bucket/raw --dst-root splits/mine --mode symlink")
    assert (
        " --format chat "
        in steps(
            "--data", "/bucket/raw", "--format", "chat", "--", "-d", "mine", "-m", "scratch-1M"
        )[1]
    )
    (tmp_path / "hf_datasets" / "c4").mkdir(parents=True)
    assert len(steps("--", "-d", "c4", "-m", str(tmp_path))) == 1
    with pytest.raises(UsageError, match="hf_datasets/mine does not exist"):
        steps("--", "-d", "mine", "-m", "org/model")
    for data in ("org/text", "allenai/c4"):  # without --include this may fetch terabytes
        with pytest.raises(UsageError, match=f"--data {data} needs --include GLOB"):
            steps("--data", data, "--", "-d", "mine", "-m", "org/model")
    with pytest.raises(UsageError, match="2 datasets are missing"):
        steps("--", "-d", "a", "-d", "b", "-m", "org/model")


@pytest.mark.slow
def test_a_run_is_prepared_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    rows = b"".join(
        json.dumps({"text": f"The quick brown fox jumps. {n} " * 20}).encode() + b"\n"
        for n in range(300)
    )
    hub.repos["org/text"] = Repo(
        {"en/train.json.gz": gzip.compress(rows), "de/a.gz": b"not this"}, kind="dataset"
    )
    words = (
        "--data",
        "org/text",
        "--include",
        "en/*.json.gz",
        "--fields",
        "text",
        "--",
        "-d",
        "mine",
        "-m",
        "org/tiny-llama",
        "-s",
        "64",
    )
    run_stage("launch/cloud/prepare.py", *words, cwd=tmp_path)
    assert (tmp_path / ".cache/models/org--tiny-llama/manifest.json").is_file()
    assert [*(tmp_path / ".cache" / "tokens").glob("mine-*")]
    hub.requests.clear()
    second = run_stage("launch/cloud/prepare.py", *words, cwd=tmp_path).stdout
    assert (
        second.count("$ python") == 1 and "--prepare-only" in second
    )  # existing artifacts are kept
    assert not hub.requests
