"""What is changed in a job before it is submitted again: nothing that changes what is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from launch.common import stage_04
from launch.kube.causes import Cause
from launch.kube.job import Job
from launch.kube.kubectl import Kubectl, KubectlError
from lib.core import log

_CHECKPOINTING = ("none", "selective", "full")


def cured(asked: Job, cause: Cause, kubectl: Kubectl) -> Job | None:
    """Return the job with its cause of failure removed, None when only a person can do that."""
    cure = _CURES.get(cause.name)
    return cure(asked, kubectl) if cure else None


def _less_memory(asked: Job, kubectl: Kubectl) -> Job | None:
    """Recompute more, which changes nothing that is learned."""
    now = stage_04.parse(asked.train).activation_checkpointing
    if now == _CHECKPOINTING[-1]:
        return None
    more = _CHECKPOINTING[_CHECKPOINTING.index(now) + 1]
    log.info(f"  cure: --activation-checkpointing {more} instead of {now}")
    return replace(asked, train=(*asked.train, f"--activation-checkpointing={more}"))


def _without_huge_pages(asked: Job, kubectl: Kubectl) -> Job | None:
    if not asked.huge_pages:
        return None
    log.info("  cure: no huge pages are asked for")
    return replace(asked, huge_pages=False)


def _any_interface(asked: Job, kubectl: Kubectl) -> Job | None:
    if not asked.interfaces:
        return None
    log.info("  cure: NCCL_SOCKET_IFNAME is left out")
    return replace(asked, interfaces="")


def _pull_secret(asked: Job, kubectl: Kubectl) -> Job | None:
    """Use the namespace's registry credentials when there are just one."""
    if asked.pull_secret:
        return None
    try:
        found = kubectl.items("secrets", "--field-selector", "type=kubernetes.io/dockerconfigjson")
    except KubectlError:
        return None
    if len(found) != 1:
        return None
    name = found[0]["metadata"]["name"]
    log.info(f"  cure: the image is pulled with the secret {name}")
    return replace(asked, pull_secret=name)


_CURES: dict[str, Callable[[Job, Kubectl], Job | None]] = {
    "out of GPU memory": _less_memory,
    "no huge pages": _without_huge_pages,
    "network interface": _any_interface,
    "image forbidden": _pull_secret,
}
