"""Submits and follows a job; finds why it fails, applies or names the cure, and tries again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from launch.kube import cluster_state, failure_causes
from launch.kube.cluster_state import ACTIVE, FAILED, SUCCEEDED
from launch.kube.failure_causes import Cause
from launch.kube.job import Job, text
from launch.kube.job_options import JobOptions
from launch.kube.kinds import KINDS
from launch.kube.kubectl import Kubectl, KubectlError
from launch.kube.nodes import INSTANCE_TYPE
from lib.core import log, options, units
from lib.core.declared import option
from lib.core.errors import EXIT_BUG, Problems, StageError
from lib.core.retry import backoff, poll
from lib.parallel import recompute
from lib.train import command_line

_LONGEST_BACKOFF_S = 600.0
_MOST_SILENT_POLLS = 20  # of a cluster that does not answer while the job runs
_LAST_LINES_S = 10.0  # of a job that is complete
_STOP_TIMEOUT_S = 420.0  # above the grace in which pods save


class JobFailed(StageError):
    """Says why a job failed in the end. code: the exit code of the run, where it is known."""

    def __init__(self, problem: str, code: int = EXIT_BUG, **parts: str) -> None:
        super().__init__(problem, **parts)
        self.code = code


@dataclass(frozen=True)
class Patience:
    """Says how often and how long a job is tried."""

    attempts: int = option(
        5, group="the run", parse=options.positive_int, help="deploy: submissions in all"
    )
    poll_seconds: float = option(
        10.0, parse=options.positive, metavar="S", help="deploy: between two looks at the job"
    )
    backoff_seconds: float = option(
        30.0,
        parse=options.non_negative,
        metavar="S",
        help="deploy: before the second attempt, doubled with each further one",
    )
    pending_minutes: float = option(
        30.0,
        parse=options.positive,
        metavar="MIN",
        help="deploy: how long pods may wait for nodes, image and volume",
    )


def submit(asked: Job, kubectl: Kubectl) -> None:
    """Create or change the job; KubectlError when the cluster refuses it."""
    headline = f"job {asked.job_name}, made by launch/kubernetes.py"
    for line in kubectl.apply(text(asked.manifests(), headline)).splitlines():
        log.info(f"  {line}")


def stop(asked: JobOptions, kubectl: Kubectl) -> None:
    """Delete a job, whose pods save and end, and the runtime that was made for it."""
    kubectl.run(
        "delete",
        asked.resource,
        asked.job_name,
        "--ignore-not-found",
        "--cascade=foreground",
        timeout=_STOP_TIMEOUT_S,
    )
    if runtimes := KINDS[asked.kind].runtime:
        kubectl.run("delete", runtimes, asked.runtime, "--ignore-not-found")


def check(asked: Job, kubectl: Kubectl) -> None:
    """Look for what the job needs in the cluster; UsageError tells all that is missing."""
    kubectl.run("get", "--raw", "/version")  # an unreachable cluster is told once
    problems = Problems()
    try:
        kubectl.items(asked.resource)
    except KubectlError as error:
        if error.is_transient:
            raise
        problems.add(
            f"the cluster does not take {asked.resource}",
            found=error.text.strip(),
            expected=f"the operator for --kind {asked.kind}, and the right to use it",
        )
    for flag, name in (("--pvc", asked.pvc), ("--bucket-pvc", asked.bucket_pvc)):
        claim = _looked_up(kubectl, "pvc", name) if name else {}
        if claim is None:
            problems.add(
                f"{flag}: no claim {name} in namespace {asked.namespace}",
                hint=f"`kubectl get pvc --namespace {asked.namespace}` shows those there are",
            )
        elif (phase := claim.get("status", {}).get("phase", "Bound")) == "Lost":
            problems.add(f"{flag}: {name} is {phase}")
    if asked.image_pull_secret and _looked_up(kubectl, "secret", asked.image_pull_secret) is None:
        problems.add(f"--image-pull-secret: no secret {asked.image_pull_secret}")
    problems.raise_if_any()
    if asked.instance_type:
        _note_nodes(asked, kubectl)


def _looked_up(kubectl: Kubectl, kind: str, name: str) -> dict[str, Any] | None:
    """Return an object, None when it is missing; empty where one may not look."""
    try:
        return kubectl.find(kind, name)
    except KubectlError as error:
        if error.is_forbidden:
            return {}
        raise


def _note_nodes(asked: Job, kubectl: Kubectl) -> None:
    try:
        nodes = kubectl.items("nodes")
    except KubectlError as error:
        log.info(f"nodes: not checked ({error.last_line})")
        return
    types = [node["metadata"].get("labels", {}).get(INSTANCE_TYPE, "?") for node in nodes]
    if (there := types.count(asked.instance_type)) < asked.nodes:
        log.warn(
            f"{there} of {asked.nodes} nodes of type {asked.instance_type} are there; the "
            f"cluster has: {', '.join(sorted(set(types))) or 'no nodes'}"
        )


def put_token(kubectl: Kubectl, name: str, token: str) -> None:
    """Create or replace the secret that holds the Hub's token, which no command line shows."""
    kubectl.put(
        text(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "type": "Opaque",
                    "metadata": {"name": name, "namespace": kubectl.namespace},
                    "stringData": {"token": token},
                }
            ],
            "made by launch/kubernetes.py",
        )
    )
    log.info(f"secret {name}: holds the token of HF_TOKEN")


