"""Check what a job needs from a cluster besides nodes: operator, rights, storage, quota, secret.

Each check calls kubectl itself, so a forbidden call does not affect the others. `needs` are the
needs of a job with all defaults filled in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from launch.checks.findings import ERROR, INFO, WARNING, Finding, not_checked
from launch.cloud.kube import remedies
from launch.cloud.kube.job_options import JobNeeds
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from launch.cloud.kube.nodes import EFA, GPU, ClusterNode, parse_quantity
from lib.core import commands
from lib.core.commands import ROOT
from lib.parallel.torch_builds import driver_problem, find_pin


def run_check(check: str, find: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check, or the reason why it is impossible."""
    check_findings: list[Finding] = []
    try:
        check_findings.extend(find())
    except KubectlError as error:
        reason = "not allowed" if error.is_forbidden else error.last_line[:200]
        check_findings.append(not_checked(check, reason))
    return check_findings


def check_server(kube: Kubectl) -> Finding:
    """Return the version of the cluster, or that it does not answer."""
    try:
        answer = json.loads(kube.run("version", "-o", "json", "--request-timeout=20s"))
    except KubectlError as error:
        return Finding(
            ERROR,
            "API server",
            f"{kube.cluster.title}: {error.last_line[:300]}",
            "kubectl config get-contexts shows the clusters that are configured here",
            run=remedies.connect(kube.cluster.eks, kube.cluster.region) if kube.cluster.eks else "",
        )
    version = answer.get("serverVersion", {}).get("gitVersion", "an unknown version")
    return Finding(INFO, "API server", f"Kubernetes {version}")


def check_namespace(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield an error if the namespace is missing."""
    if kube.find("namespace", kube.namespace) is None:
        yield Finding(
            ERROR,
            "namespace",
            f"there is no namespace {kube.namespace}",
            "create it, or name another with --namespace",
            run=remedies.create_namespace(kube.cluster, kube.namespace),
        )


# Verb, resource and group; only commands that work beside the data need them.
_RIGHTS_BESIDE_DATA = (
    ("create", "pods", ""),
    ("delete", "pods", ""),
    ("create", "pods/exec", ""),
)


def check_rights(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield an error for each right that a launch needs and the caller lacks (one call for all)."""
    name, _, group = KINDS[needs.kind].resource.partition(".")
    rights = [
        ("create", name, group),
        ("delete", name, group),
        ("get", "pods", ""),
        ("get", "pods/log", ""),
        ("list", "events", ""),
        ("create", "secrets", ""),
        *_RIGHTS_BESIDE_DATA,
    ]
    reviews = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [_make_review(kube.namespace, *right) for right in rights],
    }
    answers = kube.run(
        "create",
        "--validate=false",
        "-f",
        "-",
        "-o",
        'jsonpath={.status.allowed}{"\\n"}',
        stdin=json.dumps(reviews),
    ).split()
    for right, allowed in zip(rights, answers, strict=True):
        if allowed != "true":
            is_beside = right in _RIGHTS_BESIDE_DATA
            yield Finding(
                WARNING if is_beside else ERROR,
                "rights",
                f"you may not {right[0]} {right[1]} in {kube.namespace}"
                + (", which `run`, `shell` and `fetch` need" if is_beside else ""),
                "ask an administrator for a RoleBinding there",
            )


def _make_review(namespace: str, verb: str, resource: str, group: str) -> dict[str, Any]:
    plural, _, sub = resource.partition("/")
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "namespace": namespace,
                "verb": verb,
                "group": group,
                "resource": plural,
                **({"subresource": sub} if sub else {}),
            }
        },
    }


