"""Call docker and AWS's registry, and explain their errors."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.cloud.kube import aws
from launch.cloud.kube.kubeconfig import require_region
from lib.core import commands, log, manifest, records
from lib.core.errors import DiskFullError, UsageError

# The remedies that --auto-fix applies, in launch/build_image.py.
PRUNE = "prune"
MIRROR = "mirror"
RETRY = "retry"
DEFAULT_TORCH = "default torch"
_ECR = re.compile(r"\d+\.dkr\.ecr\.(?P<region>[\w-]+)\.amazonaws\.com(\.cn)?")
_KEPT_CHARACTERS = 200_000
_RECORD = Path(".cache") / "image.json"  # of the image that was last built here


@dataclass(frozen=True)
class Fault:
    """A known reason why an image cannot be built or run.

    pattern: matches docker's output. fix: the remedy of --auto-fix, empty if there is none.
    is_disk: whether the disk is full (exit code 4).
    """

    pattern: str
    problem: str
    remedy: str
    fix: str = ""
    is_disk: bool = False


# The first match counts, so more specific causes come first.
_FAULTS = (
    Fault(
        r"Cannot connect to the Docker daemon|Is the docker daemon running",
        "the docker daemon does not answer",
        "start it (systemctl start docker), or set DOCKER_HOST",
    ),
    Fault(
        r"permission denied while trying to connect to the [Dd]ocker",
        "you have no permission to use the docker daemon",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    Fault(
        r"--mount option requires BuildKit|unknown flag: --progress|unknown flag: --secret|"
        r"buildx component is missing|BuildKit is enabled but the buildx",
        "this docker has no BuildKit",
        "install the package docker-buildx-plugin (docker 23 or newer has it)",
    ),
    Fault(
        r"no space left on device|disk quota exceeded",
        "docker's disk is full",
        "docker builder prune --force; docker image prune; docker system df shows what uses space",
        PRUNE,
        is_disk=True,
    ),
    Fault(
        r"toomanyrequests|pull rate limit",
        "the registry of the base image limits pulls",
        "docker login, or --base-image with a mirror's name",
        MIRROR,
    ),
    Fault(
        r"unsatisfied condition: cuda|driver on your system is too old|"
        r"CUDA driver version is insufficient",
        "the driver is too old for the CUDA of torch",
        "update the driver, or use --driver-version with its version, and --auto-fix",
    ),
    Fault(
        r"No matching distribution found for torch\b|"
        r"Could not find a version that satisfies the requirement torch\b",
        "pip finds no such torch for this Python and platform",
        "the default index lacks builds for another CUDA: name an index that has them with "
        "--pip-conf FILE, or provide a wheelhouse for this Python",
        DEFAULT_TORCH,
    ),
    Fault(
        r"No matching distribution found for|Could not find a version that satisfies",
        "pip finds no such package for this Python and platform",
        "pack the wheelhouse again for the Python of the image, or name an index with --pip-conf",
    ),
    Fault(
        r"ResolutionImpossible|conflicting dependencies",
        "two requirements exclude each other",
        "restore requirements.txt, whose versions are tested together",
    ),
    Fault(
        r"DO NOT MATCH THE HASHES|BadZipFile|has an invalid wheel",
        "a wheel is damaged",
        "run `python launch/airgap.py verify` on the bundle, then copy it again",
    ),
    Fault(
        r"manifest unknown|manifest for \S+ not found|pull access denied|"
        r"failed to resolve source metadata.*not found",
        "the base image does not exist",
        "use a --base-image that this machine can pull; in an air gap, docker load it first",
        MIRROR,
    ),
    Fault(
        r"efa-installer\.amazonaws\.com|efa_installer\.sh",
        "the EFA installer failed",
        "put aws-efa-installer-<version>.tar.gz beside requirements.txt, or build without --efa",
    ),
    Fault(
        r"[Tt]emporary failure in name resolution|Could not resolve host|i/o timeout|"
        r"TLS handshake timeout|[Cc]onnection (refused|reset|timed out)|Read timed out|"
        r"Network is unreachable",
        "the network failed",
        "in an air gap, build from an unpacked bundle, which has a wheelhouse",
        RETRY,
    ),
)


class DockerError(Exception):
    """Docker failed. output: the end of its output. cause: None if it is unknown."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output
        self.cause = next(
            (cause for cause in _FAULTS if re.search(cause.pattern, output, re.MULTILINE)), None
        )

    def evidence(self, of_cause: bool = True) -> str:
        """Return the lines of the output that show the cause, or the last lines."""
        lines = [line.rstrip() for line in self.output.splitlines() if line.strip()]
        if self.cause and of_cause:
            lines = [line for line in lines if re.search(self.cause.pattern, line)] or lines
        return "\n".join(line[:300] for line in lines[-5:])

    def explained(self, attempt: int) -> UsageError | DiskFullError:
        """Return the error for the user. attempt: how often the build was tried."""
        after = f" after {attempt} attempts" if attempt > 1 else ""
        if self.cause is None:
            return UsageError(
                f"the image could not be built{after}",
                found=self.evidence(),
                hint="see docker's output above",
            )
        kind = DiskFullError if self.cause.is_disk else UsageError
        return kind(f"{self.cause.problem}{after}", found=self.evidence(), hint=self.cause.remedy)


