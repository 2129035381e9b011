# covers: launch/cloud/kube/failure_causes.py, launch/cloud/kube/cluster_state.py
# covers: launch/cloud/kube/kubectl.py
"""Test that every cause of a failed job is found in its pods, events and logs."""

from __future__ import annotations

from typing import Any

import pytest

from launch.cloud.kube import cluster_state
from launch.cloud.kube.failure_causes import REMEDIES, Cause
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl
from tests.cloud.kube_cluster import make_ended_state, make_pod
from tests.cloud.kube_server import Cluster

HEAD = "exp-worker-0"


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def unscheduled(message: str) -> dict[str, Any]:
    """Return a pod for which the scheduler finds no node."""
    return make_pod(
        "exp",
        HEAD,
        "Pending",
        conditions=[
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
        ],
    )


def failed(code: int, reason: str = "Error") -> dict[str, Any]:
    """Return a pod whose container has ended."""
    return make_pod("exp", HEAD, "Failed", state=make_ended_state(code, reason))


def starting(reason: str, message: str) -> dict[str, Any]:
    return make_pod("exp", HEAD, "Pending", state=waiting(reason, message))


def event(name: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{name}.1"},
        "involvedObject": {"name": name},
        "type": "Warning",
        "reason": reason,
        "message": message,
    }


def find_cause(
    cluster: Cluster,
    *,
    events: list[dict[str, Any]] | None = None,
    log: str | None = None,
    pods: list[dict[str, Any]],
) -> Cause | None:
    """Return the cause that kubectl finds in a cluster with these pods."""
    for item in pods:
        cluster.add("pods", item)
    for item in events or []:
        cluster.add("events", item)
    if log is not None:
        cluster.logs[HEAD] = log.splitlines()
    kubectl = Kubectl("default")
    pod_list = cluster_state.list_pods(kubectl, JobOptions(job_name="exp").selector)
    assert len(pod_list) == len(pods)
    return cluster_state.find_cause(kubectl, "exp", pod_list)


