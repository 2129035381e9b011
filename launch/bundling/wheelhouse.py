"""Has pip fetch the wheels of requirements.txt for a named Python and platform, on any machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, log, manifest, publish
from lib.core.errors import UsageError

KIND = "wheelhouse/1"
_OLDEST_GLIBC = 5
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

# pip evaluates `; python_version < "3.11"` for the interpreter it runs on, whatever
# --python-version and --platform say (up to pip 26; pypa/pip 11664): told here.
_PIP = """
import json, runpy, sys
from pip._vendor.packaging import markers
environment = {**markers.default_environment(), **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(environment)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""


@dataclass(frozen=True)
class Target:
    """Describes the far side. python: `3.11`. glibc: its minor version. machine: `x86_64`."""

    python: str
    glibc: int
    machine: str

    @property
    def platform(self) -> str:
        """Return the newest platform tag that a wheel may have."""
        return f"manylinux_2_{self.glibc}_{self.machine}"

    @property
    def tags(self) -> list[str]:
        """Return all platform tags that wheels for it may have, the best first."""
        tags = []
        for minor in range(self.glibc, _OLDEST_GLIBC - 1, -1):
            tags.append(f"manylinux_2_{minor}_{self.machine}")
            tags += [f"{_LEGACY[minor]}_{self.machine}"] if minor in _LEGACY else []
        return [*tags, f"linux_{self.machine}"]

    @property
    def markers(self) -> dict[str, str]:
        """Return what a requirement may ask about it after `;`."""
        return {"python_version": self.python, "python_full_version": f"{self.python}.0",
                "implementation_version": f"{self.python}.0", "implementation_name": "cpython",
                "platform_python_implementation": "CPython", "platform_machine": self.machine,
                "platform_system": "Linux", "sys_platform": "linux", "os_name": "posix"}


def target(python: str, platform: str) -> Target:
    """Return the target that --python and --platform name; UsageError for what has no wheels."""
    name = platform.replace("manylinux2014", "manylinux_2_17")
    match = re.fullmatch(r"manylinux_2_(\d+)_(x86_64|aarch64)", name)
    if not match or int(match[1]) < _OLDEST_GLIBC:
        raise UsageError(f"--platform {platform} is not known",
                         expected="manylinux_2_<minor of glibc>_x86_64 or …_aarch64; torch 2.13 "
                                  "needs manylinux_2_28")
    if not re.fullmatch(r"3\.1\d", python):
        raise UsageError(f"--python {python} is not known", expected="3.10, 3.11 or 3.12")
    return Target(python, int(match[1]), match[2])


def prepare(cache_dir: Path, lists: dict[str, bytes], wanted: Target) -> Path:
    """Return the finished wheelhouse, fetching what is not there; UsageError when pip cannot.

    lists: requirement files by name.
    """
    made_of: dict[str, Any] = {
        "options": {"python": wanted.python, "platform": wanted.platform},
        "inputs": {name: hashing.bytes_digest(text, "sha256") for name, text in lists.items()}}
    name = f"py{wanted.python}-{wanted.platform}-{hashing.fingerprint(made_of)[:8]}"
    place = cache_dir / "wheelhouse" / name
    if publish.is_done(place, KIND, made_of, overwrite=False):
        log.info(f"wheels: {place}, fetched before")
        return place
    with publish.Build(place, KIND, made_of, overwrite=False, resumable=True) as build:
        for name, text in lists.items():
            (build.dir / name).write_bytes(text)
        _download(build.dir, list(lists), wanted)
        files = [manifest.file_entry(build.dir, path, "sha256")
                 for path in build.files()]
        build.publish(stage="launch/airgap.py pack", options=made_of["options"], files=files,
                      summary={"installed_bytes": installed_bytes(build.dir)})
    return place


def _download(place: Path, lists: list[str], wanted: Target) -> None:
    words = [word for name in lists for word in ("-r", name)]
    words += [word for tag in wanted.tags for word in ("--platform", tag)]
    # With pip itself, the far side needs no ensurepip, which Debian's Python lacks.
    command = ["download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", wanted.python, "--dest", ".", "pip"]
    log.info(f"fetching wheels for Python {wanted.python} on {wanted.platform} "
             "(pip download; its settings name the index)")
    done = subprocess.run([sys.executable, "-c", _PIP, json.dumps(wanted.markers), *command,
                           *words], cwd=place, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise UsageError(f"pip found no complete set of wheels for Python {wanted.python} on "
                         f"{wanted.platform}", found="\n".join(said[-8:]),
                         hint="--no-wheels leaves them out; or when the index is in reach:",
                         run=commands.as_typed())


def installed_bytes(place: Path) -> int:
    """Return what the wheels take when they are installed."""
    total = 0
    for path in place.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            total += sum(member.file_size for member in wheel.infolist())
    return total
