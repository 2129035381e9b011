#!/usr/bin/env python3
"""Build the image of a training job, after a check that torch, CUDA and the nodes' driver agree.

  python launch/build_image.py                                   # llm-training:<commit>-…
  python launch/build_image.py --efa --driver-version 570.86 --auto-fix
  python launch/build_image.py --context unpacked-bundle         # offline, from its wheelhouse
  python launch/build_image.py --push 1234.dkr.ecr.us-west-2.amazonaws.com/llm --create-repository

launch/images/torch_cuda.yaml holds what is checked before the build. When docker or pip fails, the
cause is named with its remedy; --auto-fix applies those that cost nothing and tries again: an older
CUDA build of the same torch for an old driver, docker's build cache pruned when its disk is full, a
mirror of the base image, another try when the network failed. The image is run once at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.images import causes  # noqa: E402
from launch.images import docker as image_docker  # noqa: E402
from launch.images import versions as image_versions  # noqa: E402
from launch.images.docker import DockerError  # noqa: E402
from launch.images.plan import NAME, PYTHONS, Build, planned  # noqa: E402
from lib.core import commands, log, options, stage  # noqa: E402
from lib.core.errors import DiskFullError, UsageError  # noqa: E402
from lib.core.options import Options  # noqa: E402

# Where AWS mirrors Docker's official images.
MIRROR = "public.ecr.aws/docker/library"
_BACKOFF_S = float(os.environ.get("BUILD_IMAGE_BACKOFF_S", "10"))


def _like(pattern: str, wanted: str) -> Callable[[str], str]:
    """Return what reads an option of a certain form; an empty one means its default."""
    def read(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return text
    return read


_IMAGE = _like(r"[A-Za-z0-9][\w./:@-]*", "letters, digits and any of . _ - / : @")
_PLATFORM = _like(r"[a-z]+/[a-z0-9]+(/v\d+)?", "OS/ARCH, such as linux/arm64")
_CUDA = _like(r"\d+\.\d+|none", "a version such as 12.6, or none")
_DRIVER = _like(r"\d+(\.\d+){0,2}", "a version such as 570.86.15")


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__)
    parser.add_argument("--tag", type=_IMAGE, default="", metavar="NAME",
                        help=f"name of the image (default: {NAME}:<commit>-torch…)")
    parser.add_argument("--efa", action="store_true",
                        help="with libfabric and the NCCL plugin for AWS's network")
    parser.add_argument("--context", type=Path, default=ROOT, metavar="DIR",
                        help="checkout or unpacked bundle to build from; its wheelhouse/ is used "
                             "when there is one (default: this checkout)")
    parser.add_argument("--requirements", default="requirements.txt", metavar="FILE",
                        help="requirements*.txt of the context to install")
    parser.add_argument("--python", choices=PYTHONS, default="3.11", help="Python of the image")
    parser.add_argument("--base-image", type=_IMAGE, default="", metavar="IMAGE",
                        help="image to start from (default: the official one of that Python)")
    parser.add_argument("--platform", type=_PLATFORM, default="linux/amd64", metavar="OS/ARCH",
                        help="platform of the nodes")
    parser.add_argument("--cuda", type=_CUDA, default="", metavar="X.Y",
                        help="CUDA build of torch, or none (default: that of requirements.txt)")
    parser.add_argument("--driver-version", type=_DRIVER, default="", metavar="V",
                        help="NVIDIA driver of the nodes (default: this machine's, if it has one)")
    parser.add_argument("--pip-conf", type=Path, metavar="FILE",
                        help="pip.conf with the index to install from; it stays out of the image "
                             "(default: none)")
    parser.add_argument("--auto-fix", action="store_true",
                        help="apply remedies that cost nothing, and try again")
    parser.add_argument("--max-attempts", type=options.positive_int, default=3, metavar="N",
                        help="builds to try with --auto-fix")
    parser.add_argument("--push", type=_IMAGE, default="", metavar="REGISTRY",
                        help="push to REGISTRY/NAME, or to a registry's root; logs in to ECR "
                             "(default: not pushed)")
    parser.add_argument("--create-repository", action="store_true",
                        help="with --push to ECR: make the repository if it is missing")
    options.add_config(parser, "check, print the commands of docker and run none")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Check, build, run once, push."""
    build_and_push(parse(argv))


def build_docker_image(*, auto_fix: bool = False, tag: str = "", efa: bool = False,
                       push: str = "", create_repository: bool = False, driver_version: str = "",
                       context: Path | None = None, base_image: str = "", max_attempts: int = 3,
                       dry_run: bool = False) -> str:
    """Build the image as the command line does, and return its name.

    Raises UsageError or DiskFullError, with the cause and its remedy.
    """
    words = [f"--tag={tag}", f"--push={push}", f"--driver-version={driver_version}",
             f"--base-image={base_image}", f"--max-attempts={max_attempts}",
             *([f"--context={context}"] if context else []),
             *(flag for flag, wanted in (("--auto-fix", auto_fix), ("--efa", efa),
                                         ("--create-repository", create_repository),
                                         ("--dry-run", dry_run)) if wanted)]
    return build_and_push(parse(words))


