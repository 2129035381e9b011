"""Prepare the comparison with test sets before the first row of a corpus is read."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import log, stage, units
from lib.core.errors import MOVE_TEMPORARY, UsageError, name_full_disk
from lib.core.progress import Progress
from lib.corpus import work_units
from lib.corpus.inputs import InputFile
from lib.corpus.row_options import RowOptions
from lib.curate.decontaminate import frequency, index, questions
from lib.curate.decontaminate.index import SHORTEST, Index
from lib.curate.decontaminate.prepared import PreparedOptions, add_index

_ALL = "all"  # directory of the index with all n-grams, which the sample uses
_INDEX = "index"
_PREFIX = "test-sets-"  # of temporary directories
_LOCK = "lock"
_NAMED = 10
_FREQUENT = "frequent n-grams of the test sets"  # a key in the identity of parts


def require_test_sets(row_options: RowOptions, progress: bool = False) -> None:
    """Raise UsageError if the test sets cannot be read, or if no question can be compared.

    progress: whether to show the progress, since many test sets take a minute.
    """
    if row_options.decontaminate:
        _load_index(tuple(row_options.decontaminate), progress)


def identify_test_sets(row_options: RowOptions) -> dict[str, Any]:
    """Return the digest of each test set by its name, for the identity of a dataset."""
    if not row_options.decontaminate:
        return {}
    return {"decontaminate": questions.identify_sets(row_options.decontaminate)}


def add_frequent(identity: dict[str, Any], row_options: RowOptions) -> dict[str, Any]:
    """Return the identity of a dataset for its parts, with the digest of the frequent n-grams.

    The identity of parts contains only their own split, but which n-grams are frequent depends on
    the whole input.
    """
    if not isinstance(row_options, PreparedOptions):
        return identity
    _, frequent = index.read_sets(Path(row_options.test_index))
    return identity | {_FREQUENT: frequent.digest}


class IndexBuilder(NamedTuple):
    """Builds the index of the test sets for a build of stage 02.

    files: the whole input in `folder`, including the files that other machines read.
    """

    folder: Path
    files: Sequence[InputFile]
    workers: int
    progress: bool

    def __call__(self, row_options: RowOptions) -> RowOptions:
        """Return the options with an index if they name test sets.

        The index is a temporary directory, which is deleted when this process ends.
        """
        is_prepared = isinstance(row_options, PreparedOptions) or not row_options.decontaminate
        return row_options if is_prepared else self._prepare(row_options)

    def _prepare(self, row_options: RowOptions) -> RowOptions:
        with name_full_disk(Path(tempfile.gettempdir()), MOVE_TEMPORARY):
            work = make_directory()
            full_index = _load_index(tuple(row_options.decontaminate), self.progress)
            index.save_index(full_index, work / _ALL)
            tasks = work_units.cut_splits(self.folder, self.files, work, row_options)
            is_frequent, frequent = frequency.sample_corpus(
                row_options, str(work / _ALL), tasks, self.workers, self.progress
            )
            final = index.ignore_frequent(full_index, is_frequent, frequent)
            index.save_index(final, work / _INDEX)
            shutil.rmtree(work / _ALL)
        _log_index(final)
        return add_index(row_options, str(work / _INDEX))


def make_directory() -> Path:
    """Return a new temporary directory, which is deleted when this process ends.

    The kernel releases the lock of a killed process, so its directory is found and deleted here.
    """
    for leftover in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), (leftover / _LOCK).open("rb") as its_lock:
            fcntl.flock(its_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (work / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def delete(code: int, error: BaseException | None) -> None:
        shutil.rmtree(work, ignore_errors=True)
        lock.close()

    stage.call_at_end(delete)
    return work


def _log_index(test_index: Index) -> None:
    """Print how many questions are compared, and how many n-grams are ignored as frequent."""
    total = sum(test_set.questions for test_set in test_index.test_sets)
    protected = sum(test_set.protected for test_set in test_index.test_sets)
    frequent = test_index.frequent
    log.info(
        f"test sets: {protected:,} of {units.counted(total, 'question')} can be compared; "
        f"{units.counted(frequent.ignored, 'n-gram')} ignored, since more than "
        f"{frequent.least:,} of {units.counted(frequent.rows, 'sampled row')} contain them"
    )
    if names := [test_set.name for test_set in test_index.test_sets if not test_set.protected]:
        log.warn(
            "--decontaminate: no question can be compared in "
            f"{units.counted(len(names), 'test set')}: {units.join_names(names, _NAMED)}"
        )


@cache
def _load_index(directories: tuple[Path, ...], progress: bool) -> Index:
    files = questions.list_files(directories)
    size = sum(file.path.stat().st_size for file in files)
    log.info(f"reading {units.counted(len(files), 'test set')}, {units.size(size)}")
    with Progress("test sets", len(files), "set", progress) as bar:
        built_index = index.build_index(questions.read_sets(directories, bar.advance))
    digests = questions.identify_sets(directories)
    if not any(test_set.protected for test_set in built_index.test_sets):
        raise UsageError(
            "--decontaminate: no question can be compared",
            expected=f"questions of at least {SHORTEST} words, without the words that all "
            "questions of a set share",
            found=f"{units.counted(len(built_index.test_sets), 'test set')} with "
            f"{units.counted(sum(s.questions for s in built_index.test_sets), 'question')}",
        )
    test_sets = [
        replace(test_set, digest=digests[test_set.name]) for test_set in built_index.test_sets
    ]
    return built_index._replace(test_sets=test_sets)
