"""Write and check `manifest.json`, which lists an artifact's files and marks it as finished."""

from __future__ import annotations

import functools
import glob
import json
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from lib.core import commands, hashing, placeholders, records, units
from lib.core.commands import REDACTED
from lib.core.config_file import TYPED
from lib.core.errors import ArtifactError, is_missing
from lib.core.options import VOLATILE
from lib.core.paths import MANIFEST

_INPUTS = ("src_dir", "data_folder", "train_tokenizer", "tokenizer", "config_json")  # paths
_STAGE = re.compile(r"0[1-5]_\w+\.py", re.ASCII)
_TEMPORARY = re.compile(r".+\.tmp-\d+")
_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "safetensors", "pyarrow")


class Remedy(TypedDict, total=False):
    """The parts of an error that say how to repair an artifact: a command, or a hint."""

    run: str
    hint: str


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect an artifact."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def file_entry(root: Path, path: Path, algorithm: str = hashing.FAST) -> dict[str, Any]:
    """Return the entry of a file: path relative to `root`, bytes, digest."""
    return {
        "path": path.relative_to(root).as_posix(),
        "bytes": path.stat().st_size,
        "digest": hashing.file_digest(path, algorithm),
    }


def write_manifest(
    directory: Path,
    *,
    kind: str,
    stage: str,
    identity: dict[str, Any],
    options: dict[str, Any],
    files: Iterable[dict[str, Any]],
    summary: dict[str, Any],
) -> None:
    """Write and fsync `<directory>/manifest.json`.

    kind: `name/version` of the format. identity: options and inputs that decide the content.
    files: entries from `file_entry`. summary: facts for later stages.
    """
    content = {
        "kind": kind,
        "stage": stage,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "identity": identity,
        "options": options,
        "versions": package_versions(),
        "summary": summary,
        "files": list(files),
    }
    write_json(directory / MANIFEST, content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_text(path, format_json(content))


def format_json(content: Any) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=1) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: through a temporary file, fsync and rename."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_temporary(directory: Path, names: Iterable[str] = ("*",)) -> None:
    """Delete temporary files that `write_text` of a killed process left in a directory.

    names: globs of the files that the killed process wrote, if other processes may write there too.
    """
    for name in names:
        for path in directory.glob(f"{name}.tmp-*"):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()


def read_manifest(
    directory: Path, kind: str, name: str, run: str = "", hint: str = ""
) -> dict[str, Any]:
    """Return the manifest of a finished artifact.

    name: the artifact in messages, such as "the splits". run, hint: how to make it. Raises
    ArtifactError if the directory is missing, unfinished, unreadable or of another kind.
    """
    if not directory.is_dir():
        raise ArtifactError(
            f"{directory} does not exist",
            expected=f"{name} in this directory",
            found=describe_leftovers(directory),
            run=run,
            hint=hint,
        )
    if not (directory / MANIFEST).exists():
        raise ArtifactError(
            f"{name} {directory} {_is(name)} not finished (no {MANIFEST})",
            found=describe_leftovers(directory),
            run=run,
            hint=hint,
        )
    content = read_if_any(directory)
    if content is None:
        raise ArtifactError(
            f"{directory / MANIFEST} is damaged",
            expected="the manifest that a finished stage writes",
            hint=hint,
            run=commands.move_away(directory, run),
        )
    if content["kind"] != kind:
        raise ArtifactError(
            f"{directory} contains no {name.removeprefix('the ')}",
            expected=f"kind {kind}",
            found=f"kind {content['kind']}",
            run=run,
            hint=hint,
        )
    return content


