"""Declare the options of a new cluster, and render its files from templates/cluster/."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.cloud.kube import aws
from launch.cloud.kube.job import fill_template, render_manifests
from launch.cloud.kube.job_options import (
    MAX_LABEL,
    TEMPLATES,
    JobNeeds,
    read_instances,
    require_price,
)
from launch.cloud.kube.kubeconfig import require_region
from lib.core import commands, config_file, options
from lib.core.declared import option
from lib.core.errors import Problems, UsageError

EKS, HYPERPOD, HYPERPOD_SLURM = KINDS = ("eks", "hyperpod", "hyperpod-slurm")
CLUSTER, NODES, STORAGE = PARTS = ("cluster", "nodes", "storage")
SYSTEM_TYPE = "m5.2xlarge"  # its price is in templates/prices.yaml
_PRICES = (  # in templates/prices.yaml
    "eks_hour",
    "nat_hour",
    "system_hour",
    "controller_hour",
    "fsx_gb_month",
    "efs_gb_month",
    "disk_gb_month",
    "image_gb_month",
    "traffic_gb",
)
CONTROLLER_TYPE = "m5.2xlarge"
SCRIPT = "launch/kubernetes.py"
_FOLDER = TEMPLATES / "cluster"
_MAX_NAME = 40  # since the bucket is called sagemaker-NAME-ACCOUNT
_MAX_CLAIM = MAX_LABEL - len("-lustre")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_EKS_NAME = re.compile(r"[0-9A-Za-z][\w-]*")
_REGION = re.compile(r"[a-z]+(-[a-z]+)+-\d+")
_FILE_SYSTEM = re.compile(r"fs-[0-9a-f]{8,}")


def _default(name: str) -> Any:
    """Return the default of a job's option, so that the files of a cluster use it as well."""
    return next(field.default for field in fields(JobNeeds) if field.name == name)


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a new cluster and its volume."""

    kind: str = option(
        EKS,
        group="the cluster",
        choices=KINDS,
        help="EKS with GPU nodes, HyperPod orchestrated by EKS, or HyperPod with Slurm",
    )
    cluster_name: str = option("llm-training", metavar="NAME", help="name of the cluster")
    region: str = option("", metavar="NAME", help="AWS region (default: that of the AWS settings)")
    zones: str = option(
        "",
        metavar="Z1,Z2",
        help="two availability zones; nodes and file system are in the first (default: a and b of "
        "the region)",
    )
    kubernetes_version: str = option("1.34", metavar="V", help="version of EKS")
    operator: str = option(
        "pytorchjob",
        choices=("pytorchjob", "trainjob"),
        help="eks: kind of job whose operator to install",
    )
    instance_type: str = option("g5.8xlarge", group="the nodes", metavar="T", help="GPU nodes")
    nodes: int = option(
        4,
        aliases=("num_nodes", "node_count"),
        parse=options.positive_int,
        help="number of GPU nodes",
    )
    capacity_block: str = option(
        "", metavar="cr-…", help="eks: reserved capacity block of the nodes (default: on demand)"
    )
    training_plan: str = option(
        "", metavar="ARN", help="hyperpod: training plan of the nodes (default: on demand)"
    )
    checkpoint_memory: int = option(
        0,
        parse=options.count,
        metavar="PERCENT",
        help="hyperpod: share of the nodes' memory that keeps checkpoints, for --ckpt-local-dir",
    )
    filesystem: str = option(
        "fsx",
        group="the volume",
        choices=("fsx", "efs", "none"),
        help="shared file system: FSx for Lustre, EFS (slower), or none",
    )
    filesystem_id: str = option(
        "", metavar="fs-…", help="existing file system (default: fsx creates one)"
    )
    size: int = option(
        1200, parse=options.positive_int, metavar="GIB", help="fsx: GiB, 1200 or a multiple of 2400"
    )
    storage_class: str = option(
        "",
        metavar="NAME",
        help="existing storage class to use instead of a file system (default: none)",
    )
    pvc: str = option(_default("pvc"), metavar="NAME", help="claim of the volume")
    namespace: str = option(_default("namespace"), metavar="NS", help="namespace of the claim")
    subnet: str = option(
        "",
        group="the network",
        metavar="subnet-…",
        help="private subnet of nodes and file system (default: that of the EKS cluster)",
    )
    security_group: str = option(
        "", metavar="sg-…", help="security group (default: that of the EKS cluster)"
    )

    @property
    def on_hyperpod(self) -> bool:
        return self.kind in (HYPERPOD, HYPERPOD_SLURM)

    @property
    def partition(self) -> str:
        """Return the part of AWS that the region belongs to, as in ARNs."""
        for prefix, partition in (("cn-", "aws-cn"), ("us-gov-", "aws-us-gov")):
            if self.region.startswith(prefix):
                return partition
        return "aws"

    @property
    def zone_names(self) -> list[str]:
        if self.zones:
            return [name.strip() for name in self.zones.split(",")]
        return [f"{self.region}{letter}" for letter in "ab"]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts that this kind of cluster consists of."""
        has_storage = (STORAGE,) if self.filesystem != "none" else ()
        if self.kind == EKS:
            return (CLUSTER, *has_storage)
        return (CLUSTER, NODES, *has_storage) if self.kind == HYPERPOD else (NODES,)

    def to_words(self, **changes: str) -> list[str]:
        """Return the options that differ from their defaults, as words of a command line."""
        values = {**vars(self), **changes}
        return commands.as_words(
            {
                field.name: str(values[field.name])
                for field in fields(self)
                if field.name == "region" or values[field.name] != field.default
            }
        )

    def check(self, problems: Problems, is_new: bool = True) -> None:
        """Add a problem for each name, size or combination that AWS refuses.

        is_new: whether the cluster is to be created; an existing cluster may have any name that EKS
        accepts.
        """
        for name, pattern, longest in (
            ("cluster_name", _NAME if is_new else _EKS_NAME, _MAX_NAME if is_new else 100),
            ("namespace", _LABEL, MAX_LABEL),
            ("pvc", _CLAIM, _MAX_CLAIM),
        ):
            value = getattr(self, name)
            if not pattern.fullmatch(value) or len(value) > longest:
                problems.add(
                    f"--{name.replace('_', '-')} {value!r} is not a name for a cluster or claim",
                    expected=f"lower-case letters, digits, hyphens; at most {longest} characters",
                )
        if self.storage_class:
            return
        if not _REGION.fullmatch(self.region):
            problems.add(f"--region {self.region!r} is not a region", expected="such as us-west-2")
        zones = self.zone_names
        if len(set(zones)) < 2 or any(not zone.startswith(self.region) for zone in zones):
            problems.add(
                f"--zones {self.zones!r}",
                expected=f"two zones of {self.region}, such as {self.region}a,{self.region}b",
            )
        if self.instance_type not in read_instances():
            problems.add(
                f"--instance-type {self.instance_type} is not in the table",
                expected=f"one of {', '.join(read_instances())}",
            )
        if self.nodes < 1:
            problems.add("--nodes 0 gives a cluster without GPU nodes", expected="1 or more")
        if not 0 <= self.checkpoint_memory <= 100:
            problems.add(f"--checkpoint-memory {self.checkpoint_memory}", expected="0 to 100")
        self._check_volume(problems)

    def _check_volume(self, problems: Problems) -> None:
        if self.filesystem_id and not _FILE_SYSTEM.fullmatch(self.filesystem_id):
            problems.add(f"--filesystem-id {self.filesystem_id!r}", expected="fs-0123456789abcdef0")
        if self.filesystem == "fsx" and self.size != 1200 and self.size % 2400:
            problems.add(
                f"--size {self.size} is not a size of FSx for Lustre",
                expected="1200, or a multiple of 2400",
            )
        if self.kind == HYPERPOD_SLURM and self.filesystem != "fsx":
            problems.add(
                f"--filesystem {self.filesystem}: HyperPod with Slurm mounts FSx for Lustre",
                expected="--filesystem fsx",
            )
        for name, is_wrong, kinds in (
            ("capacity_block", self.on_hyperpod, "--kind eks"),
            ("training_plan", not self.on_hyperpod, "--kind hyperpod or hyperpod-slurm"),
            ("checkpoint_memory", self.kind != HYPERPOD, "--kind hyperpod"),
        ):
            if getattr(self, name) and is_wrong:
                problems.add(f"--{name.replace('_', '-')} needs {kinds}")


