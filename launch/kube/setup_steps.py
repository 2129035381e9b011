"""List the commands that create and delete a cluster, in order, and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from launch.kube import cluster_files
from launch.kube.cluster_files import (
    CLUSTER,
    EKS,
    HYPERPOD,
    HYPERPOD_SLURM,
    NODES,
    SCRIPT,
    STORAGE,
    ClusterOptions,
)
from launch.kube.job_options import JobNeeds, read_instances
from launch.kube.kinds import KINDS
from launch.kube.quotas import count_vcpus, quota_commands
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


def render_steps(new: ClusterOptions, folder: Path) -> str:
    """Return a script with all commands. folder: where the files of `setup --out` are."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Creates {_describe(new)}.",
        "# Run the commands one after the other: some take 20 minutes, and most cost money.",
        "#",
        *(f"#   {label:<16} {text}" for label, text in list_costs(new).items()),
        "set -euo pipefail",
    ]
    for number, (comment, words) in enumerate(_list_steps(new, folder), 1):
        lines += ["", f"# {number}. {comment}", *words]
    lines += ["", "# To delete everything again, in this order:"]
    lines += [f"#   {command}" for command in _list_deletions(new)]
    return "\n".join(lines) + "\n"


def _describe(new: ClusterOptions) -> str:
    name = {EKS: "EKS", HYPERPOD: "HyperPod on EKS", HYPERPOD_SLURM: "HyperPod with Slurm"}
    return (
        f"{new.cluster_name} in {new.region}: {name[new.kind]}, {new.nodes} × {new.instance_type}"
    )


def list_costs(new: ClusterOptions) -> dict[str, str]:
    """Return the estimated costs by item, in US dollars."""
    prices = cluster_files.read_prices()
    kind = "hyperpod" if new.on_hyperpod else new.operator
    node = JobNeeds(kind=kind, instance_type=new.instance_type).price
    hourly = {"NAT gateway": prices["nat_hour"]}
    if new.kind == HYPERPOD_SLURM:
        hourly["head node"] = prices["controller_hour"]
    else:
        hourly |= {"EKS": prices["eks_hour"], "system node": prices["system_hour"]}
        disk_price = prices["disk_gb_month"] / _HOURS_PER_MONTH
        hourly["disks"] = (_SYSTEM_DISK + _GPU_DISK * new.nodes) * disk_price
        of_gpu_nodes = new.nodes * (node + _GPU_DISK * disk_price)
    if node:
        hourly["GPU nodes"] = new.nodes * node
    texts = {label: f"${price:,.3f} per hour" for label, price in hourly.items()}
    if not node:
        texts["GPU nodes"] = f"no price for {new.instance_type} in templates/instances.yaml"
    monthly = {"fsx": new.size * prices["fsx_gb_month"], "efs": 0.0, "none": 0.0}[new.filesystem]
    if new.filesystem == "fsx" and not new.filesystem_id:
        texts["file system"] = f"${monthly:,.0f} per month, also while no node runs"
        hourly["file system"] = monthly / _HOURS_PER_MONTH
    elif new.filesystem == "efs":
        texts["file system"] = f"${prices['efs_gb_month']:.2f} per month for each GB"
    texts["together"] = f"about ${sum(hourly.values()):,.2f} per hour" + (
        "" if node else " without the GPU nodes"
    )
    if node and new.kind != HYPERPOD_SLURM:
        idle = sum(hourly.values()) - of_gpu_nodes
        texts["without GPUs"] = f"about ${idle:,.2f} per hour, while the GPU nodes are off"
    return texts


