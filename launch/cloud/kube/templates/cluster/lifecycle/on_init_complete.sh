#!/usr/bin/env bash
# Lifecycle script of a HyperPod cluster on Slurm: runs once as root on each new node, after HyperPod
# has configured Slurm and mounted /fsx. A failure makes HyperPod replace the node.
set -euo pipefail

log=/var/log/provision/provisioning.log
mkdir -p "${log%/*}"
exec > >(tee -a "$log") 2>&1
trap 'echo "on_init_complete.sh: exit code $?"; sleep 5' EXIT  # the log is uploaded every few seconds

user=ubuntu  # EDIT: who submits jobs
mountpoint /fsx
mkdir -p "/fsx/$user"
chown "$user:" "/fsx/$user"

# NCCL's plugin for EFA pins memory, for the steps of Slurm and for logins.
printf '* soft memlock unlimited\n* hard memlock unlimited\n' > /etc/security/limits.d/60-memlock.conf
if systemctl cat slurmd.service > /dev/null 2>&1; then
    mkdir -p /etc/systemd/system/slurmd.service.d
    printf '[Service]\nLimitMEMLOCK=infinity\n' > /etc/systemd/system/slurmd.service.d/memlock.conf
    systemctl daemon-reload
fi

# The Python of launch/slurm.sbatch: a virtual environment beside the code, on the shared file system.
if [[ -f "/fsx/$user/llm-training/requirements.txt" && ! -d "/fsx/$user/llm-training/.venv" ]]; then
    echo "next: cd /fsx/$user/llm-training && python3 -m venv .venv && .venv/bin/pip install -r requirements.txt"
fi
