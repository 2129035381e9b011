"""Train on Kubernetes: render a job's manifest, submit it, follow it, and explain its failures.

  python launch/kubernetes.py setup --kind eks --region us-west-2 --out new-cluster
  python launch/kubernetes.py cluster --cluster-name eks --nodes 4
  python launch/kubernetes.py deploy --cluster-name eks --num-nodes 4 --job-name exp
  python launch/kubernetes.py prepare --cluster-name eks --job-name exp
  python launch/kubernetes.py deploy --kind trainjob --job-name exp --instance-type p5.48xlarge \\
      --nodes 2 --image REGISTRY/train:1 -- --config recipes/llama-3.1-8b.yaml -d c4
  python launch/kubernetes.py render --job-name exp --nodes 2 --instance-type p5.48xlarge \\
      --image REGISTRY/train:1 -- -d c4 -m meta-llama/Llama-3.1-8B --global-batch-size 256
  python launch/kubernetes.py status|logs|stop --kind trainjob --job-name exp
  python launch/kubernetes.py validate --kind trainjob --job-name exp --nodes 2
  python launch/kubernetes.py run -- python launch/monitor.py outputs/exp
  python launch/kubernetes.py shell
  python launch/kubernetes.py fetch outputs/exp/export/final DIR

  from launch.kubernetes import build_docker_image, deploy_training_job, manage_eks_cluster

setup     writes the files of a new cluster and its volume, the commands that create them, and
          their costs; `setup --help` lists its options
prepare   prepares dataset, model and tokens on the volume of --pvc (hf_datasets, .cache, outputs)
cluster   checks the cluster for any job, or describes it; `cluster --help` lists its options
validate  checks whether the cluster is ready for the job; exit code 6 if it is not
render    prints the manifest, or writes it to a file
apply     submits the job
deploy    checks the cluster, prepares the run if needed (see --prepare), submits the job and shows
          its log; after a failure, it finds the cause, applies or prints the remedy, and retries
status    prints the state of the job and its pods, and the cause of a failure
logs      prints the log of a node
stop      deletes the job, whose pods save and end
run       runs any command in a pod with the volume; `run --help` lists its options
shell     opens a shell in such a pod
fetch     copies a directory or a file from the volume to this machine

The options after `--` are options of 04_train_fsdp.py. The default of -e is the job's name, and a
--config file is read on this machine. The default run trains a 1B model from scratch on c4
(recipes/scratch-1b-g5.yaml). The default image is the last one that was built in this directory,
and the default instance type is that of the cluster's nodes. HF_TOKEN is stored in a secret, for
pods that read from the Hub: those of `prepare`, and with --streaming --online those of the run.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from launch.cloud.images import docker as image_docker
from launch.cloud.kube import cluster, deploy, preparation, setup, volume_commands
from launch.cloud.kube.cluster import log_cluster
from launch.cloud.kube.costs import log_cost
from launch.cloud.kube.deploy import Patience
from launch.cloud.kube.job import Job, plan_job, render_manifests
from launch.cloud.kube.job_commands import JOB_COMMANDS, SCRIPT, format_command
from launch.cloud.kube.job_options import ClusterChoice, JobOptions
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubectl import Kubectl
from launch.cloud.kube.open_options import choose_context, fill_open_options
from launch.cloud.kube.preparation import Preparation, plan_preparation
from launch.cloud.kube.raw_text import RawText
from launch.cloud.kube.volume_commands import VOLUME_COMMANDS
from lib.core import commands, declared, log, options, output_file
from lib.core.errors import Problems, UsageError
from lib.core.options import Options
from lib.train import command_line
from lib.train.config import Config
from lib.train.output.kinds import choose_kind

_HEADLINE = "# made by: "  # begins each manifest
_STARTING = ("prepare", "render", "apply", "deploy")
_FIRST_WORDS = ("setup", "cluster", *VOLUME_COMMANDS)  # commands with options of their own


def _is_manifest(text: str) -> bool:
    """Return whether a text is a manifest that `render` has made."""
    return text.startswith(_HEADLINE)


def build_parser() -> options.Parser:
    parser = options.Parser(__doc__, "COMMAND --job-name J [options] -- TRAINING OPTIONS")
    parser.add_argument(
        "command", choices=(*_STARTING, *JOB_COMMANDS, *_FIRST_WORDS), help="the command to run"
    )
    declared.add_options(parser, JobOptions)
    declared.add_options(parser, Patience)
    declared.add_options(parser, RawText)
    group = parser.add_argument_group("the command")
    declared.add_options(group, ClusterChoice)
    group.add_argument(
        "--token",
        "--hf-token",
        default=os.environ.get("HF_TOKEN", ""),
        metavar="TOKEN",
        help="deploy, prepare: token for the Hub, stored in a secret of the cluster; set "
        "HF_TOKEN rather than this option, which others can see (default: HF_TOKEN)",
    )
    group.add_argument(
        "--out",
        type=partial(output_file.parse_output_file, is_own=_is_manifest),
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
        "--prepare",
        choices=preparation.CHOICES,
        default=preparation.AUTO,
        help="deploy: run the job of `prepare` first; auto: only if no finished job has prepared "
        "the same run on this volume",
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
    if argv[:1] == ["setup"]:
        setup.main(argv[1:])
        return
    if argv[:1] == ["cluster"]:
        cluster.main(argv[1:])
        return
    if argv and argv[0] in VOLUME_COMMANDS:
        volume_commands.main(argv, choose_image)
        return
    opts, train = parse(argv)
    if opts.command in _FIRST_WORDS:
        raise UsageError(
            f"{opts.command} is not the first word", expected=f"{opts.command}, then its options"
        )
    if opts.dry_run or opts.command == "logs" or (opts.command == "render" and not opts.out):
        log.setup(sys.stderr)  # the standard output is the manifest or the node's log alone
    # By an exception, so that `finally` also ends a kubectl that follows a log.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    job_options = choose_context(
        declared.read_options(JobOptions, opts),
        opts.cluster_name,
        opts.dry_run,
        only_plans=opts.dry_run and opts.command in _STARTING,
    )
    kubectl = Kubectl(
        job_options.namespace, job_options.context, opts.cluster_name, job_options.region
    )
    queries_cluster = not opts.dry_run and (opts.command != "render" or bool(opts.cluster_name))
    if queries_cluster:
        log_cluster(kubectl)
    typed_command = f"python {SCRIPT} {commands.shell(*argv)}"
    if opts.command in JOB_COMMANDS:
        problems = Problems()
        job_options.check_names(problems)
        problems.raise_if_any()
        JOB_COMMANDS[opts.command](job_options, kubectl, opts)
        return
    job_options = choose_image(job_options)
    raw_text = declared.read_options(RawText, opts)
    if opts.command == "prepare":
        start_job(plan_preparation(job_options, raw_text, train, typed_command), kubectl, opts)
        if not opts.dry_run:
            log.info(f"next: {commands.script(SCRIPT, *make_deploy_words(argv))}")
        return
    job = plan_job(fill_open_options(job_options, kubectl, queries_cluster), train, typed_command)
    log_cost(job)
    first = None
    if opts.command == "deploy" and opts.prepare != preparation.NEVER:
        first = plan_preparation(job_options, raw_text, job.train, typed_command)
    start_job(job, kubectl, opts, first)
    if opts.command == "deploy" and not opts.dry_run:
        log_next_command(job, job_options)


def log_next_command(job: Job, job_options: JobOptions) -> None:
    """Print the command that exports the run of a complete job, in a pod that sees its checkpoints.
    The command that the stage itself prints is for a shell in the pod.
    """
    config = command_line.parse_options(job.train)
    if not (choose_kind(config).keeps_files and config.experiment_name):
        return
    usual = JobOptions(job_name=job.job_name)
    names = ("namespace", "context", "region", "pvc", "mount_path", "project_dir", "code_dir")
    values = {name: getattr(job_options, name) for name in names}
    built = image_docker.find_last_built_image()
    if not built or built.image != job.image:
        values["image"] = job.image
    words = commands.as_words(
        {name: value for name, value in values.items() if value != getattr(usual, name)}
    )
    export = ("--", "python", "05_export_checkpoint.py", "-e", config.experiment_name)
    log.info(f"next: {commands.script(SCRIPT, 'run', *words, *export)}")


def make_deploy_words(argv: list[str]) -> list[str]:
    """Return the arguments of the `deploy` command that follows a `prepare`."""
    replaced = [
        [*argv[:position], "deploy", *argv[position + 1 :]]
        for position, word in enumerate(argv)
        if word == "prepare"
    ]
    # The command may follow options, and the value of an option may be the same word.
    return next(words for words in replaced if parse(words)[0].command == "deploy")


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


def start_job(job: Job, kubectl: Kubectl, opts: Options, first: Preparation | None = None) -> None:
    """Write, print or submit a job, and follow it if the command is `deploy` or `prepare`.

    first: see `run_job`.
    """
    manifest = render_manifests(
        job.manifests(), f"{_HEADLINE[2:]}{job.launched_as}".replace("\n", " ")
    )
    if opts.command == "render" and opts.out and not opts.dry_run:
        output_file.write_output(opts.out, manifest)
        log.info(
            f"{opts.out}: {job.nodes} × {job.gpus_per_node} GPUs, {job.efa_per_node} EFA per node"
        )
        log.info(f"next: {kubectl.format('apply', '-f', str(opts.out))}")
    elif opts.command == "render" or opts.dry_run:
        if first:
            is_auto = opts.prepare == preparation.AUTO
            log.info(
                (is_auto and preparation.explain_omission(job))
                or f"--prepare {opts.prepare}: job {first.job_name} would prepare the run first"
                + (", unless it has done so" if is_auto else "")
            )
        print(manifest, end="")
    elif opts.command == "apply":
        deploy.submit_job(job, kubectl)
        log.info(f"next: {format_command('logs', job)}")
    else:
        run_job(
            job,
            kubectl,
            first,
            opts.prepare,
            token=opts.token,
            monitor=opts.monitor,
            patience=declared.read_options(Patience, opts),
        )


def run_job(
    job: Job, kubectl: Kubectl, first: Preparation | None, prepare: str, **settings: Any
) -> None:
    """Run a job to its end, and before it the job that prepares its run, if that is needed.

    first: the job that prepares the run, or None. prepare: the value of --prepare. settings: for
    `deploy.deploy_job`.
    """
    is_checked = False
    if first:
        deploy.require_needs(job, kubectl, has_token=bool(settings["token"]))
        is_checked = not preparation.is_needed(prepare, first, job, kubectl)
        if not is_checked:
            run_job(first, kubectl, None, prepare, **settings)
    try:
        deploy.deploy_job(job, kubectl, is_checked=is_checked, **settings)
    except KeyboardInterrupt:
        log.info(f"\nthe job continues; to end it: {_format_stop_command(job, kubectl)}")
        raise


def _format_stop_command(job: Job, kubectl: Kubectl) -> str:
    return (
        format_command("stop", job)
        if job.resource == KINDS[job.kind].resource
        else shlex.join(kubectl.command("delete", job.resource, job.job_name))
    )


@commands.repeatable_call
def deploy_training_job(
    *,
    cluster_name: str = "",
    hf_token: str | None = None,
    monitor: bool = True,
    auto_retry: bool = True,
    prepare: str = preparation.AUTO,
    train: Sequence[str] = (),
    patience: Patience | None = None,
    **values: Any,
) -> None:
    """Run a job to its end as `deploy` does. Raises launch.cloud.kube.deploy.JobFailed if it fails.

    cluster_name: an EKS cluster, or a context of the kubeconfig (default: the current one).
    hf_token: stored in a secret for pods that need it (default: HF_TOKEN). auto_retry: submit again
    after failures that may pass. prepare: auto, always or never, as --prepare. train: options of
    stage 04, such as --config recipes/llama-3.1-8b.yaml. patience: how often and how long to try.
    values: options of `deploy` or of stage 04 by their names, such as job_name="exp", num_nodes=4,
    max_steps=1000; defaults are those of the command line.
    """
    log.ensure_setup()
    if prepare not in preparation.CHOICES:
        raise UsageError(
            f"prepare={prepare!r} is not a choice", expected=", ".join(preparation.CHOICES)
        )
    job_fields = declared.fields_by_spelling(JobOptions)
    text_fields = declared.fields_by_spelling(RawText)
    known = (JobOptions, RawText, Config, ClusterChoice)
    declared.require_known(
        values, [name for one in known for name in declared.fields_by_spelling(one)]
    )
    job_options = declared.from_values(
        JobOptions, **{name: values[name] for name in values if name in job_fields}
    )
    raw_text = declared.from_values(
        RawText, **{name: values[name] for name in values if name in text_fields}
    )
    stage_values = declared.merge_spellings(
        Config, {name: values[name] for name in values if name not in {**job_fields, **text_fields}}
    )
    words = [*train, *command_line.to_words(stage_values)]
    job_options = choose_image(choose_context(job_options, cluster_name))
    kubectl = Kubectl(job_options.namespace, job_options.context, cluster_name, job_options.region)
    log_cluster(kubectl)
    job = plan_job(fill_open_options(job_options, kubectl), words)
    log_cost(job)
    run_job(
        job,
        kubectl,
        plan_preparation(job_options, raw_text, job.train, "")
        if prepare != preparation.NEVER
        else None,
        prepare,
        token=os.environ.get("HF_TOKEN", "") if hf_token is None else hf_token,
        monitor=monitor,
        patience=patience or (Patience() if auto_retry else Patience(attempts=1)),
    )
