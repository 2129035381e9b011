# covers: launch/cloud/kube/setup.py, launch/cloud/kube/setup_steps.py
# covers: launch/cloud/kube/cluster_files.py, launch/cloud/kube/quotas.py
"""Test the files that `kubernetes.py setup` renders: their schemas, their facts, their commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch.cloud.kube import cluster_files, setup_steps
from launch.cloud.kube.cluster_files import KINDS, ClusterOptions
from launch.cloud.kube.job_options import JobOptions, read_instances
from launch.cloud.kube.kinds import KINDS as JOB_KINDS
from launch.cloud.kube.quotas import count_vcpus, quota_commands
from lib.core import declared
from lib.core.errors import Problems, UsageError
from tests.cloud.kube_schemas import CRDS
from tests.conftest import ROOT, run_stage

FILE_SYSTEM = "fs-0123456789abcdef0"
AWS = """#!/bin/sh
echo "$*" >> "$AWS_CALLS"
case "$1 $2" in
"eks list-clusters") echo '{"clusters": ["llm-training"]}';;
"eks describe-cluster") echo '{"cluster": {"status": "ACTIVE", "version": "1.34",
  "arn": "arn:aws:eks:us-west-2:123456789012:cluster/llm-training",
  "resourcesVpcConfig": {"subnetIds": ["subnet-1", "subnet-2", "subnet-3"],
                         "clusterSecurityGroupId": "sg-1"}}}';;
"ec2 describe-subnets") echo '{"Subnets": [
  {"SubnetId": "subnet-1", "AvailabilityZone": "us-west-2a", "MapPublicIpOnLaunch": true},
  {"SubnetId": "subnet-2", "AvailabilityZone": "us-west-2a", "MapPublicIpOnLaunch": false},
  {"SubnetId": "subnet-3", "AvailabilityZone": "us-west-2b", "MapPublicIpOnLaunch": false}]}';;
"fsx describe-file-systems") echo '{"FileSystems": [{
  "DNSName": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
  "LustreConfiguration": {"MountName": "abcdefgh"}}]}';;
