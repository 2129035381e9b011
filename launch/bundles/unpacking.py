#!/usr/bin/env python3
"""Verify a bundle, and unpack it into a project; the airgap.py of every bundle is this file.

  python3.11 bundle/airgap.py verify bundle
  python3.11 bundle/airgap.py unpack bundle --to project --install

It needs only Python 3.10 or newer. Beside it are manifest.json, with the SHA-256 of every file, and
the files in volume_001/ and so on. Exit codes: 0 done; 2 bad usage; 3 the bundle is damaged; 4 out
of disk space.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
KIND = "bundle/1"
UNPACKED = ".bundle.json"
_USAGE = 2
_DAMAGED = 3
_FULL = 4
_CHUNK = 4 << 20
_WORKERS = min(16, (os.cpu_count() or 1) + 2)
_LINE_EVERY_S = 10.0
_CONTROL_ESCAPES = {n: f"\\x{n:02x}" for n in (*range(10), *range(11, 32), *range(127, 160))}

Entry = dict[str, Any]


class BundleError(Exception):
    """An error of this script, formatted for printing. code: the exit code."""

    def __init__(self, code: int, problem: str, **parts: str) -> None:
        lines = [
            f"  {label + ':':<9} " + text.replace("\n", f"\n{'':12}")
            for label, text in parts.items()
        ]
        super().__init__("\n".join([f"error: {problem}", *lines]))
        self.code = code


def parse_arguments(argv: list[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="pack|verify|unpack")
    actions.add_parser("pack", add_help=False, help="pack a bundle in a checkout: see pack --help")
    verify = actions.add_parser("verify", help="hash a bundle and name all damaged files")
    unpack = actions.add_parser("unpack", help="verify a bundle, then unpack it into a project")
    verify.description = "Hash a bundle, and name all damaged files."
    unpack.description = "Verify a bundle, then unpack it into a project."
    for action in (verify, unpack):
        action.add_argument("bundle", type=Path, metavar="DIR", help="the bundle")
    unpack.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="the project's directory (required)"
    )
    unpack.add_argument(
        "--install",
        action="store_true",
        help="create its .venv from the wheelhouse with this Python (default: off)",
    )
    unpack.add_argument("--dry-run", action="store_true", help="only print the plan (default: off)")
    return parser.parse_args(argv)


def print_line(text: object, descriptor: int = 1) -> None:
    """Print a line with unprintable characters escaped; do nothing if nobody reads (`| head`)."""
    visible = f"{text}\n".translate(_CONTROL_ESCAPES)
    with suppress(BrokenPipeError):
        os.write(descriptor, visible.encode(errors="backslashreplace"))


def read_manifest(bundle: Path) -> dict[str, Any]:
    """Return the manifest of a bundle. Raises BundleError (3) if it is missing or damaged."""
    path = bundle / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise BundleError(
                _DAMAGED, f"{bundle} is not a bundle", found=f"kind {content['kind']}"
            )
        if content_digest(content["files"], content["summary"]) != content["summary"]["digest"]:
            raise ValueError("its content does not match its digest")
        _require_valid(content["files"])
    except FileNotFoundError:
        raise BundleError(
            _DAMAGED,
            f"{bundle} is not a bundle (no {MANIFEST})",
            expected="the directory that `airgap.py pack` wrote",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(_DAMAGED, f"{path} is damaged", found=lacks) from None
    return content


def content_digest(entries: list[Entry], summary: dict[str, Any]) -> str:
    """Return the digest of a manifest's content, which detects damage to the manifest itself."""
    facts = {key: value for key, value in summary.items() if key != "digest"}
    return hashlib.sha256(json.dumps([entries, facts], sort_keys=True).encode()).hexdigest()


