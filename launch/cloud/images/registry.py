"""Check that an image can be pushed before it is built, so that no build is wasted."""

from __future__ import annotations

import os
from pathlib import Path

from launch.cloud.images import docker as image_docker
from launch.cloud.images.docker import DockerError
from launch.cloud.kube import aws
from lib.core import commands, log, records
from lib.core.errors import UsageError

_DOCKER_HUB = "docker.io"
_DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"


def prepare_push(target: str, create_repository: bool) -> None:
    """Log in to the registry of an image, and check or create its repository.

    target: full name to push. Raises UsageError with the command to type if a push cannot succeed,
    and warns if this cannot be known.
    """
    try:
        image_docker.run_docker("version", quiet=True)  # fails if the daemon does not answer
    except DockerError as error:
        raise error.explained(1) from None
    if image_docker.find_region(target):
        _prepare_ecr(target.rpartition(":")[0], create_repository)
    elif create_repository:
        raise UsageError("--create-repository works only with ECR", found=target)
    elif not _has_login(host := find_host(target)):
        log.warn(
            f"docker has no login for {host}; unless the registry needs none, type this before the "
            f"build ends: {_format_login(host)}"
        )


def _prepare_ecr(repository: str, create: bool) -> None:
    """Find or create a repository of an Amazon registry, and log in to it."""
    try:
        if create:
            is_new = image_docker.create_repository(repository)
            log.info("created the repository" if is_new else "the repository exists already")
        else:
            _require_repository(repository)
        image_docker.log_in(repository)
    except aws.AwsError as error:
        raise UsageError(
            f"no image can be pushed to {repository}, so nothing was built: {error.problem}",
            found=error.found,
            expected="credentials of AWS that may push there (`aws configure` or `aws sso login`)",
            hint="to build without a push, leave out --push",
        ) from None


def _require_repository(repository: str) -> None:
    """Raise UsageError if a repository does not exist; warn if this user may not query it."""
    name = repository.partition("/")[2]
    region = image_docker.find_region(repository)
    try:
        aws.query_json("ecr", "describe-repositories", "--repository-names", name, region=region)
    except aws.AwsError as error:
        if "RepositoryNotFoundException" in error.found:
            raise UsageError(
                f"the repository {name} does not exist in {region}, so nothing was built",
                run=commands.as_typed("--create-repository"),
            ) from None
        if "AccessDenied" not in error.found:
            raise
        log.warn(f"cannot check whether the repository {name} exists: permission denied")


def explain_failed_push(target: str, error: DockerError) -> UsageError:
    """Return the error for the user after docker could not push an image."""
    is_missing = "does not exist" in error.output or "name unknown" in error.output
    return UsageError(
        f"{target} could not be pushed",
        found=error.evidence(of_cause=False),
        run=commands.as_typed("--create-repository")
        if is_missing and image_docker.find_region(target)
        else _format_login(find_host(target)),
    )


def find_host(target: str) -> str:
    """Return the registry of an image; names without one are on Docker Hub."""
    host, slash, _ = target.partition("/")
    return host if slash and (set(".:") & set(host) or host == "localhost") else _DOCKER_HUB


def _format_login(host: str) -> str:
    return commands.shell("docker", "login", *([host] if host != _DOCKER_HUB else []))


def _has_login(host: str) -> bool:
    """Return whether docker has stored a login for a registry; True for a local registry."""
    if host.partition(":")[0] in ("localhost", "127.0.0.1"):
        return True
    directory = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = records.read_json(directory / "config.json")
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    names = {host, f"https://{host}", _DOCKER_HUB_LOGIN if host == _DOCKER_HUB else host}
    return any(names & set(config.get(key) or {}) for key in ("auths", "credHelpers"))