@dataclass(frozen=True)
class NetworkFacts:
    """Facts that AWS reports about a cluster and its file system; empty if they are not needed."""

    account: str = ""
    subnet: str = ""
    security_group: str = ""
    dns_name: str = ""
    mount_name: str = ""


def render_part(part: str, cluster: ClusterOptions) -> str:
    """Return the file of a part: YAML for eksctl and kubectl, JSON for create-cluster of SageMaker.

    Queries AWS for the facts that the options do not give. Raises UsageError if one is missing.
    """
    if part not in cluster.parts:
        raise UsageError(
            f"--only {part}: a cluster of --kind {cluster.kind} has no such file",
            expected=" or ".join(cluster.parts) or "another --filesystem",
        )
    if part == CLUSTER:
        # HyperPod adds the GPU nodes itself.
        return _render_template(
            "eks.yaml",
            cluster,
            NetworkFacts(),
            GPU_NODES=cluster.nodes if cluster.kind == EKS else 0,
        )
    facts = find_facts(part, cluster)
    if part == NODES:
        template = "hyperpod.yaml" if cluster.kind == HYPERPOD else "hyperpod-slurm.yaml"
        [request] = fill_template(f"cluster/{template}", _settings(cluster, facts))
        return json.dumps(request, indent=2) + "\n"
    if cluster.storage_class:
        return _render_template("storage-class.yaml", cluster, facts)
    if cluster.filesystem == "efs":
        return _render_template("storage-efs.yaml", cluster, facts)
    template = "storage-fsx-existing.yaml" if cluster.filesystem_id else "storage-fsx.yaml"
    return _render_template(template, cluster, facts, also="volume-owner.yaml")


