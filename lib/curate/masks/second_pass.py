"""Mask the rows that a build in two passes keeps, in worker processes, unit by unit in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lib.core import declared, hashing, workers
from lib.corpus import pool, work_units
from lib.corpus.dataset import DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.corpus.work_units import UnitResult
from lib.curate.masks import part_masker
from lib.curate.masks.mask_options import make_masker
from lib.curate.masks.part_masker import MaskedPart

if TYPE_CHECKING:
    import numpy as np

MaskedUnit = tuple[UnitResult, Mapping[str, MaskedPart]]


class _MaskTask(NamedTuple):
    """Describes the parts of a unit that a worker masks.

    parts: by split, the path of the part, its digest, and which rows to mask (bool [rows]). out:
    the common beginning of the paths of the masked parts.
    """

    parts: dict[str, tuple[Path, str, np.ndarray]]
    out: Path
    row_options: RowOptions


def mask_units(
    results: Iterable[UnitResult], dataset: DatasetWriter, opts: RowOptions, count: int
) -> Iterator[MaskedUnit]:
    """Yield each unit with its masked parts by split; {} for a unit that this pass need not mask.

    results: the units that the dataset takes next. count: number of worker processes.
    """
    if not opts.masks_later:
        for result in results:
            yield result, {}
        return
    assert dataset.plan
    plan = dataset.plan
    first = dataset.planned_rows
    row_options = declared.read_options(RowOptions, opts)  # workers cannot import the stage
    waiting: deque[UnitResult] = deque()

    def list_tasks() -> Iterator[_MaskTask]:
        row = first
        for result in results:
            unit = result.unit
            parts = {}
            for split in row_options.splits:
                is_kept = plan.select(row, result.rows[split]).copies > 0
                row += result.rows[split]
                part = unit.part(split)
                parts[split] = part, result.digests[part.name], is_kept
            waiting.append(result)
            out = dataset.plan_work / f"masked.{Path(unit.out).name}.{unit.number:08d}"
            yield _MaskTask(parts, out, row_options)

    with workers.Pool(count, "masks", _prepare_worker, context=pool.start_server()) as processes:
        for masked in processes.run(list_tasks()):
            yield waiting.popleft(), masked


def _prepare_worker() -> Callable[[_MaskTask], dict[str, MaskedPart]]:
    return _mask_unit


def _mask_unit(task: _MaskTask) -> dict[str, MaskedPart]:
    """Mask the parts of a unit; a damaged part is left to the reader, which reports it."""
    masker = make_masker(task.row_options)
    schema = work_units.make_part_schema(task.row_options)
    masked = {}
    for split, (part, digest, is_kept) in task.parts.items():
        if part.is_file() and hashing.has_digest(part, digest):
            out = task.out.with_name(f"{task.out.name}.{split}")
            masked[split] = part_masker.mask_part(part, out, schema, masker, is_kept)
    return masked
