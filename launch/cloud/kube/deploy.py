"""Submit and follow a job; on a failure find the cause, apply or name the remedy, and retry."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from launch.cloud.kube import cluster_state, failure_causes, remedies
from launch.cloud.kube.cluster_checks import list_storage_classes
from launch.cloud.kube.cluster_state import ACTIVE, FAILED, SUCCEEDED
from launch.cloud.kube.failure_causes import Cause
from launch.cloud.kube.job import Job, render_manifests
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from launch.cloud.kube.nodes import INSTANCE_TYPE
from lib.core import log, options, units
from lib.core.declared import option
from lib.core.errors import EXIT_BUG, Problems, StageError
from lib.core.retry import backoff, poll
from lib.parallel.degrees import RECOMPUTATIONS, list_more_recomputation
from lib.train import command_line

_MAX_BACKOFF_S = 600.0
_MAX_SILENT_POLLS = 20  # polls in a row without an answer of the cluster
_LOG_END_TIMEOUT_S = 10.0  # to print the end of a complete job's log
_STOP_TIMEOUT_S = 420.0  # longer than the grace period in which pods save


class JobFailed(StageError):
    """A job failed for good. code: the exit code of the run, if it is known."""

    def __init__(self, problem: str, code: int = EXIT_BUG, **parts: str) -> None:
        super().__init__(problem, **parts)
        self.code = code


@dataclass(frozen=True)
class Patience:
    """How often and how long a job is tried."""

    attempts: int = option(
        5,
        group="the run",
        parse=options.positive_int,
        help="deploy, prepare: maximum number of submissions",
    )
    poll_seconds: float = option(
        10.0, parse=options.positive, metavar="S", help="deploy, prepare: seconds between two polls"
    )
    backoff_seconds: float = option(
        30.0,
        parse=options.non_negative,
        metavar="S",
        help="deploy, prepare: seconds before the second attempt, doubled each time",
    )
    pending_minutes: float = option(
        30.0,
        parse=options.positive,
        metavar="MIN",
        help="deploy, prepare: minutes that pods may wait for nodes, image and volume",
    )


def submit_job(job: Job, kubectl: Kubectl) -> None:
    """Create or change the job. Raises KubectlError if the cluster refuses it."""
    headline = f"job {job.job_name}, created by launch/kubernetes.py"
    for line in kubectl.apply(render_manifests(job.manifests(), headline)).splitlines():
        log.info(f"  {line}")


def stop_job(job: JobOptions, kubectl: Kubectl) -> None:
    """Delete a job, which makes its pods save and end, and delete its runtime object."""
    for arguments in list_deletions(job):
        kubectl.run(*arguments, timeout=_STOP_TIMEOUT_S)


def list_deletions(job: JobOptions) -> list[list[str]]:
    """Return the arguments of the calls of kubectl that delete a job and its runtime object."""
    runtimes = KINDS[job.kind].runtime
    return [
        ["delete", job.resource, job.job_name, "--ignore-not-found", "--cascade=foreground"],
        *([["delete", runtimes, job.runtime, "--ignore-not-found"]] if runtimes else []),
    ]


def require_needs(job: Job, kubectl: Kubectl, has_token: bool = False) -> None:
    """Raise UsageError with everything that the job needs and the cluster lacks.

    has_token: whether the Hub's token is known, so that its secret will be created.
    """
    kubectl.run("get", "--raw", "/version")  # report an unreachable cluster only once
    problems = Problems()
    try:
        kubectl.items(job.resource)
    except KubectlError as error:
        if error.is_transient:
            raise
        problems.add(
            f"{kubectl.cluster.title} does not accept {job.resource}",
            found=error.text.strip(),
            expected=f"the operator for --kind {job.kind}, and the right to use it",
            run="" if error.is_forbidden else remedies.install_operator(kubectl.cluster, job.kind),
        )
    _check_objects(job, kubectl, has_token, problems)
    problems.raise_if_any()
    if job.instance_type:
        _warn_of_missing_nodes(job, kubectl)


def require_objects(job: Job, kubectl: Kubectl) -> None:
    """Raise UsageError with all objects that the pods of a job need and the namespace lacks."""
    kubectl.run("get", "--raw", "/version")  # report an unreachable cluster only once
    problems = Problems()
    _check_objects(job, kubectl, False, problems)
    problems.raise_if_any()


def _check_objects(job: Job, kubectl: Kubectl, has_token: bool, problems: Problems) -> None:
    """Add a problem for the namespace and each claim, secret and account that is missing."""
    namespace = job.namespace
    if namespace != "default" and _find_object(kubectl, "namespace", namespace) is None:
        problems.add(
            f"--namespace: there is no namespace {namespace} in {kubectl.cluster.title}",
            run=remedies.create_namespace(kubectl.cluster, namespace),
        )
    for flag, name in (("--pvc", job.pvc), ("--bucket-pvc", job.bucket_pvc)):
        claim = _find_object(kubectl, "pvc", name) if name else {}
        if claim is None:
            problems.add(
                f"{flag}: no claim {name} in namespace {job.namespace} of {kubectl.cluster.title}",
                hint=f"`{kubectl.format('get', 'pvc')}` shows all claims",
                run=remedies.create_bucket_claim(kubectl.cluster, job.namespace, name)
                if flag == "--bucket-pvc"
                else remedies.create_claim(
                    kubectl.cluster, job.namespace, name, list_storage_classes(kubectl)
                ),
            )
        elif (phase := claim.get("status", {}).get("phase", "Bound")) == "Lost":
            problems.add(f"{flag}: {name} is {phase} on {kubectl.cluster.title}")
    if job.image_pull_secret and _find_object(kubectl, "secret", job.image_pull_secret) is None:
        problems.add(
            f"--image-pull-secret: no secret {job.image_pull_secret} in namespace {job.namespace} "
            f"of {kubectl.cluster.title}",
            run=remedies.create_pull_secret(
                kubectl.cluster, job.namespace, job.image_pull_secret, job.image
            ),
        )
    _check_accounts(job, kubectl, has_token, problems)


def _check_accounts(job: Job, kubectl: Kubectl, has_token: bool, problems: Problems) -> None:
    """Add a problem if the account of the pods or the secret of the token is missing."""
    place = f"in namespace {job.namespace} of {kubectl.cluster.title}"
    account = job.service_account
    if account and _find_object(kubectl, "serviceaccount", account) is None:
        problems.add(
            f"--service-account: no account {account} {place}",
            hint="launch/cloud/kube/templates/service-account.yaml gives it a role of AWS as well",
            run=remedies.create_service_account(kubectl.cluster, job.namespace, account),
        )
    secret = job.token_secret if job.needs_token else ""
    if secret and not has_token and _find_object(kubectl, "secret", secret) is None:
        problems.add(
            f"--token-secret: no secret {secret} {place}",
            run=remedies.create_token_secret(kubectl.cluster, job.namespace, secret),
        )


def _find_object(kubectl: Kubectl, kind: str, name: str) -> dict[str, Any] | None:
    """Return an object, None if it is missing; empty if reading it is not allowed."""
    try:
        return kubectl.find(kind, name)
    except KubectlError as error:
        if error.is_forbidden:
            return {}
        raise


def _warn_of_missing_nodes(job: Job, kubectl: Kubectl) -> None:
    try:
        nodes = kubectl.items("nodes")
    except KubectlError as error:
        log.info(f"nodes: not checked ({error.last_line})")
        return
    types = [node["metadata"].get("labels", {}).get(INSTANCE_TYPE, "?") for node in nodes]
    if (count := types.count(job.instance_type)) < job.nodes:
        log.warn(
            f"{count} of {job.nodes} nodes of type {job.instance_type} exist; the "
            f"cluster has: {', '.join(sorted(set(types))) or 'no nodes'}"
        )
        if run := remedies.add_nodes(kubectl.cluster, "", job.nodes):
            log.info(f"  run: {run}")


def put_token(kubectl: Kubectl, name: str, token: str) -> None:
    """Create or replace the secret of the Hub's token, which appears on no command line."""
    kubectl.put(
        render_manifests(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "type": "Opaque",
                    "metadata": {"name": name, "namespace": kubectl.namespace},
                    "stringData": {"token": token},
                }
            ],
            "created by launch/kubernetes.py",
        )
    )
    log.info(f"secret {name} contains the token of HF_TOKEN")


