"""Keep the parts of each split as an artifact, so that several machines can build one dataset.

`<save-dir>.parts/split_03/` contains the parts of each unit of that split, and one record per unit
with its result. The record is written last, so a unit with a record is complete.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.core import (
    commands,
    hashing,
    log,
    manifest,
    partial_dirs,
    reading,
    records,
    units,
)
from lib.core.errors import ArtifactError, UsageError
from lib.core.identity import find_differences
from lib.core.paths import MANIFEST
from lib.corpus import work_units
from lib.corpus.inputs import InputFile, identify_inputs
from lib.corpus.tally import Tally
from lib.corpus.work_units import UnitResult, WorkUnit

KIND = "dataset-parts/1"


def locate_parts(save_dir: Path) -> Path:
    """Return the directory for the parts of a dataset until they are merged."""
    return save_dir.with_name(f"{save_dir.name}.parts")


def delete_parts(save_dir: Path, splits: Iterable[str]) -> None:
    """Delete the parts of a merged dataset, and no other file in their directory."""
    candidates = [locate_parts(save_dir) / name for name in splits if name]
    merged = [
        path
        for path in candidates
        if partial_dirs.is_bare(path)
        or (not path.is_symlink() and (manifest.read_if_any(path) or {}).get("kind") == KIND)
    ]
    for path in merged:
        # The manifest goes last, so that a later run recognises the rest after a kill.
        partial_dirs.delete_marked(path, path / MANIFEST)
    if merged:
        log.info(f"removed {locate_parts(save_dir)}, which has been merged")
    with suppress(OSError):  # it does not exist, or is not empty
        locate_parts(save_dir).rmdir()


def parse_numbers(text: str) -> list[int]:
    """Return the numbers in a value of --only-splits, such as `0-4,7`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"expected numbers such as 0-4,7, got {text!r}")
        if len(selected := range(int(first), int(last or first) + 1)) == 0:
            raise argparse.ArgumentTypeError(f"expected an increasing range, got {part!r}")
        numbers += selected
    return numbers