"sts get-caller-identity") echo '{"Account": "123456789012"}';;
*) echo "unexpected: $*" >&2; exit 1;;
esac
"""


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for the AWS command line on the PATH; return the file with its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "aws").write_text(AWS)
    (folder / "aws").chmod(0o755)
    file = tmp_path / "aws-calls"
    file.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("AWS_CALLS", str(file))
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.chdir(tmp_path)
    return file


def check_options(**values: Any) -> ClusterOptions:
    """Return checked options of a new cluster."""
    new = cluster_files.fill_region(declared.from_values(ClusterOptions, **values))
    problems = Problems()
    new.check(problems)
    problems.raise_if_any()
    return new


def validate_document(schema: str, document: Any) -> None:
    jsonschema.Draft202012Validator(json.loads((CRDS / schema).read_text())).validate(document)


SETS: list[dict[str, Any]] = [
    {},
    {"instance_type": "g5.xlarge"},
    {"instance_type": "ml.p5.48xlarge", "nodes": 2, "capacity_block": "cr-0123456789abcdef0"},
    {"kind": "hyperpod", "checkpoint_memory": 20},
    {"kind": "hyperpod", "region": "cn-north-1"},
]


@pytest.mark.parametrize("values", SETS, ids=str)
def test_eksctl_accepts_the_cluster(values: dict[str, Any]) -> None:
    new = check_options(**values)
    [config] = yaml.safe_load_all(cluster_files.render_part("cluster", new))
    validate_document("eksctl_clusterconfig.json", config)
    groups = {group["name"]: group for group in config["managedNodeGroups"]}
    addons = {addon["name"] for addon in config["addons"]}
    assert {"aws-fsx-csi-driver", "aws-efs-csi-driver", "eks-pod-identity-agent"} <= addons
    assert ("gpu" in groups) == (new.kind == "eks")  # HyperPod adds its nodes itself
    assert ("cert-manager" in addons) == ("iam" in config) == (new.kind == "hyperpod")
    if new.kind == "eks":
        gpu = groups["gpu"]
        assert gpu["instanceType"] == new.instance_type and gpu["maxSize"] == new.nodes
        assert gpu["desiredCapacity"] == 0 and f"--name gpu --nodes {new.nodes}" in (
            setup_steps.render_steps(new, Path("dir"))
        )
        assert gpu.get("efaEnabled", False) == bool(read_instances()[new.instance_type]["efa"])
        assert ("instanceMarketOptions" in gpu) == bool(new.capacity_block)
        assert gpu["availabilityZones"] == [f"{new.region}a"]
    arns = re.findall(r"arn:[\w-]+:", cluster_files.render_part("cluster", new))
    assert set(arns) == {f"arn:{'aws-cn' if new.region.startswith('cn') else 'aws'}:"}


@pytest.mark.parametrize("kind", ["hyperpod", "hyperpod-slurm"])
def test_sagemaker_accepts_the_nodes(kind: str, calls: Path) -> None:
    """The request fits the shape of CreateCluster, and names what the other steps create."""
    where = (
        {"subnet": "subnet-9", "security_group": "sg-9", "filesystem_id": FILE_SYSTEM}
        if kind == "hyperpod-slurm"
        else {"checkpoint_memory": 20}
    )
    new = check_options(kind=kind, instance_type="p5.48xlarge", nodes=2, **where)
    text = cluster_files.render_part("nodes", new)
    request = json.loads(text)
    validate_document("sagemaker_createcluster.json", request)
    groups = {group["InstanceGroupName"]: group for group in request["InstanceGroups"]}
    assert groups["gpu"]["InstanceType"] == "ml.p5.48xlarge"
    assert groups["gpu"]["InstanceCount"] == 2
    steps = setup_steps.render_steps(new, Path("dir"))
    role = groups["gpu"]["ExecutionRole"].rpartition("/")[2]
    assert f"create-role --role-name {role} " in steps
    bucket = groups["gpu"]["LifeCycleConfig"]["SourceS3Uri"].split("/")[2]
    assert bucket.replace("123456789012", "$ACCOUNT") in steps
    script = next(
        value for key, value in groups["gpu"]["LifeCycleConfig"].items() if key.startswith("On")
    )
    cluster_files.write_support_files(new, Path("dir"))
    assert os.access(Path("dir/lifecycle") / script, os.X_OK)
    for name in ("hyperpod-trust.json", "hyperpod-nodes.json"):
        assert json.loads((Path("dir/iam") / name).read_text())["Version"] == "2012-10-17"
        assert f"iam/{name}" in steps
    if kind == "hyperpod":
        assert request["Orchestrator"]["Eks"]["ClusterArn"].endswith(":cluster/llm-training")
        assert request["VpcConfig"] == {"Subnets": ["subnet-2"], "SecurityGroupIds": ["sg-1"]}
    else:
        assert groups["controller"]["SlurmConfig"] == {"NodeType": "Controller"}
        assert groups["gpu"]["SlurmConfig"]["NodeType"] == "Compute"
        mount = groups["gpu"]["InstanceStorageConfigs"][0]["FsxLustreConfig"]
        assert mount["MountName"] == "abcdefgh" and mount["DnsName"].startswith(FILE_SYSTEM)
    assert all("--region us-west-2" in line for line in calls.read_text().splitlines())


def test_a_wrong_member_of_a_request_is_refused() -> None:
    new = check_options(kind="hyperpod")
    request = json.loads(cluster_files.render_part("nodes", new))
    for change in (
        {"NodeRecover": "Automatic"},
        {"NodeRecovery": "automatic"},
        {"ClusterName": "a_b"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate_document("sagemaker_createcluster.json", {**request, **change})
    [config] = yaml.safe_load_all(cluster_files.render_part("cluster", new))
    config["managedNodeGroups"][0]["efaenabled"] = True
    with pytest.raises(jsonschema.ValidationError):
        validate_document("eksctl_clusterconfig.json", config)


VOLUMES: list[dict[str, Any]] = [
    {},
    {"pvc": "data", "namespace": "team", "size": 4800},
    {"filesystem_id": FILE_SYSTEM},
    {"filesystem": "efs", "filesystem_id": FILE_SYSTEM},
    {"storage_class": "nfs", "pvc": "data"},
    {"subnet": "subnet-9", "security_group": "sg-9"},
]


@pytest.mark.parametrize("values", VOLUMES, ids=str)
def test_the_claim_is_the_one_that_jobs_mount(values: dict[str, Any], calls: Path) -> None:
    """Its name, namespace and access mode are those that `prepare` and `deploy` use."""
    new = check_options(**values)
    documents = [*yaml.safe_load_all(cluster_files.render_part("storage", new))]
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    by_kind = {document["kind"]: document for document in documents}
    claim = by_kind["PersistentVolumeClaim"]
    same = {name: value for name, value in values.items() if name in ("pvc", "namespace")}
    job = declared.from_values(JobOptions, job_name="j", **same)
    assert claim["metadata"] == {"name": job.pvc, "namespace": job.namespace}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    if driver := by_kind.get("StorageClass"):
        assert claim["spec"]["storageClassName"] == driver["metadata"]["name"]
        assert driver["provisioner"] in ("fsx.csi.aws.com", "efs.csi.aws.com")
    if volume := by_kind.get("PersistentVolume"):
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        assert volume["spec"]["csi"]["volumeHandle"] == FILE_SYSTEM
        assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    if not values:
        parameters = by_kind["StorageClass"]["parameters"]
        assert (parameters["subnetId"], parameters["securityGroupIds"]) == ("subnet-2", "sg-1")
    if owner := by_kind.get("Job"):  # Lustre's root belongs to root, EFS's access point to 1000
        [volume] = owner["spec"]["template"]["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == job.pvc
    assert ("Job" in by_kind) == (not {"filesystem", "storage_class"} & {*values})
    if "subnet" in values or "storage_class" in values:
        assert not calls.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_a_script_whose_own_commands_exist(kind: str, tmp_path: Path) -> None:
    result = run_stage("launch/kubernetes.py", "setup", "--kind", kind, cwd=tmp_path)
    steps = result.stdout
    assert "next: " in result.stderr and not [*tmp_path.glob("*/steps.sh")]
    (tmp_path / "steps.sh").write_text(steps)
    subprocess.run(["bash", "-n", "steps.sh"], check=True)
    beside = Path(sys.executable).with_name("shellcheck")
    if shellcheck := beside if beside.exists() else shutil.which("shellcheck"):
        checked = subprocess.run([shellcheck, "steps.sh"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    words = {word for word in re.findall(r"(?<=\s)--[a-z][a-z-]+", steps)}
    assert {"--region", "--role-name" if kind != "eks" else "--cluster-name"} <= words
    for script in re.findall(r"(launch/\w+\.py)", steps):
        assert (ROOT / script).exists()
    order = [
        "service-quotas",
        *(
            ["build_image.py", "eksctl create cluster -f", "--only storage", " prepare "]
            if kind != "hyperpod-slurm"
            else []
        ),
        "eksctl scale" if kind == "eks" else "sagemaker create-cluster",
        *(["validate", " deploy "] if kind != "hyperpod-slurm" else ["slurm.sbatch"]),
        "To delete everything",
        "delete-file-system",
        "while aws fsx",
        *(["eksctl delete", "ecr delete"] if kind != "hyperpod-slurm" else ["s3 rb"]),
    ]
    places = [steps.index(word) for word in order]
    assert places == sorted(places)
    assert "GPU nodes        $" in steps and "To delete everything" in steps
    if kind != "hyperpod-slurm":
        operator = JOB_KINDS["hyperpod" if kind == "hyperpod" else "pytorchjob"]
        assert operator.install_commands("llm-training", "us-west-2")[-1] in steps


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"filesystem": "efs"},
        {"kind": "hyperpod"},
        {"kind": "hyperpod", "filesystem": "efs", "pvc": "mine"},
        {"kind": "hyperpod-slurm"},
    ],
)
def test_what_the_steps_create_is_deleted_from_any_shell(values: dict[str, Any]) -> None:
    """A person deletes the cluster days later, in a shell without the variables of the steps."""
    steps = setup_steps.render_steps(check_options(**values), Path("new"))
    create, _, delete = steps.partition("# To delete everything again, in this order:\n")
    lines = [line.removeprefix("#   ") for line in delete.splitlines()]
    known: set[str] = set()
    for line in lines:
        assert "…" not in line and "EDIT" not in line
        variables = set(re.findall(r"(\w+)=\"|\bfor (\w+) in", line))
        known |= {name for names in variables for name in names if name}
        assert {*re.findall(r"\$([A-Z_]+)", line)} <= known, line
    script = "\n".join(lines)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for creation, deleted in (
        ("eksctl create cluster", "eksctl delete cluster"),
        ("ecr/llm-training", "ecr delete-repository"),
        ("sagemaker create-cluster", "sagemaker delete-cluster"),
        ("iam create-role --role-name llm-training-nodes", "iam delete-role --role-name llm-train"),
        ("iam attach-role-policy", "iam detach-role-policy"),
        ("iam put-role-policy", "iam delete-role-policy"),
        ("s3 mb", "s3 rb"),
        ("efs create-file-system", "efs delete-file-system"),
        ("efs create-mount-target", "efs delete-mount-target"),
        ("fsx create-file-system", "fsx delete-file-system"),
    ):
        assert (creation in create) == (deleted in script) or deleted.startswith("fsx"), creation
    names = re.findall(r"--creation-token (\S+)", steps)
    assert len(set(names)) <= 1 and len(names) == (2 if "filesystem" in values else 0)


@pytest.mark.parametrize(
    ("values", "created", "used", "available"),
    [
        ({"filesystem": "efs"}, "efs create-file-system", "efs create-mount-target", "available"),
        ({"kind": "hyperpod-slurm"}, "fsx create-file-system", "create-cluster", "AVAILABLE"),
    ],
)
def test_a_new_file_system_is_available_before_it_is_used(
    values: dict[str, Any], created: str, used: str, available: str, tmp_path: Path
) -> None:
    """AWS refuses a mount target, and HyperPod a mount, while a file system is being created."""
    steps = setup_steps.render_steps(check_options(**values), Path("new"))
    wait = next(line for line in steps.splitlines() if line.startswith("until aws "))
    assert steps.index(created) < steps.index(wait) < steps.index(used)
    aws = tmp_path / "aws"
    aws.write_text(
        f"#!/bin/sh\necho >> calls\n[ -f asked ] && echo {available} || echo NOT{available}"
    )
    aws.chmod(0o755)
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/bin/sh\ntouch asked")
    sleep.chmod(0o755)
    script = f"set -euo pipefail; {wait}"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FILE_SYSTEM": "fs-1"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=30)
    assert (tmp_path / "calls").read_text() == "\n\n"


def test_the_namespace_exists_before_the_volume() -> None:
    create = "kubectl create namespace mine"
    steps = setup_steps.render_steps(check_options(namespace="mine"), Path("new"))
    assert steps.index(create) < steps.index("kubectl apply -f new/storage.yaml")
    assert "create namespace" not in setup_steps.render_steps(check_options(), Path("new"))


def test_the_files_are_written_and_found_by_their_steps(tmp_path: Path) -> None:
    run_stage("launch/kubernetes.py", "setup", "--kind", "hyperpod", "--out", "new", cwd=tmp_path)
    new = tmp_path / "new"
    steps = (new / "steps.sh").read_text()
    for name in re.findall(r"-f (new/cluster\.yaml)|file://(new/iam/[\w.-]+)", steps):
        assert (tmp_path / "".join(name)).exists()
    assert (new / "lifecycle" / "on_create.sh").exists()
    for line in steps.splitlines():  # the parts that need facts of the existing cluster
        if " --only " in line:
            command = line.split("kubernetes.py ")[1]
            part, _, target = command.partition(" > ")
            out = run_stage("launch/kubernetes.py", *part.split(), cwd=tmp_path).stdout
            assert out and target.startswith("new/")
    run_stage("launch/kubernetes.py", "setup", "--only", "cluster", "--out", "x", cwd=tmp_path)
    assert yaml.safe_load((tmp_path / "x" / "cluster.yaml").read_text())["kind"] == "ClusterConfig"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cluster_name": "A_b"}, "--cluster-name 'A_b'"),
        ({"region": "moon"}, "--region 'moon'"),
        ({"zones": "us-west-2a"}, "two zones of us-west-2"),
        ({"instance_type": "m5.large"}, "is not in the table"),
        ({"size": 1300}, "--size 1300"),
        ({"kind": "hyperpod-slurm", "filesystem": "efs"}, "mounts FSx for Lustre"),
        ({"kind": "hyperpod", "capacity_block": "cr-1"}, "--capacity-block needs --kind eks"),
        ({"training_plan": "arn"}, "--training-plan needs --kind hyperpod"),
        ({"filesystem_id": "vol-1"}, "--filesystem-id 'vol-1'"),
        ({"pvc": "A"}, "--pvc 'A'"),
    ],
)
def test_impossible_options_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(**values)
    assert says in caught.value.render()


def test_what_is_missing_at_aws_ends_with_a_command() -> None:
    for part, values, says, run in (
        ("storage", {"cluster_name": "other"}, "no EKS cluster other", "setup --kind eks"),
        ("storage", {"filesystem": "efs"}, "needs --filesystem-id", "aws efs create-file-system"),
        ("storage", {"filesystem": "efs"}, "needs", "--creation-token llm-training-fsx-claim "),
        ("nodes", {"kind": "hyperpod-slurm"}, "needs --subnet, --security-group", "--out"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            cluster_files.render_part(part, check_options(**values))
        assert run in caught.value.run
    with pytest.raises(UsageError, match="subnet in us-west-2c") as caught:
        cluster_files.render_part("storage", check_options(zones="us-west-2c,us-west-2a"))
    assert "us-west-2a, us-west-2b" in caught.value.found


def test_the_volume_of_an_existing_cluster_takes_its_name_and_zones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that a new cluster could not have, and no private subnet in the first zone."""
    aws = tmp_path / "bin" / "aws"
    aws.write_text(
        AWS.replace('["llm-training"]', '["My_EKS"]').replace("us-west-2a", "us-west-2d")
    )
    result = run_stage(
        "launch/kubernetes.py",
        "setup",
        "--only",
        "storage",
        "--cluster-name",
        "My_EKS",
        cwd=tmp_path,
    )
    parameters = next(yaml.safe_load_all(result.stdout))["parameters"]
    assert parameters["subnetId"] == "subnet-3"
    run_stage("launch/kubernetes.py", "setup", "--cluster-name", "My_EKS", cwd=tmp_path, expect=2)


def test_quotas_are_counted_in_vcpus_and_in_nodes() -> None:
    assert [count_vcpus(f"x.{size}") for size in ("xlarge", "8xlarge", "48xlarge", "metal")] == [
        4,
        32,
        192,
        96,
    ]
    assert "L-DB2E81BA --desired-value 128" in quota_commands("g5.8xlarge", 4, "r", False)[1]
    assert "L-417A185B" in quota_commands("p5.48xlarge", 1, "", False)[1]
    command = quota_commands("ml.p5.48xlarge", 2, "us-west-2", True)[1]
    assert "ml.p5.48xlarge for cluster usage" in command and command.endswith("--desired-value 2")
