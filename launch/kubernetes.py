#!/usr/bin/env python3
"""Train on Kubernetes: make a job's manifest, submit it, follow it, and find out why it fails.

  python launch/kubernetes.py prepare --cluster-name eks --job-name exp
  python launch/kubernetes.py deploy --cluster-name eks --num-nodes 4 --job-name exp
  python launch/kubernetes.py deploy --kind trainjob --job-name exp --instance-type p5.48xlarge \\
      --nodes 2 --image REGISTRY/train:1 -- --config recipes/llama-3.1-8b.yaml -d c4
  python launch/kubernetes.py render --job-name exp --nodes 2 --instance-type p5.48xlarge \\
      --image REGISTRY/train:1 -- -d c4 -m meta-llama/Llama-3.1-8B --global-batch-size 256
  python launch/kubernetes.py status|logs|stop --kind trainjob --job-name exp
  python launch/kubernetes.py validate --kind trainjob --job-name exp --nodes 2

  from launch.kubernetes import build_docker_image, deploy_training_job, manage_eks_cluster

prepare makes data, model and tokens on the volume of --pvc, which holds hf_datasets, .cache and
outputs; validate asks whether the cluster is ready for the job, as `launch/check.py cluster` does,
and exits with 6 where it is not; render prints or writes the manifest; apply submits it; deploy
checks the cluster, makes the secret of HF_TOKEN, submits, shows the log, and on a failure finds the
cause, applies or names the cure and tries again. What stands behind `--` are options of
04_train_fsdp.py; -e is the job's name unless it is given, and what --config names is read here.
Where nothing says what to train, it is a 1B from scratch on c4 (recipes/scratch-1b-g5.yaml). The
image is the last that was built here, and the cluster is asked for the instance type, unless they
are given.
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
from launch.kube.cluster import eks_of, manage_eks_cluster, validate  # noqa: E402
from launch.kube.deploy import Patience  # noqa: E402
from launch.kube.job import Job, planned, text  # noqa: E402
from launch.kube.job_options import JobOptions, instances  # noqa: E402
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


def parser() -> options.Parser:
    parser = options.Parser(__doc__, "COMMAND --job-name J [options] -- TRAINING OPTIONS")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    declared.add_options(parser, JobOptions)
    declared.add_options(parser, Patience)
    declared.add_options(parser, RawText)
    one = parser.add_argument_group("the command")
    one.add_argument(
        "--cluster-name",
        default="",
        metavar="NAME",
        help="cluster of EKS; its context is fetched where the kubeconfig has none "
        "(default: that of --context)",
    )
    one.add_argument(
        "--token",
        default=os.environ.get("HF_TOKEN", ""),
        metavar="TOKEN",
        help="deploy, prepare: token of the Hub, for a secret of the cluster; rather "
        "not on a command line (default: HF_TOKEN)",
    )
    one.add_argument(
        "--out",
        type=findings.output_file,
        metavar="FILE",
        help="render: file to write (default: print it)",
    )
    one.add_argument(
        "--node-rank", type=options.count, default=0, metavar="R", help="logs: of which node"
    )
    one.add_argument(
        "--follow",
        type=options.on_off,
        default=True,
        metavar="on|off",
        help="logs: go on until the pod ends",
    )
    one.add_argument(
        "--monitor",
        type=options.on_off,
        default=True,
        metavar="on|off",
        nargs="?",
        const=True,
        help="deploy, prepare: show the first node's log",
    )
    one.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be submitted, or the kubectl command, and do nothing",
    )
    return parser


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """Return our options, and those of stage 04: words after `--`, or options only it knows."""
    own, train = command_line.split_at_dashes(argv)
    asking = parser()
    own, more = command_line.take_stage_options(own, asking._option_string_actions)
    return asking.parse(own), [*more, *train]


def main(argv: list[str]) -> None:
    opts, train = parse(argv)
    if opts.dry_run or (opts.command == "render" and not opts.out):
        log.setup(sys.stderr)  # the standard output is the manifest alone
    # Through `finally`, where a kubectl that follows a log is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    asked = connected(
        declared.read_options(JobOptions, opts),
        opts.cluster_name,
        opts.dry_run,
        only_plans=opts.dry_run and opts.command in _STARTING,
    )
    kubectl = Kubectl(asked.namespace, asked.context)
    typed = f"python {_SCRIPT} {commands.shell(*argv)}"
    if opts.command == "validate":
        judge(asked, kubectl, opts)
        return
    if opts.command == "prepare":
        start(
            preparation.planned(
                with_image(asked), declared.read_options(RawText, opts), train, typed
            ),
            kubectl,
            opts,
        )
        if not opts.dry_run:
            log.info(f"next: {commands.script(_SCRIPT, *deploying(argv))}")
        return
    if opts.command in _STARTING:
        asks = not opts.dry_run and (opts.command != "render" or bool(opts.cluster_name))
        start(planned(completed(asked, kubectl, asks), train, typed), kubectl, opts)
        return
    problems = Problems()
    asked.check_names(problems)
    problems.raise_if_any()
    {"status": status, "logs": logs, "stop": stop}[opts.command](asked, kubectl, opts)


def deploying(argv: list[str]) -> list[str]:
    """Return the words of a `prepare` for the `deploy` that follows it."""
    own, train = command_line.split_at_dashes(argv)
    # The command may stand behind options, and one of these may have the same word as its value.
    at = 0 if own[0] == "prepare" else len(own) - 1 - own[::-1].index("prepare")
    return [*own[:at], "deploy", *own[at + 1 :], *(["--", *train] if train else [])]


def connected(
    asked: JobOptions, cluster_name: str, dry_run: bool = False, only_plans: bool = False
) -> JobOptions:
    """Return it with the context of the cluster; UsageError when there is none.

    only_plans: print the name of a cluster that cannot be found, since no command needs it.
    """
    if cluster_name and asked.context:
        raise UsageError(
            f"--cluster-name {cluster_name} and --context {asked.context} both name a cluster",
            expected="one of them",
        )
    if not cluster_name:
        return asked
    try:
        return replace(asked, context=aws.context_of(cluster_name, fetch=not dry_run))
    except UsageError as error:
        if not only_plans:
            raise
        log.info(f"cluster: {cluster_name}, for which there is no context yet: {error.problem}")
        return asked


def with_image(asked: JobOptions) -> JobOptions:
    """Return it with the image that was built last, unless one is given."""
    if asked.image or not (built := image_docker.last_built_image()):
        return asked
    log.info(f"image: {built.image}, the last that was built in this directory")
    if not built.is_pushed:
        log.warn(
            "it was not pushed to a registry, so that only nodes which hold it can start it: "
            + commands.script("launch/build_image.py", "--push", "REGISTRY/llm-training")
        )
    return replace(asked, image=built.image)


def completed(asked: JobOptions, kubectl: Kubectl, asks: bool = True) -> JobOptions:
    """Return it with what is not given: the image of the last build, and what the nodes are.

    asks: whether to ask the cluster. UsageError where that leaves a choice.
    """
    asked = with_image(asked)
    if not asks or asked.gpus_per_node == 0:
        return asked
    try:
        found = nodes.read(kubectl.items("nodes"), [])
    except KubectlError:
        if asked.instance_type and (asked.node or asked.gpus_per_node is not None):
            return asked  # nothing is open
        raise
    if not asked.instance_type and not any(node.gpus for node in found):
        asked = replace(asked, instance_type=_of_node_groups(kubectl))
    return nodes.completed(asked, found)


def _of_node_groups(kubectl: Kubectl) -> str:
    """Return the only type with GPUs that an EKS cluster could start nodes of; empty if unknown."""
    cluster, region = eks_of(kubectl, "", "")
    found = (
        [name for name in aws.node_types(cluster, region) if name in instances()] if cluster else []
    )
    if len(found) == 1:
        log.info(f"asked of EKS: its node groups start {found[0]}")
    return found[0] if len(found) == 1 else ""


def start(job: Job, kubectl: Kubectl, opts: Options) -> None:
    """Write, print or submit a job, and follow it when that is asked for."""
    manifest = text(job.manifests(), f"made by: {job.launched_as}".replace("\n", " "))
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
        deploy.submit(job, kubectl)
        log.info(f"next: {_command('logs', job)}")
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
            log.info(f"\nthe job goes on; end it: {_ending(job, kubectl)}")
            raise


def _ending(job: Job, kubectl: Kubectl) -> str:
    return (
        _command("stop", job)
        if job.resource == KINDS[job.kind].resource
        else shlex.join(kubectl.command("delete", job.resource, job.job_name))
    )


def _command(command: str, job: JobOptions) -> str:
    """Return a command of this script about the same job."""
    names = {name: getattr(job, name) for name in ("kind", "namespace", "job_name", "context")}
    return commands.script(_SCRIPT, command, *commands.as_words(names))


def judge(asked: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Say whether the cluster is ready for the job; findings.NotReady when it is not."""
    if opts.dry_run:
        print(*kubectl.command("get", "…", "-o", "json"))
        return
    problems = Problems()
    asked.check_names(problems)
    if asked.instance_type:
        asked.check_type(problems)
    problems.raise_if_any()
    found = validate(kubectl, asked, eks_of(kubectl, opts.cluster_name, ""))
    findings.print_findings(found)
    findings.conclude(found, findings.ERROR, "this cluster")


