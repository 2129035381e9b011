"""Read the state of a job from the cluster: its condition, its pods and their output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.cloud.kube import failure_causes
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from lib.core import log
from lib.core.errors import UsageError

ACTIVE = "active"
SUCCEEDED = "succeeded"
FAILED = "failed"
_FINAL_STATES = {
    "Succeeded": SUCCEEDED,
    "Complete": SUCCEEDED,
    "Completed": SUCCEEDED,
    "Failed": FAILED,
}
_LOG_LINES = "400"
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class State:
    """The state of a job: active, succeeded or failed. words: the condition that shows it."""

    state: str
    words: str


def read_job_state(job: dict[str, Any]) -> State:
    """Return the state of a job, according to its last condition that is true."""
    conditions = job.get("status", {}).get("conditions") or []
    for condition in reversed(conditions):
        if condition.get("status") == "True":
            words = f"{condition['type']} since {condition.get('lastTransitionTime', '?')}"
            if message := condition.get("message"):
                words += f": {message}"
            return State(_FINAL_STATES.get(condition["type"], ACTIVE), words)
    return State(ACTIVE, "the operator has not reported a condition yet")


def find_job(kubectl: Kubectl, resource: str, name: str) -> dict[str, Any]:
    """Return a job. Raises UsageError if it does not exist."""
    names: list[str] = []
    try:
        if job := kubectl.find(resource, name):
            return job
        names = [item["metadata"]["name"] for item in kubectl.items(resource)]
    except KubectlError as error:
        if not error.is_unknown_type:
            raise
    raise UsageError(
        f"no job {name} of type {resource} in namespace "
        f"{kubectl.namespace} of {kubectl.cluster.title}",
        found=", ".join(names) or "none of that type at all",
        hint=f"`{kubectl.format('get', resource, '--all-namespaces')}` shows those of other "
        "namespaces",
    )


def list_pods(kubectl: Kubectl, selector: str) -> list[failure_causes.Pod]:
    """Return the pods of a job in the order of their ranks, without replaced ones."""
    newest: dict[str, failure_causes.Pod] = {}
    for pod in sorted(
        kubectl.items("pods", "--selector", selector),
        key=lambda pod: pod["metadata"].get("creationTimestamp", ""),
    ):
        metadata = pod["metadata"]
        # A Job keeps ended pods beside their successors, under other names.
        newest[metadata.get("labels", {}).get(_INDEX_LABEL, metadata["name"])] = pod
    return failure_causes.sort_by_rank([*newest.values()])


def read_log_end(kubectl: Kubectl, pod: failure_causes.Pod) -> str:
    """Return the end of a pod's output; after a restart, of the previous container."""
    name = pod["metadata"]["name"]
    restarted = failure_causes.get_container(pod).get("restartCount", 0)
    has_ended = "terminated" in failure_causes.get_container(pod).get("state", {})
    for previous in (["--previous"] if restarted and not has_ended else [], []):
        try:
            return kubectl.run("logs", name, "--tail", _LOG_LINES, *previous)
        except KubectlError:
            continue  # the node is gone, or nothing has started yet
    return ""


def find_cause(
    kubectl: Kubectl, name: str, pods: list[failure_causes.Pod]
) -> failure_causes.Cause | None:
    """Return why a job does not run, None if nothing is wrong."""
    names = {name, *(pod["metadata"]["name"] for pod in pods)}
    try:
        events = [
            event
            for event in kubectl.items("events")
            if event.get("involvedObject", {}).get("name") in names
        ]
    except KubectlError as error:
        if not error.is_forbidden:
            raise
        events = []
    return failure_causes.find_cause(pods, events, lambda pod: read_log_end(kubectl, pod))


def print_pods(pods: list[failure_causes.Pod]) -> None:
    """Print a table of pods."""
    rows = [("pod", "phase", "node", "restarts", "")]
    for pod in pods:
        status = pod.get("status", {})
        ran = failure_causes.get_container(pod)
        waiting_reason = (ran.get("state", {}).get("waiting") or {}).get("reason", "")
        code = failure_causes.get_termination(pod).get("exitCode")
        rows.append(
            (
                pod["metadata"]["name"],
                status.get("phase", "?"),
                pod["spec"].get("nodeName", "-"),
                str(ran.get("restartCount", 0)),
                waiting_reason or ("" if code is None else f"exit code {code}"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        log.info(f"  {'  '.join(cells)}  {row[4]}".rstrip())


def print_cause(cause: failure_causes.Cause, run: str = "") -> None:
    """Print a cause with its evidence and its remedy. run: the commands that remove it, if any."""
    where = f" ({cause.pod})" if cause.pod else ""
    log.info(f"cause: {cause.name}{where}")
    for line in cause.evidence.splitlines()[-12:]:
        log.info(f"  | {line}")
    log.info(f"  → {cause.remedy}")
    for line in run.splitlines():
        log.info(f"  run: {line}")
