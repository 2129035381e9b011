"""Which CUDA the wheels of torch bring along, and which driver that CUDA wants of a machine.

Images, bundles and the checks of a machine read this one table. A new torch or CUDA is a new row.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import NamedTuple

from lib.core.errors import UsageError


class Release(NamedTuple):
    """newest: its last patch. default: the CUDA of plain `torch==X`. builds: all, oldest first."""

    newest: str
    default: str
    builds: tuple[str, ...]


# Source: the local versions torch-X+cuYYZ that PyTorch publishes for Linux; the default also stands
# in the wheel's metadata (2.13.0 requires cuda-toolkit 13.0.3).
RELEASES = {
    "2.11": Release("2.11.0", "13.0", ("12.6", "12.8", "13.0")),
    "2.12": Release("2.12.1", "13.0", ("12.6", "13.0", "13.2")),
    "2.13": Release("2.13.0", "13.0", ("12.6", "13.0", "13.2")),
}
# Oldest Linux driver by the major version of CUDA: within one, any minor version runs.
# Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1
# (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
OLDEST_DRIVERS = {"12": "525", "13": "580"}
# The one without code for Blackwell (10.0, 12.0), and what has it for drivers older than 580.
# Source: RELEASE.md of PyTorch, "PyTorch CUDA support matrix".
WITHOUT_BLACKWELL = "12.6"
BLACKWELL = "cu128"
NO_CUDA = "none"
_PIN = re.compile(r"^torch==(\d+\.\d+)(\.\d+)(?:\+(\w+))?[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Torch:
    """Names a build of torch. version: `2.13.0`. cuda: `13.0`, or empty for one without."""

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
        """Return what is known of its release; UsageError when that is nothing."""
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
        """Return the oldest driver that it works with, "" without CUDA; UsageError if unknown."""
        major = self.cuda.partition(".")[0]
        if major and major not in OLDEST_DRIVERS:
            raise UsageError(
                f"the driver that CUDA {major} wants is not known",
                hint="add a row for it to lib/parallel/torch_builds.py",
            )
        return OLDEST_DRIVERS.get(major, "")

    @property
    def requirement(self) -> str:
        """Return what pip is asked for: without a local version where that build is the default."""
        is_default = self.cuda == self.release.default
        return f"torch=={self.version}" if is_default else f"torch=={self}"


def pinned(requirements: str, cuda: str = "") -> Torch:
    """Return the build that a list of requirements names. cuda: another one than that, or `none`.

    Raises UsageError when the list pins no torch, or there is no such build.
    """
    match = _PIN.search(requirements)
    if not match:
        raise UsageError("the requirements pin no torch", expected="a line `torch==X.Y.Z`")
    minor, patch, local = match.groups()
    release = Torch(minor + patch, "").release
    wanted = cuda or (cuda_of(f"+{local}") or NO_CUDA if local else release.default)
    if wanted not in (*release.builds, NO_CUDA):
        raise UsageError(
            f"torch {minor} is not built for CUDA {wanted}",
            expected=f"one of {', '.join(release.builds)}, or {NO_CUDA}",
        )
    return Torch(minor + patch, "" if wanted == NO_CUDA else wanted)


def repinned(requirements: str, torch: Torch) -> str:
    """Return a list of requirements with this build in the place of the one that it pins."""
    return _PIN.sub(torch.requirement, requirements)


def cuda_of(version: str) -> str:
    """Return the CUDA that a local version names: `12.6` for `2.13.0+cu126`; empty for none."""
    match = re.search(r"\+cu(\d{2,})(\d)$", version)
    return f"{match[1]}.{match[2]}" if match else ""


def read_cuda(text: str) -> str:
    """Parse a CUDA version as people type it: 12.6, cu126, or none and cpu for a torch without."""
    found = cuda_of(f"+{text}") or text
    if found in (NO_CUDA, "cpu"):
        return NO_CUDA
    if found and not re.fullmatch(r"\d+\.\d+", found):
        raise argparse.ArgumentTypeError(
            f"expected a version such as 12.6 or cu126, or {NO_CUDA}, got {text!r}"
        )
    return found


def read_driver(text: str) -> str:
    """Parse the version of a driver; an empty one means that none is named."""
    if text and not re.fullmatch(r"\d+(\.\d+){0,2}", text):
        raise argparse.ArgumentTypeError(f"expected a version such as 570.86.15, got {text!r}")
    return text


def driver_problem(torch: Torch, driver: str) -> str:
    """Return in a sentence why a driver does not do for this torch; empty when it does."""
    needed = torch.oldest_driver
    if not needed or _parts(driver) >= _parts(needed):
        return ""
    return (
        f"driver {driver} is too old for torch {torch.version}, whose CUDA {torch.cuda} wants "
        f"{needed} or newer"
    )


def build_for(torch: Torch, driver: str) -> Torch | None:
    """Return the same torch with the newest CUDA that a driver does for, None without any."""
    return next(
        (build for build in candidates(torch, driver) if build.version == torch.version), None
    )


def candidates(torch: Torch, driver: str = "", cuda: str = "") -> list[Torch]:
    """Return the builds of this torch and of older ones, the newest first.

    driver: those that it does for. cuda: those for that version.
    """
    older = [
        Torch(release.newest, "")
        for release in reversed(RELEASES.values())
        if _parts(release.newest) < _parts(torch.version) and release is not torch.release
    ]
    builds = [
        Torch(each.version, number)
        for each in (torch, *older)
        for number in reversed(each.release.builds)
    ]
    return [
        build
        for build in builds
        if cuda in ("", build.cuda) and not (driver and driver_problem(build, driver))
    ]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
