#!/usr/bin/env python3
"""Look at a Kubernetes cluster before a job goes there: will it run, and if not, what is missing?

  python launch/cluster.py validate --kind pytorchjob --nodes 4 --instance-type p5.48xlarge
  python launch/cluster.py validate --kind hyperpod --cluster-name my-eks --pvc fsx-claim
  python launch/cluster.py describe                   # nodes, devices, storage, quotas, operators

Asks kubectl, in the context that it would use by itself, and changes nothing. Where the AWS command
line is installed, EKS and HyperPod are asked too. Every finding has a severity and a remedy. Exit
code: 0 ready, 5 a warning (with --fail-on warning), 6 an error, 2 without kubectl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.clusters import aws as cluster_aws  # noqa: E402
from launch.clusters import nodes as cluster_nodes  # noqa: E402
from launch.clusters.nodes import EFA, GPU, Node  # noqa: E402
from launch.common import findings  # noqa: E402
from launch.common.findings import Finding  # noqa: E402
from launch.kube.kubectl import Kubectl, KubectlError  # noqa: E402
from lib.core import log, options, stage  # noqa: E402
from lib.core.errors import Problems, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402

KINDS = ("pytorchjob", "trainjob", "hyperpod")


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__)
    parser.add_argument("action", nargs="?", choices=("validate", "describe"), default="validate",
                        help="judge the cluster for a job, or show what it has "
                             "(default: validate)")
    where = parser.add_argument_group("the cluster")
    where.add_argument("--context", default="", metavar="NAME",
                       help="context of the kubeconfig (default: the current one)")
    where.add_argument("--namespace", default="default", metavar="NAME",
                       help="namespace of the job")
    where.add_argument("--cluster-name", default="", metavar="NAME",
                       help="EKS cluster, for what AWS tells (default: that of the context)")
    where.add_argument("--region", default="", metavar="NAME",
                       help="AWS region (default: that of the context, or of the AWS settings)")
    job = parser.add_argument_group("the job")
    job.add_argument("--kind", choices=KINDS, default="pytorchjob", help="kind of job")
    job.add_argument("--nodes", type=options.positive_int, default=1, metavar="N",
                     help="nodes that the job asks for")
    job.add_argument("--instance-type", default="", metavar="T",
                     help="instance type of the nodes (default: any with GPUs)")
    job.add_argument("--gpus-per-node", type=options.count, metavar="N",
                     help="GPUs per node (default: those of the instance type, else 1)")
    job.add_argument("--efa-per-node", type=options.count, metavar="N",
                     help="EFA devices per node (default: those of the instance type, else 0)")
    job.add_argument("--pvc", default="fsx-claim", metavar="NAME",
                     help="volume claim with data and experiments")
    job.add_argument("--image", default="", metavar="IMAGE",
                     help="container image of the job (default: not checked)")
    job.add_argument("--image-pull-secret", default="", metavar="NAME",
                     help="secret that the nodes fetch the image with (default: none)")
    findings.add_options(parser)
    options.add_config(parser, "print what would be asked and ask nothing")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Judge or describe."""
    opts = parse(argv)
    _check(opts)
    kube = Kubectl(opts.namespace, opts.context)
    if opts.dry_run:
        _plan(opts, kube)
    elif opts.action == "describe":
        describe(kube, opts)
    else:
        found = validate(kube, opts)
        findings.show(found)
        if opts.json:
            findings.write_json(opts.json, found)
        findings.conclude(found, opts.fail_on, "this cluster")


def _check(opts: Options) -> None:
    """Raise UsageError for names that no cluster has, before anything is asked."""
    from launch.kube import checks, render

    problems, known = Problems(), render.instances()
    checks.objects(opts, problems)
    bare_type = opts.instance_type.removeprefix("ml.")
    if bare_type and bare_type not in known and opts.gpus_per_node is None:
        checks.unknown_type(bare_type, known, problems)
    problems.raise_if_any()


def validate(kube: Kubectl, opts: Options) -> list[Finding]:
    """Return everything that can be said of the cluster for this job."""
    from launch.clusters import checks
    from launch.kube import render

    found = [checks.server(kube)]
    if found[0].severity == findings.ERROR:
        return [*found, *_aws(kube, opts)]
    wanted = checks.wanted_of(opts, render.instances())
    nodes: list[Node] = []

    def look_at_nodes() -> list[Finding]:
        gaps: list[Finding] = []
        nodes.extend(_nodes(kube, gaps))
        return [*gaps, *cluster_nodes.judge(nodes, wanted, _grows(kube))]

    each: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("namespace", lambda: checks.namespace(kube)),
        ("rights", lambda: checks.rights(kube, opts.kind)),
        ("operator", lambda: checks.operator(kube, opts.kind)),
        ("nodes", look_at_nodes),
        ("storage", lambda: checks.storage(kube, opts.pvc)),
        ("quota", lambda: checks.quota(kube, wanted)),
        ("image pull secret",
         lambda: checks.pull_secret(kube, opts.image_pull_secret, opts.image)),
        ("EKS", lambda: _aws(kube, opts))]
    with ThreadPoolExecutor() as pool:
        for of_one in pool.map(lambda check: checks.guarded(*check), each):
            found += of_one
    return [*found, *(checks.drivers(nodes) if wanted.gpus else ())]