def run_docker(*arguments: str, stdin: str = "", quiet: bool = False) -> str:
    """Run docker, print its output as it comes, and return the end of the output.

    stdin: text for its standard input. Raises DockerError if docker fails, and UsageError if it is
    not installed.
    """
    try:
        process = subprocess.Popen(
            ["docker", *arguments],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
        )
    except FileNotFoundError:
        raise UsageError(
            "docker is not installed",
            expected="docker with BuildKit on the PATH",
            hint="to print the commands for another machine:",
            run=commands.as_typed("--dry-run"),
        ) from None
    with process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, and its output shows why
        output = ""
        for line in process.stdout:
            output = (output + line)[-_KEPT_CHARACTERS:]
            if not quiet:
                sys.stdout.write(line)
                sys.stdout.flush()
    if process.returncode:
        raise DockerError(output)
    return output


def find_region(registry: str) -> str:
    """Return the region of an Amazon registry, empty for any other."""
    match = _ECR.match(registry)
    return match["region"] if match else ""


def resolve_registry(push: str, region: str, queries_aws: bool = True) -> str:
    """Return --push with the account's own registry in place of `ecr/`.

    Raises UsageError if --region contradicts the name of the registry.
    """
    if (region_of_registry := find_region(push)) and region and region_of_registry != region:
        raise UsageError(
            f"--region {region}, but --push names a registry in {region_of_registry}",
            found=push,
            expected="one of the two, or both for the same region",
        )
    if push != "ecr" and not push.startswith("ecr/"):
        return push
    region = require_region(region)
    identity = aws.query_json("sts", "get-caller-identity", region=region) if queries_aws else {}
    return f"{identity.get('Account', 'ACCOUNT')}.dkr.ecr.{region}.amazonaws.com{push[3:]}"


def log_in(registry: str) -> None:
    """Log in to an Amazon registry with the credentials of the AWS command line.

    Raises UsageError if the registry refuses the login.
    """
    region = find_region(registry)
    password = aws.run_aws("ecr", "get-login-password", region=region)
    try:
        run_docker(
            "login",
            "--username",
            "AWS",
            "--password-stdin",
            registry.partition("/")[0],
            stdin=password,
            quiet=True,
        )
    except DockerError as error:
        raise UsageError(
            f"{registry.partition('/')[0]} refused the login",
            found=error.output.strip()[-300:],
            hint="`aws sts get-caller-identity` shows who you are",
        ) from None


def create_repository(repository: str) -> bool:
    """Create a repository in an Amazon registry. Return False if it exists already."""
    name = repository.partition("/")[2]
    try:
        aws.query_json(
            "ecr", "create-repository", "--repository-name", name, region=find_region(repository)
        )
    except aws.AwsError as error:
        if "RepositoryAlreadyExistsException" in error.found:
            return False
        raise
    return True


def format_command(arguments: Sequence[str]) -> str:
    """Return a docker command as one would type it; its --secret names a file and no secret."""
    return shlex.join(["docker", *arguments])


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built here. is_pushed: whether nodes can fetch it from a registry."""

    image: str
    is_pushed: bool


def record_built_image(built: BuiltImage) -> None:
    """Record the image for jobs started in this directory; without a record they need --image."""
    try:
        _RECORD.parent.mkdir(exist_ok=True)
        manifest.write_json(_RECORD, asdict(built))
    except OSError as error:
        log.warn(f"the image is not recorded for launch/kubernetes.py: {error}")


def find_last_built_image() -> BuiltImage | None:
    """Return the image that was last built in this directory, None if there is none."""
    try:
        record = records.read_json(_RECORD)
        return BuiltImage(str(record["image"]), bool(record["is_pushed"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
