#!/usr/bin/env bash
# Lifecycle script of a HyperPod cluster on EKS: runs once as root on each new node, before its pods.
# A failure makes HyperPod replace the node, so this script checks only what every job needs. Its
# output is in CloudWatch (/aws/sagemaker/Clusters/…) and in the file below.
set -euo pipefail

log=/var/log/provision/provisioning.log
mkdir -p "${log%/*}"
exec > >(tee -a "$log") 2>&1
trap 'echo "on_create.sh: exit code $?"; sleep 5' EXIT  # the log is uploaded every few seconds

# NCCL's plugin for EFA pins memory; containers inherit this limit from containerd.
mkdir -p /etc/systemd/system/containerd.service.d
printf '[Service]\nLimitMEMLOCK=infinity\n' > /etc/systemd/system/containerd.service.d/memlock.conf
systemctl daemon-reload
systemctl try-restart containerd

# EDIT: huge pages of 2 MiB for pods with EFA, which request 5120Mi.
echo 'vm.nr_hugepages = 5128' > /etc/sysctl.d/60-hugepages.conf
sysctl --load /etc/sysctl.d/60-hugepages.conf || echo "warning: no huge pages were reserved"

if command -v nvidia-smi > /dev/null; then
    nvidia-smi --list-gpus
fi
