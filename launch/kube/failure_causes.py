"""Finds why a job does not run, in its pods, events and logs, and what cures it, if only time.

The first thing that explains the rest is looked for: a pod that cannot start tells more than one
that waits for it, and the words of a log more than an exit code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.kube.kinds import ELASTIC
from lib.core.errors import EXIT_ARTIFACT, EXIT_BUG, EXIT_DISK_FULL, EXIT_PREEMPTED, EXIT_USAGE

Pod = dict[str, Any]
Logs = Callable[[Pod], str]


@dataclass(frozen=True)
class Cause:
    """Says what is wrong.

    name: a key of REMEDIES, which stays. evidence: what the cluster or a log says. code: the exit
    code of a run that failed of it.
    """

    name: str
    pod: str
    evidence: str
    code: int = EXIT_BUG

    @property
    def remedy(self) -> str:
        return REMEDIES[self.name]

    @property
    def passes(self) -> bool:
        """Tell whether it may pass by itself."""
        return self.name in _PASSING

    @property
    def is_stuck(self) -> bool:
        """Tell whether it keeps a pod from running until somebody acts."""
        return self.name in _STUCK


# What a person can do about each cause. These keep a pod from running for good, or until somebody
# acts: there is no need to wait for the operator.
_STUCK = {
    "image missing": "check --image and its tag; launch/build_image.py --push makes and pushes one",
    "image forbidden": "kubectl create secret docker-registry NAME …, then --image-pull-secret "
    "NAME; on EKS the nodes' role needs AmazonEC2ContainerRegistryPullOnly",
    "missing token": "export HF_TOKEN and use prepare or deploy, which make the secret; for a "
    "gated model, ask for access on its page",
    "missing secret": "create the secret or config map that the pod names",
    "no such node": "check --instance-type against `kubectl get nodes -L "
    "node.kubernetes.io/instance-type`, and the taints of these nodes",
    "no huge pages": "the nodes reserve none: they are not asked for in the next try",
    "no EFA": "install the EFA device plugin, or --efa-per-node 0, which is several times slower "
    "between nodes",
    "quota": "raise the namespace's ResourceQuota, or ask for fewer --nodes",
    "pods refused": "what the event says; mostly a limit, a policy or an admission webhook",
    "driver mismatch": "take an image whose CUDA the driver supports: launch/build_image.py "
    "--auto-fix; or update the driver of the nodes",
    "wrong image": "the image lacks the program or the code: --code-dir is where "
    "04_train_fsdp.py lies in it",
    "out of GPU memory": "--activation-checkpointing full, a smaller -b with the same "
    "--global-batch-size, more nodes; stage 04 --dry-run --plan-gpus plans it",
    "out of memory": "a larger memory request in launch/kube/templates/pod.yaml, fewer workers, "
    "or an instance with more memory",
    "bad input": "what the run says above; nothing is gained by another try",
    "damaged artifact": "what the run says above; prepare the artifact again: `kubernetes.py "
    "prepare` with the same options makes what is not on the volume",
    "disk full": "room on the volume of --pvc, or --ckpt-keep with fewer checkpoints",
}
# These may pass by themselves, so that the same job is worth another try.
_PASSING = {
    "registry out of reach": "it is tried again; in an air gap, --image must name a registry "
    "inside it",
    "no capacity": "wait, add nodes, ask for fewer --nodes, or start smaller with --min-nodes "
    f"({ELASTIC})",
    "node lost": "it is tried again on another node, from the newest checkpoint",
    "evicted": "the node ran short of what the message says",
    "stopped": "something told the pods to end; the same job goes on from its checkpoint",
    "NCCL": "NCCL_DEBUG=INFO says more; run `launch/check.py network` on the same nodes",
}
REMEDIES = {
    **_STUCK,
    **_PASSING,
    "storage": "check --pvc: `kubectl get pvc` must show it Bound, with access mode ReadWriteMany",
    "operator missing": "install the operator of --kind, or see its log: it made no pods",
    "network interface": "NCCL_SOCKET_IFNAME excludes the interface of the pods: the next try "
    "lets NCCL choose",
    "EFA configuration": "the image needs libfabric and aws-ofi-nccl (launch/Dockerfile with "
    "EFA), and the nodes' security group must allow all traffic to itself",
    "deleted": "somebody stopped it; the same command submits it again, and it goes on from its "
    "checkpoint",
    "crash loop": "what the pod printed, above; `kubernetes.py logs` shows all of it",
    "crashed": "what the pod printed, above; `kubernetes.py logs` shows all of it",
}

# Lines of a log, the most telling first; (cause, pattern, exit code).
_SIGNS = [
    (name, re.compile(rf"^.*(?:{pattern}).*$", re.IGNORECASE | re.MULTILINE), code)
    for name, pattern, code in (
        (
            "driver mismatch",
            r"driver version is insufficient|driver on your system is too old|"
            r"forward compatibility was attempted|no kernel image is available|"
            r"driver/library version mismatch|unsatisfied condition: cuda",
            EXIT_BUG,
        ),
        (
            "driver mismatch",
            r"driver [\d.]+ is too old for torch|holds no code for its compute cap",
            EXIT_USAGE,
        ),
        (
            "missing token",
            r"gated repo|401 Client Error|Access to model .* is restricted|"
            r"Invalid user(name)? or (password|token)|HF_TOKEN.*(missing|not set|needed)",
            EXIT_USAGE,
        ),
        (
            "out of GPU memory",
            r"CUDA out of memory|OutOfMemoryError|^error: out of memory",
            EXIT_USAGE,
        ),
        (
            "network interface",
            r"no socket interface found|"
            r"Unable to find (address|interface)|NCCL_SOCKET_IFNAME",
            EXIT_BUG,
        ),
        (
            "EFA configuration",
            r"No eligible providers were found|NET/OFI .*(fail|unable|error|couldn't)"
            r"|fi_getinfo.*(No data available|fail)|fi_domain.*(fail|error)"
            r"|efa.*Cannot allocate memory|RDMA .*not supported",
            EXIT_BUG,
        ),
        (
            "NCCL",
            r"ncclSystemError|ncclInternalError|ncclRemoteError|unhandled system error|"
            r"NCCL WARN|Watchdog caught collective operation timeout",
            EXIT_BUG,
        ),
    )
]
# Words of a message about an image, and of the scheduler, which lists a reason for every group of
# nodes: the most telling first, the last if none is there.
_IMAGE = (
    ("image forbidden", "unauthorized|denied|no basic auth|authentication required|403"),
    (
        "registry out of reach",
        "timeout|timed out|no such host|connection re|too ?many ?requests|429|TLS|EOF",
    ),
    ("image missing", ""),
)
_UNSCHEDULED = (
    ("storage", "persistentvolumeclaim|volume node affinity|unbound"),
    ("no huge pages", "Insufficient hugepages"),
    ("no EFA", "Insufficient vpc.amazonaws.com/efa"),
    ("no capacity", "Insufficient|Too many pods"),
    ("no such node", "node affinity|node selector|untolerated taint"),
    ("no capacity", ""),
)
_CODES = {EXIT_USAGE: "bad input", EXIT_ARTIFACT: "damaged artifact", EXIT_DISK_FULL: "disk full"}
_OF_ANY_CODE = {"missing token", "out of GPU memory", "driver mismatch"}  # a run tells them with 2
_IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
}
_START_REASONS = {"RunContainerError", "CreateContainerError", "StartError", "ContainerCannotRun"}
_SIGNALLED = 128
_NEVER = "9999"


def find(pods: list[Pod], events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Return what keeps a job from running, None when nothing is seen to.

    events: of the pods and of the job. logs: returns the end of what a pod printed.
    """
    by_end = sorted(pods, key=lambda pod: terminated(pod).get("finishedAt", _NEVER))
    for look, order in ((_of_starting, pods), (_of_scheduling, pods), (_of_ending, by_end)):
        for pod in order:
            if cause := look(pod, events, logs):
                return cause
    return _of_events(pods, events)


