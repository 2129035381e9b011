"""What image is to be built: the versions that agree, and the command of docker that says so."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch.images import versions as image_versions
from launch.images.versions import ROOT, Torch
from lib.core import commands, log
from lib.core.errors import Problems, UsageError
from lib.core.options import Options

DOCKERFILE = ROOT / "launch" / "Dockerfile"
NAME = "llm-training"
# The image of each Python that the code supports.
PYTHONS = {"3.10": "3.10.19", "3.11": "3.11.14", "3.12": "3.12.12"}
_CODE = "/opt/pipeline"


@dataclass(frozen=True)
class Build:
    """What is built. python: `3.11`; driver: of the nodes, empty when not known."""

    context: Path
    tag: str
    torch: Torch
    named_torch: Torch
    python: str
    base_image: str
    efa: bool
    driver: str
    requirements: str
    platform: str
    pip_conf: Path | None

    def command(self) -> list[str]:
        """Return the arguments of docker."""
        major = self.torch.cuda.partition(".")[0]
        values = {"BASE_IMAGE": self.base_image, "VARIANT": "efa" if self.efa else "plain",
                  "TORCH_LOCAL": "" if self.torch == self.named_torch else self.torch.local,
                  "REQUIREMENTS": self.requirements, "REVISION": _commit(self.context),
                  "NVIDIA_REQUIRE_CUDA": f"cuda>={major}.0" if major else ""}
        return ["build", "--progress=plain", "--platform", self.platform,
                "--file", str(DOCKERFILE), "--tag", self.tag,
                *(word for name, value in values.items() if value or name == "NVIDIA_REQUIRE_CUDA"
                  for word in ("--build-arg", f"{name}={value}")),
                *(("--secret", f"id=pip.conf,src={self.pip_conf}") if self.pip_conf else ()),
                str(self.context)]

    def try_out(self) -> list[str]:
        """Return the arguments of docker that run the image once, without network or GPU.

        The driver of this machine may be older than that of the nodes, so it is not asked.
        """
        program = ("import torch; print('torch', torch.__version__, 'CUDA', "
                   "torch.version.cuda or 'none')")
        return ["run", "--rm", "--network", "none", "--env", "NVIDIA_DISABLE_REQUIRE=1",
                "--env", "NVIDIA_VISIBLE_DEVICES=void", self.tag, "sh", "-c",
                f'python {_CODE}/04_train_fsdp.py --help > /dev/null && python -c "{program}"']


def planned(opts: Options) -> Build:
    """Return the build of the options, with what does not agree told, or mended by --auto-fix."""
    requirements = opts.context / opts.requirements
    if not requirements.is_file():
        raise UsageError(f"{opts.context} is not a checkout and no unpacked bundle",
                         expected=f"{opts.requirements} in it")
    if opts.pip_conf and not opts.pip_conf.is_file():
        raise UsageError(f"--pip-conf: no such file: {opts.pip_conf}")
    named = image_versions.torch_pin(requirements)
    torch = image_versions.torch_pin(requirements, opts.cuda)
    problems = Problems()
    driver = opts.driver_version or _local_driver()
    if driver and (problem := image_versions.driver_problem(torch, driver)):
        fitting = image_versions.build_for(torch, driver)
        if opts.auto_fix and fitting:
            log.info(f"fixed: {problem}; torch {fitting.version}{fitting.local} is taken")
            torch = fitting
        else:
            problems.add(problem, hint="update the driver" + ", or:" * bool(fitting),
                         run=commands.again("--cuda", fitting.cuda) if fitting else "")
    base = opts.base_image or f"python:{PYTHONS[opts.python]}-bookworm"
    if problem := image_versions.base_problem(torch, base):
        problems.add(problem, hint="choose a base image without CUDA, or with that of torch")
    python = opts.python
    if problem := _wheelhouse_problem(opts.context / "wheelhouse", torch, named, python):
        other = _wheelhouse_python(opts.context / "wheelhouse", torch, named)
        if opts.auto_fix and other and not opts.base_image:
            log.info(f"fixed: {problem}; Python {other} is taken")
            python, base = other, f"python:{PYTHONS[other]}-bookworm"
        else:
            problems.add(problem, run=commands.again("--python", other) if other else "",
                         hint="" if other else "pack the bundle again for this Python and torch")
    problems.raise_if_any()
    tag = opts.tag or (f"{NAME}:{_commit(opts.context)[:12]}-torch{torch.version}"
                       f"-{torch.local.removeprefix('+')}" + ("-efa" if opts.efa else ""))
    return Build(opts.context.resolve(), tag, torch, named, python, base, opts.efa, driver,
                 opts.requirements, opts.platform, opts.pip_conf and opts.pip_conf.resolve())


def _wheelhouse_problem(wheelhouse: Path, torch: Torch, named: Torch, python: str) -> str:
    """Return why a wheelhouse cannot serve this build; empty without one, or when it can."""
    if not wheelhouse.is_dir():
        return ""
    found = sorted(path.name for path in wheelhouse.glob("torch-*.whl"))
    if any(_is_wheel_of(name, torch, named, python) for name in found):
        return ""
    return (f"{wheelhouse} has no wheel of torch {torch.version}{torch.local} for Python {python} "
            f"({', '.join(found) or 'none of torch'})")


def _wheelhouse_python(wheelhouse: Path, torch: Torch, named: Torch) -> str:
    return next((python for python in PYTHONS if any(
        _is_wheel_of(path.name, torch, named, python)
        for path in wheelhouse.glob("torch-*.whl"))), "")


def _is_wheel_of(name: str, torch: Torch, named: Torch, python: str) -> bool:
    """Tell whether a wheel is of a torch; one without local version is the default build."""
    full, _, rest = name.removeprefix("torch-").partition("-")
    version, _, local = full.partition("+")
    return version == torch.version and rest.startswith(f"cp{python.replace('.', '')}-") \
        and (f"+{local}" == torch.local or (not local and torch == named))


def _local_driver() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def _commit(directory: Path) -> str:
    try:
        done = subprocess.run(["git", "-C", str(directory), "rev-parse", "HEAD"],
                              capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
