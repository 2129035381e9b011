"""Render the files of a cluster and its volume, and print the commands that create them, in order.

  python launch/kubernetes.py setup --region us-west-2 --out new-cluster       # EKS, 4 × g5.8xlarge
  python launch/kubernetes.py setup --kind hyperpod --instance-type p5.48xlarge --nodes 2 \\
      --region us-west-2 --out new-cluster
  python launch/kubernetes.py setup --only storage --cluster-name eks | kubectl apply -f -

The command itself creates nothing at AWS. It writes cluster.yaml for eksctl, hyperpod.json for
`aws sagemaker create-cluster`, lifecycle scripts, policies, and steps.sh with all commands and the
estimated costs. Without --out, it prints the steps. --only prints one file. The files `nodes` and
`storage` need facts of the EKS cluster, which `--only` queries, so steps.sh renders them after the
cluster exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.cloud.kube import cluster_files, setup_steps
from launch.cloud.kube.cluster_files import CLUSTER, PARTS, STORAGE, ClusterOptions
from lib.core import commands, declared, log, options
from lib.core.errors import Problems, UsageError
from lib.core.options import Options


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__)
    parser.prog = "kubernetes.py setup"
    declared.add_options(parser, ClusterOptions)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--only", choices=PARTS, default="", help="print one file (default: print the steps)"
    )
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for the files (default: none)"
    )
    options.add_config(parser, "print the steps and write nothing")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    opts = parse(argv)
    if not opts.out:
        log.setup(sys.stderr)  # standard output is for the file or the steps alone
    cluster = declared.read_options(ClusterOptions, opts)
    if not cluster.storage_class:  # all files without a storage class are for AWS
        cluster = cluster_files.fill_region(cluster)
    problems = Problems()
    cluster.check(problems, is_new=opts.only != STORAGE)
    problems.raise_if_any()
    if opts.only:
        print_part(opts.only, cluster, opts.out)
        return
    folder = opts.out or Path(cluster.cluster_name)
    steps = setup_steps.render_steps(cluster, folder)
    if not opts.out or opts.dry_run:
        print(steps, end="")
        log.info(f"next: {_format_command(cluster, '--out', folder)}")
        return
    write_files(cluster, folder, steps)
    log.info(f"next: read {folder / 'steps.sh'}, and run its commands one after the other")


def print_part(part: str, cluster: ClusterOptions, out: Path | None) -> None:
    """Print one file, or write it below `out`."""
    text = cluster_files.render_part(part, cluster)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        path = out / setup_steps.FILES[part]
        path.write_text(text, encoding="utf-8")
        log.info(f"wrote {path}")
    else:
        print(text, end="")


def write_files(cluster: ClusterOptions, folder: Path, steps: str) -> None:
    """Write the files that need no facts of an existing cluster, and the steps.

    Raises UsageError if --out is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file", expected="a directory")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"steps.sh": steps}
    if CLUSTER in cluster.parts:
        texts[setup_steps.FILES[CLUSTER]] = cluster_files.render_part(CLUSTER, cluster)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        log.info(f"wrote {folder / name}")
    if cluster.on_hyperpod:
        cluster_files.write_support_files(cluster, folder)
        log.info(f"wrote {folder / 'lifecycle'} and {folder / 'iam'}")
    log.table(setup_steps.list_costs(cluster))


def _format_command(cluster: ClusterOptions, *words: object) -> str:
    return commands.script(cluster_files.SCRIPT, "setup", *cluster.to_words(), *words)
