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
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.build_image import build_docker_image  # noqa: E402
from launch.cluster import manage_eks_cluster  # noqa: E402
from launch.common import findings, stage_04  # noqa: E402
from lib.core import commands, log, options, stage  # noqa: E402
from lib.core.errors import Problems, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402

if TYPE_CHECKING:  # imports yaml, which --help does not wait for
    from launch.kube.deploy import Patience
    from launch.kube.kubectl import Kubectl

__all__ = ["build_docker_image", "deploy_training_job", "manage_eks_cluster"]

KINDS = ("pytorchjob", "trainjob", "hyperpod")
COMMANDS = ("render", "apply", "status", "logs", "stop", "deploy")
_STARTING = ("render", "apply", "deploy")
_SCRIPT = "launch/kubernetes.py"


def parser() -> options.Parser:
    """Return the parser of everything before `--`."""
    parser = options.Parser(__doc__, f"{'|'.join(COMMANDS)} --job-name J [options] -- "
                            "TRAINING OPTIONS")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    job = parser.add_argument_group("the job")
    job.add_argument("--kind", choices=KINDS, default="pytorchjob",
                     help="Kubeflow training operator, Kubeflow trainer, SageMaker HyperPod")
    job.add_argument("--job-name", metavar="J", required=True, help="name of the job")
    job.add_argument("--namespace", default="default", metavar="NS", help="where it runs")
    job.add_argument("--context", default="", metavar="NAME",
                     help="of the kubeconfig (default: the current one)")
    nodes = parser.add_argument_group("the nodes")
    nodes.add_argument("--nodes", type=options.positive_int, default=1, metavar="N", help="nodes")
    nodes.add_argument("--min-nodes", type=options.positive_int, metavar="N",
                       help="go on with so many when others are lost (default: all are needed)")
    nodes.add_argument("--spares", type=options.count, default=0, metavar="N",
                       help="nodes kept ready for those that fail (hyperpod)")
    nodes.add_argument("--instance-type", default="", metavar="T",
                       help="for example p5.48xlarge; HyperPod's ml. is added (default: any node)")
    nodes.add_argument("--gpus-per-node", type=options.count, metavar="N",
                       help="GPUs to ask for, 0 to train on the CPU (default: by instance type)")
    nodes.add_argument("--efa-per-node", type=options.count, metavar="N",
                       help="EFA adapters to ask for (default: by instance type)")
    pod = parser.add_argument_group("the pods")
    pod.add_argument("--image", default="", metavar="URI",
                     help="image with the code (needed by render, apply and deploy)")
    pod.add_argument("--image-pull-secret", default="", metavar="NAME",
                     help="secret with the registry's credentials (default: none)")
    pod.add_argument("--code-dir", default="/opt/pipeline", metavar="DIR",
                     help="where 04_train_fsdp.py lies in the image")
    pod.add_argument("--pvc", default="fsx-claim", metavar="NAME",
                     help="claim of the volume that all nodes share")
    pod.add_argument("--mount-path", default="/data", metavar="DIR", help="where it is mounted")
    pod.add_argument("--project-dir", metavar="DIR",
                     help="directory with hf_datasets, .cache and outputs there (default: the "
                          "mount path)")
    pod.add_argument("--token-secret", default="", metavar="NAME",
                     help="secret whose key `token` becomes HF_TOKEN (default: none; deploy makes "
                          "one when HF_TOKEN is set)")
    run = parser.add_argument_group("the run")
    run.add_argument("--max-restarts", type=options.count, default=5, metavar="M",
                     help="restarts without progress before the job fails")
    run.add_argument("--slow-below", type=options.count, default=0, metavar="TOK_S",
                     help="call the job slow below so many tokens per second (hyperpod)")
    run.add_argument("--out", type=findings.output_file, metavar="FILE",
                     help="render: file to write (default: print it)")
    run.add_argument("--node-rank", type=options.count, default=0, metavar="R",
                     help="logs: of which node")
    run.add_argument("--follow", type=options.on_off, default=True, metavar="on|off",
                     help="logs: go on until the pod ends")
    run.add_argument("--attempts", type=options.positive_int, default=5, metavar="N",
                     help="deploy: submissions in all")
    run.add_argument("--poll-seconds", type=options.positive, default=10.0, metavar="S",
                     help="deploy: between two looks at the job")
    run.add_argument("--backoff-seconds", type=options.non_negative, default=30.0, metavar="S",
                     help="deploy: before the second attempt, doubled with each further one")
    run.add_argument("--pending-minutes", type=options.positive, default=30.0, metavar="MIN",
                     help="deploy: how long pods may wait for nodes, image and volume")
    run.add_argument("--monitor", type=options.on_off, default=True, metavar="on|off",
                     help="deploy: show the first node's log")
    run.add_argument("--dry-run", action="store_true",
                     help="print what would be submitted, or the kubectl command, and do nothing")
    return parser


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """Return the options, and those of stage 04, which stand behind `--`."""
    if "--" not in argv and argv[:1] and argv[0] in _STARTING and not {"-h", "--help"} & {*argv}:
        raise UsageError("`--` is missing",
                         expected="the options of the launcher, then `--`, then those of "
                                  f"{stage_04.SCRIPT}: -- -d c4 -m ORG/NAME")
    at = argv.index("--") if "--" in argv else len(argv)
    return parser().parse(argv[:at]), argv[at + 1:]


