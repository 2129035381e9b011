"""Format commands that fix a cluster, for messages, which print them under `run:`.

The functions are named after the effect of their commands. They run nothing themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from launch.cloud.kube.cluster_files import SCRIPT, STORAGE
from launch.cloud.kube.failure_causes import Cause
from launch.cloud.kube.job_options import TEMPLATES, JobNeeds
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.kubeconfig import ClusterName
from lib.core import commands

NVIDIA_PLUGIN = (
    "https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v0.17.1/deployments/static/"
    "nvidia-device-plugin.yml"
)
EFA_CHARTS = "https://aws.github.io/eks-charts"
FSX_DRIVER = "fsx.csi.aws.com"
_USUAL_CLAIM = "fsx-claim"
# Messages of Kubernetes.
_EXCEEDED = re.compile(
    r"exceeded quota: (?P<name>[^,\s]+), requested: (?P<resource>[^=,\s]+)=(?P<asked>\d+)\b.*"
    r"used: (?:[^,]*,)*?(?P=resource)=(?P<used>\d+)\b"
)
_NO_ACCOUNT = re.compile(r'serviceaccount "([^"]+)" not found')


def format_kubectl(cluster: ClusterName, namespace: str, *words: object) -> str:
    """Return a kubectl command for a cluster. namespace: empty for objects without one."""
    where = ["--namespace", namespace] if namespace else []
    return commands.shell("kubectl", *cluster.context_words, *where, *words)


def create_namespace(cluster: ClusterName, namespace: str) -> str:
    return format_kubectl(cluster, "", "create", "namespace", namespace)


def install_operator(cluster: ClusterName, kind: str) -> str:
    row = KINDS[kind]
    return "\n".join(row.install_commands(cluster.eks, cluster.region, cluster.context))


def create_claim(
    cluster: ClusterName, namespace: str, claim: str, classes: Iterable[tuple[str, str]] = ()
) -> str:
    """Return the commands that create the volume of --pvc.

    classes: name and provisioner of the cluster's storage classes. On EKS, `setup` creates a file
    system of FSx for Lustre; elsewhere it uses a storage class. Empty if neither exists.
    """
    words = ["--only", STORAGE]
    install = []
    if cluster.eks:
        words += ["--cluster-name", cluster.eks, *_option("--region", cluster.region)]
        if FSX_DRIVER not in [provisioner for _, provisioner in classes]:
            install = [create_addon(cluster, "aws-fsx-csi-driver")]
    elif names := [name for name, _ in classes]:
        words += ["--storage-class", names[0]]
    else:
        return ""
    words += _option("--pvc", claim, _USUAL_CLAIM) + _option("--namespace", namespace, "default")
    apply = format_kubectl(cluster, "", "apply", "-f", "-")
    return "\n".join([*install, f"{commands.script(SCRIPT, 'setup', *words)} | {apply}"])


def create_addon(cluster: ClusterName, addon: str) -> str:
    return commands.shell("aws", "eks", "create-addon", *cluster.aws_words, "--addon-name", addon)


def create_bucket_claim(cluster: ClusterName, namespace: str, claim: str) -> str:
    """Return the command that creates a claim for a bucket; the user fills in the bucket's name."""
    template = commands.path_of(str((TEMPLATES / "bucket.yaml").relative_to(commands.ROOT)))
    edits = f"s/my-bucket/BUCKET/; s/training-data/{claim}/; s/: default/: {namespace}/"
    apply = format_kubectl(cluster, "", "apply", "-f", "-")
    return f"{commands.shell('sed', edits, template)} | {apply}"


def create_pull_secret(cluster: ClusterName, namespace: str, name: str, image: str) -> str:
    """Return the command that stores the credentials of an image's registry."""
    registry, slash, _ = image.partition("/")
    server = registry if slash and re.search("[.:]", registry) else "REGISTRY"
    words = format_kubectl(cluster, namespace, "create", "secret", "docker-registry", name)
    return (
        f"{words} --docker-server={server} --docker-username=USER "
        '--docker-password="$REGISTRY_PASSWORD"'
    )