def deploy_job(
    job: Job,
    kubectl: Kubectl,
    *,
    token: str = "",
    monitor: bool = True,
    patience: Patience | None = None,
    is_checked: bool = False,
) -> None:
    """Run a job to its end. Raises JobFailed if that is impossible.

    token: for the Hub, stored in a secret if the pods need it. monitor: whether to print the first
    node's log. is_checked: `require_needs` has just succeeded.
    """
    patience = patience or Patience()
    token = token if job.needs_token else ""
    if not is_checked:
        require_needs(job, kubectl, has_token=bool(token))
    if token:
        job = replace(job, token_secret=job.token_secret or f"{job.job_name}-hub-token")
    for attempt in range(1, patience.attempts + 1):
        if token:
            put_token(kubectl, job.token_secret, token)
        log.info(
            f"attempt {attempt} of {patience.attempts}: {job.job_name}, {job.nodes} × "
            f"{job.instance_type or 'any node'}"
        )
        if not _is_active(job, kubectl):
            submit_job(job, kubectl)
        cause = _JobWatch(job, kubectl, patience, monitor).wait_for_end()
        if cause is None:
            log.info(f"job {job.job_name} is complete")
            return
        cluster_state.print_cause(cause)
        remedy = _REMEDIES.get(cause.name)
        changed_job = remedy(job, kubectl) if remedy else None
        if attempt == patience.attempts or not (changed_job or cause.passes):
            raise _give_up(job, kubectl, cause, attempt)
        pause = backoff(attempt, patience.backoff_seconds, _MAX_BACKOFF_S)
        log.info(
            f"retrying in {units.duration(pause)}" + (", with the remedy" if changed_job else "")
        )
        stop_job(job, kubectl)
        time.sleep(pause)
        job = changed_job or job


