"""Find the cause of a job's failure in its pods, events and logs, and its remedy.

The cause that explains the others comes first: a pod that cannot start takes precedence over pods
that wait for it, and the text of a log over an exit code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.cloud.kube.kinds import ELASTIC
from lib.core.errors import EXIT_ARTIFACT, EXIT_BUG, EXIT_DISK_FULL, EXIT_PREEMPTED, EXIT_USAGE
from lib.planning.knobs import KNOBS

Pod = dict[str, Any]
Logs = Callable[[Pod], str]


@dataclass(frozen=True)
class Cause:
    """Why a job failed or does not start.

    name: a key of REMEDIES; names never change. evidence: text of the cluster or of a log. code:
    the exit code of a run that failed for this cause.
    """

    name: str
    pod: str
    evidence: str
    code: int = EXIT_BUG

    @property
    def remedy(self) -> str:
        """Return what a person can do about it."""
        return REMEDIES[self.name]

    @property
    def passes(self) -> bool:
        """Return whether the cause may pass by itself."""
        return self.name in _PASSING_REMEDIES

    @property
    def is_stuck(self) -> bool:
        """Return whether the cause keeps a pod from running until a person acts."""
        return self.name in _STUCK_REMEDIES


# What a person can do about each cause. These causes keep a pod from running until a person acts,
# so waiting for the operator is pointless.
_STUCK_REMEDIES = {
    "image missing": "check --image and its tag; launch/build_image.py --push pushes an image",
    "image forbidden": "kubectl create secret docker-registry NAME …, then --image-pull-secret "
    "NAME; on EKS the nodes' role needs AmazonEC2ContainerRegistryPullOnly",
    "missing token": "export HF_TOKEN and use prepare or deploy, which create the secret; for a "
    "gated model, request access on its page",
    "missing secret": "create the secret or config map that the pod names",
    "no such node": "check --instance-type against `kubectl get nodes -L "
    "node.kubernetes.io/instance-type`, and the taints of these nodes",
    "no huge pages": "the nodes reserve none; the next attempt does not request them",
    "no EFA": "install the EFA device plugin, or use --efa-per-node 0, which is several times "
    "slower between nodes",
    "quota": "raise the namespace's ResourceQuota, or use fewer --nodes",
    "pods refused": "see the event; mostly a limit, a policy or an admission webhook is the reason",
    "driver mismatch": "use an image whose CUDA the driver supports (launch/build_image.py "
    "--auto-fix), or update the driver of the nodes",
    "wrong image": "the image lacks the program or the code; --code-dir is the directory of "
    "04_train_fsdp.py in it",
    "out of GPU memory": f"in this order: {'; '.join(knob.remedy for knob in KNOBS)}; stage 04 "
    "--dry-run --plan-gpus estimates the memory",
    "out of memory": "a larger memory request in launch/cloud/kube/templates/pod.yaml, fewer "
    "workers, or an instance with more memory",
    "bad input": "see the error of the run above; another attempt would fail as well",
    "damaged artifact": "see the error of the run above; `kubernetes.py prepare` with the same "
    "options makes missing artifacts again",
    "disk full": "free space on the volume of --pvc, or keep fewer checkpoints (--ckpt-keep)",
}
# These causes may pass by themselves, so the same job is worth another attempt.
_PASSING_REMEDIES = {
    "registry out of reach": "the pull is retried; in an air gap, --image must name a registry "
    "inside it",
    "no capacity": "wait, add nodes, use fewer --nodes, or start smaller with --min-nodes "
    f"({ELASTIC})",
    "node lost": "the job is retried on another node, from the newest checkpoint",
    "evicted": "the node ran out of the resource in the message",
    "stopped": "the pods received a signal; the same job continues from its checkpoint",
    "NCCL": "NCCL_DEBUG=INFO shows more; run `launch/check.py network` on the same nodes",
}
REMEDIES = {
    **_STUCK_REMEDIES,
    **_PASSING_REMEDIES,
    "storage": "check --pvc: `kubectl get pvc` must show it Bound, with access mode ReadWriteMany",
    "operator missing": "install the operator of --kind, or see its log: it created no pods",
    "network interface": "NCCL_SOCKET_IFNAME excludes the interface of the pods; the next attempt "
    "lets NCCL choose",
    "EFA configuration": "the image needs libfabric and aws-ofi-nccl (launch/cloud/Dockerfile with "
    "EFA), and the nodes' security group must allow all traffic to itself",
    "deleted": "somebody deleted it; the same command submits it again, and it continues from its "
    "checkpoint",
    "crash loop": "see the output of the pod above; `kubernetes.py logs` shows all of it",
    "crashed": "see the output of the pod above; `kubernetes.py logs` shows all of it",
}

# Lines of a log, the most specific first: (cause, pattern, exit code).
_LOG_SIGNS = [
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
            r"gated repo|is gated: its owner|does not accept the token|401 Client Error|"
            r"Access to model .* is restricted|"
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
# Patterns for messages about an image, and for those of the scheduler, which lists a reason for
# each group of nodes. The most specific come first; the last matches any message.
_IMAGE_CAUSES = (
    ("image forbidden", "unauthorized|denied|no basic auth|authentication required|403"),
    (
        "registry out of reach",
        "timeout|timed out|no such host|connection re|too ?many ?requests|429|TLS|EOF",
    ),
    ("image missing", ""),
)
_SCHEDULING_CAUSES = (
    ("storage", "persistentvolumeclaim|volume node affinity|unbound"),
    ("no huge pages", "Insufficient hugepages"),
    ("no EFA", "Insufficient vpc.amazonaws.com/efa"),
    ("no capacity", "Insufficient|Too many pods"),
    ("no such node", "node affinity|node selector|untolerated taint"),
    ("no capacity", ""),
)
_CAUSE_OF_CODE = {
    EXIT_USAGE: "bad input",
    EXIT_ARTIFACT: "damaged artifact",
    EXIT_DISK_FULL: "disk full",
}
# Causes that are read from the log even if the exit code alone would name another one.
_CAUSES_OF_ANY_CODE = {"missing token", "out of GPU memory", "driver mismatch"}
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
_NEVER_ENDED = "9999"


def find_cause(pods: list[Pod], events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Return the cause that keeps a job from running, None if there is none.

    events: of the pods and of the job. logs: function that returns the end of a pod's output.
    """
    by_end = sorted(pods, key=lambda pod: get_termination(pod).get("finishedAt", _NEVER_ENDED))
    for find, order in (
        (_find_start_cause, pods),
        (_find_scheduling_cause, pods),
        (_find_end_cause, by_end),
    ):
        for pod in order:
            if cause := find(pod, events, logs):
                return cause
    return _find_event_cause(pods, events)