def create_token_secret(cluster: ClusterName, namespace: str, name: str) -> str:
    words = format_kubectl(cluster, namespace, "create", "secret", "generic", name)
    return f'{words} --from-literal=token="$HF_TOKEN"'


def create_service_account(cluster: ClusterName, namespace: str, name: str) -> str:
    return format_kubectl(cluster, namespace, "create", "serviceaccount", name)


def raise_namespace_quota(
    cluster: ClusterName, namespace: str, name: str, resource: str, amount: int
) -> str:
    patch = json.dumps({"spec": {"hard": {resource: str(amount)}}})
    return format_kubectl(cluster, namespace, "patch", "resourcequota", name, "--patch", patch)


def install_nvidia_plugin(cluster: ClusterName) -> str:
    return format_kubectl(cluster, "", "apply", "-f", NVIDIA_PLUGIN)


def install_efa_plugin(cluster: ClusterName) -> str:
    context = ["--kube-context", cluster.context] if cluster.context else []
    name = "aws-efa-k8s-device-plugin"
    return commands.shell(
        *("helm", "upgrade", "--install", name, name, "--repo", EFA_CHARTS),
        *("--namespace", "kube-system", *context),
    )


def add_nodes(cluster: ClusterName, group: str, nodes: int) -> str:
    """Return the command that gives an EKS node group more nodes; empty for other clusters."""
    if not cluster.eks:
        return ""
    region = _option("--region", cluster.region)
    return commands.shell(
        *("eksctl", "scale", "nodegroup", "--cluster", cluster.eks, *region),
        *("--name", group or "gpu", "--nodes", nodes, "--nodes-max", nodes),
    )


def connect(cluster: str, region: str) -> str:
    """Return the command that writes a cluster's context to the kubeconfig."""
    return commands.shell(
        "aws", "eks", "update-kubeconfig", "--name", cluster, *_option("--region", region)
    )


def push_image(image: str) -> str:
    """Return the command that builds an image and pushes it under a name."""
    create = ["--create-repository"] if ".dkr.ecr." in image else []
    return commands.script("launch/build_image.py", "--push", image, *create)


def find_remedy(cause: Cause, needs: JobNeeds, cluster: ClusterName) -> str:
    """Return the commands that remove the cause of a failure, "" if none are known."""
    namespace = needs.namespace
    secret = getattr(needs, "token_secret", "") or f"{getattr(needs, 'job_name', 'job')}-hub-token"
    makers = {
        "image missing": lambda: push_image(needs.image) if needs.image else "",
        "image forbidden": lambda: create_pull_secret(
            cluster, namespace, needs.image_pull_secret or "registry", needs.image
        ),
        "missing token": lambda: create_token_secret(cluster, namespace, secret),
        "no EFA": lambda: install_efa_plugin(cluster),
        "no capacity": lambda: add_nodes(cluster, "", needs.nodes),
        "storage": lambda: format_kubectl(cluster, namespace, "describe", "pvc", needs.pvc),
        "operator missing": lambda: install_operator(cluster, needs.kind),
        "quota": lambda: _raise_exceeded_quota(cause.evidence, needs, cluster),
        "pods refused": lambda: _create_named_account(cause.evidence, needs, cluster),
    }
    return makers[cause.name]() if cause.name in makers else ""


def _raise_exceeded_quota(message: str, needs: JobNeeds, cluster: ClusterName) -> str:
    """Return the command for the quota that an event names."""
    match = _EXCEEDED.search(message)
    if not match:
        return format_kubectl(cluster, needs.namespace, "edit", "resourcequota")
    amount = int(match["used"]) + needs.nodes * int(match["asked"])
    return raise_namespace_quota(cluster, needs.namespace, match["name"], match["resource"], amount)


def _create_named_account(message: str, needs: JobNeeds, cluster: ClusterName) -> str:
    match = _NO_ACCOUNT.search(message)
    return create_service_account(cluster, needs.namespace, match[1]) if match else ""


def _option(name: str, value: str, usual: str = "") -> list[str]:
    return [name, value] if value and value != usual else []