def _require_valid(entries: list[Entry]) -> None:
    """Raise ValueError for an impossible entry, such as a path that leads out of the bundle."""
    for entry in entries:
        for text in filter(None, (entry["path"], entry["to"])):
            if {"", ".", ".."} & {*text.split("/")} or "\0" in text:  # begins with / too
                raise ValueError(f"{text!r} leads out of its directory")
        if entry["to"] and not 0 <= entry["mode"] <= 0o777:
            raise ValueError(f"{entry['to']!r} has the mode {entry['mode']:o}")
        numbers = ("bytes", "offset", "mtime_ns") if entry["to"] else ("bytes",)
        if any(type(entry[key]) is not int or entry[key] < 0 for key in numbers):
            raise ValueError(f"{entry['path']!r} has impossible sizes or times")
    if len({entry["path"] for entry in entries}) < len(entries):
        raise ValueError("it names a file twice")
    files = group_by_file(entries)
    folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    for name, parts in files.items():
        ends = [part["offset"] + part["bytes"] for part in parts]
        if name in folders or [part["offset"] for part in parts] != [0, *ends[:-1]]:
            raise ValueError(f"the parts of {name!r} do not form a file")


def group_by_file(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the parts of each file of the project, by its path there, in their order."""
    files: dict[str, list[Entry]] = {}
    for entry in sorted((e for e in entries if e["to"]), key=lambda e: e["offset"]):
        files.setdefault(entry["to"], []).append(entry)
    return files


def verify_bundle(bundle: Path, content: dict[str, Any]) -> None:
    """Hash all files. Raises BundleError (3) with each damaged, missing or unknown file."""
    entries = content["files"]
    show = _make_progress("verifying", sum(entry["bytes"] for entry in entries))
    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = [
            *filter(None, pool.map(lambda e: _find_damage(bundle, e, show), entries)),
            *_find_unlisted(bundle, entries),
        ]
    if problems:
        raise BundleError(
            _DAMAGED,
            f"{bundle} is damaged: {len(problems)} problems",
            found="\n".join(problems),
            hint="copy these files again, then verify again",
        )
    print_line(
        f"{bundle}: {len(entries)} files, every byte is intact\n"
        f"  SHA-256 of {MANIFEST}: {manifest_digest(bundle)}"
    )


def manifest_digest(bundle: Path) -> str:
    """Return the SHA-256 of the manifest, which identifies the bundle."""
    return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()


def _find_damage(bundle: Path, entry: Entry, show: Callable[[int], None]) -> str:
    path = bundle / entry["path"]
    try:
        if path.is_symlink() or not path.is_file():
            exists = os.path.lexists(path)
            return f"{entry['path']} is {'not a plain file' if exists else 'missing'}"
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{entry['path']} has {size} bytes instead of {entry['bytes']}"
        if copy_part(path, None, show) != entry["digest"]:
            return f"{entry['path']} has changed since it was packed"
    except PermissionError:  # a problem of the user, not of the bundle
        raise
    except OSError as error:
        return f"{entry['path']} cannot be read: {error.strerror}"
    return ""


def _find_unlisted(bundle: Path, entries: list[Entry]) -> list[str]:
    """Return the files in a bundle that its manifest does not list. A volume may be a symlink."""
    known = {entry["path"] for entry in entries} | {MANIFEST}
    volumes = {path.partition("/")[0] for path in known if "/" in path}
    paths = [path for path in bundle.iterdir() if path.name not in volumes]
    for top in [bundle / name for name in volumes] + [p for p in paths if p.is_dir()]:
        for folder, folders, names in os.walk(top):
            links = [name for name in folders if Path(folder, name).is_symlink()]
            paths += [Path(folder, name) for name in names + links]
    plain = sorted(
        path.relative_to(bundle).as_posix()
        for path in paths
        if path.is_symlink() or not path.is_dir()
    )
    return [f"{name} is not part of the bundle" for name in plain if name not in known]


def copy_part(path: Path, to: Any, show: Callable[[int], None]) -> str:
    """Read a part, copy it to an open file if one is given, and return its digest."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            if to:
                to.write(chunk)
            show(len(chunk))
    return f"sha256:{hasher.hexdigest()}"


def _make_progress(action: str, total: int) -> Callable[[int], None]:
    """Return a function that counts bytes and prints a line now and then."""
    lock = threading.Lock()
    state = {"done": 0, "line": time.monotonic()}

    def show(count: int) -> None:
        with lock:
            state["done"] += count
            if time.monotonic() - state["line"] > _LINE_EVERY_S:
                state["line"] = time.monotonic()
                print_line(f"{action}: {state['done'] / 1e9:.1f} of {total / 1e9:.1f} GB")

    return show


def unpack_bundle(bundle: Path, target: Path, options: argparse.Namespace) -> None:
    """Unpack a bundle into a project: all checks come first, then all files or none."""
    content = read_manifest(bundle)
    stamp = target / UNPACKED  # a copy of the manifest
    is_unpacked = stamp.is_file() and stamp.read_bytes() == (bundle / MANIFEST).read_bytes()
    obstacle = ""
    if os.path.ismount(target) or target.is_relative_to(bundle.resolve()):
        obstacle = "is a mount point, or is inside the bundle"
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        obstacle = "exists and was not unpacked from this bundle"
    if obstacle and not is_unpacked:
        expected = "an unused name; the artifacts can be moved together afterwards"
        raise BundleError(_USAGE, f"{target} {obstacle}", expected=expected)
    torch = content["summary"].get("torch")  # bundles of earlier versions lack it
    if options.install:
        _require_python(content)
        _require_driver(torch)
    _require_space(content, target, options.install, is_unpacked)
    print_line(
        f"{bundle}: code at {content['summary']['commit'][:12]}, "
        f"{len(group_by_file(content['files']))} files → {target}"
        + (f", .venv of {sys.executable}" if options.install else "")
        + (f", torch {torch['version']} for {_describe_driver(torch)}" if torch else "")
    )
    if options.dry_run:
        return
    if is_unpacked:
        print_line(f"{target} was unpacked from this bundle already")
    else:
        verify_bundle(bundle, content)
        _write_files(bundle, content, target)
    if options.install:
        create_venv(target)
    activate = " && . .venv/bin/activate" if options.install else ""
    print_line(
        "\n      ".join(
            [f"\nnext: cd {shlex.quote(str(target))}{activate}", *content["summary"]["next"]]
        )
    )


def _require_space(
    content: dict[str, Any], target: Path, with_venv: bool, is_unpacked: bool
) -> None:
    needed = 0 if is_unpacked else sum(entry["bytes"] for entry in content["files"])
    if with_venv and not (target / ".venv" / "installed").exists():
        needed += content["summary"]["installed_bytes"]
    existing = next(path for path in (target, *target.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise BundleError(
            _FULL,
            f"not enough space under {existing}",
            expected=f"{needed / 1e6:,.0f} MB free",
            found=f"{free / 1e6:,.0f} MB free",
        )


def _write_files(bundle: Path, content: dict[str, Any], target: Path) -> None:
    """Write all files to a partial directory, hashing them again, and rename it to the target."""
    partial = target.absolute().with_name(f"{target.name}.partial-{manifest_digest(bundle)[:8]}")
    partial.mkdir(parents=True, exist_ok=True)
    content_dir = partial / "content"
    with _lock_partial(partial, target):
        shutil.rmtree(content_dir, ignore_errors=True)  # left by a killed run
        try:
            files = group_by_file(content["files"])
            show = _make_progress("unpacking", sum(e["bytes"] for e in content["files"]))
            for folder in {(content_dir / name).parent for name in files}:
                folder.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(_WORKERS) as pool:
                list(
                    pool.map(
                        lambda item: _write_file(bundle, content_dir / item[0], item[1], show),
                        files.items(),
                    )
                )
            shutil.copyfile(bundle / MANIFEST, content_dir / UNPACKED)
            os.sync()
            content_dir.rename(target.absolute())
        finally:
            shutil.rmtree(content_dir, ignore_errors=True)


@contextmanager
def _lock_partial(partial: Path, target: Path) -> Iterator[None]:
    """Lock a partial directory for a block, then delete it. Raises BundleError (2) on failure."""
    mark = partial / f".unfinished-{hashlib.sha256(os.fsencode(partial.name)).hexdigest()[:12]}"
    if partial.is_symlink() or (not mark.is_file() and any(partial.iterdir())):
        problem = f"{partial} is in the way, and this program did not create it"
        raise BundleError(_USAGE, problem, expected="an unused name; move it away")
    with mark.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BundleError(_USAGE, f"another process is unpacking {target} now") from None
        try:
            yield
        finally:
            mark.unlink(
                missing_ok=True
            )  # last, since after a kill the mark shows that the rest is ours
            partial.rmdir()


def _write_file(bundle: Path, path: Path, parts: list[Entry], show: Callable[[int], None]) -> None:
    with path.open("xb") as file:
        for part in parts:
            if copy_part(bundle / part["path"], file, show) != part["digest"]:
                problem = f"{bundle / part['path']} changed while it was copied"
                found = "other content than a moment ago; the disk may be failing"
                raise BundleError(_DAMAGED, problem, found=found)
    path.chmod(parts[0]["mode"])
    os.utime(path, ns=(parts[0]["mtime_ns"], parts[0]["mtime_ns"]))


def _require_python(content: dict[str, Any]) -> None:
    """Raise BundleError (2) if the wheelhouse is for another Python or machine."""
    python = content["summary"]["python"]
    tag = content["summary"]["platform"]
    if not python:
        raise BundleError(
            _USAGE, "the bundle has no wheelhouse", hint="unpack it without --install"
        )
    this_python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    libc, version = platform.libc_ver()
    glibc, _, machine = tag.removeprefix("manylinux_2_").partition("_")
    found = f"Python {this_python}, {platform.machine()}, {libc or 'no glibc'} {version}"
    is_new_enough = libc == "glibc" and int(version.split(".")[1]) >= int(glibc)
    if this_python != python or machine != platform.machine() or not is_new_enough:
        raise BundleError(
            _USAGE,
            "the wheelhouse is for another Python or machine",
            expected=f"Python {python}, {machine}, glibc 2.{glibc} or newer",
            found=found,
            hint=f"the same command with python{python}, or without --install",
        )


def _describe_driver(torch: dict[str, str]) -> str:
    """Return a text about the drivers that a build of torch works with."""
    return f"NVIDIA driver {torch['driver']} or newer" if torch["driver"] else "CPUs only"


def _require_driver(torch: dict[str, str] | None) -> None:
    """Raise BundleError (2) if this machine has GPUs whose driver is too old for torch.

    torch: the build in the wheelhouse. A machine without GPUs may install it for others.
    """
    try:
        process = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    driver = process.stdout.partition("\n")[0].strip() if process.returncode == 0 else ""
    driver_parts, needed_parts = (
        [int(part) for part in re.findall(r"\d+", text)]
        for text in (driver, (torch or {}).get("driver", ""))
    )
    if torch and driver_parts and driver_parts < needed_parts:
        raise BundleError(
            _USAGE,
            f"the NVIDIA driver here is too old for torch {torch['version']}",
            expected=_describe_driver(torch),
            found=f"driver {driver}",
            hint=f"update the driver, or pack again with --driver-version {driver}; "
            "without --install the files can still be unpacked",
        )


def create_venv(project: Path) -> None:
    """Create the project's .venv from its wheelhouse, with the bundle's own script."""
    script = project / "launch" / "bundles" / "install_wheels.py"
    if subprocess.run([sys.executable, str(script)], check=False).returncode:
        raise BundleError(
            _DAMAGED,
            f"{project / '.venv'} could not be created from the wheelhouse",
            found="see pip's output above",
            run=shlex.join([sys.executable, str(script)]),
        )


def main(argv: list[str], description: str) -> int:
    """Run `verify` or `unpack` and return the exit code."""
    try:
        if argv[:1] == ["pack"]:
            raise BundleError(
                _USAGE, "pack works only in a checkout", hint="use launch/airgap.py of the checkout"
            )
        options = parse_arguments(argv, description)
        if options.action == "verify":
            verify_bundle(options.bundle, read_manifest(options.bundle))
        else:
            unpack_bundle(options.bundle, Path(os.path.realpath(options.to)), options)
    except BundleError as error:
        print_line(error, 2)
        return error.code
    except OSError as error:
        print_line(f"error: {error.strerror}: {error.filename}", 2)
        return _FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else _USAGE
    except KeyboardInterrupt:
        print_line("\ninterrupted; the same command begins again", 2)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
