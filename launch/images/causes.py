"""Why an image could not be built or run, from what docker and pip said, and what cures it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What --auto-fix does about a cause, carried out by build_image.
PRUNE, MIRROR, RETRY, DEFAULT_TORCH, NOTHING = (
    "prune", "mirror", "retry", "default torch", "")


@dataclass(frozen=True)
class Cause:
    """A cause. pattern: of what was said; fix: what can be done without asking; is_disk: exit 4."""

    pattern: str
    problem: str
    remedy: str
    fix: str = NOTHING
    is_disk: bool = False


# The first that matches counts, so what explains more stands further up.
CAUSES = (
    Cause(r"Cannot connect to the Docker daemon|Is the docker daemon running",
          "the docker daemon does not answer", "start it (systemctl start docker), or set "
          "DOCKER_HOST"),
    Cause(r"permission denied while trying to connect to the [Dd]ocker",
          "you may not use the docker daemon", "sudo usermod -aG docker $USER, then log in again"),
    Cause(r"--mount option requires BuildKit|unknown flag: --progress|unknown flag: --secret|"
          r"buildx component is missing|BuildKit is enabled but the buildx",
          "this docker builds without BuildKit", "install the package docker-buildx-plugin "
          "(docker 23 or newer has it)"),
    Cause(r"no space left on device|disk quota exceeded", "docker's disk is full",
          "docker builder prune --force; docker image prune; docker system df tells what is there",
          PRUNE, is_disk=True),
    Cause(r"toomanyrequests|pull rate limit", "the registry of the base image limits pulls",
          "docker login, or --base-image with a mirror's name", MIRROR),
    Cause(r"unsatisfied condition: cuda|driver on your system is too old|"
          r"CUDA driver version is insufficient", "the driver is too old for the CUDA of torch",
          "update the driver, or give its version by --driver-version, with --auto-fix"),
    Cause(r"No matching distribution found for torch\b|"
          r"Could not find a version that satisfies the requirement torch\b",
          "pip finds no such torch for this Python and platform",
          "a build with another CUDA is not on the default index: name one that has it by "
          "--pip-conf FILE, or give a wheelhouse for this Python", DEFAULT_TORCH),
    Cause(r"No matching distribution found for|Could not find a version that satisfies",
          "pip finds no such package for this Python and platform",
          "pack the wheelhouse again for the Python of the image, or name an index by --pip-conf"),
    Cause(r"ResolutionImpossible|conflicting dependencies", "two requirements exclude each other",
          "restore requirements.txt: its versions were tried together"),
    Cause(r"DO NOT MATCH THE HASHES|BadZipFile|has an invalid wheel",
          "a wheel is damaged", "python launch/airgap.py verify on the bundle, then copy it again"),
    Cause(r"manifest unknown|manifest for \S+ not found|pull access denied|"
          r"failed to resolve source metadata.*not found",
          "the base image is not there", "--base-image with one that this machine can pull; in an "
          "air gap, docker load it first", MIRROR),
    Cause(r"efa-installer\.amazonaws\.com|efa_installer\.sh", "the EFA installer failed",
          "put aws-efa-installer-<version>.tar.gz beside requirements.txt, or build without --efa"),
    Cause(r"[Tt]emporary failure in name resolution|Could not resolve host|i/o timeout|"
          r"TLS handshake timeout|[Cc]onnection (refused|reset|timed out)|Read timed out|"
          r"Network is unreachable", "the network failed",
          "in an air gap, build in an unpacked bundle: it has a wheelhouse", RETRY),
)


def find(said: str) -> Cause | None:
    """Return the cause that explains what docker said, None for an unknown one."""
    return next((cause for cause in CAUSES if re.search(cause.pattern, said, re.MULTILINE)), None)


def evidence(said: str, cause: Cause | None) -> str:
    """Return the lines to show: those that a cause was told by, or the last ones."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    if cause:
        lines = [line for line in lines if re.search(cause.pattern, line)] or lines
    return "\n".join(line[:300] for line in lines[-5:])