def build_and_push(opts: Options) -> str:
    """Do what the options say and return the name of the image."""
    build = planned(opts)
    log.table({"image": build.tag, "base": build.base_image, "variant": "efa" if opts.efa else
               "plain", "torch": f"{build.torch.version}{build.torch.local}",
               "driver": build.driver or "not known (--driver-version): not checked",
               "packages": "wheelhouse/" if (build.context / "wheelhouse").is_dir() else
               "from pip's index"})
    target = _target(opts.push, build.tag)
    log.info(image_docker.shown(build.command()))
    if opts.dry_run:
        log.info(image_docker.shown(build.try_out()))
        for command in (["tag", build.tag, target], ["push", target]) if target else ():
            log.info(image_docker.shown(command))
        return target or build.tag
    build = _build(build, opts)
    if target:
        _push(build.tag, target, opts.create_repository)
    log.info(f"built {target or build.tag}")
    log.info(f"launch/kubernetes.py takes it as --image {target or build.tag}")
    return target or build.tag


def _build(build: Build, opts: Options) -> Build:
    """Build and run once; with --auto-fix, mend what can be and try again."""
    attempts = opts.max_attempts if opts.auto_fix else 1
    for attempt in range(1, attempts + 1):
        try:
            image_docker.require_daemon()
            image_docker.docker(*build.command())
            _check_result(build, image_docker.docker(*build.try_out()))
            return build
        except DockerError as error:
            cause = causes.find(error.said)
            fixed = _fixed(build, cause, attempt) if attempt < attempts else None
            if fixed is None:
                raise _error(error.said, cause, attempt) from None
            build = fixed
            log.info(image_docker.shown(build.command()))
    raise AssertionError("the last attempt returns or raises")


def _fixed(build: Build, cause: causes.Cause | None, attempt: int) -> Build | None:
    """Return what to build after a remedy was applied, None when there is none to apply."""
    fix = cause.fix if cause else causes.NOTHING
    mended: Build | None = None
    if fix == causes.PRUNE:
        image_docker.docker("builder", "prune", "--force")
        mended = build
    elif fix == causes.MIRROR and build.base_image.startswith("python:"):
        mended = replace(build, base_image=f"{MIRROR}/{build.base_image}")
    elif fix == causes.RETRY:
        time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        mended = build
    elif fix == causes.DEFAULT_TORCH and build.torch != build.named_torch and not (
            build.driver and image_versions.driver_problem(build.named_torch, build.driver)):
        mended = replace(build, torch=build.named_torch)
    if mended and cause:
        log.info(f"fixed: {cause.problem} ({fix}); trying again")
    return mended


def _error(said: str, cause: causes.Cause | None, attempt: int) -> UsageError | DiskFullError:
    found = causes.evidence(said, cause)
    kind = DiskFullError if cause and cause.is_disk else UsageError
    after = f" after {attempt} attempts" if attempt > 1 else ""
    return kind(f"{cause.problem if cause else 'the image could not be built'}{after}",
                found=found, hint=cause.remedy if cause else "see what docker printed above")


def _check_result(build: Build, said: str) -> None:
    """Raise UsageError when the image holds another torch or CUDA than was asked for."""
    told = re.search(r"^torch (\S+) CUDA (\S+)$", said, re.MULTILINE)
    cuda = build.torch.cuda or "none"
    if not told or told[1].partition("+")[0] != build.torch.version or told[2] != cuda:
        raise UsageError("the image does not hold the torch that was asked for",
                         expected=f"torch {build.torch.version}, CUDA {cuda}",
                         found=told[0] if told else said.strip()[-300:],
                         hint="check what the index or the wheelhouse has: --pip-conf, --context")


def _push(tag: str, target: str, create: bool) -> None:
    is_ecr = bool(image_docker.region_of(target))
    if create and not is_ecr:
        raise UsageError("--create-repository is for ECR", found=target)
    if is_ecr:
        if create:
            made = image_docker.create_repository(target.rpartition(":")[0])
            log.info("the repository was made" if made else "the repository is there already")
        image_docker.log_in(target)
    try:
        image_docker.docker("tag", tag, target)
        image_docker.docker("push", target)
    except DockerError as error:
        missing = "does not exist" in error.said or "name unknown" in error.said
        raise UsageError(f"{target} could not be pushed", found=causes.evidence(error.said, None),
                         run=commands.again("--create-repository") if missing and is_ecr else
                         commands.shell("docker", "login", target.partition("/")[0])) from None


def _target(registry: str, tag: str) -> str:
    """Return the full name that is pushed; the local image's name and tag fill in what is left."""
    registry = registry.rstrip("/")
    _, slash, repository = registry.rpartition("/")
    if not registry or (slash and ":" in repository):
        return registry
    path, slash_of_tag, last = tag.rpartition("/")
    name, _, version = last.partition(":")
    where = registry if slash else f"{registry}/{path}{slash_of_tag}{name}"
    return f"{where}:{version or 'latest'}"


if __name__ == "__main__":
    stage.run(main)