def status(asked: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print the job's state, its pods, and what is wrong with them."""
    if opts.dry_run:
        print(*kubectl.command("get", asked.resource, asked.job_name, "-o", "json"))
        return
    state = cluster_state.of_job(cluster_state.require(kubectl, asked.resource, asked.job_name))
    log.info(f"{asked.job_name} is {state.state}: {state.words}")
    pods = cluster_state.pods(kubectl, asked.selector)
    cluster_state.show_pods(pods)
    if state.state != cluster_state.SUCCEEDED and (
        cause := cluster_state.find_cause(kubectl, asked.job_name, pods)
    ):
        cluster_state.show_cause(cause)


def logs(asked: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Print what a node's pod prints; UsageError when there is no such pod."""
    follow = ["--follow"] if opts.follow else []
    if opts.dry_run:
        print(*kubectl.command("logs", *follow, f"POD of node {opts.node_rank}"))
        return
    cluster_state.require(kubectl, asked.resource, asked.job_name)
    pods = cluster_state.pods(kubectl, asked.selector)
    if opts.node_rank >= len(pods):
        raise UsageError(
            f"--node-rank {opts.node_rank}: the job has {len(pods)} pods",
            run=_command("status", asked),
        )
    name = pods[opts.node_rank]["metadata"]["name"]
    stream = kubectl.stream("logs", *follow, name)
    try:
        code = stream.wait()
    finally:
        stream.terminate()
    if code:
        raise UsageError(
            f"no log of {name} (kubectl exit code {code})", run=_command("status", asked)
        )


def stop(asked: JobOptions, kubectl: Kubectl, opts: Options) -> None:
    """Delete the job; its pods finish their step and save."""
    delete = kubectl.command("delete", asked.resource, asked.job_name)
    if opts.dry_run:
        print(*delete)
        return
    state = cluster_state.of_job(cluster_state.require(kubectl, asked.resource, asked.job_name))
    if state.state != cluster_state.ACTIVE:
        log.info(f"nothing to stop: {asked.job_name} is not running ({state.words})")
        log.info(f"its pods and logs stay until it is deleted: {shlex.join(delete)}")
        return
    log.info(f"{asked.job_name}: its pods finish their step, save and end")
    deploy.stop(asked, kubectl)
    log.info("stopped; the same job goes on from the checkpoint")


def deploy_training_job(
    *,
    cluster_name: str = "",
    hf_token: str | None = None,
    monitor: bool = True,
    auto_retry: bool = True,
    train: Sequence[str] = (),
    patience: Patience | None = None,
    **asked: Any,
) -> None:
    """Do what `deploy` does; raises a StageError (launch.kube.deploy.JobFailed) with the last word.

    cluster_name: of EKS, or a context of the kubeconfig (default: the current one). hf_token: for a
    secret of the cluster (default: HF_TOKEN). auto_retry: submit again what may go well the next
    time. train: options of stage 04, such as --config recipes/llama-3.1-8b.yaml. patience: how
    often and how long to try. asked: options of `deploy` or of stage 04 by their names, such as
    job_name="exp", num_nodes=4, max_steps=1000; what is not given is found as on the command line.
    """
    log.setup_unless_heard()
    ours = declared.fields_by_spelling(JobOptions)
    theirs = declared.fields_by_spelling(Config)
    declared.require_known(asked, [*ours, *theirs])
    job = declared.from_values(JobOptions, **{name: asked[name] for name in asked if name in ours})
    given = declared.merge_spellings(
        Config, {name: asked[name] for name in asked if name not in ours}
    )
    job = connected(job, cluster_name)
    kubectl = Kubectl(job.namespace, job.context)
    token = os.environ.get("HF_TOKEN", "") if hf_token is None else hf_token
    deploy.deploy(
        planned(completed(job, kubectl), [*train, *command_line.to_words(given)]),
        kubectl,
        token=token,
        monitor=monitor,
        patience=patience or (Patience() if auto_retry else Patience(attempts=1)),
    )


if __name__ == "__main__":
    stage.run(main, only_shows=sys.argv[1:2] in (["logs"], ["status"]))
