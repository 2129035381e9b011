"""Calls of docker and of AWS's registry; what they print is shown and kept."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from launch.kube import aws as cluster_aws
from lib.core import commands
from lib.core.errors import UsageError

_ECR = re.compile(r"\d+\.dkr\.ecr\.(?P<region>[\w-]+)\.amazonaws\.com(\.cn)?")
_KEPT = 200_000


class DockerError(Exception):
    """A call of docker that failed. said: the end of what it printed."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


def docker(*arguments: str, given: str = "", quiet: bool = False) -> str:
    """Run docker, show what it prints as it comes, and return it.

    given: its input. Raises DockerError when it fails, UsageError without docker.
    """
    try:
        process = subprocess.Popen(["docker", *arguments], stdin=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   errors="replace")
    except FileNotFoundError:
        raise UsageError("docker is not installed", expected="docker with BuildKit on the PATH",
                         hint="this prints the commands for another machine:",
                         run=commands.again("--dry-run")) from None
    with process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(given)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, and its output tells why
        said = ""
        for line in process.stdout:
            said = (said + line)[-_KEPT:]
            if not quiet:
                sys.stdout.write(line)
                sys.stdout.flush()
    if process.returncode:
        raise DockerError(said)
    return said


def require_daemon() -> None:
    """Raise DockerError when the daemon does not answer, UsageError without docker."""
    docker("version", "--format", "{{.Server.Version}}", quiet=True)


def region_of(registry: str) -> str:
    """Return the region of an Amazon registry, empty for any other."""
    match = _ECR.match(registry)
    return match["region"] if match else ""


def log_in(registry: str) -> None:
    """Log in to an Amazon registry with the credentials of the AWS command line."""
    region = region_of(registry)
    password = cluster_aws.text("ecr", "get-login-password", region=region)
    try:
        docker("login", "--username", "AWS", "--password-stdin", registry.partition("/")[0],
               given=password, quiet=True)
    except DockerError as error:
        raise UsageError(f"{registry.partition('/')[0]} refused the login",
                         found=error.said.strip()[-300:],
                         hint="`aws sts get-caller-identity` shows who you are") from None


def create_repository(repository: str) -> bool:
    """Make a repository in an Amazon registry; False when it is there already."""
    name = repository.partition("/")[2]
    try:
        cluster_aws.aws("ecr", "create-repository", "--repository-name", name,
                        region=region_of(repository))
    except cluster_aws.AwsError as error:
        if "RepositoryAlreadyExistsException" in error.found:
            return False
        raise
    return True


def shown(arguments: Sequence[str]) -> str:
    """Return a docker command as one would type it."""
    import shlex
    return shlex.join(["docker", *arguments])