def deploy(
    asked: Job,
    kubectl: Kubectl,
    *,
    token: str = "",
    monitor: bool = True,
    patience: Patience | None = None,
) -> None:
    """Run a job to its end; JobFailed with the last word when it cannot be.

    token: of the Hub; it goes into a secret. monitor: show the first node's log meanwhile.
    """
    patience = patience or Patience()
    check(asked, kubectl)
    if token:
        asked = replace(asked, token_secret=asked.token_secret or f"{asked.job_name}-hub-token")
    for attempt in range(1, patience.attempts + 1):
        if token:
            put_token(kubectl, asked.token_secret, token)
        log.info(
            f"attempt {attempt} of {patience.attempts}: {asked.job_name}, {asked.nodes} × "
            f"{asked.instance_type or 'any node'}"
        )
        if not _is_there(asked, kubectl):
            submit(asked, kubectl)
        cause = _Watch(asked, kubectl, patience, monitor).until_it_ends()
        if cause is None:
            log.info(f"job {asked.job_name} is complete")
            return
        cluster_state.show_cause(cause)
        cure = _CURES.get(cause.name)
        cured = cure(asked, kubectl) if cure else None
        if attempt == patience.attempts or not (cured or cause.passes):
            raise _give_up(asked, kubectl, cause, attempt)
        pause = backoff(attempt, patience.backoff_seconds, _LONGEST_BACKOFF_S)
        log.info(f"trying again in {units.duration(pause)}" + (", with the cure" if cured else ""))
        stop(asked, kubectl)
        time.sleep(pause)
        asked = cured or asked


def _is_there(asked: Job, kubectl: Kubectl) -> bool:
    """Tell whether a job of that name runs; one that has ended makes room."""
    there = kubectl.find(asked.resource, asked.job_name)
    if there is None:
        return False
    if cluster_state.of_job(there).state == ACTIVE:
        log.warn(
            f"a job {asked.job_name} runs already: it is followed as it is; stop it to change it"
        )
        return True
    log.info("  an ended job of that name makes room")
    stop(asked, kubectl)
    return False


def _give_up(asked: Job, kubectl: Kubectl, cause: Cause, attempt: int) -> JobFailed:
    """Return the last word; a job that would still wait or crash is deleted, it holds GPUs."""
    there = kubectl.find(asked.resource, asked.job_name)
    left = f"kubectl describe pods --namespace {asked.namespace} --selector {asked.selector}"
    if there and cluster_state.of_job(there).state == ACTIVE:
        stop(asked, kubectl)
        left = "nothing of the job is left in the cluster"
    tried = f"after {attempt} attempts" if attempt > 1 else "at the first attempt"
    return JobFailed(
        f"job {asked.job_name} failed {tried}: {cause.name}",
        cause.code,
        hint=cause.remedy,
        found=f"{cause.evidence.strip() or 'the operator says nothing'}\n({left})",
    )


def _less_memory(asked: Job, kubectl: Kubectl) -> Job | None:
    """Recompute more, which changes nothing that is learned."""
    now = command_line.parse_options(asked.train).activation_checkpointing
    if now == recompute.KINDS[-1]:
        return None
    # What auto has chosen there is not known here.
    more = recompute.KINDS[recompute.KINDS.index(now) + 1 if now in recompute.KINDS else -1]
    log.info(f"  cure: --activation-checkpointing {more} instead of {now}")
    return replace(asked, train=(*asked.train, f"--activation-checkpointing={more}"))


def _changed(said: str, **changes: Any) -> Callable[[Job, Kubectl], Job | None]:
    """Return the cure that changes a job in one way; None once it has been changed so."""

    def cure(asked: Job, kubectl: Kubectl) -> Job | None:
        if changes.items() <= vars(asked).items():
            return None
        log.info(f"  cure: {said}")
        return replace(asked, **changes)

    return cure


