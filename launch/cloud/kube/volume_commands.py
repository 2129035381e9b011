"""Run a command in a pod with the volume of the runs, or copy files from the volume.

  python launch/kubernetes.py run --job-name exp -- python launch/monitor.py outputs/exp --once
  python launch/kubernetes.py run -- python 05_export_checkpoint.py -e exp
  python launch/kubernetes.py run --gpus-per-node 8 --instance-type p5.48xlarge -- nvidia-smi
  python launch/kubernetes.py shell
  python launch/kubernetes.py fetch outputs/exp/export/final exp-final

run    runs any command in a pod with the image and the volume of --pvc, by default without a GPU;
       prints the output and exits with the command's exit code. Paths of this project's files
       (launch/monitor.py, 05_export_checkpoint.py, recipes/…) stand for the files in the image.
       Other relative paths start from the directory with outputs/.
shell  opens an interactive shell in such a pod, or runs the command after `--`
fetch  copies a directory or a file from the volume to a new directory on this machine, and compares
       the SHA-256 of each file. After an interruption, the same command continues.

The pod is deleted when the command ends, even after Ctrl-C. The default image is the last one
that was built in this directory.
"""

from __future__ import annotations

import argparse
import posixpath
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch.cloud.kube import fetch
from launch.cloud.kube.cluster import log_cluster
from launch.cloud.kube.deploy import Patience
from launch.cloud.kube.job import render_manifests
from launch.cloud.kube.job_options import ClusterChoice, JobOptions
from launch.cloud.kube.kubectl import Kubectl
from launch.cloud.kube.open_options import choose_context
from launch.cloud.kube.preparation import BUCKET
from launch.cloud.kube.volume_pod import (
    PodOptions,
    VolumePod,
    find_in_image,
    plan_pod,
    run_in_pod,
    start_pod,
)
from lib.core import declared, log, options
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.train import command_line

# A pod whose launcher was killed ends by itself after a day.
_IDLE = ("sleep", "86400")
_SHELL = ("sh", "-c", "exec $(command -v bash || command -v sh)")
# Accepted, so that `make` can pass the options of a job.
_WITHOUT_EFFECT = (
    "nodes",
    "min_nodes",
    "spares",
    "efa_per_node",
    "max_restarts",
    "slow_below",
    "attempts",
    "poll_seconds",
    "backoff_seconds",
)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def parse(argv: list[str]) -> Options:
    usage = {
        "run": "[options] -- COMMAND",
        "shell": "[options] [-- COMMAND]",
        "fetch": "PATH DIR [options]",
    }
    parser = options.Parser(__doc__, usage[argv[0]])
    parser.prog = f"kubernetes.py {argv[0]}"
    if argv[0] == "fetch":
        parser.add_argument("path", metavar="PATH", help="directory or file on the volume")
        parser.add_argument(
            "directory", type=Path, metavar="DIR", help="new directory on this machine"
        )
        parser.add_argument(
            "--overwrite", action="store_true", help="replace an earlier copy in DIR"
        )
    hidden = dict.fromkeys(_WITHOUT_EFFECT, argparse.SUPPRESS)
    declared.add_options(parser, PodOptions, **hidden)
    declared.add_options(
        parser,
        Patience,
        **hidden,
        pending_minutes="minutes that the pod may wait for a node and its image",
    )
    group = parser.add_argument_group("the command")
    declared.add_options(group, ClusterChoice)
    group.add_argument(
        "--dry-run", action="store_true", help="print the manifest of the pod and do nothing"
    )
    return parser.parse(argv[1:])


def main(argv: list[str], choose_image: Callable[[JobOptions], JobOptions]) -> None:
    """Run one of the commands `run`, `shell` and `fetch` of launch/kubernetes.py.

    argv[0]: the command. choose_image: returns the options with the default image.
    """
    log.setup(sys.stderr)  # standard output is for the output of the command alone
    for number in _SIGNALS:  # exit by an exception, so that the pod is deleted
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    own_words, words = command_line.split_at_dashes(argv)
    opts = parse(own_words)
    if argv[0] == "run" and not words:
        raise UsageError(
            "`--` is missing, or nothing follows it",
            expected="the command to run in the pod: -- python launch/monitor.py outputs/exp",
        )
    if argv[0] == "fetch":
        fetch.require_new(opts.directory, opts.overwrite)
    pod_options = choose_context(
        declared.read_options(PodOptions, opts),
        opts.cluster_name,
        opts.dry_run,
        only_plans=opts.dry_run,
    )
    words = [find_in_image(word, pod_options.code_dir) for word in words]
    pod = plan_pod(choose_image(pod_options), words if argv[0] == "run" else _IDLE)
    if argv[0] == "fetch":
        find_on_volume(pod, opts.path)  # raises an error before a pod is created
    if opts.dry_run:
        print(render_manifests(pod.manifests(), "not created: --dry-run"), end="")
        return
    kubectl = Kubectl(pod.namespace, pod.context, opts.cluster_name, pod.region)
    log_cluster(kubectl)
    code = VOLUME_COMMANDS[argv[0]](pod, kubectl, opts, words)
    if code:
        sys.exit(code)


def run_command(pod: VolumePod, kubectl: Kubectl, opts: Options, words: list[str]) -> int:
    """Run a command in a pod, and return its exit code."""
    code = run_in_pod(pod, kubectl, opts.pending_minutes)
    if code:
        log.info(f"the command ended with exit code {code}")
    return code


def open_shell(pod: VolumePod, kubectl: Kubectl, opts: Options, words: list[str]) -> int:
    """Connect the terminal to a shell, or to another command, in a pod; return its exit code."""
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    with start_pod(pod, kubectl, opts.pending_minutes):
        log.info(f"in {pod.project_dir or pod.mount_path}; the pod ends with the shell")
        return subprocess.call(
            kubectl.command("exec", "--stdin", *terminal, pod.pod_name, "--", *(words or _SHELL))
        )


def find_on_volume(pod: VolumePod, path: str) -> str:
    """Return a path that a person typed as an absolute one in the pod.

    Raises UsageError if it is empty, or leads out of the volumes, to files of the image.
    """
    if not path:  # an unset variable; it would mean the whole volume
        raise UsageError("PATH: expected a path, got ''", expected="`.` for the whole directory")
    absolute = posixpath.normpath(posixpath.join(pod.project_dir or pod.mount_path, path))
    roots = [posixpath.normpath(pod.mount_path), *([BUCKET] if pod.bucket_pvc else [])]
    if not any(posixpath.commonpath([root, absolute]) == root for root in roots):
        raise UsageError(
            f"{path} is not on the volume: it leads to {absolute} in the pod",
            expected=f"a path below {' or '.join(roots)}; relative paths start from the directory "
            "with outputs/",
        )
    return absolute


def fetch_directory(pod: VolumePod, kubectl: Kubectl, opts: Options, words: list[str]) -> int:
    """Copy a directory of the volume to this machine."""
    path = find_on_volume(pod, opts.path)
    with start_pod(pod, kubectl, opts.pending_minutes):
        source = fetch.Source(kubectl, pod.pod_name, path)
        origin = f"claim {pod.pvc}, namespace {pod.namespace}, context {pod.context or 'current'}"
        fetch.Copy(source, opts.directory, origin).run(opts.overwrite)
    return 0


VOLUME_COMMANDS: dict[str, Callable[[VolumePod, Kubectl, Options, list[str]], int]] = {
    "run": run_command,
    "shell": open_shell,
    "fetch": fetch_directory,
}
