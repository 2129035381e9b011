"""List the commands that create and delete a cluster, in order, and estimate its costs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from launch.cloud.kube import cluster_files
from launch.cloud.kube.cluster_files import (
    CLUSTER,
    EKS,
    HYPERPOD,
    HYPERPOD_SLURM,
    NODES,
    SCRIPT,
    STORAGE,
    ClusterOptions,
)
from launch.cloud.kube.job_options import JobNeeds, read_instances
from launch.cloud.kube.kinds import KINDS
from launch.cloud.kube.quotas import count_vcpus, quota_commands
from lib.core import commands

FILES = {CLUSTER: "cluster.yaml", NODES: "hyperpod.json", STORAGE: "storage.yaml"}
_REPOSITORY = "llm-training"
_HOURS_PER_MONTH = 730
# GiB of the disks in templates/cluster/eks.yaml.
_GPU_DISK = 500
_SYSTEM_DISK = 100
_CHARTS = "https://github.com/aws/sagemaker-hyperpod-cli"
_SET_ACCOUNT = 'ACCOUNT="$(aws sts get-caller-identity --query Account --output text)"'

Step = tuple[str, list[str]]  # a comment and its commands


def render_steps(cluster: ClusterOptions, folder: Path) -> str:
    """Return a script with all commands. folder: that of the files of `setup --out`."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Creates {_describe_cluster(cluster)}.",
        "# Run the commands one after the other: some take 20 minutes, and most cost money.",
        "#",
        *(f"#   {label:<16} {text}" for label, text in list_costs(cluster).items()),
        "set -euo pipefail",
    ]
    for number, (comment, words) in enumerate(_list_steps(cluster, folder), 1):
        lines += ["", f"# {number}. {comment}", *words]
    lines += ["", "# To delete everything again, in this order:"]
    lines += [f"#   {command}" for command in _list_deletions(cluster)]
    return "\n".join(lines) + "\n"


def _describe_cluster(cluster: ClusterOptions) -> str:
    name = {EKS: "EKS", HYPERPOD: "HyperPod on EKS", HYPERPOD_SLURM: "HyperPod with Slurm"}
    nodes = f"{cluster.nodes} × {cluster.instance_type}"
    return f"{cluster.cluster_name} in {cluster.region}: {name[cluster.kind]}, {nodes}"


def list_costs(cluster: ClusterOptions) -> dict[str, str]:
    """Return the estimated costs by item, in US dollars."""
    prices = cluster_files.read_prices()
    kind = "hyperpod" if cluster.on_hyperpod else cluster.operator
    node = JobNeeds(kind=kind, instance_type=cluster.instance_type).price
    hourly = {"NAT gateway": prices["nat_hour"]}
    if cluster.kind == HYPERPOD_SLURM:
        hourly["head node"] = prices["controller_hour"]
    else:
        hourly |= {"EKS": prices["eks_hour"], "system node": prices["system_hour"]}
        disk_price = prices["disk_gb_month"] / _HOURS_PER_MONTH
        hourly["disks"] = (_SYSTEM_DISK + _GPU_DISK * cluster.nodes) * disk_price
        gpu_node_price = cluster.nodes * (node + _GPU_DISK * disk_price)
    if node:
        hourly["GPU nodes"] = cluster.nodes * node
    texts = {label: f"${price:,.3f} per hour" for label, price in hourly.items()}
    if not node:
        texts["GPU nodes"] = f"no price for {cluster.instance_type} in templates/instances.yaml"
    monthly = {"fsx": cluster.size * prices["fsx_gb_month"], "efs": 0.0, "none": 0.0}[
        cluster.filesystem
    ]
    if cluster.filesystem == "fsx" and not cluster.filesystem_id:
        texts["file system"] = f"${monthly:,.0f} per month, also while no node runs"
        hourly["file system"] = monthly / _HOURS_PER_MONTH
    elif cluster.filesystem == "efs":
        texts["file system"] = f"${prices['efs_gb_month']:.2f} per month for each GB"
    texts["total"] = f"about ${sum(hourly.values()):,.2f} per hour" + (
        "" if node else " without the GPU nodes"
    )
    if node and cluster.kind != HYPERPOD_SLURM:
        idle = sum(hourly.values()) - gpu_node_price
        texts["without GPUs"] = f"about ${idle:,.2f} per hour, while the GPU nodes are off"
    return texts