def check_operator(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield whether the cluster serves the kind's API version, and whether its operator runs."""
    row = KINDS[needs.kind]
    crd = row.resource
    version = row.version
    remedy = f"install the operator: {row.product}"
    install = remedies.install_operator(kube.cluster, needs.kind)
    definition = kube.find("customresourcedefinition", crd)
    if definition is None:
        yield Finding(
            ERROR,
            "operator",
            f"the cluster knows no {needs.kind} (no CRD {crd})",
            f"{remedy}, or choose another --kind",
            run=install,
        )
        return
    served = [v["name"] for v in definition["spec"]["versions"] if v.get("served")]
    if version not in served:
        yield Finding(
            ERROR,
            "operator",
            f"{crd} is served as {', '.join(served)}, not {version}",
            remedy,
            run=install,
        )
    running = [
        item
        for item in kube.items("deployments", "--all-namespaces")
        if item["metadata"]["name"].startswith(row.operator)
    ]
    if not running:
        yield Finding(
            WARNING,
            "operator",
            f"no deployment called {row.operator}* was found",
            remedy,
            run=install,
        )
    for item in running:
        name = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
        if not item.get("status", {}).get("availableReplicas"):
            yield Finding(
                ERROR,
                "operator",
                f"{name} has no available replica",
                Kubectl(item["metadata"]["namespace"], kube.context).format(
                    "describe", "deployment", item["metadata"]["name"]
                ),
            )
        else:
            yield Finding(INFO, "operator", f"{crd} ({version}), run by {name}")


def check_storage(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield whether the job's claim exists, is bound, and can be mounted by many nodes."""
    claim = needs.pvc
    volume_claim = kube.find("persistentvolumeclaim", claim)
    if volume_claim is None:
        classes = list_storage_classes(kube)
        names = ", ".join(name for name, _ in classes) or "none"
        yield Finding(
            ERROR,
            "storage",
            f"no claim {claim} in {kube.namespace} (storage classes: {names})",
            "create it with access mode ReadWriteMany, or name another with --pvc",
            run=remedies.create_claim(kube.cluster, kube.namespace, claim, classes),
        )
        return
    phase = volume_claim.get("status", {}).get("phase")
    modes = volume_claim["spec"].get("accessModes", [])
    if phase != "Bound":
        yield Finding(
            ERROR,
            "storage",
            f"claim {claim} is {phase}",
            kube.format("describe", "pvc", claim),
        )
    elif "ReadWriteMany" not in modes:
        yield Finding(
            ERROR,
            "storage",
            f"claim {claim} has access mode {', '.join(modes)}, which many nodes cannot mount",
            "use one with access mode ReadWriteMany (FSx for Lustre, EFS, NFS), and its --pvc",
            run=remedies.create_claim(
                kube.cluster, kube.namespace, f"{claim}-shared", list_storage_classes(kube)
            ),
        )
    else:
        size = volume_claim.get("status", {}).get("capacity", {}).get("storage", "unknown size")
        yield Finding(INFO, "storage", f"claim {claim}, {size}, {', '.join(modes)}")


def list_storage_classes(kube: Kubectl) -> list[tuple[str, str]]:
    """Return name and provisioner of the storage classes; empty if that is not allowed."""
    try:
        classes = kube.items("storageclasses")
    except KubectlError:
        return []
    return [(item["metadata"]["name"], item["provisioner"]) for item in classes]


def check_service_account(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield an error if the account of the pods is missing."""
    name = needs.service_account
    if name and kube.find("serviceaccount", name) is None:
        yield Finding(
            ERROR,
            "service account",
            f"no service account {name} in {kube.namespace}",
            "launch/cloud/kube/templates/service-account.yaml gives it a role of AWS as well",
            run=remedies.create_service_account(kube.cluster, kube.namespace, name),
        )


def check_quota(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield an error for each quota of the namespace that is too small for the job."""
    needed = {
        f"requests.{GPU}": needs.nodes * (needs.gpus_per_node or 0),
        f"requests.{EFA}": needs.nodes * (needs.efa_per_node or 0),
        "pods": needs.nodes,
        "count/pods": needs.nodes,
    }
    for item in kube.items("resourcequotas"):
        limits = item.get("status", {}).get("hard", {})
        used = item.get("status", {}).get("used", {})
        for resource, amount in needed.items():
            if resource not in limits:
                continue
            available = parse_quantity(limits[resource]) - parse_quantity(used.get(resource, "0"))
            if available < amount:
                yield Finding(
                    ERROR,
                    "quota",
                    f"{item['metadata']['name']} leaves {available} of "
                    f"{resource}, the job needs {amount}",
                    "raise the quota, end other jobs, or use fewer --nodes",
                    run=remedies.raise_namespace_quota(
                        kube.cluster,
                        kube.namespace,
                        item["metadata"]["name"],
                        resource,
                        parse_quantity(used.get(resource, "0")) + amount,
                    ),
                )


def check_pull_secret(kube: Kubectl, needs: JobNeeds) -> Iterable[Finding]:
    """Yield whether nodes can pull the image. Of a secret, only the type is read."""
    name = needs.image_pull_secret
    image = needs.image
    if name:
        try:
            kind = kube.run("get", "secret", name, "-o", "jsonpath={.type}").strip()
        except KubectlError as error:
            if not error.is_missing:
                raise
            yield Finding(
                ERROR,
                "image pull secret",
                f"no secret {name} in {kube.namespace}",
                "create it with your name and password at the registry",
                run=remedies.create_pull_secret(kube.cluster, kube.namespace, name, image),
            )
            return
        if kind != "kubernetes.io/dockerconfigjson":
            yield Finding(
                ERROR,
                "image pull secret",
                f"{name} is of type {kind}",
                "create one of another name with the credentials of the registry",
                run=remedies.create_pull_secret(
                    kube.cluster, kube.namespace, f"{name}-registry", image
                ),
            )
        return
    if not image or ".dkr.ecr." in image:
        return  # the role of the nodes gives access
    account = kube.find("serviceaccount", "default") or {}
    if not account.get("imagePullSecrets"):
        yield Finding(
            INFO,
            "image pull secret",
            f"none: {image} must be public, or the nodes must have credentials for it",
            "name one with --image-pull-secret",
        )


def check_drivers(nodes: list[ClusterNode]) -> Iterable[Finding]:
    """Yield the nodes whose driver is too old for the torch of requirements.txt."""
    node_by_driver = {node.driver: node.name for node in nodes if node.driver}
    if not node_by_driver:
        yield not_checked(
            "driver",
            "the nodes have no label with its version (NVIDIA's GPU feature discovery adds one)",
        )
    torch = find_pin((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    for version, node in node_by_driver.items():
        if problem := driver_problem(torch, version):
            yield Finding(
                ERROR,
                "driver",
                f"{node}: {problem}",
                "update it, or build the image for this driver",
                run=commands.script(
                    "launch/build_image.py", "--driver-version", version, "--auto-fix"
                ),
            )
