"""An AWS account for tests: programs in place of aws, eksctl and docker, and kubectl's downloads.

They record their calls and keep a state, so a cluster is listed from its creation to its deletion.
A command that they do not know fails. Their API server is that of tests/cloud/kube_server.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cloud.kube_cluster import make_condition
from tests.cloud.kube_server import Cluster, Object, Type
from tests.cloud.test_image import Machine

ACCOUNT = "123456789012"
REGION = "us-west-2"
NAME = "llm-training"
ARN = f"arn:aws:eks:{REGION}:{ACCOUNT}:cluster/{NAME}"
FILE_SYSTEM = "fs-0123456789abcdef0"
AWS = f"""#!/bin/sh
echo "aws $*" >> "$STATE/calls"
is_text() {{ case "$words" in *"--output text"*) true;; *) false;; esac; }}
words="$*"
case "$1 $2" in
"sts get-caller-identity")
  if is_text; then echo {ACCOUNT}; else echo '{{"Account": "{ACCOUNT}"}}'; fi;;
"service-quotas get-service-quota") echo 128.0;;
"ec2 describe-instance-type-offerings") echo {REGION}a {REGION}c;;
"ecr get-login-password") echo the-password;;
"ecr create-repository") touch "$STATE/repository"; echo '{{}}';;
"ecr delete-repository") rm "$STATE/repository";;
"ecr describe-repositories") [ ! -e "$STATE/repository" ] || echo {NAME};;
"eks list-clusters")
  if is_text; then [ ! -e "$STATE/cluster" ] || echo {NAME}
  elif [ -e "$STATE/cluster" ]; then echo '{{"clusters": ["{NAME}"]}}'
  else echo '{{"clusters": []}}'; fi;;
"eks describe-cluster") echo '{{"cluster": {{"status": "ACTIVE", "version": "1.34", "arn": "{ARN}",
  "resourcesVpcConfig": {{"subnetIds": ["subnet-1"], "clusterSecurityGroupId": "sg-1"}}}}}}';;
"eks list-nodegroups") echo '{{"nodegroups": ["gpu"]}}';;
"eks describe-nodegroup") echo '{{"nodegroup": {{"instanceTypes": ["g5.8xlarge"]}}}}';;
"eks list-addons") echo '{{"addons": ["eks-pod-identity-agent", "aws-fsx-csi-driver"]}}';;
"ec2 describe-subnets") echo '{{"Subnets": [{{"SubnetId": "subnet-1",
  "AvailabilityZone": "{REGION}a", "MapPublicIpOnLaunch": false}}]}}';;
"fsx delete-file-system") touch "$STATE/deleting"; echo '"DELETING"';;
"fsx describe-file-systems")
  case "$words" in *"--file-system-ids {FILE_SYSTEM} "*)
    echo '"DELETING"'; if [ -e "$STATE/gone" ]; then exit 254; fi; touch "$STATE/gone";;
  *"--file-system-ids"*) echo "FileSystemNotFound" >&2; exit 254;;
  esac;;
"service-quotas request-service-quota-increase" | "eks update-kubeconfig") ;;
"service-quotas list-requested-service-quota-change-history-by-quota") ;;
"budgets create-budget" | "iam create-policy" | "iam attach-user-policy") ;;
"eks create-access-entry" | "eks associate-access-policy") ;;
"ec2 describe-instances" | "ec2 describe-nat-gateways" | "ec2 describe-addresses") ;;
"ec2 describe-volumes" | "cloudformation describe-stacks") ;;
*) echo "unexpected: aws $*" >&2; exit 252;;
esac
"""
EKSCTL = """#!/bin/sh
echo "eksctl $*" >> "$STATE/calls"
case "$1 $2" in
"create cluster") [ -f "$4" ] && touch "$STATE/cluster";;
"scale nodegroup") ;;
"delete cluster") rm "$STATE/cluster";;
*) echo "unexpected: eksctl $*" >&2; exit 1;;
esac
"""
KUBECTL = """#!/bin/sh
case "$*" in *"-k https://"*) echo "kubectl $*" >> "$STATE/calls"; exit;; esac
exec {kubectl} "$@"
"""
_TYPES = (
    Type("v1", "persistentvolumes", "PersistentVolume", False),
    Type("apps/v1", "deployments", "Deployment"),
    Type("storage.k8s.io/v1", "storageclasses", "StorageClass", False),
    Type("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", False),
)


def open_account(root: Path, cluster: Cluster) -> dict[str, str]:
    """Write the programs, and fill the cluster as eksctl would; return the variables for them.

    root: an empty directory.
    """
    machine = Machine(root)
    programs = {"aws": AWS, "eksctl": EKSCTL, "kubectl": KUBECTL}
    for name, text in programs.items():
        path = machine.bin / name
        path.write_text(text.replace("{kubectl}", shutil.which("kubectl") or ""))
        path.chmod(0o755)
    cluster.types += _TYPES
    for key in [key for key in cluster.objects if key[0] == "nodes"]:
        del cluster.objects[key]
    cluster.add("nodes", make_node("system-1", "m5.2xlarge"))
    for namespace in ("default", "kubeflow"):
        cluster.add("namespaces", {"metadata": {"name": namespace}})
    cluster.add(
        "customresourcedefinitions",
        {
            "metadata": {"name": "pytorchjobs.kubeflow.org"},
            "spec": {"versions": [{"name": "v1", "served": True}]},
        },
    )
    controller = {"metadata": {"name": "training-operator"}, "status": {"availableReplicas": 1}}
    cluster.add("deployments", controller, "kubeflow")
    cluster.add(
        "persistentvolumes",
        {
            "metadata": {"name": "pvc-1"},
            "spec": {"claimRef": {"name": "fsx-claim"}, "csi": {"volumeHandle": FILE_SYSTEM}},
        },
    )
    return {
        "CALLS": str(machine.log),
        "FAILURES": str(machine.failures),
        "STATE": str(root),
        "DOCKER_CONFIG": str(root),
        "PATH": str(machine.bin),
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
    }


def make_node(name: str, instance_type: str, **devices: str) -> Object:
    """Return a node that is ready. devices: what its device plugins report."""
    return {
        "metadata": {"name": name, "labels": {"node.kubernetes.io/instance-type": instance_type}},
        "spec": {},
        "status": {"allocatable": devices, "conditions": [make_condition("Ready")]},
    }