def _list_steps(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    quota = quota_commands(
        cluster.instance_type, cluster.nodes, cluster.region, cluster.on_hyperpod
    )
    amount = (
        cluster.nodes if cluster.on_hyperpod else cluster.nodes * count_vcpus(cluster.instance_type)
    )
    unit = "nodes" if cluster.on_hyperpod else "vCPUs"
    yield (
        f"The account's quota must be {amount} {unit} or more. AWS may take days to raise it.",
        [quota[0], f"# {quota[1]}"],
    )
    if cluster.kind == HYPERPOD_SLURM:
        yield from _list_slurm_steps(cluster, folder)
        return
    yield from _list_image_steps(cluster)
    yield (
        "Create network, control plane, add-ons and a node without GPUs (20 to 30 minutes)",
        [
            f"eksctl create cluster -f {_quote_path(folder / FILES[CLUSTER])}",
            _format_words(
                "aws eks update-kubeconfig", name=cluster.cluster_name, region=cluster.region
            ),
        ],
    )
    if cluster.kind == HYPERPOD:
        yield from _list_hyperpod_steps(cluster, folder)
    kind = KINDS["hyperpod" if cluster.kind == HYPERPOD else cluster.operator]
    installs = kind.install_commands(cluster.cluster_name, cluster.region)
    # cluster.yaml already contains the requirements of HyperPod's add-on.
    yield f"Install the operator: {kind.product}", installs[-1:]
    if cluster.namespace != "default":
        yield (
            "Create the namespace of the volume and the jobs",
            [f"kubectl create namespace {cluster.namespace}"],
        )
    if STORAGE in cluster.parts:
        yield from _list_storage_steps(cluster, folder)
    yield from _list_first_run(cluster, folder)


def _list_hyperpod_steps(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    clone = _quote_path(folder / "hyperpod-cli")
    chart = _quote_path(folder / "hyperpod-cli/helm_chart/HyperPodHelmChart")
    yield (
        "Install HyperPod's health agent, device plugins and permissions in the cluster",
        [
            f"git clone --depth 1 {_CHARTS} {clone}",
            f"helm dependency update {chart}",
            f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
        ],
    )
    yield from _list_role_steps(cluster, folder)
    group = (
        f"$(aws eks describe-cluster --name {cluster.cluster_name} --region {cluster.region} "
        "--query cluster.resourcesVpcConfig.clusterSecurityGroupId --output text)"
    )
    yield (
        "EFA needs a rule for outgoing traffic within the security group.",
        [f'SECURITY_GROUP="{group}"', _format_group_rule(cluster)],
    )


def _list_role_steps(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    role = _name_role(cluster)
    trust = _quote_path(f"file://{folder}/iam/hyperpod-trust.json")
    nodes = _quote_path(f"file://{folder}/iam/hyperpod-nodes.json")
    bucket = f"s3://{cluster_files.name_bucket(cluster, '$ACCOUNT')}"
    yield (
        "Create the role of the nodes",
        [
            f"aws iam create-role --role-name {role} --assume-role-policy-document {trust}",
            f"aws iam attach-role-policy --role-name {role} --policy-arn {_name_policy(cluster)}",
            f"aws iam put-role-policy --role-name {role} --policy-name nodes "
            f"--policy-document {nodes}",
        ],
    )
    yield (
        "Create the bucket of the lifecycle scripts",
        [
            _SET_ACCOUNT,
            f'aws s3 mb "{bucket}" --region {cluster.region}',
            f'aws s3 sync {_quote_path(folder / "lifecycle")} "{bucket}/lifecycle"',
        ],
    )


def _format_group_rule(cluster: ClusterOptions, direction: str = "egress") -> str:
    return (
        f"aws ec2 authorize-security-group-{direction} --region {cluster.region} "
        '--group-id "$SECURITY_GROUP" '
        '--ip-permissions "IpProtocol=-1,UserIdGroupPairs=[{GroupId=$SECURITY_GROUP}]"'
    )


def _format_creation(cluster: ClusterOptions, folder: Path, more: str = "") -> list[str]:
    request = _quote_path(folder / FILES[NODES])
    document = _quote_path(f"file://{folder / FILES[NODES]}")
    return [
        f"{_format_setup(cluster, NODES)}{more} > {request}",
        f"aws sagemaker create-cluster --region {cluster.region} --cli-input-json {document}",
        f"aws sagemaker describe-cluster --region {cluster.region} "
        f"--cluster-name {cluster.cluster_name} --query ClusterStatus  # until it is InService",
    ]


def _list_storage_steps(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    file = _quote_path(folder / FILES[STORAGE])
    wait = (
        f"kubectl wait pvc/{cluster.pvc} --namespace {cluster.namespace} "
        "--for=jsonpath='{.status.phase}'=Bound --timeout=30m"
    )
    more = ""
    if cluster.filesystem == "efs" and not cluster.filesystem_id:
        query = "--query cluster.resourcesVpcConfig"
        describe = (
            f"aws eks describe-cluster --name {cluster.cluster_name} --region {cluster.region}"
        )
        more = ' --filesystem-id "$FILE_SYSTEM"'
        yield (
            "Create the EFS file system, with a mount target in each zone of the cluster",
            [
                f'FILE_SYSTEM="$({shlex.join(cluster_files.format_efs_creation(cluster))})"',
                _format_wait(
                    f"aws efs describe-file-systems --region {cluster.region} --file-system-id "
                    "\"$FILE_SYSTEM\" --query 'FileSystems[0].LifeCycleState'",
                    "available",
                ),
                f'GROUP="$({describe} {query}.clusterSecurityGroupId --output text)"',
                "# A zone has one mount target: for a second one, AWS answers MountTargetConflict.",
                f"for SUBNET in $({describe} {query}.subnetIds --output text); do",
                f"    aws efs create-mount-target --region {cluster.region} --subnet-id $SUBNET "
                '--file-system-id "$FILE_SYSTEM" --security-groups "$GROUP" || true',
                "done",
            ],
        )
    yield (
        f"Create the volume as claim {cluster.pvc} in namespace {cluster.namespace}",
        [f"{_format_setup(cluster, STORAGE)}{more} > {file}", f"kubectl apply -f {file}", wait],
    )


def _list_image_steps(cluster: ClusterOptions) -> Iterator[Step]:
    efa = " --efa" if read_instances()[cluster.instance_type]["efa"] else ""
    image = (
        f"{commands.script('launch/build_image.py')}{efa} --push ecr/{_REPOSITORY} "
        f"--create-repository --region {cluster.region}"
    )
    if cluster.kind == HYPERPOD:
        yield (
            "HyperPod's launcher needs an older torch in the image.",
            [
                "sed 's/^torch==.*/torch==2.11.0/' requirements.txt > requirements-hyperpod.txt",
                "echo hyperpod-elastic-agent==1.1.3 >> requirements-hyperpod.txt",
            ],
        )
        image += " --requirements requirements-hyperpod.txt"
    yield (
        "Build the image and push it to the account's registry; this needs no cluster yet",
        [image],
    )


def _list_first_run(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    """Yield the steps from the data to the first run. GPU nodes start once the data exist."""
    kind = "hyperpod" if cluster.kind == HYPERPOD else cluster.operator
    cluster_words = f"--cluster-name {cluster.cluster_name} --region {cluster.region}"
    kind_words = "" if kind == "pytorchjob" else f" --kind {kind}"
    volume = "".join(
        f" --{name} {getattr(cluster, name)}"
        for name, usual in (("pvc", "fsx-claim"), ("namespace", "default"))
        if getattr(cluster, name) != usual
    )
    job = f"{cluster_words}{kind_words}{volume} --job-name first"
    node_words = f"--nodes {cluster.nodes} --instance-type {cluster.instance_type}"
    yield (
        "Prepare data, model and tokens in a pod on the node without GPUs",
        [f"{commands.script(SCRIPT, 'prepare')} {job}"],
    )
    if cluster.kind == HYPERPOD:
        yield "Create the GPU nodes (20 minutes or more)", _format_creation(cluster, folder)
    else:
        yield (
            "Start the GPU nodes, which cost money from now on (5 minutes)",
            [scale_nodes(cluster)],
        )
    check = f"{commands.script(SCRIPT, 'validate')} {job} {node_words}"
    yield (
        "Check the cluster until the nodes and their device plugins have started",
        [f"until {check}; do sleep 30; done"],
    )
    stop = (
        [f"# {scale_nodes(cluster, 0)}  # idle nodes cost money too"] if cluster.kind == EKS else []
    )
    yield "Start the first run", [f"{commands.script(SCRIPT, 'deploy')} {job} {node_words}", *stop]


def scale_nodes(cluster: ClusterOptions, nodes: int | None = None) -> str:
    """Return the command that starts or stops the GPU nodes of a cluster of eks.yaml."""
    return (
        f"eksctl scale nodegroup --cluster {cluster.cluster_name} --region {cluster.region} "
        f"--name gpu --nodes {cluster.nodes if nodes is None else nodes}"
    )


def _format_wait(query: str, state: str) -> str:
    """Return the command that repeats a query, and prints its answers, until one is `state`."""
    return f"until {query} --output text | tee /dev/stderr | grep -qx {state}; do sleep 10; done"


def _list_slurm_steps(cluster: ClusterOptions, folder: Path) -> Iterator[Step]:
    yield (
        "EDIT: a private subnet with a NAT gateway in the GPU nodes' zone, and a security group.",
        [
            f"SUBNET={cluster.subnet or 'subnet-EDIT'}",
            f"SECURITY_GROUP={cluster.security_group or 'sg-EDIT'}",
            f"{_format_group_rule(cluster, 'ingress')} || true  # fails if the rule exists",
            f"{_format_group_rule(cluster)} || true",
        ],
    )
    create = (
        f"aws fsx create-file-system --region {cluster.region} --file-system-type LUSTRE "
        f"--file-system-type-version 2.15 --storage-capacity {cluster.size} "
        '--subnet-ids "$SUBNET" --security-group-ids "$SECURITY_GROUP" '
        "--lustre-configuration DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=125 "
        f"--tags Key=Name,Value={cluster.cluster_name} "
        "--query FileSystem.FileSystemId --output text"
    )
    system = cluster.filesystem_id or f'"$({create})"'
    wait = _format_wait(
        f'aws fsx describe-file-systems --region {cluster.region} --file-system-ids "$FILE_SYSTEM" '
        "--query 'FileSystems[0].Lifecycle'",
        "AVAILABLE",
    )
    yield (
        "The file system, which HyperPod mounts at /fsx (10 minutes)",
        [f"FILE_SYSTEM={system}", wait],
    )
    yield from _list_role_steps(cluster, folder)
    more = "".join(
        f' --{name.replace("_", "-")} "${variable}"'
        for name, variable in (
            ("subnet", "SUBNET"),
            ("security_group", "SECURITY_GROUP"),
            ("filesystem_id", "FILE_SYSTEM"),
        )
        if not getattr(cluster, name)
    )
    yield "Create the nodes (20 minutes or more)", _format_creation(cluster, folder, more)
    yield (
        "Install the code and its packages in /fsx/ubuntu, on the head node; submit the first job",
        [
            f"aws sagemaker list-cluster-nodes --region {cluster.region} "
            f"--cluster-name {cluster.cluster_name}  # for the instance of the group `controller`",
            "# aws ssm start-session --target sagemaker-cluster:CLUSTER-ID_controller-INSTANCE-ID",
            f"# sbatch -N {cluster.nodes} -p gpu launch/slurm.sbatch -e first -d hf_datasets/c4",
        ],
    )


def _list_deletions(cluster: ClusterOptions) -> Iterator[str]:
    region = f"--region {cluster.region}"
    if cluster.on_hyperpod:
        name = f"{region} --cluster-name {cluster.cluster_name}"
        yield f"aws sagemaker delete-cluster {name}"
        state = f"aws sagemaker describe-cluster {name} --query ClusterStatus"
        yield f"while {state}; do sleep 30; done"
    if cluster.filesystem == "fsx" and not cluster.filesystem_id:
        yield _find_lustre(cluster)
        yield f'aws fsx delete-file-system {region} --file-system-id "$FILE_SYSTEM"'
        yield (
            "# The network cannot be deleted before it; the loop ends with FileSystemNotFound.\n"
            f'#   while aws fsx describe-file-systems {region} --file-system-ids "$FILE_SYSTEM" '
            "--query 'FileSystems[0].Lifecycle'; do sleep 30; done"
        )
    elif cluster.filesystem == "efs" and not cluster.filesystem_id:
        yield from _list_efs_deletions(cluster)
    if cluster.kind != HYPERPOD_SLURM:
        # With one node left, the disruption budget of CoreDNS would block an eviction for ever.
        yield (
            f"eksctl delete cluster --name {cluster.cluster_name} {region} --wait "
            "--disable-nodegroup-eviction"
        )
        yield f"aws ecr delete-repository {region} --repository-name {_REPOSITORY} --force"
    if cluster.on_hyperpod:
        yield _SET_ACCOUNT
        yield f'aws s3 rb --force "s3://{cluster_files.name_bucket(cluster, "$ACCOUNT")}"'
        role = f"--role-name {_name_role(cluster)}"
        yield f"aws iam detach-role-policy {role} --policy-arn {_name_policy(cluster)}"
        yield f"aws iam delete-role-policy {role} --policy-name nodes"
        yield f"aws iam delete-role {role}"


def _find_lustre(cluster: ClusterOptions) -> str:
    """Return the command that sets FILE_SYSTEM to the file system that the steps have created."""
    if cluster.kind == HYPERPOD_SLURM:
        name = f"Tags[?Key=='Name' && Value=='{cluster.cluster_name}']"
        query = (
            f"aws fsx describe-file-systems --region {cluster.region} --output text "
            f'--query "FileSystems[?{name}].FileSystemId"'
        )
    else:
        handle = f'{{.items[?(@.spec.claimRef.name=="{cluster.pvc}")].spec.csi.volumeHandle}}'
        query = f"kubectl get pv -o jsonpath='{handle}'"
    return f'FILE_SYSTEM="$({query})"'


def _list_efs_deletions(cluster: ClusterOptions) -> Iterator[str]:
    """Yield the commands that delete the file system of EFS; the last target needs a minute."""
    region = f"--region {cluster.region}"
    token = cluster_files.name_efs(cluster)
    find = (
        f"aws efs describe-file-systems {region} --creation-token {token} "
        "--query 'FileSystems[0].FileSystemId' --output text"
    )
    targets = (
        f'aws efs describe-mount-targets {region} --file-system-id "$FILE_SYSTEM" '
        "--query 'MountTargets[].MountTargetId' --output text"
    )
    yield f'FILE_SYSTEM="$({find})"'
    yield (
        f"for TARGET in $({targets}); do aws efs delete-mount-target {region} --mount-target-id "
        '"$TARGET"; done'
    )
    yield f'while [ -n "$({targets})" ]; do sleep 10; done'
    yield f'aws efs delete-file-system {region} --file-system-id "$FILE_SYSTEM"'


def _name_role(cluster: ClusterOptions) -> str:
    return f"{cluster.cluster_name}-nodes"


def _name_policy(cluster: ClusterOptions) -> str:
    return f"arn:{cluster.partition}:iam::aws:policy/AmazonSageMakerClusterInstanceRolePolicy"


def _quote_path(path: object) -> str:
    return shlex.quote(str(path))


def _format_setup(cluster: ClusterOptions, part: str) -> str:
    return commands.script(SCRIPT, "setup", *cluster.to_words(), "--only", part)


def _format_words(command: str, **words: str) -> str:
    return shlex.join([*command.split(), *commands.as_words(words)])