def sort_by_rank(pods: list[Pod]) -> list[Pod]:
    """Return pods sorted by the numbers in their names."""
    return sorted(
        pods,
        key=lambda pod: [
            int(part) if part.isdecimal() else -1
            for part in re.split(r"\D+", pod["metadata"]["name"])
        ],
    )


def get_container(pod: Pod) -> dict[str, Any]:
    """Return the state of a pod's only container, empty before there is one."""
    return next(iter(pod.get("status", {}).get("containerStatuses") or []), {})


def get_termination(pod: Pod) -> dict[str, Any]:
    """Return how the container ended, now or before its restart; empty if it has not ended."""
    states = get_container(pod)
    return (
        states.get("state", {}).get("terminated")
        or states.get("lastState", {}).get("terminated")
        or {}
    )


def is_looping(pod: Pod) -> bool:
    """Return whether the container keeps failing."""
    waiting = get_container(pod).get("state", {}).get("waiting") or {}
    return waiting.get("reason") == "CrashLoopBackOff"


def _pod_name(pod: Pod) -> str:
    return pod["metadata"]["name"]


def _find_start_cause(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Return why a container cannot start: its image, its configuration or its first process."""
    state = get_container(pod).get("state", {})
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    message = waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        reasons = " ".join(
            [message, *(text for text in _list_warnings(pod, events) if "pull" in text)]
        )
        return Cause(
            _match_cause(_IMAGE_CAUSES, reasons), _pod_name(pod), message or reasons or reason
        )
    if reason == "CreateContainerConfigError":
        is_token = (
            re.search(r"secret .*not found|couldn't find key token", message)
            and _find_token_secret(pod) in message
        )
        return Cause("missing token" if is_token else "missing secret", _pod_name(pod), message)
    end = get_termination(pod)
    for end_reason, text in ((reason, message), (end.get("reason", ""), end.get("message", ""))):
        if end_reason in _START_REASONS:
            name = (
                "driver mismatch" if re.search("nvidia-container-cli|cuda", text) else "wrong image"
            )
            return Cause(name, _pod_name(pod), text)
    return None


def _match_cause(table: tuple[tuple[str, str], ...], text: str) -> str:
    """Return the first cause of a table whose pattern matches a text."""
    return next(name for name, pattern in table if re.search(pattern, text, re.IGNORECASE))


def _find_token_secret(pod: Pod) -> str:
    """Return the name of the secret of HF_TOKEN; without one, a text that no message contains."""
    variables = pod["spec"]["containers"][0].get("env", [])
    return next(
        (
            v["valueFrom"]["secretKeyRef"]["name"]
            for v in variables
            if v["name"] == "HF_TOKEN" and "secretKeyRef" in v.get("valueFrom", {})
        ),
        "\0",
    )


def _find_scheduling_cause(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Return why a pod has no node, or why its volume cannot be mounted."""
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
        return Cause(_match_cause(_SCHEDULING_CAUSES, message), _pod_name(pod), message)
    if not get_container(pod).get("started"):
        for text in _list_warnings(pod, events):
            if re.search("FailedMount|FailedAttachVolume|MountVolume", text):
                return Cause("storage", _pod_name(pod), text)
    return None


def _find_end_cause(pod: Pod, events: list[dict[str, Any]], logs: Logs) -> Cause | None:
    """Return why a container ended, from its status, its exit code and its log."""
    status = pod.get("status", {})
    end = get_termination(pod)
    if status.get("reason") in ("NodeLost", "NodeShutdown", "Terminated", "Shutdown"):
        return Cause("node lost", _pod_name(pod), status.get("message", status["reason"]))
    if status.get("reason") == "Evicted":
        return Cause("evicted", _pod_name(pod), status.get("message", ""))
    code = end.get("exitCode", 0)
    if not end or code == 0:
        return None
    if end.get("reason") == "OOMKilled":
        return Cause(
            "out of memory",
            _pod_name(pod),
            "the kernel killed the container (OOMKilled)",
            EXIT_USAGE,
        )
    text = logs(pod)
    # The error of the run itself counts more than what NCCL printed before it.
    [*_, error] = re.split(r"^(?=.*\berror: )", text, flags=re.MULTILINE) or [""]
    for name, pattern, exit_code in _LOG_SIGNS:
        is_possible = code not in _CAUSE_OF_CODE or name in _CAUSES_OF_ANY_CODE
        if is_possible and (match := pattern.search(text)):
            return Cause(name, _pod_name(pod), match[0].strip()[:1000], exit_code)
    evidence = f"exit code {code}: {error.strip() or end.get('message', '')}"[:1500]
    if code in _CAUSE_OF_CODE:
        return Cause(_CAUSE_OF_CODE[code], _pod_name(pod), evidence, code)
    if code in (EXIT_PREEMPTED, _SIGNALLED + 15):
        name = "stopped"
    else:
        name = "crash loop" if is_looping(pod) else "crashed"
    return Cause(name, _pod_name(pod), evidence, code if code < _SIGNALLED else EXIT_BUG)


def _find_event_cause(pods: list[Pod], events: list[dict[str, Any]]) -> Cause | None:
    """Return why pods are missing."""
    for event in events:
        message = event.get("message", "")
        if "exceeded quota" in message:
            return Cause("quota", "", message)
        if event.get("reason", "") in ("FailedCreatePod", "FailedCreate"):
            return Cause("pods refused", "", message)
    return None


def _list_warnings(pod: Pod, events: list[dict[str, Any]]) -> list[str]:
    """Return the warnings about a pod, the newest last, as `reason: message`."""
    return [
        f"{event.get('reason', '')}: {event.get('message', '')}"
        for event in events
        if event.get("involvedObject", {}).get("name") == _pod_name(pod)
        and event.get("type") == "Warning"
    ]