PULL = 'Failed to pull image "registry/train:1": '
STARTING = [
    ("image missing", "ErrImagePull", PULL + "manifest unknown: no such tag"),
    ("image missing", "InvalidImageName", "couldn't parse image reference"),
    ("image forbidden", "ErrImagePull", PULL + "pull access denied, no basic auth credentials"),
    ("image forbidden", "ImagePullBackOff", PULL + "401 Unauthorized"),
    ("registry out of reach", "ErrImagePull", PULL + "dial tcp 10.0.0.9:443: i/o timeout"),
    ("registry out of reach", "ErrImagePull", PULL + "429 Too Many Requests"),
    (
        "driver mismatch",
        "RunContainerError",
        "OCI runtime create failed: nvidia-container-cli: "
        "requirement error: unsatisfied condition: cuda>=13.0, please update your driver",
    ),
    ("wrong image", "CreateContainerError", 'exec: "python3": executable file not found in $PATH'),
    ("missing secret", "CreateContainerConfigError", 'configmap "settings" not found'),
]
SCHEDULING = [
    ("no capacity", "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."),
    ("no such node", "0/4 nodes are available: 4 node(s) didn't match node affinity/selector."),
    ("no such node", "0/4 nodes are available: 4 node(s) had untolerated taint {gpu: true}."),
    ("no huge pages", "0/2 nodes are available: 2 Insufficient hugepages-2Mi."),
    ("no EFA", "0/2 nodes are available: 2 Insufficient vpc.amazonaws.com/efa."),
    ("storage", 'persistentvolumeclaim "fsx-claim" not found'),
    ("storage", "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
]
LOGS = [
    ("driver mismatch", 1, "RuntimeError: CUDA driver version is insufficient for CUDA runtime"),
    ("driver mismatch", 1, "UserWarning: The NVIDIA driver on your system is too old (11040)"),
    (
        "driver mismatch",
        2,
        "error: torch cannot use the GPUs of this machine: driver 535.104.05 is "
        "too old for torch 2.13.0, whose CUDA 13.0 needs 580 or newer",
    ),
    ("missing token", 2, "error: Access to model meta-llama/Llama-3.1-8B is restricted"),
    ("missing token", 2, "error: org/name is gated: its owner grants access to users one by one"),
    ("missing token", 1, "huggingface_hub.errors.GatedRepoError: 401 Client Error. gated repo"),
    ("out of GPU memory", 2, "error: out of memory\n  found:    CUDA out of memory. Tried to …"),
    ("out of GPU memory", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
    ("network interface", 1, "NCCL WARN Bootstrap : no socket interface found"),
    ("EFA configuration", 1, "NCCL WARN NET/OFI No eligible providers were found"),
    ("EFA configuration", 1, "NET/OFI Couldn't open a fabric access domain. RC: -12"),
    ("NCCL", 1, "torch.distributed.DistBackendError: NCCL error: ncclSystemError: unhandled"),
    ("bad input", 2, "error: --lr must be above 0, got -1"),
    ("damaged artifact", 3, "error: hf_datasets/c4 is not finished (no manifest.json)"),
    ("disk full", 4, "error: no room to write: outputs/exp/checkpoints"),
    ("stopped", 143, "stopped by SIGTERM after saving"),
    ("crashed", 1, "Traceback (most recent call last):\nKeyError: 'x'"),
]


@pytest.mark.parametrize(("name", "reason", "message"), STARTING)
def test_the_cause_of_a_container_that_does_not_start_is_found(
    kube: Cluster, name: str, reason: str, message: str
):
    cause = find_cause(kube, pods=[starting(reason, message)])
    assert (cause.name, cause.pod) == (name, HEAD) and cause.evidence == message


@pytest.mark.parametrize(("name", "message"), SCHEDULING)
def test_the_cause_of_a_pod_without_a_node_is_found(kube: Cluster, name: str, message: str):
    cause = find_cause(kube, pods=[unscheduled(message)])
    assert cause.name == name and cause.evidence == message


@pytest.mark.parametrize(("name", "code", "text"), LOGS)
def test_a_cause_is_found_in_the_log(kube: Cluster, name: str, code: int, text: str):
    log = "\n".join(["[rank=0] {'global_step': 10}", "NCCL INFO Bootstrap : Using eth0", text])
    cause = find_cause(kube, pods=[failed(code)], log=log)
    assert cause.name == name and text.splitlines()[0].removeprefix("error: ") in cause.evidence
    expected = 2 if name in ("missing token", "out of GPU memory") else code
    assert cause.code == (expected if expected < 128 else 1)


def test_a_crash_loop_is_explained_by_the_previous_log(kube: Cluster):
    looping = make_pod(
        "exp",
        HEAD,
        "Running",
        state=waiting("CrashLoopBackOff", "back-off 5m0s"),
        restarts=4,
        last_state=make_ended_state(1),
    )
    cause = find_cause(kube, pods=[looping], log="Segmentation fault")
    assert cause.name == "crash loop" and "Segmentation fault" in cause.evidence
    assert any("previous=true" in request for request in kube.requests)


def test_a_missing_token_differs_from_another_missing_secret(kube: Cluster):
    item = starting("CreateContainerConfigError", 'secret "hub" not found')
    item["spec"]["containers"][0]["env"] = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    ]
    assert find_cause(kube, pods=[item]).name == "missing token"


def test_a_container_killed_for_memory_is_explained(kube: Cluster):
    cause = find_cause(kube, pods=[failed(137, "OOMKilled")])
    assert (cause.name, cause.code) == ("out of memory", 2)


def test_lost_nodes_and_nodes_short_of_resources_are_causes(kube: Cluster):
    lost = make_pod("exp", HEAD, "Failed", reason="NodeLost", message="Node n1 is not responding")
    assert find_cause(kube, pods=[lost]).name == "node lost"


def test_an_evicted_pod_is_a_cause(kube: Cluster):
    item = make_pod("exp", HEAD, "Failed", reason="Evicted", message="low on ephemeral-storage")
    cause = find_cause(kube, pods=[item])
    assert cause.name == "evicted" and cause.passes


def test_a_volume_that_cannot_be_mounted_is_a_cause(kube: Cluster):
    item = make_pod("exp", HEAD, "Pending", state=waiting("ContainerCreating"))
    cause = find_cause(
        kube, pods=[item], events=[event(HEAD, "FailedMount", "MountVolume.SetUp: x")]
    )
    assert cause.name == "storage" and "MountVolume" in cause.evidence


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quota", 'pods "exp-worker-0" is forbidden: exceeded quota: gpus'),
        ("pods refused", "admission webhook denied the request: no such service account"),
    ],
)
def test_the_cause_of_a_job_without_pods_is_found(kube: Cluster, name: str, message: str):
    cause = find_cause(kube, pods=[], events=[event("exp", "FailedCreatePod", message)])
    assert cause.name == name


