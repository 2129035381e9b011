# covers: launch/kubernetes.py, launch/cloud/kubernetes.py, launch/cloud/kube/deploy.py
# covers: launch/cloud/kube/kubectl.py, launch/cloud/kube/job_commands.py
"""Test launch/kubernetes.py with the real kubectl: all commands, failures and remedies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch import kubernetes
from launch.cloud.kube import aws
from launch.cloud.kube.deploy import JobFailed, Patience
from lib.core.errors import UsageError
from lib.train import command_line
from tests.cloud.kube_cluster import (
    JOB_OPTIONS,
    PLURALS,
    SCRIPT,
    TRAIN_OPTIONS,
    make_condition,
    make_ended_state,
    make_pod,
    run_launcher,
)
from tests.cloud.kube_server import CORE_TYPES, Cluster, Object, Server

# Another module tests --prepare auto.
QUICK = ("--poll-seconds", "0.2", "--backoff-seconds", "0.1", "--prepare", "never")
QUICK_KIND = [
    "pytorchjob",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("trainjob", "hyperpod")),
]
RUNNING: Object = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
SCHEDULED = [{"type": "PodScheduled", "status": "True"}]
NAMES = {
    "PyTorchJob": "{}-worker-{}",
    "TrainJob": "{}-node-0-{}",
    "HyperPodPyTorchJob": "{}-pod-{}",
    "Job": "{}-{}",
}
SUCCESS = {
    "PyTorchJob": "Succeeded",
    "TrainJob": "Complete",
    "HyperPodPyTorchJob": "Completed",
    "Job": "Complete",
}


def add_pods(
    cluster: Cluster,
    item: Object,
    phase: str = "Running",
    log: tuple[str, ...] = (),
    nodes: int = 2,
    **options: Any,
) -> list[str]:
    """Add the pods of a job, and return their names."""
    name = item["metadata"]["name"]
    names = [NAMES[item["kind"]].format(name, number) for number in range(nodes)]
    for pod_name in names:
        options.setdefault("conditions", SCHEDULED)
        cluster.add("pods", make_pod(name, pod_name, phase, **options))
        cluster.logs[pod_name] = list(log)
    return names


def set_condition(item: Object, type_: str, message: str = "") -> None:
    """Set the condition of a job, as its operator would."""
    item.setdefault("status", {}).setdefault("conditions", []).append(
        make_condition(type_, message)
    )


def act_later(cluster: Cluster, seconds: float, do: Callable[[], None]) -> None:
    def run() -> None:
        with cluster.lock:
            do()

    threading.Timer(seconds, run).start()


def complete_job(
    cluster: Cluster, item: Object, seconds: float = 1.0, when_followed: bool = False
) -> None:
    """Run a job to its end, as an operator would. when_followed: once a client reads its log."""
    set_condition(item, "Created")
    names = add_pods(cluster, item, state=RUNNING, log=("[rank=0] {'global_step': 1}",))
    cluster.following |= set(names)
    set_condition(item, "Running")

    def end() -> None:
        if when_followed and not any("/log" in request for request in cluster.requests):
            act_later(cluster, 0.1, end)
            return
        for name in names:
            cluster.logs[name].append("done: 10 steps")
        cluster.following -= set(names)
        set_condition(item, SUCCESS[item["kind"]])

    act_later(cluster, seconds, end)


def fail_job(cluster: Cluster, item: Object, code: int, *log: str) -> None:
    """End a job at once."""
    add_pods(cluster, item, "Failed", state=make_ended_state(code), log=log)
    set_condition(item, "Failed", "a pod failed")


def one_after_the_other(
    *operators: Callable[[Cluster, Object], None],
) -> Callable[[Cluster, Object], None]:
    """Return an operator with one behaviour per submission; the last one repeats."""
    remaining = list(operators)

    def run(cluster: Cluster, item: Object) -> None:
        (remaining.pop(0) if len(remaining) > 1 else remaining[0])(cluster, item)

    return run


def jobs(cluster: Cluster, kind: str = "pytorchjob") -> list[Object]:
    return [item for (plural, _, _), item in cluster.objects.items() if plural == PLURALS[kind]]


def submissions(cluster: Cluster) -> int:
    return sum(
        request.startswith("POST") and "/pytorchjobs" in request for request in cluster.requests
    )


@pytest.mark.parametrize("kind", QUICK_KIND)
def test_apply_status_logs_and_stop(kube: Cluster, kind: str) -> None:
    words = ("--kind", kind, "--job-name", "exp")
    assert "no job exp" in run_launcher("status", *words, expect=2).stderr
    assert "created" in run_launcher("apply", "--kind", kind, *JOB_OPTIONS, *TRAIN_OPTIONS).stdout
    [item] = jobs(kube, kind)
    assert "has not reported" in run_launcher("status", *words).stdout
    with kube.lock:
        names = add_pods(kube, item, state=RUNNING, log=("step 1",))
        kube.logs[names[1]] = ["of the other"]
        set_condition(item, "Created")
        set_condition(item, "Running", "all pods run")
        kube.following.add(names[0])
    output = run_launcher("status", *words).stdout
    assert "exp is active: Running" in output and names[1] in output and "cause" not in output

    def end_the_log() -> None:
        kube.logs[names[0]].append("step 2")
        kube.following.clear()

    act_later(kube, 0.8, end_the_log)
    assert run_launcher("logs", *words).stdout.splitlines() == ["step 1", "step 2"]
    assert (
        run_launcher("logs", *words, "--node-rank", 1, "--follow", "off").stdout == "of the other\n"
    )
    assert "has 2 pods" in run_launcher("logs", *words, "--node-rank", 2, expect=2).stderr
    assert "unchanged" in run_launcher("apply", "--kind", kind, *JOB_OPTIONS, *TRAIN_OPTIONS).stdout
    run_launcher("stop", *words)
    plurals = {plural for plural, _, _ in kube.objects}
    assert plurals == {"persistentvolumeclaims", "nodes"}
    run_launcher("stop", *words, expect=2)


def test_the_status_of_a_failed_job_shows_the_cause(kube: Cluster) -> None:
    kube.on_create = lambda cluster, item: fail_job(cluster, item, 3, "error: c4 is not finished")
    run_launcher("apply", *JOB_OPTIONS, *TRAIN_OPTIONS)
    output = run_launcher("status", "--job-name", "exp").stdout
    assert "exp is failed" in output and "cause: damaged artifact" in output
    assert "c4 is not finished" in output and "exit code 3" in output
    output = run_launcher("stop", "--job-name", "exp").stdout
    assert "nothing to stop" in output and "kubectl" in output
    assert jobs(kube), "its logs may still be wanted"


def test_dry_runs_do_not_query_the_cluster(kube: Cluster) -> None:
    for command in ("apply", "deploy"):
        assert (
            'kind: "PyTorchJob"'
            in run_launcher(command, *JOB_OPTIONS, "--dry-run", *TRAIN_OPTIONS).stdout
        )
    for command in ("status", "logs", "stop"):
        assert "kubectl" in run_launcher(command, "--job-name", "exp", "--dry-run").stdout
    assert not kube.requests


def test_the_cluster_refuses_unknown_fields(kube: Cluster) -> None:
    from launch.cloud.kube.kubectl import Kubectl, KubectlError

    wrong = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "x"},
        "spec": {"pytorchReplicaSpecs": {}, "replicas": 2},
    }
    with pytest.raises(KubectlError, match="failed") as caught:
        Kubectl("default").apply(json.dumps(wrong))
    assert "unknown field" in caught.value.text and not caught.value.is_transient


@pytest.mark.parametrize("kind", QUICK_KIND)
def test_deploy_follows_a_job_to_its_end(kube: Cluster, kind: str) -> None:
    """The output of a quick job is shown even if it ends before the first poll."""
    kube.on_create = partial(complete_job, seconds=0.0 if kind == "pytorchjob" else 1.0)
    output = run_launcher("deploy", "--kind", kind, *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert "job exp is complete" in output and "attempt 1 of 5" in output
    assert "[rank=0] {'global_step': 1}" in output and "done: 10 steps" in output
    assert f"{SUCCESS[jobs(kube, kind)[0]['kind']]} since" in output


def test_a_job_out_of_gpu_memory_recomputes_more(kube: Cluster) -> None:
    kube.on_create = one_after_the_other(
        lambda cluster, item: fail_job(
            cluster, item, 2, "error: out of memory", "CUDA out of memory"
        ),
        lambda cluster, item: fail_job(
            cluster, item, 2, "error: out of memory", "CUDA out of memory"
        ),
        complete_job,
    )
    none = ("--activation-checkpointing", "none")
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, *none).stdout
    assert "remedy: --activation-checkpointing selective" in output
    assert "attempt 3 of 5" in output and "complete" in output
    [item] = jobs(kube)
    worker = item["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    options = command_line.parse_options(worker["containers"][0]["args"])
    assert options.activation_checkpointing == "full"


@pytest.mark.long
def test_out_of_gpu_memory_with_everything_recomputed_is_final(kube: Cluster) -> None:
    kube.on_create = lambda cluster, item: fail_job(cluster, item, 2, "CUDA out of memory")
    result = run_launcher(
        "deploy",
        *JOB_OPTIONS,
        *QUICK,
        *TRAIN_OPTIONS,
        "--activation-checkpointing",
        "full",
        expect=2,
    )
    assert "out of GPU memory" in result.stderr
    assert "--plan-gpus" in result.stderr and submissions(kube) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "log", "says"),
    [
        (2, "error: --lr must be above 0", "bad input"),
        (3, "error: c4 is not finished", "damaged artifact"),
        (4, "error: no room to write", "disk full"),
    ],
)
def test_a_final_failure_ends_with_the_code_of_the_run(
    kube: Cluster, code: int, log: str, says: str
) -> None:
    kube.on_create = lambda cluster, item: fail_job(cluster, item, code, log)
    result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, expect=code)
    assert f"first attempt: {says}" in result.stderr and log in result.stderr
    assert submissions(kube) == 1 and len(jobs(kube)) == 1  # the job remains, to be examined


def test_an_image_that_is_missing_ends_and_deletes_the_job(kube: Cluster) -> None:
    def operator(cluster: Cluster, item: Object) -> None:
        add_pods(
            cluster,
            item,
            "Pending",
            state={"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}},
        )

    kube.on_create = operator
    result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, expect=1)
    assert "image missing" in result.stderr and "build_image.py" in result.stderr
    assert not jobs(kube) and "Traceback" not in result.stderr


@pytest.mark.long
def test_a_private_image_is_pulled_with_the_only_credentials(kube: Cluster) -> None:
    kube.add("secrets", {"metadata": {"name": "ours"}, "type": "kubernetes.io/dockerconfigjson"})

    def operator(cluster: Cluster, item: Object) -> None:
        worker = item["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        if worker.get("imagePullSecrets") == [{"name": "ours"}]:
            complete_job(cluster, item)
        else:
            add_pods(
                cluster,
                item,
                "Pending",
                state={
                    "waiting": {"reason": "ErrImagePull", "message": "no basic auth credentials"}
                },
            )

    kube.on_create = operator
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert "the secret ours" in output and "is complete" in output


@pytest.mark.long
def test_huge_pages_and_interfaces_are_dropped_if_they_fail(kube: Cluster) -> None:
    def operator(cluster: Cluster, item: Object) -> None:
        text = json.dumps(item)
        if "hugepages" in text:
            add_pods(
                cluster,
                item,
                "Pending",
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": "0/2 nodes are available: 2 Insufficient hugepages-2Mi.",
                    }
                ],
            )
        elif (
            "NCCL_SOCKET_IFNAME" in text.partition('"annotations"')[2].partition("spec")[2]
            or '"name": "NCCL_SOCKET_IFNAME"' in text
        ):
            fail_job(cluster, item, 1, "NCCL WARN Bootstrap : no socket interface found")
        else:
            complete_job(cluster, item)

    kube.on_create = operator
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert "cause: no huge pages" in output and "cause: network interface" in output
    assert "attempt 3 of 5" in output and "is complete" in output


def lost(cluster: Cluster, item: Object) -> None:
    add_pods(cluster, item, "Failed", reason="NodeLost", message="node is not responding")
    set_condition(item, "Failed")


@pytest.mark.long
def test_a_lost_node_is_retried_until_no_attempt_is_left(kube: Cluster) -> None:
    kube.on_create = one_after_the_other(lost, lost, complete_job)
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert output.count("cause: node lost") == 2 and "is complete" in output
    run_launcher("stop", "--job-name", "exp")
    kube.on_create = lost
    result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, "--attempts", 2, *TRAIN_OPTIONS, expect=1)
    assert "2 attempts: node lost" in result.stderr


@pytest.mark.long
def test_deploy_waits_for_capacity(kube: Cluster) -> None:
    message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."

    def operator(cluster: Cluster, item: Object) -> None:
        add_pods(
            cluster,
            item,
            "Pending",
            conditions=[{"type": "PodScheduled", "status": "False", "message": message}],
        )

        def found() -> None:
            cluster.delete_job("exp")
            complete_job(cluster, item, 0.5)

        act_later(cluster, 3.0, found)

    kube.on_create = operator
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert output.count("is waiting: no capacity") == 1 and "is complete" in output
    assert output.count("has not reported") == 1
    assert submissions(kube) == 1


@pytest.mark.long
def test_waiting_for_capacity_ends_after_the_limit(kube: Cluster) -> None:
    def operator(cluster: Cluster, item: Object) -> None:
        add_pods(
            cluster,
            item,
            "Pending",
            conditions=[
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "message": "Insufficient nvidia.com/gpu",
                }
            ],
        )

    kube.on_create = operator
    result = run_launcher(
        "deploy",
        *JOB_OPTIONS,
        *QUICK,
        "--pending-minutes",
        0.01,
        "--attempts",
        2,
        *TRAIN_OPTIONS,
        expect=1,
    )
    assert "2 attempts: no capacity" in result.stderr and "--min-nodes" in result.stderr
    assert not jobs(kube) and submissions(kube) == 2


@pytest.mark.long
def test_a_job_without_an_operator_is_explained(kube: Cluster) -> None:
    result = run_launcher(
        "deploy", *JOB_OPTIONS, *QUICK, "--pending-minutes", 0.01, *TRAIN_OPTIONS, expect=1
    )
    assert "operator missing" in result.stderr and "no pods" in result.stderr


def test_the_token_goes_into_a_secret_and_nowhere_else(kube: Cluster) -> None:
    kube.on_create = complete_job
    token = {"HF_TOKEN": "hf_verysecret"}
    run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, env=token)
    assert "HF_TOKEN" not in json.dumps(jobs(kube))
    assert not [key for key in kube.objects if key[0] == "secrets"]
    from_hub = ("--streaming", "--online")
    result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, *from_hub, env=token)
    secret = kube.objects["secrets", "default", "exp-hub-token"]
    assert secret["stringData"] == {"token": "hf_verysecret"}
    assert "hf_verysecret" not in result.stdout + result.stderr
    assert "annotations" not in secret["metadata"]
    [item] = jobs(kube)
    assert "hf_verysecret" not in json.dumps(item) and "exp-hub-token" in json.dumps(item)


@pytest.mark.long
def test_a_cluster_may_be_silent_for_a_while(kube: Cluster) -> None:
    def operator(cluster: Cluster, item: Object) -> None:
        complete_job(cluster, item, 6.0)
        act_later(cluster, 0.5, lambda: setattr(cluster, "failing", 8))

    kube.on_create = operator
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert "does not answer" in output and "is complete" in output


@pytest.mark.long
def test_a_job_that_somebody_stops_is_not_submitted_again(kube: Cluster) -> None:
    def operator(cluster: Cluster, item: Object) -> None:
        def stop() -> None:
            cluster.objects.pop(("pytorchjobs", "default", "exp"))
            cluster.delete_job("exp")

        complete_job(cluster, item, 60)
        act_later(cluster, 1.0, stop)

    kube.on_create = operator
    result = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS, expect=1)
    assert "deleted" in result.stderr and submissions(kube) == 1


def test_everything_that_the_cluster_lacks_is_reported_at_once(
    kube: Cluster, kube_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECACHEDIR", str(kube_server.home / "without operators"))
    kube.types[:] = CORE_TYPES
    kube.objects.clear()
    result = run_launcher(
        "deploy", *JOB_OPTIONS, *QUICK, "--image-pull-secret", "none", *TRAIN_OPTIONS, expect=2
    )
    assert "does not accept pytorchjobs.kubeflow.org" in result.stderr
    assert "no claim fsx-claim" in result.stderr and "no secret none" in result.stderr
    assert not any(request.startswith("POST") for request in kube.requests)


def test_a_cluster_out_of_reach_is_reported_once(
    kube: Cluster, kube_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "nowhere").write_text(json.dumps(config))
    result = run_launcher(
        "deploy",
        *JOB_OPTIONS,
        *QUICK,
        *TRAIN_OPTIONS,
        expect=1,
        env={"KUBECONFIG": str(tmp_path / "nowhere")},
    )
    assert "refused" in result.stderr and "Traceback" not in result.stderr


def test_a_missing_kubectl_is_an_error(tmp_path: Path) -> None:
    result = run_launcher("status", "--job-name", "exp", expect=2, env={"PATH": str(tmp_path)})
    assert "kubectl is not installed" in result.stderr


@pytest.mark.long
def test_a_running_job_is_followed_and_a_finished_one_deleted(kube: Cluster) -> None:
    kube.on_create = lambda cluster, item: complete_job(cluster, item, 10.0)
    run_launcher("apply", *JOB_OPTIONS, *TRAIN_OPTIONS)
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert "is running" in output and "is complete" in output and submissions(kube) == 1
    kube.on_create = complete_job
    output = run_launcher("deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS).stdout
    assert (
        "deleting the finished job" in output and "is complete" in output and submissions(kube) == 2
    )


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_job_running(kube: Cluster, number: signal.Signals, code: int) -> None:
    kube.on_create = lambda cluster, item: complete_job(cluster, item, 60)
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "deploy", *JOB_OPTIONS, *QUICK, *TRAIN_OPTIONS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )
    assert process.stdout
    output = ""
    while "Running since" not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    time.sleep(0.5)
    process.send_signal(number)
    output += process.communicate(timeout=60)[0]  # the output is complete once kubectl has ended
    assert process.returncode == code and "Traceback" not in output
    assert "the job continues" in output or number != signal.SIGINT
    assert len(jobs(kube)) == 1


@pytest.mark.long
def test_deploying_works_as_a_function(
    kube: Cluster, kube_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = "arn:aws:eks:us-west-2:1:cluster/big"
    monkeypatch.setenv("KUBECONFIG", str(kube_server.kubeconfig(tmp_path / "eks", arn)))
    options = {
        "num_nodes": 2,
        "job_name": "exp",
        "instance_type": "p5.48xlarge",
        "image_uri": "registry/train:1",
        "max_steps": 5,
        "train": ["-d", "c4"],
        "patience": Patience(poll_seconds=0.2, backoff_seconds=0.1),
    }
    kube.on_create = complete_job
    kubernetes.deploy_training_job(
        cluster_name="big", hf_token="hf_x", prepare="never", monitor=True, **options
    )
    [item] = jobs(kube)
    worker = item["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert command_line.parse_options(worker["containers"][0]["args"]).max_steps == 5
    assert not [key for key in kube.objects if key[0] == "secrets"]
    kube.on_create = lambda cluster, item: fail_job(cluster, item, 3, "error: c4 is not finished")
    with pytest.raises(JobFailed, match="damaged artifact") as caught:
        kubernetes.deploy_training_job(cluster_name="big", monitor=False, **options)
    assert caught.value.code == 3


def test_a_cluster_missing_in_the_kubeconfig_is_an_error(
    kube: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the AWS command line, the error names the command to type."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").symlink_to(shutil.which("kubectl") or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UsageError, match="no cluster small") as caught:
        aws.find_context("small")
    assert caught.value.run == "aws eks update-kubeconfig --name small"
