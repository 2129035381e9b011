"""Declare the options of a new cluster, and render its files from templates/cluster/."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.kube import aws
from launch.kube.job import fill_template, render_manifests
from launch.kube.job_options import MAX_LABEL, TEMPLATES, JobNeeds, read_instances
from launch.kube.kubeconfig import require_region
from lib.core import commands, config_file, options
from lib.core.declared import option
from lib.core.errors import Problems, UsageError

EKS, HYPERPOD, HYPERPOD_SLURM = KINDS = ("eks", "hyperpod", "hyperpod-slurm")
CLUSTER, NODES, STORAGE = PARTS = ("cluster", "nodes", "storage")
SYSTEM_TYPE = "m5.2xlarge"  # its price is in templates/prices.yaml
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
    """Return the default of an option of a job, which a cluster's files must use as well."""
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
    nodes: int = option(4, parse=options.positive_int, help="number of GPU nodes")
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
        help="hyperpod: share of the nodes' memory that keeps checkpoints, for --ckpt-hyperpod",
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

    def words(self, **changes: str) -> list[str]:
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

        is_new: whether the cluster is to be created; one that exists may have any name of EKS.
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
                    expected=f"small letters, digits and hyphens, at most {longest} characters",
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
            problems.add("--nodes 0: a cluster without GPU nodes")
        if not 0 <= self.checkpoint_memory <= 100:
            problems.add(f"--checkpoint-memory {self.checkpoint_memory}", expected="0 to 100")
        self._check_volume(problems)

    def _check_volume(self, problems: Problems) -> None:
        if self.filesystem_id and not _FILE_SYSTEM.fullmatch(self.filesystem_id):
            problems.add(f"--filesystem-id {self.filesystem_id!r}", expected="fs-0123456789abcdef0")
        if self.filesystem == "fsx" and self.size != 1200 and self.size % 2400:
            problems.add(
                f"--size {self.size}: no size of FSx for Lustre",
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
    """What AWS knows about a cluster and its file system; each is empty if it is not needed."""

    account: str = ""
    subnet: str = ""
    security_group: str = ""
    dns_name: str = ""
    mount_name: str = ""


def render_part(part: str, new: ClusterOptions) -> str:
    """Return the file of a part: YAML for eksctl and kubectl, JSON for create-cluster of SageMaker.

    Queries AWS for the facts that the options do not give. Raises UsageError if one is missing.
    """
    if part not in new.parts:
        raise UsageError(
            f"--only {part}: a cluster of --kind {new.kind} has no such file",
            expected=" or ".join(new.parts) or "another --filesystem",
        )
    if part == CLUSTER:
        # HyperPod adds the GPU nodes itself.
        return _render(
            "eks.yaml", new, NetworkFacts(), GPU_NODES=new.nodes if new.kind == EKS else 0
        )
    facts = find_facts(part, new)
    if part == NODES:
        template = "hyperpod.yaml" if new.kind == HYPERPOD else "hyperpod-slurm.yaml"
        [request] = fill_template(f"cluster/{template}", _settings(new, facts))
        return json.dumps(request, indent=2) + "\n"
    if new.storage_class:
        return _render("storage-class.yaml", new, facts)
    if new.filesystem == "efs":
        return _render("storage-efs.yaml", new, facts)
    template = "storage-fsx-existing.yaml" if new.filesystem_id else "storage-fsx.yaml"
    return _render(template, new, facts, also="volume-owner.yaml")


def _render(
    template: str, new: ClusterOptions, facts: NetworkFacts, also: str = "", **changes: Any
) -> str:
    """Return the documents of a template. also: another template. changes: other settings."""
    settings = {**_settings(new, facts), **changes}
    documents = [
        document
        for name in filter(None, (template, also))
        for document in fill_template(f"cluster/{name}", settings)
    ]
    return render_manifests(documents, f"made by: {commands.script(SCRIPT, 'setup', *new.words())}")


def _settings(new: ClusterOptions, facts: NetworkFacts) -> dict[str, Any]:
    """Return the settings of the templates."""
    return {
        **{name.upper(): value for name, value in vars(facts).items()},
        "CLUSTER": new.cluster_name,
        "REGION": new.region,
        "PARTITION": new.partition,
        "ZONES": new.zone_names,
        "ZONE": new.zone_names[0],
        "KUBERNETES": new.kubernetes_version,
        "HYPERPOD": new.on_hyperpod,
        "SYSTEM_TYPE": SYSTEM_TYPE,
        "CONTROLLER_TYPE": CONTROLLER_TYPE,
        "INSTANCE_TYPE": new.instance_type,
        "GPU_NODES": new.nodes,
        "EFA": read_instances()[new.instance_type]["efa"],
        "CAPACITY_BLOCK": new.capacity_block,
        "TRAINING_PLAN": new.training_plan,
        "CHECKPOINT_MEMORY": new.checkpoint_memory,
        "BUCKET": name_bucket(new, facts.account),
        "PVC": new.pvc,
        "NAMESPACE": new.namespace,
        "SIZE": new.size,
        "FILE_SYSTEM": new.filesystem_id,
        "STORAGE_CLASS": new.storage_class,
    }


def name_bucket(new: ClusterOptions, account: str) -> str:
    """Return the bucket of the lifecycle scripts; HyperPod may read buckets with this prefix."""
    return f"sagemaker-{new.cluster_name}-{account}"


def read_prices() -> dict[str, float]:
    """Return the prices of what a cluster needs beside its GPU nodes."""
    return config_file.read_yaml(TEMPLATES / "prices.yaml")


def write_support_files(new: ClusterOptions, folder: Path) -> None:
    """Write the lifecycle scripts and the policies of a HyperPod cluster."""
    script = "on_create.sh" if new.kind == HYPERPOD else "on_init_complete.sh"
    for name in (f"lifecycle/{script}", "iam/hyperpod-trust.json", "iam/hyperpod-nodes.json"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (_FOLDER / name).read_text(encoding="utf-8")
        target.write_text(text.replace("arn:aws:", f"arn:{new.partition}:"), encoding="utf-8")
        target.chmod(0o755 if target.suffix == ".sh" else 0o644)


def find_facts(part: str, new: ClusterOptions) -> NetworkFacts:
    """Return what AWS knows and the part needs. Raises UsageError with the command that helps."""
    if part == STORAGE and new.storage_class:
        return NetworkFacts()
    creates_volume = part == STORAGE and new.filesystem == "fsx" and not new.filesystem_id
    if part == STORAGE and new.filesystem == "efs" and not new.filesystem_id:
        raise UsageError(
            "--filesystem efs needs --filesystem-id",
            expected="a file system of EFS with a mount target in the nodes' subnets",
            hint="steps.sh of `setup --out DIR` contains these steps with the mount target",
            run=commands.shell(*create_efs_words(new)),
        )
    if part == NODES and new.kind == HYPERPOD_SLURM:
        missing = [
            name for name in ("subnet", "security_group", "filesystem_id") if not getattr(new, name)
        ]
        if missing:
            options_text = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise UsageError(
                f"--kind hyperpod-slurm needs {options_text}",
                expected="a private subnet, a security group that allows all traffic within "
                "itself, and a file system of FSx for Lustre there",
                run=commands.script(SCRIPT, "setup", *new.words(), "--out", new.cluster_name),
            )
    facts = NetworkFacts(subnet=new.subnet, security_group=new.security_group)
    if part == NODES and new.kind == HYPERPOD_SLURM:
        identity = aws.query_json("sts", "get-caller-identity", region=new.region)
        facts = replace(facts, account=identity["Account"])
    elif part == NODES or (creates_volume and not (new.subnet and new.security_group)):
        facts = _describe_network(new)
    if new.filesystem == "fsx" and new.filesystem_id and part in (STORAGE, NODES):
        dns_name, mount_name = _describe_lustre(new)
        facts = replace(facts, dns_name=dns_name, mount_name=mount_name)
    return facts


def _describe_network(new: ClusterOptions) -> NetworkFacts:
    """Return account, private subnet in the first zone and security group of the EKS cluster."""
    aws.require_cluster(new.cluster_name, new.region)
    info = aws.query_json("eks", "describe-cluster", "--name", new.cluster_name, region=new.region)
    network = info["cluster"]["resourcesVpcConfig"]
    subnets = aws.query_json(
        "ec2", "describe-subnets", "--subnet-ids", *network["subnetIds"], region=new.region
    )["Subnets"]
    return NetworkFacts(
        account=info["cluster"]["arn"].split(":")[4],
        subnet=new.subnet or _choose_subnet(subnets, new),
        security_group=new.security_group or network["clusterSecurityGroupId"],
    )


def _choose_subnet(subnets: list[dict[str, Any]], new: ClusterOptions) -> str:
    """Return a private subnet in the zone of the GPU nodes, without --zones in any zone."""
    private = {
        subnet["AvailabilityZone"]: subnet["SubnetId"]
        for subnet in sorted(subnets, key=lambda subnet: subnet["SubnetId"], reverse=True)
        if not subnet["MapPublicIpOnLaunch"]
    }
    zone = new.zone_names[0]
    if zone not in private and (new.zones or not private):
        raise UsageError(
            f"cluster {new.cluster_name} has no private subnet in {zone}",
            expected="--zones with the zone of the GPU nodes first, or --subnet",
            found=", ".join(sorted(private)) or "no private subnets",
        )
    return private[zone if zone in private else min(private)]


def _describe_lustre(new: ClusterOptions) -> tuple[str, str]:
    """Return the DNS name and the mount name of the existing file system."""
    answer = aws.query_json(
        "fsx", "describe-file-systems", "--file-system-ids", new.filesystem_id, region=new.region
    )
    [system] = answer["FileSystems"]
    return system["DNSName"], system["LustreConfiguration"]["MountName"]


def name_efs(new: ClusterOptions) -> str:
    """Return the creation token of a file system of EFS, by which it is found again."""
    return f"{new.cluster_name}-{new.pvc}"


def create_efs_words(new: ClusterOptions) -> list[str]:
    """Return the command that creates a file system of EFS."""
    return [
        *("aws", "efs", "create-file-system", "--region", new.region, "--encrypted"),
        *("--throughput-mode", "elastic", "--creation-token", name_efs(new)),
        *("--query", "FileSystemId", "--output", "text"),
    ]


def fill_region(new: ClusterOptions) -> ClusterOptions:
    """Return the options with the region of the AWS settings. Raises UsageError without one."""
    return replace(
        new,
        region=require_region(new.region),
        instance_type=new.instance_type.removeprefix("ml."),
    )
