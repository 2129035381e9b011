"""Plan the image: choose torch, its CUDA and Python so that they fit the driver."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lib.core import commands, log, nvidia, options
from lib.core.declared import option
from lib.core.errors import Problems, UsageError
from lib.parallel import torch_builds
from lib.parallel.torch_builds import Torch, driver_problem, find_build

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "launch" / "cloud" / "Dockerfile"
NAME = "llm-training"
# The image of each Python that the code supports.
PYTHONS = {
    "3.10": "3.10.19",
    "3.11": "3.11.14",
    "3.12": "3.12.12",
    "3.13": "3.13.9",
    "3.14": "3.14.0",
}
_CODE = "/opt/pipeline"
_REQUIREMENT_LISTS = (
    "wheelhouse/requirements.txt",
    "requirements.txt",
)  # a bundle may contain another torch


def find_torch_pin(requirements: Path = ROOT / "requirements.txt", cuda: str = "") -> Torch:
    """Return the torch that a requirements file names, or its build for another CUDA."""
    return torch_builds.find_pin(requirements.read_text(encoding="utf-8"), cuda)


def find_base_conflict(torch: Torch, base_image: str) -> str:
    """Return why the CUDA of a base image conflicts with torch's; empty if it does not.

    A CUDA of another major version shadows the libraries inside the wheel of torch.
    """
    match = re.search(r"cuda[:-]?v?(\d+)\.(\d+)", base_image)
    if not match or not torch.cuda or match[1] == torch.cuda.partition(".")[0]:
        return ""
    return (
        f"{base_image} has CUDA {match[1]}.{match[2]}, torch {torch.version} has CUDA {torch.cuda}"
    )


def _make_pattern_parser(pattern: str, description: str) -> Callable[[str], str]:
    """Return a parser of an option that must match a pattern; an empty value means its default."""

    def parse(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"expected {description}, got {text!r}")
        return text

    return parse


_IMAGE = _make_pattern_parser(r"[A-Za-z0-9][\w./:@-]*", "letters, digits and any of . _ - / : @")
_PLATFORM = _make_pattern_parser(r"[a-z]+/[a-z0-9]+(/v\d+)?", "OS/ARCH, such as linux/arm64")


@dataclass(frozen=True)
class ImageOptions:
    """The options of launch/build_image.py."""

    tag: str = option(
        "",
        parse=_IMAGE,
        metavar="NAME",
        help=f"name of the image (default: auto, {NAME}:<commit>-torch…)",
    )
    efa: bool = option(False, help="add libfabric and the NCCL plugin for AWS's network")
    context: Path = option(
        ROOT,
        parse=Path,
        help="checkout or unpacked bundle to build from, with its wheelhouse/ "
        "if there is one (default: this checkout)",
    )
    dockerfile: Path = option(
        DOCKERFILE,
        parse=Path,
        metavar="FILE",
        help="another Dockerfile, or its name in launch/cloud/; it gets the same "
        "build arguments (default: launch/cloud/Dockerfile)",
    )
    requirements: str = option(
        "",
        metavar="FILE",
        help="requirements*.txt of the context to install (default: the file in "
        "wheelhouse/, otherwise requirements.txt)",
    )
    python: str = option("3.11", choices=tuple(PYTHONS), help="Python version of the image")
    base_image: str = option(
        "",
        parse=_IMAGE,
        metavar="IMAGE",
        help="image to start from (default: the official image of --python)",
    )
    platform: str = option(
        "linux/amd64", parse=_PLATFORM, metavar="OS/ARCH", help="platform of the nodes"
    )
    cuda: str = option(
        "",
        parse=torch_builds.parse_cuda,
        metavar="X.Y",
        help="CUDA build of torch: 12.6 or cu126, or none (default: as in requirements.txt)",
    )
    driver_version: str = option(
        "",
        parse=torch_builds.parse_driver,
        metavar="V",
        help="NVIDIA driver of the nodes (default: that of this machine, if it has one)",
    )
    pip_conf: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="pip.conf with the index to install from; it stays out of the image (default: none)",
    )
    auto_fix: bool = option(
        False,
        parse=options.on_off,
        nargs="?",
        const=True,
        help="apply remedies that cost nothing, and retry",
    )
    max_attempts: int = option(3, parse=options.positive_int, help="builds to try with --auto-fix")
    push: str = option(
        "",
        parse=_IMAGE,
        metavar="REGISTRY",
        help="push to REGISTRY/NAME or the root of a registry, after a login for ECR; ecr/NAME is "
        "a repository of your AWS account "
        "(default: no push)",
    )
    create_repository: bool = option(False, help="with --push to ECR: create a missing repository")
    region: str = option(
        "",
        metavar="NAME",
        help="with --push ecr/NAME: AWS region of the registry (default: that of the AWS settings)",
    )


@dataclass(frozen=True)
class ImageBuild(ImageOptions):
    """Options with all defaults filled in. named_torch: the torch of the requirements file."""

    torch: Torch = field(kw_only=True)
    named_torch: Torch = field(kw_only=True)

    def command(self) -> list[str]:
        major = self.torch.cuda.partition(".")[0]
        values = {
            "BASE_IMAGE": self.base_image,
            "VARIANT": "efa" if self.efa else "plain",
            "TORCH_LOCAL": "" if self.torch == self.named_torch else self.torch.local,
            "REQUIREMENTS": self.requirements,
            "REVISION": _find_commit(self.context),
            "NVIDIA_REQUIRE_CUDA": f"cuda>={major}.0" if major else "",
        }
        return [
            "build",
            "--progress=plain",
            "--platform",
            self.platform,
            "--file",
            str(self.dockerfile),
            "--tag",
            self.tag,
            *(
                word
                for name, value in values.items()
                if value or name == "NVIDIA_REQUIRE_CUDA"
                for word in ("--build-arg", f"{name}={value}")
            ),
            *(("--secret", f"id=pip.conf,src={self.pip_conf}") if self.pip_conf else ()),
            str(self.context),
        ]

    def try_out(self) -> list[str]:
        """Return the arguments of docker that run the image once, without network or GPU.

        The driver of this machine may be older than that of the nodes, so it is not checked.
        """
        program = (
            "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda or 'none')"
        )
        return [
            "run",
            "--rm",
            "--network",
            "none",
            "--env",
            "NVIDIA_DISABLE_REQUIRE=1",
            "--env",
            "NVIDIA_VISIBLE_DEVICES=void",
            self.tag,
            "sh",
            "-c",
            f'python {_CODE}/04_train_fsdp.py --help > /dev/null && python -c "{program}"',
        ]


def plan_build(opts: ImageOptions) -> ImageBuild:
    """Return the build for options; with --auto-fix, resolve conflicts where possible.

    Raises UsageError with all remaining conflicts at once.
    """
    name = opts.requirements or next(
        (name for name in _REQUIREMENT_LISTS if (opts.context / name).is_file()),
        _REQUIREMENT_LISTS[-1],
    )
    requirements = opts.context / name
    if not requirements.is_file():
        raise UsageError(
            f"{opts.context} is neither a checkout nor an unpacked bundle",
            expected=f"{name} in it",
        )
    if opts.pip_conf and not opts.pip_conf.is_file():
        raise UsageError(f"--pip-conf: no such file: {opts.pip_conf}")
    dockerfile = (
        opts.dockerfile if opts.dockerfile.is_file() else DOCKERFILE.parent / opts.dockerfile
    )
    if not dockerfile.is_file():
        raise UsageError(
            f"--dockerfile: no such file: {opts.dockerfile}",
            hint="the default, launch/cloud/Dockerfile, also suits other base images and CUDA "
            "versions: --base-image, --cuda",
        )
    named = find_torch_pin(requirements)
    problems = Problems()
    driver = opts.driver_version or nvidia.find_driver()
    torch = _choose_torch(find_torch_pin(requirements, opts.cuda), driver, opts.auto_fix, problems)
    if problem := find_base_conflict(torch, opts.base_image):
        problems.add(problem, hint="choose a base image without CUDA, or with the CUDA of torch")
    python = _choose_python(opts, torch, named, problems)
    problems.raise_if_any()
    default_tag = (
        f"{NAME}:{_find_commit(opts.context)[:12]}-torch{torch.version}"
        f"-{torch.local.removeprefix('+')}" + ("-efa" if opts.efa else "")
    )
    tag = default_tag if opts.tag in ("", "auto") else opts.tag
    complete = replace(
        opts,
        context=opts.context.resolve(),
        tag=tag,
        python=python,
        requirements=name,
        base_image=opts.base_image or f"python:{PYTHONS[python]}-bookworm",
        dockerfile=dockerfile.resolve(),
        driver_version=driver,
        pip_conf=opts.pip_conf and opts.pip_conf.resolve(),
    )
    return ImageBuild(**vars(complete), torch=torch, named_torch=named)


def _choose_torch(torch: Torch, driver: str, auto_fix: bool, problems: Problems) -> Torch:
    """Return the build, or with auto_fix another for the driver; add a problem if none fits."""
    if not driver or not (problem := driver_problem(torch, driver)):
        return torch
    fitting = find_build(torch, driver)
    if auto_fix and fitting:
        log.info(f"fixed: {problem}; using torch {fitting}")
        return fitting
    problems.add(
        problem,
        hint="update the driver" + (", or:" if fitting else ""),
        run=commands.as_typed("--cuda", fitting.cuda) if fitting else "",
    )
    return torch


def _choose_python(opts: ImageOptions, torch: Torch, named: Torch, problems: Problems) -> str:
    """Return the Python of the image, or with --auto-fix one that the wheelhouse supports.

    Add a problem if neither fits. named: the torch of the requirements.
    """
    wheelhouse = opts.context / "wheelhouse"
    wheels = sorted(path.name for path in wheelhouse.glob("torch-*.whl"))
    fitting = [
        version
        for version in PYTHONS
        if any(_is_wheel_of(name, torch, named, version) for name in wheels)
    ]
    if not wheelhouse.is_dir() or opts.python in fitting:
        return opts.python
    problem = (
        f"{wheelhouse} has no wheel of torch {torch} for Python "
        f"{opts.python} ({', '.join(wheels) or 'none of torch'})"
    )
    other = next(iter(fitting), "")
    if opts.auto_fix and other and not opts.base_image:
        log.info(f"fixed: {problem}; using Python {other}")
        return other
    problems.add(
        problem,
        run=commands.as_typed("--python", other) if other else "",
        hint="" if other else "pack the bundle again for this Python and torch",
    )
    return opts.python


def _is_wheel_of(name: str, torch: Torch, named: Torch, python: str) -> bool:
    """Return whether a file is the wheel of this build of torch for this Python.

    A wheel without a local version is a build of `named`, the torch of the requirements.
    """
    full, _, rest = name.removeprefix("torch-").partition("-")
    version, _, local = full.partition("+")
    return (
        version == torch.version
        and rest.startswith(f"cp{python.replace('.', '')}-")
        and (f"+{local}" == torch.local or (not local and torch == named))
    )


def _find_commit(directory: Path) -> str:
    try:
        process = subprocess.run(
            ["git", "-C", str(directory), "rev-parse", "HEAD"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return process.stdout.strip() if process.returncode == 0 else "unknown"