def _list_steps(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    quota = quota_commands(new.instance_type, new.nodes, new.region, new.on_hyperpod)
    amount = new.nodes if new.on_hyperpod else new.nodes * count_vcpus(new.instance_type)
    unit = "nodes" if new.on_hyperpod else "vCPUs"
    yield (
        f"The account's quota must be {amount} {unit} or more. AWS may take days to raise it.",
        [quota[0], f"# {quota[1]}"],
    )
    if new.kind == HYPERPOD_SLURM:
        yield from _list_slurm_steps(new, folder)
        return
    yield from _list_image_steps(new)
    yield (
        "Network, control plane, add-ons and a node without GPUs (20 to 30 minutes)",
        [
            f"eksctl create cluster -f {_quote(folder / FILES[CLUSTER])}",
            _shell("aws eks update-kubeconfig", name=new.cluster_name, region=new.region),
        ],
    )
    if new.kind == HYPERPOD:
        yield from _list_hyperpod_steps(new, folder)
    kind = KINDS["hyperpod" if new.kind == HYPERPOD else new.operator]
    installs = kind.install_commands(new.cluster_name, new.region)
    # cluster.yaml contains what the add-on of HyperPod needs.
    yield f"The operator: {kind.product}", installs[-1:]
    if new.namespace != "default":
        yield (
            "The namespace of the volume and the jobs",
            [f"kubectl create namespace {new.namespace}"],
        )
    if STORAGE in new.parts:
        yield from _list_storage_steps(new, folder)
    yield from _list_first_run(new, folder)


def _list_hyperpod_steps(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    clone = _quote(folder / "hyperpod-cli")
    chart = _quote(folder / "hyperpod-cli/helm_chart/HyperPodHelmChart")
    yield (
        "HyperPod's health agent, device plugins and permissions in the cluster",
        [
            f"git clone --depth 1 {_CHARTS} {clone}",
            f"helm dependency update {chart}",
            f"helm upgrade --install hyperpod-dependencies {chart} --namespace kube-system",
        ],
    )
    yield from _list_role_steps(new, folder)
    group = (
        f"$(aws eks describe-cluster --name {new.cluster_name} --region {new.region} "
        "--query cluster.resourcesVpcConfig.clusterSecurityGroupId --output text)"
    )
    yield (
        "EFA needs a rule for outgoing traffic within the security group.",
        [f'SECURITY_GROUP="{group}"', _allow_within_group(new)],
    )


def _list_role_steps(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    role = _name_role(new)
    trust = _quote(f"file://{folder}/iam/hyperpod-trust.json")
    nodes = _quote(f"file://{folder}/iam/hyperpod-nodes.json")
    bucket = f"s3://{cluster_files.name_bucket(new, '$ACCOUNT')}"
    yield (
        "The role of the nodes",
        [
            f"aws iam create-role --role-name {role} --assume-role-policy-document {trust}",
            f"aws iam attach-role-policy --role-name {role} --policy-arn {_name_policy(new)}",
            f"aws iam put-role-policy --role-name {role} --policy-name nodes "
            f"--policy-document {nodes}",
        ],
    )
    yield (
        "The bucket of the lifecycle scripts",
        [
            _SET_ACCOUNT,
            f'aws s3 mb "{bucket}" --region {new.region}',
            f'aws s3 sync {_quote(folder / "lifecycle")} "{bucket}/lifecycle"',
        ],
    )


def _allow_within_group(new: ClusterOptions, direction: str = "egress") -> str:
    return (
        f"aws ec2 authorize-security-group-{direction} --region {new.region} "
        '--group-id "$SECURITY_GROUP" '
        '--ip-permissions "IpProtocol=-1,UserIdGroupPairs=[{GroupId=$SECURITY_GROUP}]"'
    )


def _create_cluster(new: ClusterOptions, folder: Path, more: str = "") -> list[str]:
    request = _quote(folder / FILES[NODES])
    document = _quote(f"file://{folder / FILES[NODES]}")
    return [
        f"{_setup(new, NODES)}{more} > {request}",
        f"aws sagemaker create-cluster --region {new.region} --cli-input-json {document}",
        f"aws sagemaker describe-cluster --region {new.region} "
        f"--cluster-name {new.cluster_name} --query ClusterStatus  # until it is InService",
    ]


def _list_storage_steps(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    file = _quote(folder / FILES[STORAGE])
    wait = (
        f"kubectl wait pvc/{new.pvc} --namespace {new.namespace} "
        "--for=jsonpath='{.status.phase}'=Bound --timeout=30m"
    )
    more = ""
    if new.filesystem == "efs" and not new.filesystem_id:
        query = "--query cluster.resourcesVpcConfig"
        cluster = f"aws eks describe-cluster --name {new.cluster_name} --region {new.region}"
        more = ' --filesystem-id "$FILE_SYSTEM"'
        yield (
            "The file system of EFS, with an address in each subnet of the cluster",
            [
                f'FILE_SYSTEM="$({shlex.join(cluster_files.create_efs_words(new))})"',
                f'GROUP="$({cluster} {query}.clusterSecurityGroupId --output text)"',
                f"for SUBNET in $({cluster} {query}.subnetIds --output text); do",
                f"    aws efs create-mount-target --region {new.region} --subnet-id $SUBNET "
                '--file-system-id "$FILE_SYSTEM" --security-groups "$GROUP" || true',
                "done",
            ],
        )
    yield (
        f"The volume, as claim {new.pvc} in namespace {new.namespace}",
        [f"{_setup(new, STORAGE)}{more} > {file}", f"kubectl apply -f {file}", wait],
    )


def _list_image_steps(new: ClusterOptions) -> Iterator[Step]:
    efa = " --efa" if read_instances()[new.instance_type]["efa"] else ""
    image = (
        f"{commands.script('launch/build_image.py')}{efa} --push ecr/{_REPOSITORY} "
        f"--create-repository --region {new.region}"
    )
    if new.kind == HYPERPOD:
        yield (
            "HyperPod's launcher needs an older torch in the image.",
            [
                "sed 's/^torch==.*/torch==2.11.0/' requirements.txt > requirements-hyperpod.txt",
                "echo hyperpod-elastic-agent==1.1.3 >> requirements-hyperpod.txt",
            ],
        )
        image += " --requirements requirements-hyperpod.txt"
    yield "The image, in a registry of the account; this needs no cluster yet", [image]


def _list_first_run(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    """Yield the steps from the data to the first run. GPU nodes start when the data are there."""
    kind = "hyperpod" if new.kind == HYPERPOD else new.operator
    cluster = f"--cluster-name {new.cluster_name} --region {new.region}"
    kind_words = "" if kind == "pytorchjob" else f" --kind {kind}"
    volume = "".join(
        f" --{name} {getattr(new, name)}"
        for name, usual in (("pvc", "fsx-claim"), ("namespace", "default"))
        if getattr(new, name) != usual
    )
    job = f"{cluster}{kind_words}{volume} --job-name first"
    node_words = f"--nodes {new.nodes} --instance-type {new.instance_type}"
    yield (
        "Data, model and tokens, in a pod on the node without GPUs",
        [f"{commands.script(SCRIPT, 'prepare')} {job}"],
    )
    if new.kind == HYPERPOD:
        yield "The GPU nodes (20 minutes or more)", _create_cluster(new, folder)
    else:
        yield "The GPU nodes, which cost money from now on (5 minutes)", [scale_nodes(new)]
    check = f"{commands.script(SCRIPT, 'validate')} {job} {node_words}"
    yield (
        "A check of all of this, repeated until the nodes and their device plugins have started",
        [f"until {check}; do sleep 30; done"],
    )
    stop = [f"# {scale_nodes(new, 0)}  # idle nodes cost as much"] if new.kind == EKS else []
    yield "The first run", [f"{commands.script(SCRIPT, 'deploy')} {job} {node_words}", *stop]


def scale_nodes(new: ClusterOptions, nodes: int | None = None) -> str:
    """Return the command that starts or ends the GPU nodes of a cluster of eks.yaml."""
    return (
        f"eksctl scale nodegroup --cluster {new.cluster_name} --region {new.region} --name gpu "
        f"--nodes {new.nodes if nodes is None else nodes}"
    )


def _list_slurm_steps(new: ClusterOptions, folder: Path) -> Iterator[Step]:
    yield (
        "EDIT: a private subnet with a NAT gateway in the zone of the GPU nodes, and its group.",
        [
            f"SUBNET={new.subnet or 'subnet-EDIT'}",
            f"SECURITY_GROUP={new.security_group or 'sg-EDIT'}",
            f"{_allow_within_group(new, 'ingress')} || true  # if it exists",
            f"{_allow_within_group(new)} || true",
        ],
    )
    create = (
        f"aws fsx create-file-system --region {new.region} --file-system-type LUSTRE "
        f"--file-system-type-version 2.15 --storage-capacity {new.size} "
        '--subnet-ids "$SUBNET" --security-group-ids "$SECURITY_GROUP" '
        "--lustre-configuration DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=125 "
        f"--tags Key=Name,Value={new.cluster_name} "
        "--query FileSystem.FileSystemId --output text"
    )
    system = new.filesystem_id or f'"$({create})"'
    yield "The file system, which HyperPod mounts at /fsx (10 minutes)", [f"FILE_SYSTEM={system}"]
    yield from _list_role_steps(new, folder)
    more = "".join(
        f' --{name.replace("_", "-")} "${variable}"'
        for name, variable in (
            ("subnet", "SUBNET"),
            ("security_group", "SECURITY_GROUP"),
            ("filesystem_id", "FILE_SYSTEM"),
        )
        if not getattr(new, name)
    )
    yield "The nodes (20 minutes or more)", _create_cluster(new, folder, more)
    yield (
        "On the head node, in /fsx/ubuntu: the code, its packages and the first job",
        [
            f"aws sagemaker list-cluster-nodes --region {new.region} "
            f"--cluster-name {new.cluster_name}  # for the instance of the group `controller`",
            "# aws ssm start-session --target sagemaker-cluster:CLUSTER-ID_controller-INSTANCE-ID",
            f"# sbatch -N {new.nodes} -p gpu launch/slurm.sbatch -e first -d hf_datasets/c4",
        ],
    )


def _list_deletions(new: ClusterOptions) -> Iterator[str]:
    region = f"--region {new.region}"
    if new.on_hyperpod:
        name = f"{region} --cluster-name {new.cluster_name}"
        yield f"aws sagemaker delete-cluster {name}"
        state = f"aws sagemaker describe-cluster {name} --query ClusterStatus"
        yield f"while {state}; do sleep 30; done"
    if new.filesystem == "fsx" and not new.filesystem_id:
        yield _find_lustre(new)
        yield f'aws fsx delete-file-system {region} --file-system-id "$FILE_SYSTEM"'
        yield (
            "# Its addresses keep the network; the loop ends with FileSystemNotFound.\n"
            f'#   while aws fsx describe-file-systems {region} --file-system-ids "$FILE_SYSTEM" '
            "--query 'FileSystems[0].Lifecycle'; do sleep 30; done"
        )
    elif new.filesystem == "efs" and not new.filesystem_id:
        yield from _list_efs_deletions(new)
    if new.kind != HYPERPOD_SLURM:
        # With one node left, the disruption budget of CoreDNS would block an eviction for ever.
        yield (
            f"eksctl delete cluster --name {new.cluster_name} {region} --wait "
            "--disable-nodegroup-eviction"
        )
        yield f"aws ecr delete-repository {region} --repository-name {_REPOSITORY} --force"
    if new.on_hyperpod:
        yield _SET_ACCOUNT
        yield f'aws s3 rb --force "s3://{cluster_files.name_bucket(new, "$ACCOUNT")}"'
        role = f"--role-name {_name_role(new)}"
        yield f"aws iam detach-role-policy {role} --policy-arn {_name_policy(new)}"
        yield f"aws iam delete-role-policy {role} --policy-name nodes"
        yield f"aws iam delete-role {role}"


def _find_lustre(new: ClusterOptions) -> str:
    """Return the command that sets FILE_SYSTEM to the file system that the steps have created."""
    if new.kind == HYPERPOD_SLURM:
        name = f"Tags[?Key=='Name' && Value=='{new.cluster_name}']"
        query = (
            f"aws fsx describe-file-systems --region {new.region} --output text "
            f'--query "FileSystems[?{name}].FileSystemId"'
        )
    else:
        handle = f'{{.items[?(@.spec.claimRef.name=="{new.pvc}")].spec.csi.volumeHandle}}'
        query = f"kubectl get pv -o jsonpath='{handle}'"
    return f'FILE_SYSTEM="$({query})"'


def _list_efs_deletions(new: ClusterOptions) -> Iterator[str]:
    """Yield the commands that delete the file system of EFS; the last target needs a minute."""
    region = f"--region {new.region}"
    find = (
        f"aws efs describe-file-systems {region} --creation-token {cluster_files.name_efs(new)} "
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


def _name_role(new: ClusterOptions) -> str:
    return f"{new.cluster_name}-nodes"


def _name_policy(new: ClusterOptions) -> str:
    return f"arn:{new.partition}:iam::aws:policy/AmazonSageMakerClusterInstanceRolePolicy"


def _quote(path: object) -> str:
    return shlex.quote(str(path))


def _setup(new: ClusterOptions, part: str) -> str:
    return commands.script(SCRIPT, "setup", *new.words(), "--only", part)


def _shell(command: str, **words: str) -> str:
    return shlex.join([*command.split(), *commands.as_words(words)])