def _pull_secret(asked: Job, kubectl: Kubectl) -> Job | None:
    """Use the namespace's registry credentials when there are just one."""
    if asked.image_pull_secret:
        return None
    try:
        found = kubectl.items("secrets", "--field-selector", "type=kubernetes.io/dockerconfigjson")
    except KubectlError:
        return None
    if len(found) != 1:
        return None
    name = found[0]["metadata"]["name"]
    log.info(f"  cure: the image is pulled with the secret {name}")
    return replace(asked, image_pull_secret=name)


# Nothing that changes what is learned; each returns None where only a person can help.
_CURES: dict[str, Callable[[Job, Kubectl], Job | None]] = {
    "out of GPU memory": _less_memory,
    "no huge pages": _changed("no huge pages are asked for", huge_pages=False),
    "network interface": _changed("NCCL_SOCKET_IFNAME is left out", interfaces=""),
    "image forbidden": _pull_secret,
}


class _Watch:
    """Follows one submission."""

    def __init__(self, asked: Job, kubectl: Kubectl, patience: Patience, monitor: bool) -> None:
        self._job = asked
        self._kubectl = kubectl
        self._patience = patience
        self._monitor = monitor
        self._log: subprocess.Popen[bytes] | None = None
        self._logged = ""
        self._shown = ""
        self._shown_cause = ""
        self._silent = 0
        self._pending_since = time.monotonic()

    def until_it_ends(self) -> Cause | None:
        """Return why the job failed, None when it is complete."""
        cause: Cause | None = None

        def has_ended() -> bool:
            nonlocal cause
            try:
                ended, cause = self._look()
            except KubectlError as error:
                self._endure(error)
                return False
            self._silent = 0
            return ended

        try:
            poll(has_ended, self._patience.poll_seconds)
            return cause
        finally:
            if self._log is not None:
                self._log.terminate()
                self._log.wait()

    def _look(self) -> tuple[bool, Cause | None]:
        name = self._job.job_name
        found = self._kubectl.find(self._job.resource, name)
        if found is None:
            return True, Cause("deleted", "", "the job is no longer there")
        state = cluster_state.of_job(found)
        pods = cluster_state.pods(self._kubectl, self._job.selector)
        if state.words != self._shown:
            self._shown = state.words
            log.info(f"{name}: {state.words}")
        if state.state == SUCCEEDED:
            self._follow_log(pods, ("Running", "Succeeded"))  # all of it, if it was that quick
            if self._log is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._log.wait(_LAST_LINES_S)
            return True, None
        cause = None
        if state.state == FAILED or not self._runs(pods):
            cause = cluster_state.find_cause(self._kubectl, name, pods)
        if state.state == FAILED:
            return True, cause or Cause("crash loop", "", state.words)
        self._follow_log(pods)
        if self._runs(pods):
            self._pending_since = time.monotonic()
        elif cause and (cause.is_stuck or any(map(failure_causes.is_looping, pods))):
            return True, cause
        elif time.monotonic() - self._pending_since > 60 * self._patience.pending_minutes:
            return True, cause or Cause(
                "operator missing",
                "",
                "there are no pods yet" if not pods else "the pods do not start",
            )
        elif cause and cause.evidence != self._shown_cause:
            self._shown_cause = cause.evidence
            log.info(f"{name}: waits: {cause.name}: {cause.evidence}")
        return False, None

    def _runs(self, pods: list[failure_causes.Pod]) -> bool:
        """Tell whether as many pods run as the job needs."""
        running = [
            pod
            for pod in pods
            if pod.get("status", {}).get("phase") in ("Running", "Succeeded")
            and "waiting" not in failure_causes.container(pod).get("state", {})
        ]
        return len(running) >= (self._job.min_nodes or self._job.nodes)

    def _endure(self, error: KubectlError) -> None:
        """Bear with a cluster that does not answer for a while: the job goes on without it."""
        self._silent += 1
        if self._silent >= _MOST_SILENT_POLLS:
            raise error
        log.warn(f"the cluster does not answer: {error.last_line}")

    def _follow_log(
        self, pods: list[failure_causes.Pod], phases: Collection[str] = ("Running",)
    ) -> None:
        """Show what the first node prints, once it runs and again when it starts anew."""
        head = next((p for p in pods[:1] if p.get("status", {}).get("phase") in phases), None)
        if not self._monitor or head is None:
            return
        uid = head["metadata"].get("uid", head["metadata"]["name"])
        if self._log is None or (self._log.poll() is not None and uid != self._logged):
            self._logged = uid
            self._log = self._kubectl.stream("logs", "--follow", head["metadata"]["name"])
