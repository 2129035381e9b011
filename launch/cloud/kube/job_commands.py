"""Query or stop a submitted job: the commands validate, status, logs and stop.

Each function takes the options of the job, kubectl, and the options of launch/kubernetes.py.
"""

from __future__ import annotations

from collections.abc import Callable

from launch.checks import findings
from launch.cloud.kube import cluster_state, deploy, remedies
from launch.cloud.kube.cluster import check_cluster, find_eks
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.kubectl import Kubectl
from lib.core import commands, log
from lib.core.errors import Problems, UsageError
from lib.core.options import Options

SCRIPT = "launch/kubernetes.py"


def format_command(command: str, job: JobOptions) -> str:
    """Return another command of this script for the same job."""
    names = ("kind", "namespace", "job_name", "context", "region")
    words = commands.as_words({name: getattr(job, name) for name in names})
    return commands.script(SCRIPT, command, *words)


def validate_cluster(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print whether the cluster is ready for the job. Raises NotReady if it is not."""
    if opts.dry_run:
        print(*kubectl.command("get", "…", "-o", "json"))
        return
    if job_options.instance_type:
        problems = Problems()
        job_options.check_type(problems)
        problems.raise_if_any()
    cluster_findings = check_cluster(kubectl, job_options, find_eks(kubectl))
    findings.print_findings(cluster_findings)
    findings.require_ready(cluster_findings, findings.ERROR, kubectl.cluster.title)


def print_status(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print the state of the job, its pods, and the cause of a failure."""
    if opts.dry_run:
        print(*kubectl.command("get", job_options.resource, job_options.job_name, "-o", "json"))
        return
    state = cluster_state.read_job_state(
        cluster_state.find_job(kubectl, job_options.resource, job_options.job_name)
    )
    log.info(f"{job_options.job_name} is {state.state}: {state.words}")
    pods = cluster_state.list_pods(kubectl, job_options.selector)
    cluster_state.print_pods(pods)
    if state.state != cluster_state.SUCCEEDED and (
        cause := cluster_state.find_cause(kubectl, job_options.job_name, pods)
    ):
        cluster_state.print_cause(cause, remedies.find_remedy(cause, job_options, kubectl.cluster))


def print_logs(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print the log of a node's pod. Raises UsageError if there is no such pod."""
    follow = ["--follow"] if opts.follow else []
    if opts.dry_run:
        print(*kubectl.command("logs", *follow, f"POD of node {opts.node_rank}"))
        return
    cluster_state.find_job(kubectl, job_options.resource, job_options.job_name)
    pods = cluster_state.list_pods(kubectl, job_options.selector)
    if opts.node_rank >= len(pods):
        raise UsageError(
            f"--node-rank {opts.node_rank}: the job has {len(pods)} pods on "
            f"{kubectl.cluster.title}",
            run=format_command("status", job_options),
        )
    name = pods[opts.node_rank]["metadata"]["name"]
    stream = kubectl.stream("logs", *follow, name)
    try:
        code = stream.wait()
    finally:
        stream.terminate()
    if code:
        raise UsageError(
            f"no log of {name} on {kubectl.cluster.title} (kubectl exit code {code})",
            run=format_command("status", job_options),
        )


def stop_job(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Delete the job, whose pods finish their step, save and end."""
    deletions = [kubectl.format(*words) for words in deploy.list_deletions(job_options)]
    if opts.dry_run:
        print("\n".join(deletions))
        return
    state = cluster_state.read_job_state(
        cluster_state.find_job(kubectl, job_options.resource, job_options.job_name)
    )
    if state.state != cluster_state.ACTIVE:
        log.info(f"nothing to stop: {job_options.job_name} is not running ({state.words})")
        log.info(f"its pods and logs remain until you delete it: {' && '.join(deletions)}")
        return
    log.info(f"{job_options.job_name}: its pods finish their step, save and end")
    deploy.stop_job(job_options, kubectl)
    log.info("stopped; submit the same job again to continue from the checkpoint")


JOB_COMMANDS: dict[str, Callable[[JobOptions, Kubectl, Options], None]] = {
    "validate": validate_cluster,
    "status": print_status,
    "logs": print_logs,
    "stop": stop_job,
}