def describe(kube: Kubectl, opts: Options) -> None:
    """Print nodes with their devices, storage, quotas and kinds of job."""
    from launch.clusters.checks import server

    gaps = [server(kube)]
    if gaps[0].severity == findings.ERROR:
        findings.show(gaps)
        findings.conclude(gaps, opts.fail_on, "this cluster")
    nodes = _nodes(kube, gaps)
    log.info(f"{len(nodes)} nodes")
    for kind in sorted({node.instance_type for node in nodes}):
        own = [node for node in nodes if node.instance_type == kind]
        log.info(f"  {kind}: {len(own)} nodes, {sum(bool(n.unfit) for n in own)} of them unusable; "
                 f"{sum(n.gpus for n in own)} {GPU}, {sum(n.gpus_free for n in own)} of them free; "
                 f"{sum(n.efa for n in own)} {EFA}")
    for node in nodes:
        if node.unfit:
            log.info(f"  {node.name}: {node.unfit}")
    for title, resource, line in (
            ("kinds of job", "customresourcedefinitions", _crd_line),
            ("storage classes", "storageclasses",
             lambda item: f"{item['metadata']['name']}: {item['provisioner']}"),
            (f"claims in {opts.namespace}", "persistentvolumeclaims",
             lambda item: f"{item['metadata']['name']}: {item.get('status', {}).get('phase')}, "
                          f"{', '.join(item['spec'].get('accessModes', []))}"),
            (f"quotas in {opts.namespace}", "resourcequotas", _quota_line)):
        log.info(title)
        try:
            lines = [text for item in kube.items(resource) if (text := line(item))]
        except KubectlError as error:
            lines = [f"not told: {error.text.strip().splitlines()[-1]}"]
        for text in lines or ["none"]:
            log.info(f"  {text}")
    findings.show([*gaps, *_aws(kube, opts)])


def manage_eks_cluster(cluster_name: str | None = None, region: str = "", *,
                       validate_components: bool = True, auto_fix: bool = False,
                       namespace: str = "default", kind: str = "pytorchjob", nodes: int = 1,
                       instance_type: str = "", pvc: str = "fsx-claim") -> list[Finding]:
    """Connect kubectl to an EKS cluster, judge it for a job, and return what was found.

    cluster_name: None for the only one of the account and region. auto_fix: make the namespace
    when it is missing; whatever else is wrong costs money or rights, and is only told with its
    remedy. Raises UsageError without kubectl or the AWS command line, or when AWS refuses.
    """
    name = cluster_name or cluster_aws.discover(region)
    cluster_aws.connect(name, region)
    opts = parse(["validate", f"--namespace={namespace}", f"--kind={kind}", f"--nodes={nodes}",
                  f"--pvc={pvc}", f"--cluster-name={name}", f"--region={region}",
                  f"--instance-type={instance_type}"])
    kube = Kubectl(namespace)
    if auto_fix and kube.find("namespace", namespace) is None:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        kube.run("create", "--validate=false", "-f", "-", given=json.dumps(made))
    found = validate(kube, opts) if validate_components else _aws(kube, opts)
    findings.show(found)
    return found


def _nodes(kube: Kubectl, found: list[Finding]) -> list[Node]:
    """Return the nodes; which GPUs are taken is only known to those who may see all pods."""
    try:
        pods = kube.items("pods", "--all-namespaces",
                          "--field-selector=status.phase!=Succeeded,status.phase!=Failed")
    except KubectlError:
        pods = []
        found.append(findings.not_checked("GPUs in use", "you may not list pods of all namespaces"))
    return cluster_nodes.read(kube.items("nodes"), pods)


def _grows(kube: Kubectl) -> bool:
    """Tell whether an autoscaler adds nodes when pods wait."""
    try:
        return kube.find("customresourcedefinition", "nodepools.karpenter.sh") is not None or any(
            "cluster-autoscaler" in item["metadata"]["name"]
            for item in kube.items("deployments", "--all-namespaces"))
    except KubectlError:
        return False


def _aws(kube: Kubectl, opts: Options) -> list[Finding]:
    context = opts.context
    if not context:
        try:
            context = kube.run("config", "current-context").strip()
        except (KubectlError, UsageError):
            context = ""
    name, region = cluster_aws.cluster_of(context)
    return cluster_aws.check(opts.cluster_name or name, opts.region or region, opts.kind)


def _crd_line(item: dict[str, Any]) -> str:
    from launch.clusters.checks import KINDS as known

    name = item["metadata"]["name"]
    served = [version["name"] for version in item["spec"]["versions"] if version.get("served")]
    return f"{name} ({', '.join(served)})" if name in {crd for crd, *_ in known.values()} else ""


def _quota_line(item: dict[str, Any]) -> str:
    hard, used = (item.get("status", {}).get(key, {}) for key in ("hard", "used"))
    return f"{item['metadata']['name']}: " + ", ".join(
        f"{resource} {used.get(resource, '0')} of {limit}" for resource, limit in hard.items())


def _plan(opts: Options, kube: Kubectl) -> None:
    log.table({"kubectl": " ".join(kube.command("get", "…", "-o", "json")),
               "for": f"version, rights, nodes, pods, CRDs, deployments, claim {opts.pvc}, quotas, "
                      "secrets (their type only)",
               "aws": "eks and sagemaker, describe and list only, where it is installed"})


if __name__ == "__main__":
    stage.run(main)