def _render_template(
    template: str, cluster: ClusterOptions, facts: NetworkFacts, also: str = "", **changes: Any
) -> str:
    """Return the documents of a template. also: a second template. changes: settings to replace."""
    settings = {**_settings(cluster, facts), **changes}
    documents = [
        document
        for name in filter(None, (template, also))
        for document in fill_template(f"cluster/{name}", settings)
    ]
    return render_manifests(
        documents, f"made by: {commands.script(SCRIPT, 'setup', *cluster.to_words())}"
    )


def _settings(cluster: ClusterOptions, facts: NetworkFacts) -> dict[str, Any]:
    """Return the settings of the templates."""
    return {
        **{name.upper(): value for name, value in vars(facts).items()},
        "CLUSTER": cluster.cluster_name,
        "REGION": cluster.region,
        "PARTITION": cluster.partition,
        "ZONES": cluster.zone_names,
        "ZONE": cluster.zone_names[0],
        "KUBERNETES": cluster.kubernetes_version,
        "HYPERPOD": cluster.on_hyperpod,
        "SYSTEM_TYPE": SYSTEM_TYPE,
        "CONTROLLER_TYPE": CONTROLLER_TYPE,
        "INSTANCE_TYPE": cluster.instance_type,
        "GPU_NODES": cluster.nodes,
        "EFA": read_instances()[cluster.instance_type]["efa"],
        "CAPACITY_BLOCK": cluster.capacity_block,
        "TRAINING_PLAN": cluster.training_plan,
        "CHECKPOINT_MEMORY": cluster.checkpoint_memory,
        "BUCKET": name_bucket(cluster, facts.account),
        "PVC": cluster.pvc,
        "NAMESPACE": cluster.namespace,
        "SIZE": cluster.size,
        "FILE_SYSTEM": cluster.filesystem_id,
        "STORAGE_CLASS": cluster.storage_class,
    }


def name_bucket(cluster: ClusterOptions, account: str) -> str:
    """Return the bucket of the lifecycle scripts; HyperPod may read buckets with this prefix."""
    return f"sagemaker-{cluster.cluster_name}-{account}"


def read_prices() -> dict[str, float]:
    """Return the prices of everything that a cluster needs besides its GPU nodes.

    Raises UsageError if a price is missing or not a number.
    """
    file = "prices.yaml"
    prices = config_file.read_yaml(TEMPLATES / file)
    return {name: require_price(file, name, prices.get(name)) for name in _PRICES}


