"""Parse and write a file that a person names for the output of a command."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lib.core import log, manifest


def add_json_option(parser: argparse.ArgumentParser, subject: str, *keys: str) -> None:
    """Add --json to a command that prints a result.

    subject: what the file contains. keys: the keys by which the command recognises its own files.
    """
    parser.add_argument(
        "--json",
        type=partial(parse_output_file, is_own=partial(_has_keys, {*keys})),
        metavar="FILE",
        help=f"also write all {subject} to FILE (default: none)",
    )


def parse_output_file(text: str, is_own: Callable[[str], bool]) -> Path:
    """Parse the path of a file that rank 0 will write; its directory may be missing.

    is_own: returns whether the command has written a file with this content. Raises
    ArgumentTypeError if it is a directory, cannot be written, or contains something else.
    """
    if not text:  # an unset variable
        raise argparse.ArgumentTypeError("expected a file to write, got ''")
    path = Path(text)
    if log.rank() > 0:
        return path
    target = path.absolute() if path.exists() else path.resolve()  # a link may lead nowhere yet
    if target.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, not a file to write")
    place = next(place for place in (target, *target.parents) if place.exists())
    if place == target and not _is_link_or_device(target):
        place = target.parent
    elif place != target and not place.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK if place.is_dir() else os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {place} is read-only")
    if target.is_file() and not _may_replace(target, is_own):
        raise argparse.ArgumentTypeError(
            f"{text} exists, and this command did not write it; choose another name"
        )
    return path


def _may_replace(path: Path, is_own: Callable[[str], bool]) -> bool:
    """Return whether a file is empty, as `mktemp` makes it, or was written by the command."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not content or is_own(content)


def _has_keys(keys: set[str], text: str) -> bool:
    """Return whether a text is a JSON object with these keys."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and keys <= content.keys()


def write_output(path: Path, text: str) -> None:
    """Write a text to the file: through a link, or into a device such as /dev/stdout.

    A file is replaced atomically, and its directory is made if it is missing.
    """
    if _is_link_or_device(path):
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(path, text)


def _is_link_or_device(path: Path) -> bool:
    """Return whether a path is a link, a device or a pipe, which no new file may replace."""
    return path.is_symlink() or (path.exists() and not path.is_file())