def _is_active(job: Job, kubectl: Kubectl) -> bool:
    """Return whether a job of that name is active; delete one that has ended."""
    existing = kubectl.find(job.resource, job.job_name)
    if existing is None:
        return False
    if cluster_state.read_job_state(existing).state == ACTIVE:
        log.warn(f"a job {job.job_name} is running: following it as it is; stop it to change it")
        return True
    log.info("  deleting the finished job of that name")
    stop_job(job, kubectl)
    return False


def _give_up(job: Job, kubectl: Kubectl, cause: Cause, attempt: int) -> JobFailed:
    """Return the error of a failed job, and delete it if it is active, since it occupies GPUs."""
    existing = kubectl.find(job.resource, job.job_name)
    remains = kubectl.format("describe", "pods", "--selector", job.selector)
    if existing and cluster_state.read_job_state(existing).state == ACTIVE:
        stop_job(job, kubectl)
        remains = "the job was deleted from the cluster"
    attempts_text = f"after {attempt} attempts" if attempt > 1 else "at the first attempt"
    return JobFailed(
        f"job {job.job_name} on {kubectl.cluster.title} failed {attempts_text}: {cause.name}",
        cause.code,
        hint=cause.remedy,
        run=remedies.find_remedy(cause, job, kubectl.cluster),
        found=f"{cause.evidence.strip() or 'the operator reports no reason'}\n({remains})",
    )


def _recompute_more(job: Job, kubectl: Kubectl) -> Job | None:
    """Return the job with more activation checkpointing, which does not change the result."""
    current = command_line.parse_options(job.train).activation_checkpointing
    kinds = list_more_recomputation(current)
    if not kinds:
        return None
    # The choice of `auto` on the nodes is unknown here.
    chosen = kinds[0] if current in RECOMPUTATIONS else kinds[-1]
    log.info(f"  remedy: --activation-checkpointing {chosen} instead of {current}")
    return replace(job, train=(*job.train, f"--activation-checkpointing={chosen}"))