def write_support_files(cluster: ClusterOptions, folder: Path) -> None:
    """Write the lifecycle scripts and the policies of a HyperPod cluster."""
    script = "on_create.sh" if cluster.kind == HYPERPOD else "on_init_complete.sh"
    for name in (f"lifecycle/{script}", "iam/hyperpod-trust.json", "iam/hyperpod-nodes.json"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (_FOLDER / name).read_text(encoding="utf-8")
        target.write_text(text.replace("arn:aws:", f"arn:{cluster.partition}:"), encoding="utf-8")
        target.chmod(0o755 if target.suffix == ".sh" else 0o644)


def find_facts(part: str, cluster: ClusterOptions) -> NetworkFacts:
    """Query AWS for the facts that a part needs. Raises UsageError with the command to type."""
    if part == STORAGE and cluster.storage_class:
        return NetworkFacts()
    creates_volume = part == STORAGE and cluster.filesystem == "fsx" and not cluster.filesystem_id
    if part == STORAGE and cluster.filesystem == "efs" and not cluster.filesystem_id:
        raise UsageError(
            "--filesystem efs needs --filesystem-id",
            expected="a file system of EFS with a mount target in the nodes' subnets",
            hint="steps.sh of `setup --out DIR` contains these steps with the mount target",
            run=commands.shell(*format_efs_creation(cluster)),
        )
    if part == NODES and cluster.kind == HYPERPOD_SLURM:
        missing = [
            name
            for name in ("subnet", "security_group", "filesystem_id")
            if not getattr(cluster, name)
        ]
        if missing:
            options_text = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise UsageError(
                f"--kind hyperpod-slurm needs {options_text}",
                expected="a private subnet with a file system of FSx for Lustre, and a security "
                "group that allows all traffic within itself",
                run=commands.script(
                    SCRIPT, "setup", *cluster.to_words(), "--out", cluster.cluster_name
                ),
            )
    facts = NetworkFacts(subnet=cluster.subnet, security_group=cluster.security_group)
    if part == NODES and cluster.kind == HYPERPOD_SLURM:
        identity = aws.query_json("sts", "get-caller-identity", region=cluster.region)
        facts = replace(facts, account=identity["Account"])
    elif part == NODES or (creates_volume and not (cluster.subnet and cluster.security_group)):
        facts = _describe_network(cluster)
    if cluster.filesystem == "fsx" and cluster.filesystem_id and part in (STORAGE, NODES):
        dns_name, mount_name = _describe_lustre(cluster)
        facts = replace(facts, dns_name=dns_name, mount_name=mount_name)
    return facts


def _describe_network(cluster: ClusterOptions) -> NetworkFacts:
    """Return the account, a private subnet and the security group of the EKS cluster."""
    aws.require_cluster(cluster.cluster_name, cluster.region)
    info = aws.query_json(
        "eks", "describe-cluster", "--name", cluster.cluster_name, region=cluster.region
    )
    network = info["cluster"]["resourcesVpcConfig"]
    subnets = aws.query_json(
        "ec2", "describe-subnets", "--subnet-ids", *network["subnetIds"], region=cluster.region
    )["Subnets"]
    return NetworkFacts(
        account=info["cluster"]["arn"].split(":")[4],
        subnet=cluster.subnet or _choose_subnet(subnets, cluster),
        security_group=cluster.security_group or network["clusterSecurityGroupId"],
    )


def _choose_subnet(subnets: list[dict[str, Any]], cluster: ClusterOptions) -> str:
    """Return a private subnet in the zone of the GPU nodes, or in any zone without --zones."""
    private = {
        subnet["AvailabilityZone"]: subnet["SubnetId"]
        for subnet in sorted(subnets, key=lambda subnet: subnet["SubnetId"], reverse=True)
        if not subnet["MapPublicIpOnLaunch"]
    }
    zone = cluster.zone_names[0]
    if zone not in private and (cluster.zones or not private):
        raise UsageError(
            f"cluster {cluster.cluster_name} has no private subnet in {zone}",
            expected="--zones with the zone of the GPU nodes first, or --subnet",
            found=", ".join(sorted(private)) or "no private subnets",
        )
    return private[zone if zone in private else min(private)]


def _describe_lustre(cluster: ClusterOptions) -> tuple[str, str]:
    """Return the DNS name and the mount name of the existing file system."""
    which = ("--file-system-ids", cluster.filesystem_id)
    answer = aws.query_json("fsx", "describe-file-systems", *which, region=cluster.region)
    [system] = answer["FileSystems"]
    return system["DNSName"], system["LustreConfiguration"]["MountName"]


def name_efs(cluster: ClusterOptions) -> str:
    """Return the creation token of a file system of EFS, by which it is found again."""
    return f"{cluster.cluster_name}-{cluster.pvc}"


def format_efs_creation(cluster: ClusterOptions) -> list[str]:
    """Return the command that creates a file system of EFS."""
    return [
        *("aws", "efs", "create-file-system", "--region", cluster.region, "--encrypted"),
        *("--throughput-mode", "elastic", "--creation-token", name_efs(cluster)),
        *("--query", "FileSystemId", "--output", "text"),
    ]


def fill_region(cluster: ClusterOptions) -> ClusterOptions:
    """Return the options with the region of the AWS settings.

    Raises UsageError if there is none.
    """
    return replace(
        cluster,
        region=require_region(cluster.region),
        instance_type=cluster.instance_type.removeprefix("ml."),
    )
