"""Remembers the image that was built last in a directory, for the jobs that are started there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from lib.core import log, manifest, records

_FILE = Path(".cache") / "image.json"


@dataclass(frozen=True)
class Built:
    """Names an image. is_pushed: to a registry, from which the nodes can fetch it."""

    image: str
    is_pushed: bool


def note(built: Built) -> None:
    """Write down what was built; where that is impossible, --image has to name it."""
    try:
        _FILE.parent.mkdir(exist_ok=True)
        manifest.write_json(_FILE, asdict(built))
    except OSError as error:
        log.warn(f"the image is not noted for launch/kubernetes.py: {error}")


def find() -> Built | None:
    """Return what was built last in this directory, None where nothing was."""
    try:
        noted = records.read_json(_FILE)
        return Built(str(noted["image"]), bool(noted["is_pushed"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