def _make_remedy(text: str, **changes: Any) -> Callable[[Job, Kubectl], Job | None]:
    """Return a remedy that changes fields of a job; it returns None if they are changed already."""

    def remedy(job: Job, kubectl: Kubectl) -> Job | None:
        if changes.items() <= vars(job).items():
            return None
        log.info(f"  remedy: {text}")
        return replace(job, **changes)

    return remedy


def _use_pull_secret(job: Job, kubectl: Kubectl) -> Job | None:
    """Return the job with the namespace's registry credentials, if there is exactly one secret."""
    if job.image_pull_secret:
        return None
    try:
        secrets = kubectl.items(
            "secrets", "--field-selector", "type=kubernetes.io/dockerconfigjson"
        )
    except KubectlError:
        return None
    if len(secrets) != 1:
        return None
    name = secrets[0]["metadata"]["name"]
    log.info(f"  remedy: the image is pulled with the secret {name}")
    return replace(job, image_pull_secret=name)


# None of them changes the result of training. Each returns None if only a person can help.
_REMEDIES: dict[str, Callable[[Job, Kubectl], Job | None]] = {
    "out of GPU memory": _recompute_more,
    "no huge pages": _make_remedy("huge pages are not requested", huge_pages=False),
    "network interface": _make_remedy("NCCL_SOCKET_IFNAME is not set", interfaces=""),
    "image forbidden": _use_pull_secret,
}


class _JobWatch:
    """Follows a job from its submission to its end."""

    def __init__(self, job: Job, kubectl: Kubectl, patience: Patience, monitor: bool) -> None:
        self._job = job
        self._kubectl = kubectl
        self._patience = patience
        self._monitor = monitor
        self._log: subprocess.Popen[bytes] | None = None
        self._logged = ""
        self._shown = ""
        self._shown_cause = ""
        self._silent = 0
        self._pending_since = time.monotonic()

    def wait_for_end(self) -> Cause | None:
        """Return why the job failed, None if it is complete."""
        cause: Cause | None = None

        def has_ended() -> bool:
            nonlocal cause
            try:
                ended, cause = self._look()
            except KubectlError as error:
                self._tolerate(error)
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
        existing = self._kubectl.find(self._job.resource, name)
        if existing is None:
            return True, Cause("deleted", "", "the job no longer exists")
        state = cluster_state.read_job_state(existing)
        pods = cluster_state.list_pods(self._kubectl, self._job.selector)
        if state.words != self._shown:
            self._shown = state.words
            log.info(f"{name}: {state.words}")
        if state.state == SUCCEEDED:
            self._follow_log(pods, ("Running", "Succeeded"))  # the whole log of a quick job
            if self._log is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._log.wait(_LOG_END_TIMEOUT_S)
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
            log.info(f"{name} is waiting: {cause.name}: {cause.evidence}")
        return False, None

    def _runs(self, pods: list[failure_causes.Pod]) -> bool:
        """Return whether as many pods run as the job needs."""
        running = [
            pod
            for pod in pods
            if pod.get("status", {}).get("phase") in ("Running", "Succeeded")
            and "waiting" not in failure_causes.get_container(pod).get("state", {})
        ]
        return len(running) >= (self._job.min_nodes or self._job.nodes)

    def _tolerate(self, error: KubectlError) -> None:
        """Warn that the cluster does not answer; raise the error after too many polls."""
        self._silent += 1
        if self._silent >= _MAX_SILENT_POLLS:
            raise error
        log.warn(f"{self._kubectl.cluster.title} does not answer: {error.last_line}")

    def _follow_log(
        self, pods: list[failure_causes.Pod], phases: Collection[str] = ("Running",)
    ) -> None:
        """Print the first node's log once it runs, and again after a restart."""
        head = next((pod for pod in pods[:1] if pod.get("status", {}).get("phase") in phases), None)
        if not self._monitor or head is None:
            return
        uid = head["metadata"].get("uid", head["metadata"]["name"])
        if self._log is None or (self._log.poll() is not None and uid != self._logged):
            self._logged = uid
            self._log = self._kubectl.stream("logs", "--follow", head["metadata"]["name"])
