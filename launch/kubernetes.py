#!/usr/bin/env python3
"""Train on Kubernetes: render a job's manifest, submit it, follow it, and explain its failures.

  python launch/kubernetes.py prepare --cluster-name eks --job-name exp
  python launch/kubernetes.py deploy --cluster-name eks --num-nodes 4 --job-name exp
  python launch/kubernetes.py deploy --kind trainjob --job-name exp --instance-type p5.48xlarge \\
      --nodes 2 --image REGISTRY/train:1 -- --config recipes/llama-3.1-8b.yaml -d c4
  python launch/kubernetes.py render --job-name exp --nodes 2 --instance-type p5.48xlarge \\
      --image REGISTRY/train:1 -- -d c4 -m meta-llama/Llama-3.1-8B --global-batch-size 256
  python launch/kubernetes.py status|logs|stop --kind trainjob --job-name exp
  python launch/kubernetes.py validate --kind trainjob --job-name exp --nodes 2

  from launch.kubernetes import build_docker_image, deploy_training_job, manage_eks_cluster

prepare   prepares dataset, model and tokens on the volume of --pvc (hf_datasets, .cache, outputs)
validate  checks whether the cluster is ready for the job, as `launch/check.py cluster` does; exit
          code 6 if it is not
render    prints the manifest, or writes it to a file
apply     submits the job
deploy    checks the cluster, creates the secret for HF_TOKEN, submits the job and shows its log;
          after a failure finds the cause, applies or names the remedy, and retries

The options after `--` are those of 04_train_fsdp.py. The default of -e is the job's name, and a
--config file is read on this machine. The default run trains a 1B model from scratch on c4
(recipes/scratch-1b-g5.yaml). The default image is the last one that was built on this machine, and
the default instance type is that of the cluster's nodes.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.build_image import build_docker_image  # noqa: E402
from launch.checks import findings  # noqa: E402
from launch.images import docker as image_docker  # noqa: E402
from launch.kube import aws, cluster_state, deploy, nodes, preparation  # noqa: E402
from launch.kube.cluster import check_cluster, find_eks, manage_eks_cluster  # noqa: E402
from launch.kube.deploy import Patience  # noqa: E402
from launch.kube.job import Job, plan_job, render_manifests  # noqa: E402
from launch.kube.job_options import JobOptions, read_instances  # noqa: E402
from launch.kube.kinds import KINDS  # noqa: E402
from launch.kube.kubectl import Kubectl, KubectlError  # noqa: E402
from launch.kube.raw_text import RawText  # noqa: E402
from lib.core import commands, declared, log, options, stage  # noqa: E402
from lib.core.errors import Problems, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402
from lib.train import command_line  # noqa: E402
from lib.train.config import Config  # noqa: E402

__all__ = ["build_docker_image", "deploy_training_job", "manage_eks_cluster"]

COMMANDS = ("validate", "prepare", "render", "apply", "deploy", "status", "logs", "stop")
_STARTING = ("prepare", "render", "apply", "deploy")
_SCRIPT = "launch/kubernetes.py"


def build_parser() -> options.Parser:
    parser = options.Parser(__doc__, "COMMAND --job-name J [options] -- TRAINING OPTIONS")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    declared.add_options(parser, JobOptions)
    declared.add_options(parser, Patience)
    declared.add_options(parser, RawText)
    group = parser.add_argument_group("the command")
    group.add_argument(
        "--cluster-name",
        default="",
        metavar="NAME",
        help="EKS cluster; its context is fetched if the kubeconfig lacks it "
        "(default: that of --context)",
    )
    group.add_argument(
        "--token",
        default=os.environ.get("HF_TOKEN", ""),
        metavar="TOKEN",
        help="deploy, prepare: token for the Hub, stored in a secret of the cluster; set "
        "HF_TOKEN rather than this option, which others can see (default: HF_TOKEN)",
    )
    group.add_argument(
        "--out",
        type=findings.parse_output_file,
        metavar="FILE",
        help="render: file to write (default: print the manifest)",
    )
    group.add_argument(
        "--node-rank", type=options.count, default=0, metavar="R", help="logs: number of the node"
    )
    group.add_argument(
        "--follow",
        type=options.on_off,
        default=True,
        metavar="on|off",
        help="logs: continue until the pod ends",
    )
    group.add_argument(
        "--monitor",
        type=options.on_off,
        default=True,
        metavar="on|off",
        nargs="?",
        const=True,
        help="deploy, prepare: show the first node's log",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the manifest or the kubectl command and do nothing",
    )
    return parser


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """Return this script's options, and the options of stage 04, which may precede `--` as well."""
    own_words, train = command_line.split_at_dashes(argv)
    parser = build_parser()
    own_words, stage_words = command_line.take_stage_options(
        own_words, parser._option_string_actions
    )
    return parser.parse(own_words), [*stage_words, *train]