def main(argv: list[str]) -> None:
    """Do what the command says."""
    opts, train = parse(argv)
    # Through `finally`, where a kubectl that follows a log is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from launch.kube import checks, deploy, job, render
    from launch.kube.kubectl import Kubectl

    kubectl = Kubectl(opts.namespace, opts.context)
    if opts.command not in _STARTING:
        problems = Problems()
        checks.names(opts, problems)
        problems.raise_if_any()
        {"status": status, "logs": logs, "stop": stop}[opts.command](opts, kubectl)
        return
    asked = replace(job.of_options(opts, train), launched_as=typed(argv))
    manifest = render.text(asked.manifests(), headline(argv))
    if opts.command == "render" and opts.out and not opts.dry_run:
        opts.out.parent.mkdir(parents=True, exist_ok=True)
        opts.out.write_text(manifest, encoding="utf-8")
        log.info(f"{opts.out}: {asked.nodes} × {asked.gpus} GPUs, {asked.efa} EFA per node")
        log.info(f"next: {commands.shell('kubectl', 'apply', '-f', opts.out)}")
    elif opts.command == "render" or opts.dry_run:
        print(manifest, end="")
    elif opts.command == "apply":
        deploy.submit(asked, kubectl)
        log.info("next: " + commands.script(_SCRIPT, "logs", *where(opts)))
    else:
        patience = deploy.Patience(opts.attempts, opts.poll_seconds, opts.backoff_seconds,
                                   opts.pending_minutes * 60)
        try:
            deploy.deploy(asked, kubectl, token=os.environ.get("HF_TOKEN", ""),
                          monitor=opts.monitor, patience=patience)
        except KeyboardInterrupt:
            log.info("\nthe job goes on; end it: " + commands.script(_SCRIPT, "stop", *where(opts)))
            raise


def headline(argv: Sequence[str]) -> str:
    """Return the comment at the top of a manifest."""
    return f"made by: {typed(argv)}".replace("\n", " ")


def typed(argv: Sequence[str]) -> str:
    """Return the command that was typed, as it is typed in the project."""
    return f"python launch/kubernetes.py {shlex.join(commands.redacted_argv(argv))}"


def where(opts: Options) -> list[str]:
    """Return the options that name a job."""
    context = ["--context", opts.context] if opts.context else []
    return ["--kind", opts.kind, "--namespace", opts.namespace, "--job-name", opts.job_name,
            *context]


def status(opts: Options, kubectl: Kubectl) -> None:
    """Print the job's state, its pods, and what is wrong with them."""
    from launch.kube import cluster_state, job

    resource = job.KINDS[opts.kind].resource
    if opts.dry_run:
        print(*kubectl.command("get", resource, opts.job_name, "-o", "json"))
        return
    found = cluster_state.require(kubectl, resource, opts.job_name)
    state = cluster_state.of_job(found)
    log.info(f"{opts.job_name} is {state.state}: {state.words}")
    pods = cluster_state.pods(kubectl, job.selector(opts.job_name))
    cluster_state.show_pods(pods)
    if state.state != cluster_state.SUCCEEDED and (
            cause := cluster_state.find_cause(kubectl, opts.job_name, pods)):
        cluster_state.show_cause(cause)


