"""Keeps parts for a merge: each split of the input is an artifact of its own, built anywhere.

`<save-dir>.parts/split_03/` holds the parts of every unit of that split and, per unit, a record of
what it gave. The record is written last, so a unit with a record need not be read again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, log, manifest, partial_dirs, reading, records, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.identity import differences
from lib.core.paths import MANIFEST
from lib.corpus import work_units
from lib.corpus.inputs import InputFile
from lib.corpus.scan import identify_files
from lib.corpus.tally import Tally
from lib.corpus.work_units import UnitResult, WorkUnit

KIND = "dataset-parts/1"
_RECORD = "json"


def locate_parts(save_dir: Path) -> Path:
    """Return the directory in which the parts of a dataset lie until they are merged."""
    return save_dir.with_name(f"{save_dir.name}.parts")


def delete_parts(save_dir: Path, splits: Iterable[str]) -> None:
    """Delete the parts of a dataset that is merged, and nothing else that lies there."""
    there = [locate_parts(save_dir) / name for name in splits if name]
    ours = [
        path
        for path in there
        if partial_dirs.is_bare(path)
        or (not path.is_symlink() and (manifest.read_if_any(path) or {}).get("kind") == KIND)
    ]
    for path in ours:
        partial_dirs.remove(path, path / MANIFEST)  # last, so that a killed run's rest is known
    if ours:
        log.info(f"removed {locate_parts(save_dir)}, which is merged")
    with suppress(OSError):  # not there, or not empty
        locate_parts(save_dir).rmdir()


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of `0-4,7`, as --only-splits takes them."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"expected numbers such as 0-4,7, got {text!r}")
        if len(found := range(int(first), int(last or first) + 1)) == 0:
            raise argparse.ArgumentTypeError(f"expected a range that rises, got {part!r}")
        numbers += found
    return numbers


def select_splits(splits: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the names of the splits with some numbers; UsageError when one does not exist."""
    if list(splits) == [""]:
        raise UsageError(
            "--only-splits needs the splits of stage 01",
            found="a plain directory",
            hint="stage 01 makes splits of it",
        )
    by_number = {int(name.rpartition("_")[2]): name for name in splits}
    if absent := sorted(set(numbers) - by_number.keys()):
        raise UsageError(
            f"--only-splits: no split {', '.join(map(str, absent))}",
            expected=f"numbers from 0 to {max(by_number)}",
        )
    return [by_number[number] for number in sorted(set(numbers))]


def make_parts_identity(whole: dict[str, Any], files: Sequence[InputFile]) -> dict[str, Any]:
    """Return what decides the parts of one split, from what decides the whole dataset."""
    options = {key: value for key, value in whole["options"].items() if key != "max_error_rate"}
    return {"options": options, "inputs": identify_files(files)}


def process_unit(unit: WorkUnit) -> UnitResult:
    """Read a unit and keep its parts, unless a run before did so and they are undamaged."""
    done = _read_record(unit)
    if done and all(
        path.is_file() and hashing.matches(path, done.digests[path.name]) for path in unit.parts()
    ):
        return done
    done = work_units.process_unit(unit)
    if done.changed:
        return done  # and no record of it
    done.digests = {path.name: hashing.file_digest(path) for path in unit.parts()}
    record = vars(done) | {"unit": None, "tally": done.tally.to_json()}
    manifest.write_json(unit.part(_RECORD), record)
    return done


def list_files(done: UnitResult) -> list[dict[str, Any]]:
    """Return the manifest entries of the files that a kept unit consists of."""
    out = Path(done.unit.out)
    record = done.unit.part(_RECORD)
    parts = [
        {"path": name, "bytes": (out / name).stat().st_size, "digest": digest}
        for name, digest in done.digests.items()
    ]
    return [*parts, manifest.file_entry(out, record)]


def _read_record(unit: WorkUnit) -> UnitResult | None:
    """Return what a unit gave, as it was recorded; None when no whole record is there."""
    try:
        record = reading.with_retries(
            lambda: records.read_json(unit.part(_RECORD)), unit.part(_RECORD)
        )
        return UnitResult(**record | {"unit": unit, "tally": Tally.from_json(record["tally"])})
    except (OSError, ValueError, KeyError, TypeError):  # of one that is not there, or is torn
        return None


def check_parts(
    save_dir: Path, whole: dict[str, Any], splits: Mapping[str, Sequence[InputFile]]
) -> int:
    """Return how many bytes the parts of all splits take.

    Raises ArtifactError that names the splits whose parts are missing, damaged, or made from other
    inputs or options.
    """
    wrong = []
    numbers = []
    stale = []
    total = 0
    versions = set()
    for name, files in splits.items():
        there = manifest.read_if_any(locate_parts(save_dir) / name)
        if there is None:
            found = [
                "not built"
                + (
                    ", or not finished"
                    if manifest.describe_leftovers(locate_parts(save_dir) / name)
                    else ""
                )
            ]
        elif there["kind"] != KIND:
            found = [f"kind {there['kind']} there, {KIND} now"]
        else:
            found = [
                *map(str, differences(there["identity"], make_parts_identity(whole, files)))
            ] or manifest.find_damage(locate_parts(save_dir) / name, there, deep=False)
            total += sum(entry["bytes"] for entry in there["files"])
            versions.add(json.dumps(there["versions"], sort_keys=True))
        if found:
            stale += ["--overwrite"] if there else []
            wrong.append(f"{name}: {'; '.join(found[:3])}")
            numbers.append(name.rpartition("_")[2].lstrip("0") or "0")
    if wrong:
        raise ArtifactError(
            f"{len(wrong)} of {len(splits)} splits cannot be merged",
            expected=f"parts of every split in {locate_parts(save_dir)}",
            found=units.join_lines(wrong, 20),
            run=commands.as_typed(*stale[:1], "--only-splits", ",".join(numbers), drop=["--merge"])
            + f"\n{commands.as_typed()}",
        )
    if len(versions) > 1:
        log.warn(
            "the parts were built with different versions of Python or its packages: one "
            "machine alone might give other bytes"
        )
    return total


def read_results(units: Sequence[WorkUnit]) -> Iterator[UnitResult]:
    """Yield what each unit gave, as it was recorded; ArtifactError when a record is missing."""
    for unit in units:
        done = _read_record(unit)
        if done is None:
            raise ArtifactError(
                f"{unit.part(_RECORD)} is damaged or gone",
                run=work_units.format_rebuild_commands(Path(unit.out)),
            )
        yield done
