"""List torch's wheels, the CUDA that each contains, and the driver that it needs.

Images, bundles and the checks of a machine use this one table. Add a row for a new torch or CUDA.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import NamedTuple

from lib.core.errors import UsageError


class Release(NamedTuple):
    """A minor release of torch. newest: its last patch version. default: CUDA in `torch==X`.

    builds: every CUDA for which there are wheels, the oldest first.
    """

    newest: str
    default: str
    builds: tuple[str, ...]


# Source: the local versions torch-X+cuYYZ that PyTorch publishes for Linux; the wheel's metadata
# also names the default (2.13.0 requires cuda-toolkit 13.0.3).
RELEASES = {
    "2.11": Release("2.11.0", "13.0", ("12.6", "12.8", "13.0")),
    "2.12": Release("2.12.1", "13.0", ("12.6", "13.0", "13.2")),
    "2.13": Release("2.13.0", "13.0", ("12.6", "13.0", "13.2")),
}
# The minor versions of Python 3 that this project supports; torch has wheels for all of them.
PYTHON_MINORS = range(10, 15)
PYTHONS = f"3.{PYTHON_MINORS[0]} to 3.{PYTHON_MINORS[-1]}"
# The oldest Linux driver for each major version of CUDA; it runs all minor versions.
# Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1
# (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
OLDEST_DRIVERS = {"12": "525", "13": "580"}
# The CUDA whose wheels contain no code for Blackwell (10.0, 12.0), and the one whose wheels contain
# it for drivers older than 580. Source: RELEASE.md of PyTorch, "PyTorch CUDA support matrix".
WITHOUT_BLACKWELL = "12.6"
BLACKWELL = "cu128"
NO_CUDA = "none"
_PIN = re.compile(r"^torch==(\d+\.\d+)(\.\d+)(?:\+(\w+))?[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Torch:
    """A build of torch. version: `2.13.0`. cuda: `13.0`, or "" for a build without CUDA."""

    version: str
    cuda: str

    def __str__(self) -> str:
        return f"{self.version}{self.local}"

    @property
    def local(self) -> str:
        """Return the local version of the wheel: `+cu130`, `+cpu`."""
        return f"+cu{self.cuda.replace('.', '')}" if self.cuda else "+cpu"

    @property
    def release(self) -> Release:
        """Return this build's release. Raises UsageError if the table does not contain it."""
        minor = self.version.rpartition(".")[0]
        if minor not in RELEASES:
            raise UsageError(
                f"torch {minor} is not in the table of its CUDA builds",
                found=f"torch {', '.join(RELEASES)}",
                hint="add a row for it to lib/parallel/torch_builds.py",
            )
        return RELEASES[minor]

    @property
    def oldest_driver(self) -> str:
        """Return the oldest driver for this CUDA, "" for no CUDA; UsageError if unknown."""
        major = self.cuda.partition(".")[0]
        if major and major not in OLDEST_DRIVERS:
            raise UsageError(
                f"the driver that CUDA {major} needs is not known",
                hint="add a row for it to lib/parallel/torch_builds.py",
            )
        return OLDEST_DRIVERS.get(major, "")

    @property
    def requirement(self) -> str:
        """Return the requirement for pip, without a local version if that build is the default."""
        is_default = self.cuda == self.release.default
        return f"torch=={self.version}" if is_default else f"torch=={self}"


def find_pin(requirements: str, cuda: str = "") -> Torch:
    """Return the build of torch that a list of requirements pins.

    cuda: replaces the CUDA of the pin; `none` for a build without CUDA. Raises UsageError if the
    list pins no torch, or the build does not exist.
    """
    match = _PIN.search(requirements)
    if not match:
        raise UsageError("the requirements pin no torch", expected="a line `torch==X.Y.Z`")
    minor, patch, local = match.groups()
    release = Torch(minor + patch, "").release
    version = cuda or (parse_local_version(f"+{local}") or NO_CUDA if local else release.default)
    if version not in (*release.builds, NO_CUDA):
        raise UsageError(
            f"torch {minor} is not built for CUDA {version}",
            expected=f"one of {', '.join(release.builds)}, or {NO_CUDA}",
        )
    return Torch(minor + patch, "" if version == NO_CUDA else version)


def replace_pin(requirements: str, torch: Torch) -> str:
    """Return a list of requirements that pins this build instead."""
    return _PIN.sub(torch.requirement, requirements)


def parse_local_version(version: str) -> str:
    """Return the CUDA version in a version of torch: `12.6` for `2.13.0+cu126`, "" without one."""
    match = re.search(r"\+cu(\d{2,})(\d)$", version)
    return f"{match[1]}.{match[2]}" if match else ""


def parse_cuda(text: str) -> str:
    """Parse the value of a CUDA option: 12.6 or cu126; none or cpu for a build without CUDA."""
    version = parse_local_version(f"+{text}") or text
    if version in (NO_CUDA, "cpu"):
        return NO_CUDA
    if version and not re.fullmatch(r"\d+\.\d+", version):
        raise argparse.ArgumentTypeError(
            f"expected a version such as 12.6 or cu126, or {NO_CUDA}, got {text!r}"
        )
    return version


def parse_driver(text: str) -> str:
    """Parse the version of a driver; "" stands for an unknown one."""
    if text and not re.fullmatch(r"\d+(\.\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"expected a version such as 570.86.15, got {text!r}")
    return text


def driver_problem(torch: Torch, driver: str) -> str:
    """Return why a driver cannot run a build of torch, or ""."""
    needed = torch.oldest_driver
    if not needed or _parts(driver) >= _parts(needed):
        return ""
    return (
        f"driver {driver} is too old for torch {torch.version}, whose CUDA {torch.cuda} needs "
        f"{needed} or newer"
    )


def find_build(torch: Torch, driver: str) -> Torch | None:
    """Return the same torch with the newest CUDA that a driver can run, or None."""
    return next(
        (build for build in list_builds(torch, driver) if build.version == torch.version), None
    )


def list_builds(torch: Torch, driver: str = "", cuda: str = "") -> list[Torch]:
    """Return the builds of this torch and of older ones, the newest first.

    driver: return only builds that this driver can run. cuda: only builds for this CUDA.
    """
    older = [
        Torch(release.newest, "")
        for release in reversed(RELEASES.values())
        if _parts(release.newest) < _parts(torch.version) and release is not torch.release
    ]
    builds = [
        Torch(base.version, cuda_version)
        for base in (torch, *older)
        for cuda_version in reversed(base.release.builds)
    ]
    return [
        build
        for build in builds
        if cuda in ("", build.cuda) and not (driver and driver_problem(build, driver))
    ]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
