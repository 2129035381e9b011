"""Download the wheels of requirements.txt for a given Python and platform, on any machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, log, manifest, publish
from lib.core.errors import UsageError
from lib.parallel import torch_builds
from lib.parallel.torch_builds import Torch

KIND = "wheelhouse/1"
_OLDEST_GLIBC = 5
_PIN_LIST = "requirements.txt"
_NOT_FOUND = re.compile(r"No matching distribution found for ([\w.-]+)==([\w.+]+)")
_NEEDS_CUDA = re.compile(
    r"^Requires-Dist: (?:cuda-toolkit|nvidia-cuda-runtime[\w-]*)\b"
    r"[^;\n]*==(\d+\.\d+)",
    re.MULTILINE,
)
_LEGACY_TAGS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

# pip evaluates `; python_version < "3.11"` for its own interpreter, whatever --python-version and
# --platform say (up to pip 26; pypa/pip 11664). So these values are replaced.
_PIP_WRAPPER = """
import json, runpy, sys
from pip._vendor.packaging import markers
environment = {**markers.default_environment(), **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(environment)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""


class NoSuchTorch(UsageError):
    """The index has no such build of torch."""


@dataclass(frozen=True)
class Target:
    """The far side. python: for example `3.11`. glibc: its minor version. machine: `x86_64`."""

    python: str
    glibc: int
    machine: str

    @property
    def platform(self) -> str:
        """Return the newest platform tag that a wheel may have."""
        return f"manylinux_2_{self.glibc}_{self.machine}"

    @property
    def tags(self) -> list[str]:
        """Return all platform tags that its wheels may have, the best first."""
        tags = []
        for minor in range(self.glibc, _OLDEST_GLIBC - 1, -1):
            tags.append(f"manylinux_2_{minor}_{self.machine}")
            tags += [f"{_LEGACY_TAGS[minor]}_{self.machine}"] if minor in _LEGACY_TAGS else []
        return [*tags, f"linux_{self.machine}"]

    @property
    def markers(self) -> dict[str, str]:
        """Return the values of the markers that may follow `;` in a requirement."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": self.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }


def parse_target(python: str, platform: str) -> Target:
    """Return the target of --python and --platform. Raises UsageError if there are no wheels."""
    name = platform.replace("manylinux2014", "manylinux_2_17")
    match = re.fullmatch(r"manylinux_2_(\d+)_(x86_64|aarch64)", name)
    if not match or int(match[1]) < _OLDEST_GLIBC:
        raise UsageError(
            f"--platform {platform} is unknown",
            expected="manylinux_2_<minor of glibc>_x86_64 or …_aarch64; torch 2.13 "
            "needs manylinux_2_28",
        )
    if python not in {f"3.{minor}" for minor in torch_builds.PYTHON_MINORS}:
        raise UsageError(f"--python {python} is not supported", expected=torch_builds.PYTHONS)
    return Target(python, int(match[1]), match[2])


def choose_builds(lists: dict[str, bytes], cuda: str, driver: str) -> list[Torch]:
    """Return the builds of torch that suit the far side, the best first.

    cuda: the CUDA version, empty for any. driver: the driver of the far side, empty if unknown. If
    both are empty, so is the result, and pip downloads the build that the lists pin. Raises
    UsageError if no build suits.
    """
    if not cuda and not driver:
        return []
    pin = torch_builds.find_pin(lists[_PIN_LIST].decode())
    if cuda == torch_builds.NO_CUDA:
        return [Torch(pin.version, "")]
    if builds := torch_builds.list_builds(pin, driver, cuda):
        return sorted(builds, key=lambda build: build != pin)  # every index has the pinned build
    condition = " and ".join(
        ([f"is built for CUDA {cuda}"] if cuda else [])
        + ([f"runs with driver {driver}"] if driver else [])
    )
    cuda_versions = sorted(
        {number for build in torch_builds.list_builds(pin) for number in [build.cuda]}, key=float
    )
    raise UsageError(
        f"no torch that this code supports {condition}",
        expected=f"CUDA {', '.join(cuda_versions)}; a driver from "
        f"{min(torch_builds.OLDEST_DRIVERS.values())} on, for CUDA 13 from "
        f"{torch_builds.OLDEST_DRIVERS['13']} on",
    )


def prepare_wheelhouse(
    cache_dir: Path, lists: dict[str, bytes], target: Target, choices: list[Torch]
) -> Path:
    """Return the finished wheelhouse, after downloading missing wheels.

    lists: requirement files by name. choices: builds of torch; the first one that pip finds
    replaces the pinned build. Without choices, the pinned build is used. Raises UsageError if pip
    fails.
    """
    for build in choices:
        try:
            return _build_wheelhouse(cache_dir, lists, target, choices, build)
        except NoSuchTorch as error:
            if build != choices[-1]:
                log.warn(f"{error.problem}; trying an older build")
            else:
                raise UsageError(
                    error.problem + (", and no other suitable build" if choices[1:] else ""),
                    expected=f"torch {' or '.join(map(str, choices))}",
                    hint=error.hint,
                ) from None
    return _build_wheelhouse(cache_dir, lists, target)


def _build_wheelhouse(
    cache_dir: Path,
    lists: dict[str, bytes],
    target: Target,
    choices: Sequence[Torch] = (),
    build: Torch | None = None,
) -> Path:
    """Return a wheelhouse for one of the builds, or for the pinned one if `build` is None."""
    if build:
        pins = torch_builds.replace_pin(lists[_PIN_LIST].decode(), build)
        lists = {**lists, _PIN_LIST: pins.encode()}
    identity: dict[str, Any] = {
        "options": {"python": target.python, "platform": target.platform},
        "inputs": {name: hashing.bytes_digest(text, "sha256") for name, text in lists.items()},
    }
    name = f"py{target.python}-{target.platform}-{hashing.fingerprint(identity)[:8]}"
    directory = cache_dir / "wheelhouse" / name
    if publish.is_done(directory, KIND, identity, overwrite=False):
        log.info(f"wheels: {directory}, downloaded before")
        return directory
    with publish.Build(directory, KIND, identity, overwrite=False, resumable=True) as building:
        for name, text in lists.items():
            (building.dir / name).write_bytes(text)
        try:
            _download_wheels(building.dir, list(lists), target, has_choice=build is not None)
        except NoSuchTorch:
            building.resumable = False  # nothing was downloaded
            raise
        if (
            build
            and (downloaded_torch := find_torch(building.dir))
            and downloaded_torch not in choices
        ):
            raise UsageError(
                f"pip takes torch {downloaded_torch} for {build.requirement}",
                expected=f"torch {build}",
                hint="remove the settings that name other wheels first (`pip config list`)",
            )
        files = [manifest.file_entry(building.dir, path, "sha256") for path in building.files()]
        building.publish(
            stage="launch/airgap.py pack",
            options=identity["options"],
            files=files,
            summary={"installed_bytes": count_installed_bytes(building.dir)},
        )
    return directory


def _download_wheels(directory: Path, lists: list[str], target: Target, has_choice: bool) -> None:
    """Download the wheels of requirement lists, and build packages that exist as source only.

    has_choice: whether the build of torch is one of several choices. If so, NoSuchTorch is raised
    if pip does not find it.
    """
    words = [word for name in lists for word in ("-r", name)]
    words += [word for tag in target.tags for word in ("--platform", tag)]
    # With pip itself, the far side needs no ensurepip, which Debian's Python lacks.
    command = [
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--find-links",
        ".",
        "--implementation",
        "cp",
        "--python-version",
        target.python,
        "--dest",
        ".",
        "pip",
        *words,
    ]
    log.info(
        f"downloading wheels for Python {target.python} on {target.platform} "
        "(pip download, from the index in its settings)"
    )
    built: set[str] = set()
    while True:
        process = subprocess.run(
            [sys.executable, "-c", _PIP_WRAPPER, json.dumps(target.markers), *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if process.returncode == 0:
            return
        not_found = _NOT_FOUND.search(process.stderr)
        pin = f"{not_found[1]}=={not_found[2]}" if not_found else ""
        if not_found and not_found[1] == "torch" and has_choice:
            raise NoSuchTorch(
                f"pip finds no {pin} for Python {target.python} on {target.platform}",
                hint="each CUDA version has its own index, which PyTorch's page on "
                "installing names: PIP_EXTRA_INDEX_URL adds an index, PIP_FIND_LINKS a "
                "directory of wheels",
            )
        if (
            not not_found
            or not_found[1] == "torch"
            or pin in built
            or not _build_wheel(directory, not_found[1], pin)
        ):
            output = [
                line for line in process.stderr.splitlines() if not line.startswith("WARNING")
            ]
            raise UsageError(
                f"pip found no complete set of wheels for Python {target.python} on "
                f"{target.platform}",
                found="\n".join(output[-8:]),
                hint="--no-wheels packs none; or if the index can be reached:",
                run=commands.as_typed(),
            )
        built.add(pin)


def _build_wheel(directory: Path, name: str, pin: str) -> bool:
    """Build the wheel of a package without wheels. Return whether it runs on any machine."""
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--disable-pip-version-check",
            "--no-binary",
            name,
            "--wheel-dir",
            "built",
            pin,
        ],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    wheels = [*(directory / "built").glob("*-none-any.whl")] if process.returncode == 0 else []
    for wheel in wheels:
        log.info(f"{pin} exists as source only; its wheel was built here")
        wheel.replace(directory / wheel.name)
    shutil.rmtree(directory / "built", ignore_errors=True)
    return bool(wheels)


def find_torch(directory: Path) -> Torch | None:
    """Return the build of torch in a wheelhouse, None if it contains none.

    If the wheel has no local version, such as `+cu128`, its requirements name the CUDA version.
    """
    wheel = next(directory.glob("torch-*.whl"), None)
    if wheel is None:
        return None
    version = wheel.name.split("-")[1]
    if "+" in version:
        return Torch(version.partition("+")[0], torch_builds.parse_local_version(version))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        cuda = _NEEDS_CUDA.search(archive.read(name).decode("utf-8", "replace"))
    return Torch(version, cuda[1] if cuda else "")


def count_installed_bytes(directory: Path) -> int:
    """Return the bytes that the wheels need once they are installed."""
    total = 0
    for path in directory.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            total += sum(member.file_size for member in wheel.infolist())
    return total
