"""Check a Kubernetes cluster for a job before you submit it.

  python launch/kubernetes.py cluster --kind pytorchjob --nodes 4 --instance-type p5.48xlarge
  python launch/kubernetes.py cluster --kind hyperpod --cluster-name my-eks --pvc fsx-claim
  python launch/kubernetes.py cluster describe        # nodes, devices, storage, quotas, operators

The check calls kubectl, in its current context or that of --cluster-name. It changes nothing,
except that --auto-fix creates a missing namespace. If the AWS command line is installed, it also
checks EKS and HyperPod. Every finding has a severity and a remedy. Exit codes: 0 ready, 5 a warning
(with --fail-on warning), 6 an error, 2 without kubectl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.checks import findings
from launch.checks.findings import Finding
from launch.cloud.kube import aws, cluster_checks
from launch.cloud.kube import nodes as cluster_nodes
from launch.cloud.kube.job_options import ClusterChoice, JobNeeds
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from launch.cloud.kube.nodes import EFA, GPU, ClusterNode
from lib.core import commands, declared, log, options
from lib.core.errors import Problems
from lib.core.options import Options


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__)
    parser.prog = "kubernetes.py cluster"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("validate", "describe"),
        default="validate",
        help="check the cluster for a job, or print its nodes and storage (default: validate)",
    )
    group = parser.add_argument_group("the cluster")
    declared.add_options(
        group,
        ClusterChoice,
        cluster_name="EKS cluster, which must be in the kubeconfig (default: that of --context)",
    )
    group.add_argument(
        "--validate-components",
        type=options.on_off,
        default=True,
        nargs="?",
        const=True,
        metavar="on|off",
        help="validate: check the cluster; off: AWS only",
    )
    group.add_argument(
        "--auto-fix",
        type=options.on_off,
        default=False,
        nargs="?",
        const=True,
        metavar="on|off",
        help="validate: create a missing namespace",
    )
    declared.add_options(
        parser,
        JobNeeds,
        instance_type="instance type of the nodes (default: any with GPUs)",
        gpus_per_node="GPUs per node (default: those of the instance type, otherwise 1)",
        image="image of the job (default: not checked)",
    )
    findings.add_options(parser)
    options.add_config(parser, "print the queries and send none")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    opts = parse(argv)
    needs = declared.read_options(JobNeeds, opts)
    problems = Problems()
    needs.check_names(problems)
    if needs.instance_type:
        needs.check_type(problems)
    problems.raise_if_any()
    kube = Kubectl(needs.namespace, _choose_context(needs, opts), opts.cluster_name, needs.region)
    if opts.dry_run:
        _print_plan(needs, kube)
        return
    log_cluster(kube)
    eks = find_eks(kube)
    if opts.action == "describe":
        print_cluster(kube, needs, eks, opts.fail_on)
        return
    findings.report_findings(
        _check_after_fix(kube, needs, eks, opts.validate_components, opts.auto_fix),
        opts,
        kube.cluster.title,
    )


def _choose_context(needs: JobNeeds, opts: Options) -> str:
    """Return the context of the cluster, empty for the current one."""
    if not opts.cluster_name or not (opts.validate_components or opts.action == "describe"):
        return needs.context
    if needs.context:
        aws.require_same_cluster(needs.context, opts.cluster_name, needs.region)
        return needs.context
    return aws.find_context(opts.cluster_name, needs.region, fetch=False)


def check_cluster(kube: Kubectl, needs: JobNeeds, eks: tuple[str, str]) -> list[Finding]:
    """Return all findings about the cluster for a job.

    eks: name and region of the EKS cluster, empty if they are unknown.
    """
    complete_needs = needs.with_defaults()
    on_hyperpod = KINDS[needs.kind].on_hyperpod
    all_findings = [cluster_checks.check_server(kube)]
    if all_findings[0].severity == findings.ERROR:
        return [*all_findings, *aws.check_eks(*eks, on_hyperpod)]
    nodes: list[ClusterNode] = []

    def check_nodes(kube: Kubectl, complete_needs: JobNeeds) -> list[Finding]:
        unchecked: list[Finding] = []
        nodes.extend(_list_nodes(kube, unchecked))
        return [
            *unchecked,
            *cluster_nodes.check_capacity(
                nodes, complete_needs, _has_autoscaler(kube), kube.cluster
            ),
        ]

    checks: dict[str, Callable[[Kubectl, JobNeeds], Iterable[Finding]]] = {
        "namespace": cluster_checks.check_namespace,
        "rights": cluster_checks.check_rights,
        "operator": cluster_checks.check_operator,
        "nodes": check_nodes,
        "storage": cluster_checks.check_storage,
        "service account": cluster_checks.check_service_account,
        "quota": cluster_checks.check_quota,
        "image pull secret": cluster_checks.check_pull_secret,
        "EKS": lambda kube, complete_needs: aws.check_eks(*eks, on_hyperpod),
    }
    with ThreadPoolExecutor() as pool:
        for check_findings in pool.map(
            lambda name: cluster_checks.run_check(name, lambda: checks[name](kube, complete_needs)),
            checks,
        ):
            all_findings += check_findings
    return [
        *all_findings,
        *(cluster_checks.check_drivers(nodes) if complete_needs.gpus_per_node else ()),
    ]


def print_cluster(kube: Kubectl, needs: JobNeeds, eks: tuple[str, str], fail_on: str) -> None:
    """Print the nodes with their devices, storage, quotas and kinds of job."""
    unchecked = [cluster_checks.check_server(kube)]
    if unchecked[0].severity == findings.ERROR:
        findings.print_findings(unchecked)
        findings.require_ready(unchecked, fail_on, kube.cluster.title)
    nodes = _list_nodes(kube, unchecked)
    log.info(f"{len(nodes)} nodes")
    for kind in sorted({node.instance_type for node in nodes}):
        group = [node for node in nodes if node.instance_type == kind]
        log.info(
            f"  {kind}: {len(group)} nodes, {sum(bool(n.unfit) for n in group)} of them unusable; "
            f"{sum(n.gpus for n in group)} {GPU}, {sum(n.gpus_free for n in group)} of them free; "
            f"{sum(n.efa for n in group)} {EFA}"
        )
    for node in nodes:
        if node.unfit:
            log.info(f"  {node.name}: {node.unfit}")
    for title, resource, format_item in (
        ("kinds of job", "customresourcedefinitions", _format_crd),
        (
            "storage classes",
            "storageclasses",
            lambda item: f"{item['metadata']['name']}: {item['provisioner']}",
        ),
        (
            f"claims in {needs.namespace}",
            "persistentvolumeclaims",
            lambda item: (
                f"{item['metadata']['name']}: {item.get('status', {}).get('phase')}, "
                f"{', '.join(item['spec'].get('accessModes', []))}"
            ),
        ),
        (f"quotas in {needs.namespace}", "resourcequotas", _format_quota),
    ):
        log.info(title)
        try:
            lines = [text for item in kube.items(resource) if (text := format_item(item))]
        except KubectlError as error:
            lines = [f"unknown: {error.last_line}"]
        for text in lines or ["none"]:
            log.info(f"  {text}")
    findings.print_findings([*unchecked, *aws.check_eks(*eks, KINDS[needs.kind].on_hyperpod)])


@commands.repeatable_call
def manage_eks_cluster(
    cluster_name: str | None = None,
    region: str = "",
    *,
    validate_components: bool = True,
    auto_fix: bool = False,
    create_if_missing: bool = False,
    **values: Any,
) -> list[Finding]:
    """Connect kubectl to an EKS cluster, check it for a job, and return the findings.

    cluster_name: None for the only cluster of the account and region. auto_fix: create a missing
    namespace. Other remedies cost money or need rights, so they are only named. create_if_missing:
    raise an error with the command that creates a missing cluster; nothing is created. values:
    options of `kubernetes.py cluster` by their names, such as num_nodes=4. Raises UsageError
    without kubectl or the AWS command line, and if AWS refuses a call.
    """
    log.ensure_setup()
    needs = declared.from_values(JobNeeds, **values)
    name = cluster_name or aws.find_only_cluster(region)
    if create_if_missing:
        aws.require_cluster(name, region)
    aws.connect_kubectl(name, region)
    kube = Kubectl(needs.namespace, "", name, region)
    log_cluster(kube)
    cluster_findings = _check_after_fix(kube, needs, find_eks(kube), validate_components, auto_fix)
    findings.print_findings(cluster_findings)
    return cluster_findings


def _check_after_fix(
    kube: Kubectl, needs: JobNeeds, eks: tuple[str, str], asks_cluster: bool, auto_fix: bool
) -> list[Finding]:
    """Return the findings about a cluster; with auto_fix, create a missing namespace first."""
    if auto_fix and kube.find("namespace", kube.namespace) is None:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace}}
        kube.run("create", "--validate=false", "-f", "-", stdin=json.dumps(namespace))
    return (
        check_cluster(kube, needs, eks)
        if asks_cluster
        else aws.check_eks(*eks, KINDS[needs.kind].on_hyperpod)
    )


def _list_nodes(kube: Kubectl, unchecked: list[Finding]) -> list[ClusterNode]:
    """Return the nodes, and add a finding to `unchecked` if the GPUs in use are unknown."""
    try:
        pods = kube.items(
            "pods",
            "--all-namespaces",
            "--field-selector=status.phase!=Succeeded,status.phase!=Failed",
        )
    except KubectlError:
        pods = []
        unchecked.append(
            findings.not_checked("GPUs in use", "you may not list pods of all namespaces")
        )
    return cluster_nodes.parse_nodes(kube.items("nodes"), pods)


def _has_autoscaler(kube: Kubectl) -> bool:
    """Return whether an autoscaler adds nodes for waiting pods."""
    try:
        return kube.find("customresourcedefinition", "nodepools.karpenter.sh") is not None or any(
            "cluster-autoscaler" in item["metadata"]["name"]
            for item in kube.items("deployments", "--all-namespaces")
        )
    except KubectlError:
        return False


def find_eks(kube: Kubectl) -> tuple[str, str]:
    """Return name and region of the EKS cluster that is queried; empty if it is none."""
    return kube.cluster.eks, kube.cluster.region


def log_cluster(kube: Kubectl) -> None:
    """Print which cluster is queried."""
    log.info(f"cluster: {kube.cluster}")


def _format_crd(item: dict[str, Any]) -> str:
    name = item["metadata"]["name"]
    served = [version["name"] for version in item["spec"]["versions"] if version.get("served")]
    return f"{name} ({', '.join(served)})" if name in {k.resource for k in KINDS.values()} else ""


def _format_quota(item: dict[str, Any]) -> str:
    hard, used = (item.get("status", {}).get(key, {}) for key in ("hard", "used"))
    return f"{item['metadata']['name']}: " + ", ".join(
        f"{resource} {used.get(resource, '0')} of {limit}" for resource, limit in hard.items()
    )


def _print_plan(needs: JobNeeds, kube: Kubectl) -> None:
    log.table(
        {
            "kubectl": " ".join(kube.command("get", "…", "-o", "json")),
            "for": "version, rights, nodes, pods, CRDs, deployments, claim "
            f"{needs.pvc}, quotas, secrets (their type only)",
            "aws": "eks and sagemaker, describe and list only, if it is installed",
        }
    )
