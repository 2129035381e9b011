"""Return the commands about an AWS account's quotas of instances."""

from __future__ import annotations

import re

_P_QUOTA = "L-417A185B"  # Running On-Demand P instances, in vCPUs
_G_QUOTA = "L-DB2E81BA"  # Running On-Demand G and VT instances, in vCPUs


def count_vcpus(instance_type: str) -> int:
    """Return the vCPUs of an instance, which follow from its size: 4 for each `xlarge`."""
    match = re.search(r"\.(\d*)xlarge$", instance_type)
    return 4 * int(match[1] or 1) if match else 96


def quota_commands(instance_type: str, nodes: int, region: str, on_hyperpod: bool) -> list[str]:
    """Return the commands that show an account's quota for nodes, and ask for a larger one."""
    region_words = f" --region {region}" if region else ""
    if on_hyperpod:
        name = f"ml.{instance_type.removeprefix('ml.')} for cluster usage"
        service = f"--service-code sagemaker{region_words}"
        code = (
            f"$(aws service-quotas list-service-quotas {service} --output text "
            f"--query \"Quotas[?QuotaName=='{name}'].QuotaCode\")"
        )
        value = nodes
    else:
        service = f"--service-code ec2{region_words}"
        code = _P_QUOTA if instance_type.startswith("p") else _G_QUOTA
        value = nodes * count_vcpus(instance_type)
    quoted = f'"{code}"' if on_hyperpod else code
    return [
        f"aws service-quotas get-service-quota {service} --quota-code {quoted} --query Quota.Value",
        f"aws service-quotas request-service-quota-increase {service} --quota-code {quoted} "
        f"--desired-value {value}",
    ]