def main(argv: list[str]) -> None:
    opts, train = parse(argv)
    if opts.dry_run or (opts.command == "render" and not opts.out):
        log.setup(sys.stderr)  # the standard output is the manifest alone
    # By an exception, so that `finally` also ends a kubectl that follows a log.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    job_options = choose_context(
        declared.read_options(JobOptions, opts),
        opts.cluster_name,
        opts.dry_run,
        only_plans=opts.dry_run and opts.command in _STARTING,
    )
    kubectl = Kubectl(job_options.namespace, job_options.context)
    typed_command = f"python {_SCRIPT} {commands.shell(*argv)}"
    if opts.command == "validate":
        validate_cluster(job_options, kubectl, opts)
        return
    if opts.command == "prepare":
        start_job(
            preparation.plan_preparation(
                choose_image(job_options),
                declared.read_options(RawText, opts),
                train,
                typed_command,
            ),
            kubectl,
            opts,
        )
        if not opts.dry_run:
            log.info(f"next: {commands.script(_SCRIPT, *make_deploy_words(argv))}")
        return
    if opts.command in _STARTING:
        queries_cluster = not opts.dry_run and (opts.command != "render" or bool(opts.cluster_name))
        start_job(
            plan_job(
                fill_open_options(job_options, kubectl, queries_cluster), train, typed_command
            ),
            kubectl,
            opts,
        )
        return
    problems = Problems()
    job_options.check_names(problems)
    problems.raise_if_any()
    {"status": print_status, "logs": print_logs, "stop": stop_job}[opts.command](
        job_options, kubectl, opts
    )


def make_deploy_words(argv: list[str]) -> list[str]:
    """Return the arguments of the `deploy` command that follows a `prepare`."""
    own_words, train = command_line.split_at_dashes(argv)
    # The command may follow options, one of which may have the same word as its value.
    position = (
        0 if own_words[0] == "prepare" else len(own_words) - 1 - own_words[::-1].index("prepare")
    )
    return [
        *own_words[:position],
        "deploy",
        *own_words[position + 1 :],
        *(["--", *train] if train else []),
    ]


def choose_context(
    job_options: JobOptions, cluster_name: str, dry_run: bool = False, only_plans: bool = False
) -> JobOptions:
    """Return the options with the context of the cluster. Raises UsageError if there is none.

    only_plans: accept a cluster that has no context, since no call needs one.
    """
    if cluster_name and job_options.context:
        raise UsageError(
            f"--cluster-name {cluster_name} and --context {job_options.context} both name a "
            "cluster",
            expected="one of them",
        )
    if not cluster_name:
        return job_options
    try:
        return replace(job_options, context=aws.find_context(cluster_name, fetch=not dry_run))
    except UsageError as error:
        if not only_plans:
            raise
        log.info(f"cluster: {cluster_name}, which has no context yet: {error.problem}")
        return job_options


def choose_image(job_options: JobOptions) -> JobOptions:
    """Return the options with the last built image, unless they have an image."""
    if job_options.image or not (built := image_docker.find_last_built_image()):
        return job_options
    log.info(f"image: {built.image}, the last one built in this directory")
    if not built.is_pushed:
        log.warn(
            "it was not pushed to a registry, so only nodes that contain it can start it: "
            + commands.script("launch/build_image.py", "--push", "REGISTRY/llm-training")
        )
    return replace(job_options, image=built.image)


def fill_open_options(
    job_options: JobOptions, kubectl: Kubectl, queries_cluster: bool = True
) -> JobOptions:
    """Return the options with the image of the last build and the devices of the nodes filled in.

    queries_cluster: whether to query the cluster. Raises UsageError if several instance types are
    possible.
    """
    job_options = choose_image(job_options)
    if not queries_cluster or job_options.gpus_per_node == 0:
        return job_options
    try:
        cluster_nodes = nodes.parse_nodes(kubectl.items("nodes"), [])
    except KubectlError:
        if job_options.instance_type and (
            job_options.node or job_options.gpus_per_node is not None
        ):
            return job_options  # the instance type is known without the cluster
        raise
    if not job_options.instance_type and not any(node.gpus for node in cluster_nodes):
        job_options = replace(job_options, instance_type=_find_node_group_type(kubectl))
    return nodes.fill_from_nodes(job_options, cluster_nodes)


def _find_node_group_type(kubectl: Kubectl) -> str:
    """Return the only instance type with GPUs of an EKS cluster's node groups; empty if unknown."""
    cluster, region = find_eks(kubectl, "", "")
    types = (
        [name for name in aws.list_node_types(cluster, region) if name in read_instances()]
        if cluster
        else []
    )
    if len(types) == 1:
        log.info(f"from EKS: its node groups start {types[0]}")
    return types[0] if len(types) == 1 else ""