def logs(opts: Options, kubectl: Kubectl) -> None:
    """Print what a node's pod prints; UsageError when there is no such pod."""
    from launch.kube import cluster_state, job

    follow = ["--follow"] if opts.follow else []
    if opts.dry_run:
        print(*kubectl.command("logs", *follow, f"POD of node {opts.node_rank}"))
        return
    cluster_state.require(kubectl, job.KINDS[opts.kind].resource, opts.job_name)
    pods = cluster_state.pods(kubectl, job.selector(opts.job_name))
    if opts.node_rank >= len(pods):
        raise UsageError(f"--node-rank {opts.node_rank}: the job has {len(pods)} pods",
                         run=commands.script(_SCRIPT, "status", *where(opts)))
    name = pods[opts.node_rank]["metadata"]["name"]
    stream = kubectl.stream("logs", *follow, name)
    try:
        code = stream.wait()
    finally:
        stream.terminate()
    if code:
        raise UsageError(f"no log of {name} (kubectl exit code {code})",
                         run=commands.script(_SCRIPT, "status", *where(opts)))


def stop(opts: Options, kubectl: Kubectl) -> None:
    """Delete the job; its pods finish their step and save."""
    from launch.kube import cluster_state, deploy, job

    kind = job.KINDS[opts.kind]
    if opts.dry_run:
        print(*kubectl.command("delete", kind.resource, opts.job_name))
        return
    found = cluster_state.require(kubectl, kind.resource, opts.job_name)
    state = cluster_state.of_job(found)
    if state.state != cluster_state.ACTIVE:
        log.info(f"nothing to stop: {opts.job_name} is not running ({state.words})")
        log.info("its pods and logs stay until it is deleted: "
                 + shlex.join(kubectl.command("delete", kind.resource, opts.job_name)))
        return
    log.info(f"{opts.job_name}: its pods finish their step, save and end")
    deploy.stop(kubectl, opts.kind, opts.job_name, job.runtime_name(opts.namespace, opts.job_name))
    log.info("stopped; the same job goes on from the checkpoint")


def deploy_training_job(*, cluster_name: str, num_nodes: int, job_name: str, instance_type: str,
                        image_uri: str, max_steps: int | None = None, hf_token: str | None = None,
                        monitor: bool = True, kind: str = "pytorchjob", namespace: str = "default",
                        train: Sequence[str] = (), patience: Patience | None = None) -> None:
    """Do what `deploy` does; raises a StageError (launch.kube.deploy.JobFailed) with the last word.

    cluster_name: of EKS, or a context of the kubeconfig. train: further options of stage 04, such
    as --config recipes/llama-3.1-8b.yaml. patience: how often and how long to try.
    """
    from launch.kube import deploy, job
    from launch.kube.kubectl import Kubectl

    argv = ["deploy", "--kind", kind, "--namespace", namespace, "--job-name", job_name,
            "--nodes", str(num_nodes), "--instance-type", instance_type, "--image", image_uri,
            "--", *train,
            *([f"--max-steps={max_steps}"] if max_steps else [])]
    asked = job.of_options(*parse(argv))
    deploy.deploy(asked, Kubectl(namespace, context_of(cluster_name)), token=hf_token or "",
                  monitor=monitor, patience=patience)


def context_of(cluster_name: str) -> str:
    """Return the context of a cluster; EKS's is fetched when the kubeconfig has none."""
    def known() -> str:
        listed = subprocess.run(["kubectl", "config", "get-contexts", "-o", "name"],
                                capture_output=True, text=True)
        return next((name for name in listed.stdout.split()
                     if name == cluster_name or name.endswith(f":cluster/{cluster_name}")), "")
    if shutil.which("kubectl") is None:
        raise UsageError("kubectl is not installed")
    if not (context := known()) and shutil.which("aws"):
        subprocess.run(["aws", "eks", "update-kubeconfig", "--name", cluster_name],
                       stdout=subprocess.DEVNULL)
        context = known()
    if not context:
        raise UsageError(f"the kubeconfig has no cluster {cluster_name}",
                         run=commands.shell("aws", "eks", "update-kubeconfig", "--name",
                                            cluster_name))
    return context


if __name__ == "__main__":
    stage.run(main, only_shows=sys.argv[1:2] in (["logs"], ["status"]))