def read_if_any(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a directory, or None if it is missing or damaged.

    Raises OSError if it cannot be read, so that no artifact is rebuilt because its disk fails.
    """
    try:
        content = records.read_json(directory / MANIFEST)
        is_valid = (
            isinstance(content["kind"], str)
            and isinstance(content["summary"], dict)
            and isinstance(content["identity"], dict)
            and isinstance(content.get("options", {}), dict)
            and all(is_valid_entry(entry, content["kind"]) for entry in content["files"])
        )
    except OSError as error:
        if not is_missing(error):
            raise
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if is_valid else None


def is_valid_entry(entry: Any, kind: str) -> bool:
    """Return whether an entry of a manifest names a file of the artifact, its bytes and digest.

    The path of a raw file may begin with `../`: it lies beside the directory of its manifest.
    """
    path = entry["path"]
    size = entry["bytes"]
    if kind.startswith("raw/") and isinstance(path, str):
        path = path.removeprefix("../")
    return (
        not records.leads_out(path)
        and type(size) is int
        and size >= 0
        and isinstance(entry["digest"], str)
    )


def read_kind(directory: Path) -> str:
    """Return the kind in a manifest, even a damaged one; empty if it names none."""
    try:
        return str(records.read_json(directory / MANIFEST)["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def is_torn(directory: Path) -> bool:
    """Return whether a directory has a manifest that is not valid JSON."""
    try:
        records.read_json(directory / MANIFEST)
    except OSError as error:
        if not is_missing(error):
            raise
        return False
    except ValueError:
        return True
    return False


def make_remedy(content: dict[str, Any], *more: object, **places: object) -> Remedy:
    """Return the parts of an error that say how to make an artifact again.

    content: its manifest. places: options that name its current directory. The result is a command
    under `run` if the inputs still exist under their names, else a sentence under `hint`.
    """
    options = {
        key: value
        for key, value in (content.get("options", {}) | places).items()
        if key not in VOLATILE and value != REDACTED
    }
    if not _STAGE.fullmatch(str(content.get("stage", ""))):
        return {"hint": f"{MANIFEST} does not name the stage that made it"}
    command = commands.script(content["stage"], *commands.as_words(options), *more)
    moved = [key for key in _INPUTS if options.get(key) and not Path(str(options[key])).exists()]
    # A command that would run a stranger's code is named, but not offered for pasting.
    needs_care = bool(moved) or any(options.get(key) for key in TYPED)
    return {"hint": f"it was made by `{command}`"} if needs_care else {"run": command}


def find_damage(directory: Path, content: dict[str, Any], deep: bool) -> list[str]:
    """Return one sentence for each damaged file of an artifact.

    deep: also hash the content; otherwise check only presence and size.
    """
    return list(
        filter(
            None,
            (
                describe_damage(directory / entry["path"], entry, deep)
                if is_valid_entry(entry, content.get("kind", ""))
                else f"{MANIFEST} names {entry['path']!r}, which is no file of {directory}"
                for entry in content["files"]
            ),
        )
    )


def describe_damage(
    path: Path,
    entry: dict[str, Any],
    deep: bool,
    advance: Callable[[int], None] = lambda size: None,
) -> str:
    """Return a sentence about the damage of a file; empty if it is intact.

    Raises OSError if the file cannot be read, since that says nothing about its content. advance:
    called with the number of bytes of each piece that was hashed.
    """
    try:
        status = path.stat()
    except OSError as error:
        if not is_missing(error):
            raise
        return f"{path} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is missing"
    if status.st_size != entry["bytes"]:
        difference = f"has {status.st_size} bytes instead of {entry['bytes']}"
    elif deep and not hashing.has_digest(path, entry["digest"], advance):
        difference = "has other content than when it was written"
    else:
        return ""
    placeholder = placeholders.find_in_file(path)
    return f"{path} {f'is {placeholder}' if placeholder else difference}"


def require_intact(
    directory: Path,
    content: dict[str, Any],
    name: str,
    run: str = "",
    hint: str = "",
    deep: bool = False,
) -> None:
    """Raise an ArtifactError that lists every damaged file of an artifact.

    run, hint: the command and the advice that repair it.
    """
    if damage := find_damage(directory, content, deep):
        raise make_damage_error(directory, name, damage, run=run, hint=hint)


def make_damage_error(directory: Path, name: str, found: list[str], **remedy: str) -> ArtifactError:
    """Return the error for a damaged artifact. found: sentences from `find_damage`."""
    return ArtifactError(
        f"{name} {directory} {_is(name)} damaged", found=units.join_lines(found, 10), **remedy
    )


def _is(name: str) -> str:
    """Return `is` or `are`, as it follows the name of an artifact: `the splits` is a plural."""
    return "are" if name.endswith("s") else "is"


def describe_leftovers(directory: Path) -> str:
    """Return a text about the leftovers of a run beside a missing artifact; empty without any."""
    leftovers = (
        sorted(directory.parent.glob(f"{glob.escape(directory.name)}.partial-*"))
        if directory.parent.is_dir()
        else []
    )
    if not leftovers:
        return ""
    age_min = (time.time() - leftovers[0].stat().st_mtime) / 60
    return f"{leftovers[0]} ({age_min:.0f} min old), left by a run that did not finish"