def start_job(job: Job, kubectl: Kubectl, opts: Options) -> None:
    """Write, print or submit a job, and follow it if the command is `deploy` or `prepare`."""
    manifest = render_manifests(job.manifests(), f"made by: {job.launched_as}".replace("\n", " "))
    if opts.command == "render" and opts.out and not opts.dry_run:
        opts.out.parent.mkdir(parents=True, exist_ok=True)
        opts.out.write_text(manifest, encoding="utf-8")
        log.info(
            f"{opts.out}: {job.nodes} × {job.gpus_per_node} GPUs, {job.efa_per_node} EFA per node"
        )
        log.info(f"next: {commands.shell('kubectl', 'apply', '-f', opts.out)}")
    elif opts.command == "render" or opts.dry_run:
        print(manifest, end="")
    elif opts.command == "apply":
        deploy.submit_job(job, kubectl)
        log.info(f"next: {_format_command('logs', job)}")
    else:
        try:
            deploy.deploy(
                job,
                kubectl,
                token=opts.token,
                monitor=opts.monitor,
                patience=declared.read_options(Patience, opts),
            )
        except KeyboardInterrupt:
            log.info(f"\nthe job continues; to end it: {_format_stop_command(job, kubectl)}")
            raise


def _format_stop_command(job: Job, kubectl: Kubectl) -> str:
    return (
        _format_command("stop", job)
        if job.resource == KINDS[job.kind].resource
        else shlex.join(kubectl.command("delete", job.resource, job.job_name))
    )


def _format_command(command: str, job: JobOptions) -> str:
    """Return another command of this script for the same job."""
    names = {name: getattr(job, name) for name in ("kind", "namespace", "job_name", "context")}
    return commands.script(_SCRIPT, command, *commands.as_words(names))


def validate_cluster(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print whether the cluster is ready for the job. Raises NotReady if it is not."""
    if opts.dry_run:
        print(*kubectl.command("get", "…", "-o", "json"))
        return
    problems = Problems()
    job_options.check_names(problems)
    if job_options.instance_type:
        job_options.check_type(problems)
    problems.raise_if_any()
    cluster_findings = check_cluster(kubectl, job_options, find_eks(kubectl, opts.cluster_name, ""))
    findings.print_findings(cluster_findings)
    findings.require_ready(cluster_findings, findings.ERROR, "this cluster")


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
        cluster_state.print_cause(cause)


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
            f"--node-rank {opts.node_rank}: the job has {len(pods)} pods",
            run=_format_command("status", job_options),
        )
    name = pods[opts.node_rank]["metadata"]["name"]
    stream = kubectl.stream("logs", *follow, name)
    try:
        code = stream.wait()
    finally:
        stream.terminate()
    if code:
        raise UsageError(
            f"no log of {name} (kubectl exit code {code})",
            run=_format_command("status", job_options),
        )


def stop_job(job_options: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Delete the job, whose pods finish their step, save and end."""
    delete = kubectl.command("delete", job_options.resource, job_options.job_name)
    if opts.dry_run:
        print(*delete)
        return
    state = cluster_state.read_job_state(
        cluster_state.find_job(kubectl, job_options.resource, job_options.job_name)
    )
    if state.state != cluster_state.ACTIVE:
        log.info(f"nothing to stop: {job_options.job_name} is not running ({state.words})")
        log.info(f"its pods and logs remain until you delete it: {shlex.join(delete)}")
        return
    log.info(f"{job_options.job_name}: its pods finish their step, save and end")
    deploy.stop_job(job_options, kubectl)
    log.info("stopped; the same job continues from the checkpoint")


def deploy_training_job(
    *,
    cluster_name: str = "",
    hf_token: str | None = None,
    monitor: bool = True,
    auto_retry: bool = True,
    train: Sequence[str] = (),
    patience: Patience | None = None,
    **values: Any,
) -> None:
    """Run a job to its end as `deploy` does. Raises launch.kube.deploy.JobFailed if it fails.

    cluster_name: an EKS cluster, or a context of the kubeconfig (default: the current one).
    hf_token: stored in a secret of the cluster (default: HF_TOKEN). auto_retry: submit again after
    failures that may pass. train: options of stage 04, such as --config recipes/llama-3.1-8b.yaml.
    patience: how often and how long to try. values: options of `deploy` or of stage 04 by their
    names, such as job_name="exp", num_nodes=4, max_steps=1000; defaults are those of the command
    line.
    """
    log.ensure_setup()
    job_fields = declared.fields_by_spelling(JobOptions)
    stage_fields = declared.fields_by_spelling(Config)
    declared.require_known(values, [*job_fields, *stage_fields])
    job = declared.from_values(
        JobOptions, **{name: values[name] for name in values if name in job_fields}
    )
    stage_values = declared.merge_spellings(
        Config, {name: values[name] for name in values if name not in job_fields}
    )
    job = choose_context(job, cluster_name)
    kubectl = Kubectl(job.namespace, job.context)
    token = os.environ.get("HF_TOKEN", "") if hf_token is None else hf_token
    deploy.deploy(
        plan_job(fill_open_options(job, kubectl), [*train, *command_line.to_words(stage_values)]),
        kubectl,
        token=token,
        monitor=monitor,
        patience=patience or (Patience() if auto_retry else Patience(attempts=1)),
    )


if __name__ == "__main__":
    stage.run(main, only_shows=sys.argv[1:2] in (["logs"], ["status"]))
