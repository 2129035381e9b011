"""Check the options of a search for near duplicates, and describe them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lib.core import units
from lib.core.errors import Problems
from lib.curate.near import key_groups, minhash
from lib.curate.near.minhash import Bands
from lib.curate.near.signatures import EarlierDataset

_OTHER_FILES = 200  # open files besides those of the bands: shards, arrays, pipes of workers


def describe_bands(bands: Bands, words: int) -> str:
    """Return the settings of the signatures, and the probability that a pair is compared."""
    curve = ", ".join(
        f"{100 * bands.find_probability(similarity):.1f} % at {similarity:g}"
        for similarity in minhash.CURVE
    )
    return (
        f"{bands.number} bands of {bands.size} minima, n-grams of {units.counted(words, 'word')}; "
        f"probability that a pair is compared: {curve}"
    )


def require_earlier(paths: Sequence[Path], parameters: Mapping[str, Any]) -> None:
    """Raise UsageError or ArtifactError if rows cannot be compared with earlier datasets.

    parameters: of the signatures, see describe_parameters.
    """
    problems = Problems()

    def require(path: Path) -> None:
        dataset = EarlierDataset(path)
        dataset.require_parameters(parameters)
        dataset.require_undamaged()

    for path in paths:
        problems.collect(partial(require, path))
    names = [path.name for path in paths]
    if len({*names}) < len(names):
        problems.add(
            "--near-against: two datasets have the same name",
            found=", ".join(map(str, paths)),
            expected="different names of the directories: rename one of them",
        )
    problems.raise_if_any()


def require_earlier_fit(
    paths: Sequence[Path],
    datasets: Sequence[EarlierDataset],
    save_dir: Path,
    changes: Mapping[str, Any],
) -> None:
    """Raise UsageError if an earlier dataset would be replaced, or has rows of another form.

    datasets: at `paths`. changes: the identity of the steps that change rows.
    """
    problems = Problems()
    if save_dir.resolve() in [path.resolve() for path in paths]:
        problems.add(
            f"--near-against {save_dir} is the --save-dir as well",
            expected="another --save-dir, because this command would replace that dataset",
        )
    other = [dataset for dataset in datasets if dataset.changes != changes]
    if other and any(dataset.changes for dataset in datasets):
        problems.add(
            "the datasets of --near-against were changed in another way than this one",
            expected=f"the same changes of rows in all of them: {changes or 'none'}",
            found=f"{other[0].name}: {other[0].changes or 'none'}",
        )
    problems.raise_if_any()


def require_bands(threshold: float, bands: int) -> None:
    """Raise UsageError if any two rows would be near duplicates, or if there are too many bands.

    Each band is a file, and all of them are open at once, like the files of a large sort. So this
    raises the limit of open files of this process, if the system allows it.
    """
    problems = Problems()
    if not threshold:
        problems.add(
            "--near-threshold 0 drops rows that have nothing in common",
            expected="a similarity above 0, such as 0.8",
        )
    needed = bands + _OTHER_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, highest = (sys.maxsize if value == resource.RLIM_INFINITY else value for value in limits)
    if needed > highest:
        problems.add(
            f"--near-bands {bands} needs {needed:,} open files",
            expected=f"at most {highest:,}, which the system allows this process (ulimit -Hn)",
        )
    problems.raise_if_any()
    useful = min(max(needed, key_groups.MOST_BUCKETS + _OTHER_FILES), highest)
    if limit < useful:
        resource.setrlimit(resource.RLIMIT_NOFILE, (useful, limits[1]))
