"""Divide the first pass among machines: `--part 3/16` on each, then `--merge` on one.

`SAVE_DIR.parts/3-of-16/` contains the files of every sixteenth unit, as an artifact of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import commands, log, manifest, partial_dirs, publish, units
from lib.core.errors import ArtifactError
from lib.core.paths import MANIFEST
from lib.curate.reader import SourceDataset, Unit

KIND = "curation-part/1"
_NAME = re.compile(r"(\d+)-of-(\d+)")


class MachinePart(NamedTuple):
    """Describes the share of one machine. number: from 1 to total."""

    number: int
    total: int

    @property
    def directory(self) -> str:
        """Return the name of the part's directory."""
        return f"{self.number}-of-{self.total}"

    def select(self, source: SourceDataset) -> list[Unit]:
        """Return the units of this part; every part has units of all kinds of rows."""
        return source.units[self.number - 1 :: self.total]


def parse_part(text: str) -> MachinePart:
    """Return the part in a value of --part, such as `3/16`."""
    number, slash, total = text.partition("/")
    if not (slash and number.isdecimal() and total.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a part and a total such as 3/16, got {text!r}")
    if not 1 <= int(number) <= int(total):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {total}, got {number}")
    return MachinePart(int(number), int(total))


def locate_parts(save_dir: Path) -> Path:
    """Return the directory for the parts of a dataset until they are merged."""
    return save_dir.with_name(f"{save_dir.name}.parts")


def make_identity(identity: dict[str, Any], part: MachinePart) -> dict[str, Any]:
    """Return the identity of a part, from the identity of the first pass."""
    return identity | {"part": part.directory}


def find_parts(save_dir: Path, identity: dict[str, Any]) -> list[MachinePart]:
    """Return the parts to merge, in order.

    identity: of the first pass. Raises ArtifactError if there are no parts, or if one is missing or
    damaged, and UsageError if one was made in another way.
    """
    root = locate_parts(save_dir)
    names = [match for path in sorted(root.glob("*-of-*")) if (match := _NAME.fullmatch(path.name))]
    totals = {int(match[2]) for match in names}
    if len(totals) != 1:
        raise ArtifactError(
            f"{root} contains no parts of one division",
            found=", ".join(match[0] for match in names) or "nothing",
            expected="the parts of all machines: the same command with --part 1/N … --part N/N",
        )
    total = totals.pop()
    parts = [MachinePart(number, total) for number in range(1, total + 1)]
    missing = [part for part in parts if not (root / part.directory).is_dir()]
    if missing:
        raise ArtifactError(
            f"{units.counted(len(missing), 'part')} of {total} are missing in {root}",
            found=f"no {units.join_names([part.directory for part in missing], 10)}",
            run=commands.as_typed("--part", f"{missing[0].number}/{total}", drop=["--merge"]),
        )
    for part in parts:
        again = commands.as_typed(
            "--part", f"{part.number}/{total}", "--overwrite", drop=["--merge", "--overwrite"]
        )
        part_identity = make_identity(identity, part)
        publish.is_done(root / part.directory, KIND, part_identity, overwrite=False, run=again)
    return parts


def make_finder(save_dir: Path, parts: Sequence[MachinePart]) -> Callable[[Unit], Path]:
    """Return a function that returns where the files of a unit are."""
    root = locate_parts(save_dir)
    return lambda unit: root / parts[unit.number % len(parts)].directory


def delete_parts(save_dir: Path, parts: Sequence[MachinePart]) -> None:
    """Delete merged parts, and no other file in their directory."""
    root = locate_parts(save_dir)
    for part in parts:
        path = root / part.directory
        if not path.is_symlink() and manifest.read_kind(path) == KIND:
            # The manifest goes last, so that a later run recognises the rest after a kill.
            partial_dirs.delete_marked(path, path / MANIFEST)
    log.info(f"removed {root}, which has been merged")
    with suppress(OSError):  # it is not empty
        root.rmdir()
