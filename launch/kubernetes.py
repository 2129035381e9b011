#!/usr/bin/env python3
"""Train on Kubernetes: make a job's manifest, submit it, follow it, and find out why it fails.

  python launch/kubernetes.py render --job-name exp --nodes 2 --instance-type p5.48xlarge \\
      --image REGISTRY/train:1 -- -d c4 -m meta-llama/Llama-3.1-8B --global-batch-size 256
  python launch/kubernetes.py deploy --kind trainjob --job-name exp --instance-type p5.48xlarge \\
      --nodes 2 --image REGISTRY/train:1 -- --config recipes/llama-3.1-8b.yaml -d c4
  python launch/kubernetes.py status|logs|stop --kind trainjob --job-name exp

  from launch.kubernetes import build_docker_image, deploy_training_job, manage_eks_cluster

render prints or writes the manifest; apply submits it; deploy checks the cluster, makes the secret
of HF_TOKEN, submits, shows the log, and on a failure finds the cause, applies or names the cure and
tries again. What stands behind `--` are options of 04_train_fsdp.py; -e is the job's name unless
it is given, and what --config names is read here. The volume of --pvc holds hf_datasets, .cache and
outputs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.build_image import build_docker_image  # noqa: E402
from launch.cluster import manage_eks_cluster  # noqa: E402
from launch.common import aws, findings, stage_04  # noqa: E402
from launch.kube import cluster_state, deploy  # noqa: E402
from launch.kube.asked import JobOptions  # noqa: E402
from launch.kube.deploy import Patience  # noqa: E402
from launch.kube.job import Job, planned, text  # noqa: E402
from launch.kube.kubectl import Kubectl  # noqa: E402
from lib.core import commands, declared, log, options, stage  # noqa: E402
from lib.core.errors import Problems, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402

__all__ = ["build_docker_image", "deploy_training_job", "manage_eks_cluster"]

COMMANDS = ("render", "apply", "status", "logs", "stop", "deploy")
_STARTING = ("render", "apply", "deploy")
_SCRIPT = "launch/kubernetes.py"


def parser() -> options.Parser:
    parser = options.Parser(__doc__, f"{'|'.join(COMMANDS)} --job-name J [options] -- "
                            "TRAINING OPTIONS")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    declared.add(parser, JobOptions)
    declared.add(parser, Patience)
    one = parser.add_argument_group("the command")
    one.add_argument("--out", type=findings.output_file, metavar="FILE",
                     help="render: file to write (default: print it)")
    one.add_argument("--node-rank", type=options.count, default=0, metavar="R",
                     help="logs: of which node")
    one.add_argument("--follow", type=options.on_off, default=True, metavar="on|off",
                     help="logs: go on until the pod ends")
    one.add_argument("--monitor", type=options.on_off, default=True, metavar="on|off",
                     help="deploy: show the first node's log")
    one.add_argument("--dry-run", action="store_true",
                     help="print what would be submitted, or the kubectl command, and do nothing")
    return parser


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """Return the options, and those of stage 04, which stand behind `--`."""
    if "--" not in argv and argv[:1] and argv[0] in _STARTING and not {"-h", "--help"} & {*argv}:
        raise stage_04.nothing_behind("-d c4 -m ORG/NAME")
    own, train = stage_04.divided(argv)
    return parser().parse(own), train


def main(argv: list[str]) -> None:
    opts, train = parse(argv)
    # Through `finally`, where a kubectl that follows a log is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    asked = declared.read(JobOptions, opts)
    kubectl = Kubectl(asked.namespace, asked.context)
    if opts.command in _STARTING:
        typed = f"python {_SCRIPT} {shlex.join(commands.redacted_argv(argv))}"
        start(planned(asked, train, typed), kubectl, opts)
        return
    problems = Problems()
    asked.check_names(problems)
    problems.raise_if_any()
    {"status": status, "logs": logs, "stop": stop}[opts.command](asked, kubectl, opts)


def start(job: Job, kubectl: Kubectl, opts: Options) -> None:
    """Write, print or submit a job, and follow it when that is asked for."""
    manifest = text(job.manifests(), f"made by: {job.launched_as}".replace("\n", " "))
    if opts.command == "render" and opts.out and not opts.dry_run:
        opts.out.parent.mkdir(parents=True, exist_ok=True)
        opts.out.write_text(manifest, encoding="utf-8")
        log.info(f"{opts.out}: {job.nodes} × {job.gpus_per_node} GPUs, {job.efa_per_node} EFA per "
                 "node")
        log.info(f"next: {commands.shell('kubectl', 'apply', '-f', opts.out)}")
    elif opts.command == "render" or opts.dry_run:
        print(manifest, end="")
    elif opts.command == "apply":
        deploy.submit(job, kubectl)
        log.info(f"next: {_command('logs', job)}")
    else:
        try:
            deploy.deploy(job, kubectl, token=os.environ.get("HF_TOKEN", ""),
                          monitor=opts.monitor, patience=declared.read(Patience, opts))
        except KeyboardInterrupt:
            log.info(f"\nthe job goes on; end it: {_command('stop', job)}")
            raise


def _command(command: str, job: JobOptions) -> str:
    """Return a command of this script about the same job."""
    names = {name: getattr(job, name) for name in ("kind", "namespace", "job_name", "context")}
    return commands.script(_SCRIPT, command, *commands.as_words(names))


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
            cause := cluster_state.find_cause(kubectl, asked.job_name, pods)):
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
        raise UsageError(f"--node-rank {opts.node_rank}: the job has {len(pods)} pods",
                         run=_command("status", asked))
    name = pods[opts.node_rank]["metadata"]["name"]
    stream = kubectl.stream("logs", *follow, name)
    try:
        code = stream.wait()
    finally:
        stream.terminate()
    if code:
        raise UsageError(f"no log of {name} (kubectl exit code {code})",
                         run=_command("status", asked))


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


def deploy_training_job(*, cluster_name: str, num_nodes: int, job_name: str, instance_type: str,
                        image_uri: str, max_steps: int | None = None, hf_token: str | None = None,
                        monitor: bool = True, kind: str = "pytorchjob", namespace: str = "default",
                        train: Sequence[str] = (), patience: Patience | None = None) -> None:
    """Do what `deploy` does; raises a StageError (launch.kube.deploy.JobFailed) with the last word.

    cluster_name: of EKS, or a context of the kubeconfig. train: further options of stage 04, such
    as --config recipes/llama-3.1-8b.yaml. patience: how often and how long to try.
    """
    asked = declared.made(JobOptions, kind=kind, namespace=namespace, job_name=job_name,
                          nodes=num_nodes, instance_type=instance_type, image=image_uri)
    job = planned(asked, [*train, *([f"--max-steps={max_steps}"] if max_steps else [])])
    deploy.deploy(job, Kubectl(namespace, aws.context_of(cluster_name)), token=hf_token or "",
                  monitor=monitor, patience=patience)


if __name__ == "__main__":
    stage.run(main, only_shows=sys.argv[1:2] in (["logs"], ["status"]))
