"""Build the index of the test sets before the first row is compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

from lib.core import log, units
from lib.core.errors import UsageError
from lib.curate.decontaminate import frequency, index, questions
from lib.curate.decontaminate.index import SHORTEST, Index
from lib.curate.reader import SourceDataset

_NAMED = 10


@cache
def load_index(directories: tuple[Path, ...]) -> Index:
    """Return the index with all n-grams of test sets.

    Raises UsageError or ArtifactError if test sets cannot be read, or if no question can be
    compared.
    """
    files = questions.list_files(directories)
    size = sum(file.path.stat().st_size for file in files)
    log.info(f"reading {units.counted(len(files), 'test set')}, {units.size(size)}")
    full_index = index.build_index(questions.read_sets(directories))
    digests = questions.identify_sets(directories)
    if not any(test_set.protected for test_set in full_index.test_sets):
        raise UsageError(
            "--decontaminate: no question can be compared",
            expected=f"questions of at least {SHORTEST} words, without the words that all "
            "questions of a set share",
            found=f"{units.counted(len(full_index.test_sets), 'test set')} with "
            f"{units.counted(sum(s.questions for s in full_index.test_sets), 'question')}",
        )
    test_sets = [
        replace(test_set, digest=digests[test_set.name]) for test_set in full_index.test_sets
    ]
    return full_index._replace(test_sets=test_sets)


def prepare_index(
    directories: tuple[Path, ...], least: float, source: SourceDataset, path: Path, progress: bool
) -> None:
    """Write the index that rows are compared with into the directory `path`.

    What an earlier process has written there is replaced, since it may be incomplete. least: see
    matching.find_hits.
    """
    full_index = load_index(directories)
    sample = frequency.sample_rows(source, full_index, least, progress)
    final = index.ignore_frequent(full_index, sample.is_frequent, sample.together, least)
    final = final._replace(frequent=sample.frequent)
    shutil.rmtree(path, ignore_errors=True)
    index.save_index(final, path)
    _log_index(final)


def _log_index(test_index: Index) -> None:
    """Print how many questions are compared, and how many n-grams are ignored as frequent."""
    total = sum(test_set.questions for test_set in test_index.test_sets)
    protected = sum(test_set.protected for test_set in test_index.test_sets)
    frequent = test_index.frequent
    log.info(
        f"test sets: {protected:,} of {units.counted(total, 'question')} can be compared; "
        f"{units.counted(frequent.ignored, 'n-gram')} ignored, since more than "
        f"{frequent.least:,} of {units.counted(frequent.rows, 'sampled row')} contain them "
        "without the rest of a question"
    )
    if names := [test_set.name for test_set in test_index.test_sets if not test_set.protected]:
        log.warn(
            "--decontaminate: no question can be compared in "
            f"{units.counted(len(names), 'test set')}: {units.join_names(names, _NAMED)}"
        )