def in_rank_order(pods: list[Pod]) -> list[Pod]:
    """Return pods by the numbers in their names, of which the last generated part is not a rank."""
    return sorted(
        pods,
        key=lambda pod: [
            int(part) if part.isdecimal() else -1
            for part in re.split(r"\D+", pod["metadata"]["name"])
        ],
    )


def container(pod: Pod) -> dict[str, Any]:
    """Return the state of a pod's only container, empty before there is one."""
    return next(iter(pod.get("status", {}).get("containerStatuses") or []), {})


def terminated(pod: Pod) -> dict[str, Any]:
    """Return how the container ended, or ended before it was started again; empty if it did not."""
    states = container(pod)
    return (
        states.get("state", {}).get("terminated")
        or states.get("lastState", {}).get("terminated")
        or {}
    )


def is_looping(pod: Pod) -> bool:
    """Tell whether the container ends again and again."""
    waits = container(pod).get("state", {}).get("waiting") or {}
    return waits.get("reason") == "CrashLoopBackOff"


def _name(pod: Pod) -> str:
    return pod["metadata"]["name"]


def _of_starting(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Look at a container that waits: for its image, its configuration, its first process."""
    state = container(pod).get("state", {})
    waits = state.get("waiting") or {}
    reason = waits.get("reason", "")
    message = waits.get("message", "")
    if reason in _IMAGE_REASONS:
        reasons = " ".join([message, *(text for text in _events_of(pod, events) if "pull" in text)])
        return Cause(_named(_IMAGE, reasons), _name(pod), message or reasons or reason)
    if reason == "CreateContainerConfigError":
        is_token = (
            re.search(r"secret .*not found|couldn't find key token", message)
            and _token_secret(pod) in message
        )
        return Cause("missing token" if is_token else "missing secret", _name(pod), message)
    ended = terminated(pod)
    for why, text in ((reason, message), (ended.get("reason", ""), ended.get("message", ""))):
        if why in _START_REASONS:
            name = (
                "driver mismatch" if re.search("nvidia-container-cli|cuda", text) else "wrong image"
            )
            return Cause(name, _name(pod), text)
    return None


def _named(table: tuple[tuple[str, str], ...], text: str) -> str:
    """Return the first cause of a table whose words are in a text."""
    return next(name for name, pattern in table if re.search(pattern, text, re.IGNORECASE))


def _token_secret(pod: Pod) -> str:
    """Return the secret that HF_TOKEN comes from; a text that is in no message without one."""
    variables = pod["spec"]["containers"][0].get("env", [])
    return next(
        (
            v["valueFrom"]["secretKeyRef"]["name"]
            for v in variables
            if v["name"] == "HF_TOKEN" and "secretKeyRef" in v.get("valueFrom", {})
        ),
        "\0",
    )


def _of_scheduling(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Look at why a pod has no node, or a node no volume for it."""
    conditions = pod.get("status", {}).get("conditions") or []
    message = next(
        (
            c.get("message", "")
            for c in conditions
            if c["type"] == "PodScheduled" and c["status"] == "False"
        ),
        "",
    )
    if message:
        return Cause(_named(_UNSCHEDULED, message), _name(pod), message)
    if not container(pod).get("started"):
        for text in _events_of(pod, events):
            if re.search("FailedMount|FailedAttachVolume|MountVolume", text):
                return Cause("storage", _name(pod), text)
    return None


def _of_ending(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Look at how a container ended, and what it said last."""
    status = pod.get("status", {})
    ended = terminated(pod)
    if status.get("reason") in ("NodeLost", "NodeShutdown", "Terminated", "Shutdown"):
        return Cause("node lost", _name(pod), status.get("message", status["reason"]))
    if status.get("reason") == "Evicted":
        return Cause("evicted", _name(pod), status.get("message", ""))
    code = ended.get("exitCode", 0)
    if not ended or code == 0:
        return None
    if ended.get("reason") == "OOMKilled":
        return Cause(
            "out of memory", _name(pod), "the kernel killed the container (OOMKilled)", EXIT_USAGE
        )
    said = logs(pod)
    # What a run says in its own error is its cause, whatever NCCL printed about it.
    [*_, error] = re.split(r"^(?=.*\berror: )", said, flags=re.MULTILINE) or [""]
    for name, pattern, exit_code in _SIGNS:
        in_doubt = code not in _CODES or name in _OF_ANY_CODE
        if in_doubt and (found := pattern.search(said)):
            return Cause(name, _name(pod), found[0].strip()[:1000], exit_code)
    evidence = f"exit code {code}: {error.strip() or ended.get('message', '')}"[:1500]
    if code in _CODES:
        return Cause(_CODES[code], _name(pod), evidence, code)
    if code in (EXIT_PREEMPTED, _SIGNALLED + 15):
        name = "stopped"
    else:
        name = "crash loop" if is_looping(pod) else "crashed"
    return Cause(name, _name(pod), evidence, code if code < _SIGNALLED else EXIT_BUG)


def _of_events(pods: list[Pod], events: list[dict[str, Any]]) -> Cause | None:
    """Look at why there are no pods, or fewer than asked for."""
    for event in events:
        message = event.get("message", "")
        if "exceeded quota" in message:
            return Cause("quota", "", message)
        if event.get("reason", "") in ("FailedCreatePod", "FailedCreate"):
            return Cause("pods refused", "", message)
    return None


def _events_of(pod: Pod, events: list[dict[str, Any]]) -> list[str]:
    """Return the warnings about a pod, the newest last, as `reason: message`."""
    return [
        f"{event.get('reason', '')}: {event.get('message', '')}"
        for event in events
        if event.get("involvedObject", {}).get("name") == _name(pod)
        and event.get("type") == "Warning"
    ]