def select_splits(splits: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the names of the splits with these numbers; UsageError if one does not exist."""
    _require_splits(splits, "--only-splits")
    by_number = {int(name.rpartition("_")[2]): name for name in splits}
    if absent := sorted(set(numbers) - by_number.keys()):
        raise UsageError(
            f"--only-splits: no split {', '.join(map(str, absent))}",
            expected=f"numbers from 0 to {max(by_number)}",
        )
    return [by_number[number] for number in sorted(set(numbers))]


def _require_splits(splits: Iterable[str], option: str) -> None:
    """Raise UsageError if the input is not divided into splits. option: the one that needs them."""
    if list(splits) == [""]:
        raise UsageError(
            f"{option} needs the splits of stage 01",
            found="a plain directory",
            hint="run stage 01 on it first",
        )


def make_parts_identity(identity: dict[str, Any], files: Sequence[InputFile]) -> dict[str, Any]:
    """Return the identity of one split's parts, from the identity of the dataset."""
    options = {key: value for key, value in identity["options"].items() if key != "max_error_rate"}
    named = {key: value for key, value in identity["inputs"].items() if key == "named_splits"}
    return identity | {"options": options, "inputs": identify_inputs(files) | named}


def process_unit(unit: WorkUnit) -> UnitResult:
    """Read a unit and keep its parts; undamaged parts of an earlier run are reused."""
    if unit.is_trial:
        return work_units.process_unit(unit)  # a record would be taken for that of the whole unit
    result = _read_record(unit)
    if result and all(
        path.name in result.digests
        and path.is_file()
        and hashing.has_digest(path, result.digests[path.name])
        for path in unit.parts()
    ):
        return result
    result = work_units.process_unit(unit)
    if result.changed:
        return result  # no record is written, because a file has changed
    result.digests = {path.name: hashing.file_digest(path) for path in unit.parts()}
    record = vars(result) | {"unit": None, "tally": result.tally.to_json()}
    if not result.rows_read:
        del record["rows_read"]  # keeps the record equal to those of versions without this field
    manifest.write_json(unit.part(work_units.RECORD), record)
    return result


def list_files(result: UnitResult) -> list[dict[str, Any]]:
    """Return the manifest entries of the files of a kept unit."""
    out = Path(result.unit.out)
    record = result.unit.part(work_units.RECORD)
    parts = [
        {"path": name, "bytes": (out / name).stat().st_size, "digest": digest}
        for name, digest in result.digests.items()
    ]
    return [*parts, manifest.file_entry(out, record)]


def _read_record(unit: WorkUnit) -> UnitResult | None:
    """Return the recorded result of a unit, None without a valid record."""
    try:
        record = reading.with_retries(
            lambda: records.read_json(unit.part(work_units.RECORD)), unit.part(work_units.RECORD)
        )
        return UnitResult(**record | {"unit": unit, "tally": Tally.from_json(record["tally"])})
    except (OSError, ValueError, KeyError, TypeError):  # the record is missing or damaged
        return None


def check_parts(
    save_dir: Path, identity: dict[str, Any], splits: Mapping[str, Sequence[InputFile]]
) -> int:
    """Check the parts of all splits before a merge and return their size in bytes.

    Raises ArtifactError with the splits whose parts are missing, damaged, or built from other
    inputs or options, and UsageError if the input has no splits.
    """
    _require_splits(splits, "--merge")
    problems = []
    numbers = []
    stale = []
    total = 0
    versions = set()
    for name, files in splits.items():
        content = manifest.read_if_any(locate_parts(save_dir) / name)
        if content is None:
            errors = [
                "not built"
                + (
                    " completely"
                    if manifest.describe_leftovers(locate_parts(save_dir) / name)
                    else ""
                )
            ]
        elif content["kind"] != KIND:
            errors = [f"it is of kind {content['kind']}, expected {KIND}"]
        else:
            errors = [
                *map(
                    str, find_differences(content["identity"], make_parts_identity(identity, files))
                )
            ] or _find_damage(locate_parts(save_dir) / name, content)
            total += sum(entry["bytes"] for entry in content["files"])
            versions.add(json.dumps(content["versions"], sort_keys=True))
        if errors:
            stale += ["--overwrite"] if content else []
            problems.append(f"{name}: {'; '.join(errors[:3])}")
            numbers.append(name.rpartition("_")[2].lstrip("0") or "0")
    if problems:
        raise ArtifactError(
            f"{len(problems)} of {units.counted(len(splits), 'split')} cannot be merged",
            expected=f"parts of every split in {locate_parts(save_dir)}",
            found=units.join_lines(problems, 20),
            run=commands.as_typed(*stale[:1], "--only-splits", ",".join(numbers), drop=["--merge"])
            + f"\n{commands.as_typed()}",
        )
    if len(versions) > 1:
        log.warn(
            "the parts were built with different versions of Python or its packages, so the "
            "dataset may differ from one that is built on one machine"
        )
    return total


def _find_damage(directory: Path, content: dict[str, Any]) -> list[str]:
    """Return sentences about damaged files of a split's parts.

    The sizes of all files are compared, and the contents of the units' records. These records
    contain the digests of the other files, which are compared when the files are read.
    """
    of_units = [
        entry for entry in content["files"] if entry["path"].endswith(f".{work_units.RECORD}")
    ]
    return manifest.find_damage(directory, content, deep=False) or manifest.find_damage(
        directory, content | {"files": of_units}, deep=True
    )


def read_results(units: Sequence[WorkUnit]) -> Iterator[UnitResult]:
    """Yield the recorded result of each unit; raises ArtifactError if a record is missing."""
    for unit in units:
        result = _read_record(unit)
        if result is None:
            raise ArtifactError(
                f"{unit.part(work_units.RECORD)} is damaged or gone",
                run=work_units.format_rebuild_commands(Path(unit.out)),
            )
        yield result
