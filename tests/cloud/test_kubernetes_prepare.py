# covers: launch/cloud/kube/preparation.py, launch/kubernetes.py, launch/cloud/kubernetes.py
"""Test that `deploy` prepares a run first if no finished job has prepared it on the volume."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

from launch import kubernetes
from launch.cloud.kube.deploy import Patience
from lib.core.errors import UsageError
from tests.cloud.kube_cluster import JOB_OPTIONS, TRAIN_OPTIONS, run_launcher
from tests.cloud.kube_node import Node, list_pods
from tests.cloud.kube_server import Cluster, Object
from tests.cloud.test_kubernetes_deploy import complete_job, fail_job, one_after_the_other

QUICK = ("--poll-seconds", "0.1", "--backoff-seconds", "0.1")
PREPARING = "preparing it first, in job exp-prepare"


def started(cluster: Cluster) -> list[str]:
    """Return the types of the jobs in the order of their submission."""
    requests = [request for request in cluster.requests if request.startswith("POST")]
    return [
        kind
        for request in requests
        for kind in ("jobs", "pytorchjobs")
        if re.search(rf"/{kind}\b", request)
    ]


@pytest.fixture
def deploy(kube: Cluster) -> Callable[..., str]:
    """Return a function that runs `deploy` on a cluster whose jobs succeed, for its output."""
    kube.on_create = partial(complete_job, seconds=0.1)

    def run(*words: object, train: tuple[str, ...] = TRAIN_OPTIONS, expect: int = 0) -> str:
        kube.requests.clear()
        result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *words, *train, expect=expect)
        return result.stdout + result.stderr

    return run


def test_a_run_is_prepared_once_before_it_trains(kube: Cluster, deploy: Callable[..., str]) -> None:
    output = deploy()
    assert started(kube) == ["jobs", "pytorchjobs"]
    assert PREPARING in output and "job exp is complete" in output
    export = "kubernetes.py run --image registry/train:1 -- python 05_export_checkpoint.py -e exp"
    assert export in output.splitlines()[-1]
    assert output.index("exp-prepare is complete") < output.index("attempt 1 of 5: exp, 2 ×")
    output = deploy()
    assert started(kube) == ["pytorchjobs"]
    assert "this run on fsx-claim" in output
    output = deploy(train=(*TRAIN_OPTIONS, "--lr", "1e-4", "-b", "4"))
    assert started(kube) == ["pytorchjobs"], "these options read the same tokens"
    output = deploy("--job-name", "other")
    assert started(kube) == ["pytorchjobs"] and "job exp-prepare has prepared" in output


@pytest.mark.slow
def test_another_run_is_prepared_again(kube: Cluster, deploy: Callable[..., str]) -> None:
    """Each run differs in one way from TRAIN_OPTIONS, and so in two ways from the one before."""
    deploy()
    for words in (
        ("--", "-d", "other", "-m", "org/model"),
        ("--", "-d", "c4", "-m", "org/other"),
        (*TRAIN_OPTIONS, "-s", "512"),
        ("--project-dir", "/data/mine", *TRAIN_OPTIONS),
    ):
        assert PREPARING in deploy(*words, train=()), words
        assert started(kube) == ["jobs", "pytorchjobs"], words


def test_the_command_prepare_leaves_the_same_record(
    kube: Cluster, deploy: Callable[..., str]
) -> None:
    run_launcher("prepare", *JOB_OPTIONS, *QUICK, "--data", "/data/raw", *TRAIN_OPTIONS)
    assert "has prepared this run" in deploy()
    assert started(kube) == ["pytorchjobs"]


@pytest.mark.slow
def test_always_prepares_and_never_does_not(kube: Cluster, deploy: Callable[..., str]) -> None:
    output = deploy("--prepare", "never")
    assert started(kube) == ["pytorchjobs"] and "prepar" not in output
    deploy()
    output = deploy("--prepare=always")
    assert started(kube) == ["jobs", "pytorchjobs"]
    assert "first, in job exp-prepare" in output


@pytest.mark.slow
def test_a_new_volume_is_prepared(kube: Cluster, deploy: Callable[..., str]) -> None:
    deploy()
    claim = kube.objects["persistentvolumeclaims", "default", "fsx-claim"]
    claim["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    assert PREPARING in deploy()


@pytest.mark.slow
def test_a_failed_preparation_ends_the_deployment(
    kube: Cluster, deploy: Callable[..., str]
) -> None:
    kube.on_create = lambda cluster, job: fail_job(cluster, job, 2, "error: c4 does not exist")
    output = deploy(expect=2)
    assert started(kube) == ["jobs"] and "c4 does not exist" in output
    kube.on_create = partial(complete_job, seconds=0.1)
    assert PREPARING in deploy(), "a failed job is no record"
    assert started(kube) == ["jobs", "pytorchjobs"]


def test_a_missing_operator_is_reported_before_the_preparation(
    kube: Cluster, deploy: Callable[..., str]
) -> None:
    kube.types = [type_ for type_ in kube.types if type_.kind != "PyTorchJob"]
    assert "does not accept" in deploy(expect=2)
    assert not started(kube)


def test_a_job_that_runs_already_is_followed_without_a_preparation(
    kube: Cluster, deploy: Callable[..., str]
) -> None:
    kube.on_create = partial(complete_job, when_followed=True)
    run_launcher("apply", *JOB_OPTIONS, *TRAIN_OPTIONS)
    output = deploy()
    assert not started(kube) and "following it" in output


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (("-d", "raw/c4", "-m", "org/model", "--streaming"), "with --streaming nothing"),
        (("-d", "synthetic", "--from-scratch", "--model-size", "1B"), "with -d synthetic noth"),
        (("--bench", "--model-size", "1B"), "with -d synthetic nothing"),
    ],
)
def test_some_runs_need_no_preparation(
    kube: Cluster, deploy: Callable[..., str], train: tuple[str, ...], reason: str
) -> None:
    assert reason in deploy(train=("--", *train))
    assert started(kube) == ["pytorchjobs"]


def test_a_dry_run_says_what_would_happen_first(kube: Cluster) -> None:
    result = run_launcher("deploy", *JOB_OPTIONS, "--dry-run", *TRAIN_OPTIONS)
    assert "exp-prepare would prepare" in result.stderr
    assert yaml.safe_load(result.stdout)["kind"] == "PyTorchJob" and not kube.requests
    result = run_launcher("deploy", *JOB_OPTIONS, "--dry-run", "--prepare=never", *TRAIN_OPTIONS)
    assert "prepare" not in result.stderr
    bench = ("--", "--bench", "--model-size", "1B")
    result = run_launcher("deploy", *JOB_OPTIONS, "--dry-run", *bench)
    assert "nothing is prepared" in result.stderr
    assert "would prepare" not in result.stderr
    assert (
        "--bucket-pvc NAME"
        in run_launcher(
            "deploy", *JOB_OPTIONS, "--dry-run", "--data=/bucket/raw", *TRAIN_OPTIONS, expect=2
        ).stderr
    )


def test_the_function_prepares_as_well(kube: Cluster) -> None:
    containers: list[Object] = []

    def operator(cluster: Cluster, job: Object) -> None:
        if job["kind"] == "Job":
            containers.extend(job["spec"]["template"]["spec"]["containers"])
        complete_job(cluster, job, 0.1)

    kube.on_create = operator
    options: dict[str, Any] = {
        "job_name": "exp",
        "image": "registry/train:1",
        "instance_type": "p5.48xlarge",
        "data": "org/text",
        "include": ["*"],
        "dataset_name": "mine",
        "model_name": "org/model",
        "patience": Patience(poll_seconds=0.1),
    }
    kubernetes.deploy_training_job(**options)
    assert started(kube) == ["jobs", "pytorchjobs"]
    [container] = containers
    assert {"--data=org/text", "--include=*"} <= set(container["command"])
    assert "--dataset-name=mine" in container["args"]
    with pytest.raises(UsageError, match="prepare='sometimes'"):
        kubernetes.deploy_training_job(**options, prepare="sometimes")


@pytest.mark.slow
def test_a_preparation_that_loses_its_node_is_tried_again(
    kube: Cluster, deploy: Callable[..., str]
) -> None:
    def lose(cluster: Cluster, job: Object) -> None:
        fail_job(cluster, job, 137)
        for pod in cluster.pods_of(job["metadata"]["name"]):
            pod["status"]["reason"] = "Evicted"

    kube.on_create = one_after_the_other(lose, partial(complete_job, seconds=0.1))
    deploy()
    assert started(kube) == ["jobs", "jobs", "pytorchjobs"]


@pytest.mark.slow
def test_a_deployment_leads_from_raw_text_to_a_checkpoint(node: Node, kube: Cluster) -> None:
    """The pods are processes here, and run the real stages on an empty volume."""
    raw = node.volume / "raw"
    raw.mkdir()
    for number in range(8):
        words = " ".join(f"word{number}-{index % 97}" for index in range(2000))
        (raw / f"{number}.txt").write_text(words)
    job = ("--job-name", "exp", *node.options(), "--gpus-per-node", "0", *QUICK, "--data", "raw")
    train = ("--", "-d", "mine", "--from-scratch", "--model-size", "1M", "-s", "32", "-b", "2")
    output = run_launcher("deploy", *job, *train, "--max-steps", "3", timeout=400).stdout
    assert PREPARING in output and "job exp is complete" in output
    assert [name.rpartition("-")[0] for name in list_pods(kube)] == ["exp-prepare", "exp-worker"]
    assert (node.volume / "hf_datasets" / "mine" / "manifest.json").is_file()
    assert (node.volume / "outputs" / "exp" / "checkpoints" / "step_00000003").is_dir()
    output = run_launcher("deploy", *job, *train, "--max-steps", "3", timeout=400).stdout
    assert "exp-prepare has prepared" in output
    assert "already done" in output and "job exp is complete" in output
