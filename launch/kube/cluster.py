"""Look at a Kubernetes cluster before a job goes there: will it run, and if not, what is missing?

  python launch/check.py cluster --kind pytorchjob --nodes 4 --instance-type p5.48xlarge
  python launch/check.py cluster --kind hyperpod --cluster-name my-eks --pvc fsx-claim
  python launch/check.py cluster describe             # nodes, devices, storage, quotas, operators

Asks kubectl, in its current context or that of --cluster-name, and changes nothing. If the AWS
command line is installed, EKS and HyperPod are asked too. Every finding has a severity and a
remedy. Exit code: 0 ready, 5 a warning (with --fail-on warning), 6 an error, 2 without kubectl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from launch.checks import findings
from launch.checks.findings import Finding
from launch.kube import aws, cluster_checks
from launch.kube import nodes as cluster_nodes
from launch.kube.job_options import JobNeeds
from launch.kube.kinds import KINDS
from launch.kube.kubectl import Kubectl, KubectlError
from launch.kube.nodes import EFA, GPU, ClusterNode
from lib.core import declared, log, options
from lib.core.errors import Problems, UsageError
from lib.core.options import Options


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__)
    parser.prog = "check.py cluster"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("validate", "describe"),
        default="validate",
        help="judge the cluster for a job, or show what it has (default: validate)",
    )
    where = parser.add_argument_group("the cluster")
    where.add_argument(
        "--cluster-name",
        default="",
        metavar="NAME",
        help="EKS cluster, which must be in the kubeconfig (default: that of --context)",
    )
    where.add_argument(
        "--region",
        default="",
        metavar="NAME",
        help="AWS region (default: that of the context, or of the AWS settings)",
    )
    where.add_argument(
        "--validate-components",
        type=options.on_off,
        default=True,
        nargs="?",
        const=True,
        metavar="on|off",
        help="validate: ask the cluster; off: AWS alone",
    )
    where.add_argument(
        "--auto-fix",
        type=options.on_off,
        default=False,
        nargs="?",
        const=True,
        metavar="on|off",
        help="validate: make the namespace where it is missing",
    )
    declared.add_options(
        parser,
        JobNeeds,
        instance_type="instance type of the nodes (default: any with GPUs)",
        gpus_per_node="GPUs per node (default: those of the instance type, else 1)",
        image="image of the job (default: not checked)",
    )
    findings.add_options(parser)
    options.add_config(parser, "print what would be asked and ask nothing")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    opts = parse(argv)
    asked = declared.read_options(JobNeeds, opts)
    problems = Problems()
    asked.check_names(problems)
    if asked.instance_type:
        asked.check_type(problems)
    problems.raise_if_any()
    kube = Kubectl(asked.namespace, _context(asked, opts))
    if opts.dry_run:
        _plan(asked, kube)
        return
    eks = eks_of(kube, opts.cluster_name, opts.region)
    if opts.action == "describe":
        describe(kube, asked, eks, opts.fail_on)
        return
    findings.report(
        _judge(kube, asked, eks, opts.validate_components, opts.auto_fix), opts, "this cluster"
    )


def _context(asked: JobNeeds, opts: Options) -> str:
    """Return the context of the cluster that is asked about, empty for the current one."""
    if not opts.cluster_name or not (opts.validate_components or opts.action == "describe"):
        return asked.context
    if asked.context:
        aws.require_same_cluster(asked.context, opts.cluster_name)
        return asked.context
    return aws.context_of(opts.cluster_name, opts.region, fetch=False)


def validate(kube: Kubectl, asked: JobNeeds, eks: tuple[str, str]) -> list[Finding]:
    """Return everything that can be said of the cluster for this job.

    eks: name and region of the EKS cluster, empty where they are not known.
    """
    wanted = asked.settled()
    on_hyperpod = KINDS[asked.kind].on_hyperpod
    found = [cluster_checks.server(kube)]
    if found[0].severity == findings.ERROR:
        return [*found, *aws.check(*eks, on_hyperpod)]
    nodes: list[ClusterNode] = []

    def look_at_nodes(kube: Kubectl, wanted: JobNeeds) -> list[Finding]:
        gaps: list[Finding] = []
        nodes.extend(_nodes(kube, gaps))
        return [*gaps, *cluster_nodes.judge(nodes, wanted, _grows(kube))]

    each: dict[str, Callable[[Kubectl, JobNeeds], Iterable[Finding]]] = {
        "namespace": cluster_checks.namespace,
        "rights": cluster_checks.rights,
        "operator": cluster_checks.operator,
        "nodes": look_at_nodes,
        "storage": cluster_checks.storage,
        "quota": cluster_checks.quota,
        "image pull secret": cluster_checks.pull_secret,
        "EKS": lambda kube, wanted: aws.check(*eks, on_hyperpod),
    }
    with ThreadPoolExecutor() as pool:
        for part in pool.map(
            lambda name: cluster_checks.guarded(name, lambda: each[name](kube, wanted)), each
        ):
            found += part
    return [*found, *(cluster_checks.drivers(nodes) if wanted.gpus_per_node else ())]


def describe(kube: Kubectl, asked: JobNeeds, eks: tuple[str, str], fail_on: str) -> None:
    """Print nodes with their devices, storage, quotas and kinds of job."""
    gaps = [cluster_checks.server(kube)]
    if gaps[0].severity == findings.ERROR:
        findings.print_findings(gaps)
        findings.conclude(gaps, fail_on, "this cluster")
    nodes = _nodes(kube, gaps)
    log.info(f"{len(nodes)} nodes")
    for kind in sorted({node.instance_type for node in nodes}):
        own = [node for node in nodes if node.instance_type == kind]
        log.info(
            f"  {kind}: {len(own)} nodes, {sum(bool(n.unfit) for n in own)} of them unusable; "
            f"{sum(n.gpus for n in own)} {GPU}, {sum(n.gpus_free for n in own)} of them free; "
            f"{sum(n.efa for n in own)} {EFA}"
        )
    for node in nodes:
        if node.unfit:
            log.info(f"  {node.name}: {node.unfit}")
    for title, resource, line in (
        ("kinds of job", "customresourcedefinitions", _crd_line),
        (
            "storage classes",
            "storageclasses",
            lambda item: f"{item['metadata']['name']}: {item['provisioner']}",
        ),
        (
            f"claims in {asked.namespace}",
            "persistentvolumeclaims",
            lambda item: (
                f"{item['metadata']['name']}: {item.get('status', {}).get('phase')}, "
                f"{', '.join(item['spec'].get('accessModes', []))}"
            ),
        ),
        (f"quotas in {asked.namespace}", "resourcequotas", _quota_line),
    ):
        log.info(title)
        try:
            lines = [text for item in kube.items(resource) if (text := line(item))]
        except KubectlError as error:
            lines = [f"not known: {error.last_line}"]
        for text in lines or ["none"]:
            log.info(f"  {text}")
    findings.print_findings([*gaps, *aws.check(*eks, KINDS[asked.kind].on_hyperpod)])


def manage_eks_cluster(
    cluster_name: str | None = None,
    region: str = "",
    *,
    validate_components: bool = True,
    auto_fix: bool = False,
    create_if_missing: bool = False,
    **wanted: Any,
) -> list[Finding]:
    """Connect kubectl to an EKS cluster, judge it for a job, and return what was found.

    cluster_name: None for the only one of the account and region. auto_fix: make the namespace
    when it is missing; whatever else is wrong costs money or rights, and is only told with its
    remedy, as is a missing cluster (create_if_missing changes nothing about that). wanted: what a
    job needs, by the names of `check.py cluster`, such as num_nodes=4. Raises UsageError without
    kubectl or the AWS command line, or when AWS refuses.
    """
    log.setup_unless_heard()
    asked = declared.from_values(JobNeeds, **wanted)
    name = cluster_name or aws.discover(region)
    if create_if_missing:
        aws.require_cluster(name, region)
    aws.connect(name, region)
    kube = Kubectl(asked.namespace)
    found = _judge(kube, asked, eks_of(kube, name, region), validate_components, auto_fix)
    findings.print_findings(found)
    return found


def _judge(
    kube: Kubectl, asked: JobNeeds, eks: tuple[str, str], asks_cluster: bool, auto_fix: bool
) -> list[Finding]:
    """Return what can be said of a cluster, after the namespace was made where that is wanted."""
    if auto_fix and kube.find("namespace", kube.namespace) is None:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace}}
        kube.run("create", "--validate=false", "-f", "-", given=json.dumps(made))
    return (
        validate(kube, asked, eks)
        if asks_cluster
        else aws.check(*eks, KINDS[asked.kind].on_hyperpod)
    )


def _nodes(kube: Kubectl, found: list[Finding]) -> list[ClusterNode]:
    """Return the nodes; which GPUs are taken is only known to those who may see all pods."""
    try:
        pods = kube.items(
            "pods",
            "--all-namespaces",
            "--field-selector=status.phase!=Succeeded,status.phase!=Failed",
        )
    except KubectlError:
        pods = []
        found.append(findings.not_checked("GPUs in use", "you may not list pods of all namespaces"))
    return cluster_nodes.read(kube.items("nodes"), pods)


def _grows(kube: Kubectl) -> bool:
    """Tell whether an autoscaler adds nodes when pods wait."""
    try:
        return kube.find("customresourcedefinition", "nodepools.karpenter.sh") is not None or any(
            "cluster-autoscaler" in item["metadata"]["name"]
            for item in kube.items("deployments", "--all-namespaces")
        )
    except KubectlError:
        return False


def eks_of(kube: Kubectl, name: str, region: str) -> tuple[str, str]:
    """Return name and region of the EKS cluster: those given, else those that the context names."""
    context = kube.context
    if not context:
        with suppress(KubectlError, UsageError):
            context = kube.run("config", "current-context").strip()
    of_context = aws.cluster_of(context)
    return name or of_context[0], region or of_context[1]


def _crd_line(item: dict[str, Any]) -> str:
    name = item["metadata"]["name"]
    served = [version["name"] for version in item["spec"]["versions"] if version.get("served")]
    return f"{name} ({', '.join(served)})" if name in {k.resource for k in KINDS.values()} else ""


def _quota_line(item: dict[str, Any]) -> str:
    hard, used = (item.get("status", {}).get(key, {}) for key in ("hard", "used"))
    return f"{item['metadata']['name']}: " + ", ".join(
        f"{resource} {used.get(resource, '0')} of {limit}" for resource, limit in hard.items()
    )


def _plan(asked: JobNeeds, kube: Kubectl) -> None:
    log.table(
        {
            "kubectl": " ".join(kube.command("get", "…", "-o", "json")),
            "for": "version, rights, nodes, pods, CRDs, deployments, claim "
            f"{asked.pvc}, quotas, secrets (their type only)",
            "aws": "eks and sagemaker, describe and list only, where it is installed",
        }
    )