def test_the_cause_that_explains_the_others_comes_first(kube: Cluster):
    """One pod waits for an image and the others for that pod, so NCCL's errors do not count."""
    kube.logs["exp-worker-0"] = ["NCCL WARN timeout"]
    cause = find_cause(
        kube,
        pods=[
            make_pod("exp", "exp-worker-0", "Failed", state=make_ended_state(1)),
            make_pod(
                "exp", "exp-worker-1", "Pending", state=waiting("ErrImagePull", "manifest unknown")
            ),
        ],
    )
    assert (cause.name, cause.pod) == ("image missing", "exp-worker-1")


def test_the_pod_that_ended_first_is_examined(kube: Cluster):
    def died(name: str, code: int, second: int) -> dict[str, Any]:
        state = make_ended_state(code)
        state["terminated"]["finishedAt"] = f"2026-01-01T00:00:{second:02d}Z"
        return make_pod("exp", name, "Failed", state=state)

    kube.logs["exp-worker-0"] = ["ncclRemoteError: the connection broke"]
    kube.logs["exp-worker-1"] = ["error: c4 is damaged"]
    cause = find_cause(kube, pods=[died("exp-worker-0", 1, 9), died("exp-worker-1", 3, 5)])
    assert (cause.name, cause.pod, cause.code) == ("damaged artifact", "exp-worker-1", 3)


def test_pods_that_were_replaced_do_not_count(kube: Cluster):
    for day, name, state in (
        (1, "exp-node-0-0-aaaaa", make_ended_state(143)),
        (2, "exp-node-0-0-bbbbb", {"running": {}}),
    ):
        item = make_pod("exp", name, state=state)
        item["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = "0"
        item["metadata"]["creationTimestamp"] = f"2026-01-0{day}T00:00:00Z"
        kube.add("pods", item)
    [pod] = cluster_state.list_pods(Kubectl("default"), JobOptions(job_name="exp").selector)
    assert pod["metadata"]["name"] == "exp-node-0-0-bbbbb"


def test_running_pods_have_no_cause(kube: Cluster):
    running = make_pod(
        "exp", HEAD, state={"running": {}}, conditions=[{"type": "PodScheduled", "status": "True"}]
    )
    other = event("other-worker-0", "FailedMount", "not ours")
    assert find_cause(kube, pods=[running], events=[other]) is None


def test_pods_are_in_the_order_of_their_ranks(kube: Cluster):
    for name in ("exp-worker-10", "exp-worker-2", "exp-worker-0"):
        kube.add("pods", make_pod("exp", name))
    pod_list = cluster_state.list_pods(Kubectl("default"), JobOptions(job_name="exp").selector)
    assert [item["metadata"]["name"] for item in pod_list] == [
        "exp-worker-0",
        "exp-worker-2",
        "exp-worker-10",
    ]


def test_every_cause_has_a_remedy_and_a_test():
    named = {name for name, *_ in (*STARTING, *SCHEDULING, *LOGS)} | {
        "crash loop",
        "missing token",
        "out of memory",
        "node lost",
        "evicted",
        "storage",
        "quota",
        "pods refused",
        "operator missing",
        "deleted",
    }  # the last two are in the tests of deploy
    assert named == set(REMEDIES) and all(REMEDIES.values())
