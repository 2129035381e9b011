"""Build the image of a training job, after checking that torch and CUDA fit the nodes' driver.

  python launch/build_image.py                                   # llm-training:<commit>-…
  python launch/build_image.py --efa --driver-version 570.86 --auto-fix
  python launch/build_image.py --context unpacked-bundle         # offline, from its wheelhouse
  python launch/build_image.py --push 1234.dkr.ecr.us-west-2.amazonaws.com/llm --create-repository
  python launch/build_image.py --push ecr/llm-training --region us-west-2 --create-repository

lib/parallel/torch_builds.py contains the table for the checks. If docker or pip fails, the error
names the cause and its remedy. --auto-fix applies remedies that cost nothing and retries: it uses
an older CUDA build of the same torch for an old driver, prunes docker's build cache if its disk is
full, uses a mirror of the base image, or retries after a network failure. Finally, this script runs
the image once as a test, and pushes it. Before the build, it logs in to the registry and finds the
repository; if it cannot push, it builds nothing and names the command to type.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from typing import Any

from launch.cloud.images import docker as image_docker
from launch.cloud.images import versions
from launch.cloud.images.docker import DockerError
from launch.cloud.images.registry import explain_failed_push, prepare_push
from launch.cloud.images.versions import ImageBuild, ImageOptions
from lib.core import commands, declared, log, options
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.core.retry import backoff
from lib.parallel import torch_builds

# Where AWS mirrors Docker's official images.
MIRROR = "public.ecr.aws/docker/library"
_BACKOFF_S = float(os.environ.get("BUILD_IMAGE_BACKOFF_S", "10"))


def parse(argv: list[str]) -> Options:
    parser = options.Parser(__doc__)
    declared.add_options(parser, ImageOptions)
    options.add_config(parser, "check, and print the docker commands without running them")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    opts = parse(argv)
    build_and_push(declared.read_options(ImageOptions, opts), opts.dry_run)


@commands.repeatable_call
def build_docker_image(*, dry_run: bool = False, **values: Any) -> str:
    """Build the image as the command line does, and return its name.

    values: options by their names, such as auto_fix=True, tag="llm:1", push="REGISTRY/llm".
    Raises UsageError or DiskFullError with the cause and its remedy.
    """
    log.ensure_setup()
    return build_and_push(declared.from_values(ImageOptions, **values), dry_run)


def build_and_push(image_options: ImageOptions, dry_run: bool) -> str:
    """Build and push the image as the options say, and return its name."""
    build = versions.plan_build(image_options)
    log.table(
        {
            "image": build.tag,
            "base": build.base_image,
            "variant": "efa" if build.efa else "plain",
            "torch": str(build.torch),
            "driver": build.driver_version or "unknown (--driver-version), so not checked",
            "packages": "wheelhouse/"
            if (build.context / "wheelhouse").is_dir()
            else "from pip's index",
        }
    )
    registry = image_docker.resolve_registry(build.push, build.region, queries_aws=not dry_run)
    target = _resolve_target(registry, build.tag)
    log.info(image_docker.format_command(build.command()))
    if dry_run:
        log.info(image_docker.format_command(build.try_out()))
        for command in (["tag", build.tag, target], ["push", target]) if target else ():
            log.info(image_docker.format_command(command))
        return target or build.tag
    if target:
        prepare_push(target, build.create_repository)
    else:
        push = commands.as_typed("--push", "REGISTRY/llm-training")
        log.info(f"the image stays on this machine; to push it as well: {push}")
    build = _build_once(build)
    if target:
        _push_image(build.tag, target)
    image_docker.record_built_image(
        image_docker.BuiltImage(target or build.tag, is_pushed=bool(target))
    )
    log.info(f"built {target or build.tag}")
    log.info(
        f"launch/kubernetes.py uses it here by default; elsewhere: --image {target or build.tag}"
    )
    return target or build.tag


def _build_once(build: ImageBuild) -> ImageBuild:
    """Build and run the image once; with --auto-fix, apply remedies and retry."""
    attempts = build.max_attempts if build.auto_fix else 1
    for attempt in range(1, attempts + 1):
        try:
            image_docker.run_docker("version", quiet=True)  # fails if the daemon does not answer
            image_docker.run_docker(*build.command())
            _check_result(build, image_docker.run_docker(*build.try_out()))
            return build
        except DockerError as error:
            next_build = _apply_remedy(build, error, attempt) if attempt < attempts else None
            if next_build is None:
                raise error.explained(attempt) from None
            build = next_build
            log.info(image_docker.format_command(build.command()))
    raise AssertionError("the last attempt returns or raises")


def _apply_remedy(build: ImageBuild, error: DockerError, attempt: int) -> ImageBuild | None:
    """Apply the remedy of an error and return the next build; None if there is no remedy."""
    cause = error.cause
    if cause is None:
        return None
    next_build: ImageBuild | None = None
    if cause.fix == image_docker.PRUNE:
        image_docker.run_docker("builder", "prune", "--force")
        next_build = build
    elif cause.fix == image_docker.MIRROR and build.base_image.startswith("python:"):
        next_build = replace(build, base_image=f"{MIRROR}/{build.base_image}")
    elif cause.fix == image_docker.RETRY:
        time.sleep(backoff(attempt, _BACKOFF_S))
        next_build = build
    elif cause.fix == image_docker.DEFAULT_TORCH and build.torch != build.named_torch:
        driver = build.driver_version
        if not driver or not torch_builds.driver_problem(build.named_torch, driver):
            next_build = replace(build, torch=build.named_torch)
    if next_build:
        log.info(f"fixed: {cause.problem} ({cause.fix}); retrying")
    return next_build


def _check_result(build: ImageBuild, output: str) -> None:
    """Raise UsageError if the image contains another torch or CUDA than the options say."""
    printed = re.search(r"^torch (\S+) CUDA (\S+)$", output, re.MULTILINE)
    cuda = build.torch.cuda or "none"
    if not printed or printed[1].partition("+")[0] != build.torch.version or printed[2] != cuda:
        raise UsageError(
            "the image contains another torch than the options say",
            expected=f"torch {build.torch.version}, CUDA {cuda}",
            found=printed[0] if printed else output.strip()[-300:],
            hint="check the contents of the index or the wheelhouse: --pip-conf, --context",
        )


def _push_image(tag: str, target: str) -> None:
    try:
        image_docker.run_docker("tag", tag, target)
        image_docker.run_docker("push", target)
    except DockerError as error:
        raise explain_failed_push(target, error) from None


def _resolve_target(registry: str, tag: str) -> str:
    """Return the full name to push, with the name and tag of the local image as defaults."""
    registry = registry.rstrip("/")
    _, slash, repository = registry.rpartition("/")
    if not registry or (slash and ":" in repository):
        return registry
    path, slash_of_tag, last = tag.rpartition("/")
    name, _, version = last.partition(":")
    full_name = registry if slash else f"{registry}/{path}{slash_of_tag}{name}"
    return f"{full_name}:{version or 'latest'}"
