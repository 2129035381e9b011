"""Drop rows whose content equals that of an earlier row, or is similar to that of a kept row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import options
from lib.core.declared import option
from lib.core.errors import Problems
from lib.curate import shingles
from lib.curate.disk_array import DiskArray
from lib.curate.near import checks, minhash, report, search
from lib.curate.near.compared_rows import (
    DIGESTS,
    LEADERS,
    OMITTED,
    SIMILARITIES,
    SIZES,
    ComparedRows,
    hash_source,
)
from lib.curate.near.minhash import Bands
from lib.curate.near.search import COPY, NEAR, WALK, NearSettings, Search
from lib.curate.near.signatures import EarlierDataset, SignatureFiles, describe_parameters
from lib.curate.rows import Row, RowBatch
from lib.curate.step import Counts, CurationStep, Section, StepResult
from lib.curate.words import WORDS, find_words

if TYPE_CHECKING:
    import numpy as np

    from lib.curate.reader import SourceDataset
    from lib.curate.whole import ChangingStep, WholeDataset

EXACT_RULE = "duplicate"
NEAR_RULE = "near duplicate"
CLUSTER_SIZE = "cluster_size"
_NONE = "none"
_EXACT = "exact"
_NEAR = "near"
_ONCE = "1"
_UPSAMPLE = "upsample"
_CORPUS = "corpus"
_SOURCE = "source"
_SOURCES = "sources"  # the sidecar with a hash of each row's source
_WEIGHTS = "weights"  # the sidecar with the value of CLUSTER_SIZE in the input
_MOST_CHARACTERS = 16_000_000  # a longer text is not compared to find near duplicates
# Smallest size of a cluster → how many times its kept row is written, as in FineWeb-2.
_COPIES = {1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1}
_TOO_LARGE = 1 << 40  # for the number of rows in a cluster
_FIRST_PASS = ("near_words", "near_bands", "near_band_size", "near_within")
_NOT_COMPARED = "not compared"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class DuplicateOptions:
    """Declares the options about duplicates."""

    dedup: str = option(
        _NONE,
        group="duplicates",
        choices=(_NONE, _EXACT, _NEAR),
        help="exact: drop rows that repeat the text of an earlier row (for conversations, its "
        "turns and tools); near: also drop rows whose text is similar to that of a kept row. Both "
        "sort on disk, in constant memory, and validation rows come first",
    )
    near_threshold: float = option(
        0.8,
        parse=options.fraction,
        metavar="F",
        help="lowest Jaccard similarity (shared ÷ all distinct word n-grams) of a near "
        "duplicate; the similarity is always computed exactly",
    )
    near_words: int = option(
        5,
        parse=options.positive_int,
        help="words in an n-gram; each character of Han, kana, Thai, Lao, Khmer and Myanmar is a "
        "word",
    )
    near_bands: int = option(
        20,
        parse=options.positive_int,
        help="bands of a MinHash signature; rows that agree in a band are compared. More bands "
        "find more pairs",
    )
    near_band_size: int = option(
        8,
        parse=options.positive_int,
        help="minima in a band; more minima find fewer pairs of low similarity",
    )
    near_candidates: int = option(
        32,
        parse=options.positive_int,
        help="maximum number of kept rows that a row is compared with",
    )
    near_members: int = option(
        1000,
        parse=options.positive_int,
        help="maximum number of kept rows that are remembered for each value of a band",
    )
    near_keep: str = option(
        _ONCE,
        choices=(_ONCE, _UPSAMPLE),
        help="1: write a kept row once; upsample: repeat it according to the size of its cluster, "
        "as FineWeb-2 does (2 rows: 2 times, 3 or 4: 3, 5 to 99: 5, 100 to 999: 8, more: once)",
    )
    near_against: list[Path] = option(
        [],
        parse=Path,
        metavar="DIR",
        help="also drop rows that duplicate rows of this dataset, which was curated with --dedup "
        "near; may be repeated (default: no other dataset)",
    )
    near_within: str = option(
        _CORPUS,
        choices=(_CORPUS, _SOURCE),
        help="corpus: compare all rows; source: compare only rows whose `source` is in the same "
        "top-level directory",
    )


@dataclass(frozen=True)
class Duplicates(CurationStep):
    """Drops rows that duplicate earlier rows. chosen: the options."""

    chosen: DuplicateOptions

    name = "duplicates"
    options = DuplicateOptions

    @classmethod
    def from_options(cls, chosen: DuplicateOptions) -> Duplicates | None:
        """Return the step, None without --dedup. Raises UsageError or ArtifactError."""
        problems = Problems()
        for field, value in vars(chosen).items():
            if field.startswith("near_") and chosen.dedup != _NEAR and value != _default(field):
                flag = f"--{field.replace('_', '-')}"
                problems.add(f"{flag} needs --dedup near", expected=f"--dedup near, or no {flag}")
        if chosen.dedup == _NEAR:
            bands = Bands(chosen.near_bands, chosen.near_band_size)
            problems.collect(partial(checks.require_bands, chosen.near_threshold, bands.number))
            parameters = describe_parameters(chosen.near_words, bands)
            problems.collect(partial(checks.require_earlier, chosen.near_against, parameters))
        problems.raise_if_any()
        return cls(chosen) if chosen.dedup != _NONE else None

    def require_command(self, save_dir: Path, changing: Sequence[CurationStep]) -> None:
        """Raise UsageError if --near-against names the dataset to write, or one of other masks."""
        ours = _identify_changes(changing)
        checks.require_earlier_fit(self.chosen.near_against, self._open_earlier(), save_dir, ours)

    def estimate_disk(self, source: SourceDataset) -> int:
        """Return the bytes of the keys and digests, which are on disk twice, and of the arrays."""
        return source.rows * (2 * 8 * (self.bands.number + 2) + 40) if self.is_near else 0

    @property
    def is_near(self) -> bool:
        """Return whether near duplicates are dropped."""
        return self.chosen.dedup == _NEAR

    @property
    def bands(self) -> Bands:
        """Return the form of the signatures."""
        return Bands(self.chosen.near_bands, self.chosen.near_band_size)

    def identify(self) -> dict[str, Any]:
        """Return the options that are in force, and the content of the earlier datasets."""
        if not self.is_near:
            return {"dedup": self.chosen.dedup}
        earlier = [dataset.identify() for dataset in self._open_earlier()]
        return vars(self.chosen) | {"near_against": earlier}

    def identify_first_pass(self) -> dict[str, Any]:
        """Return the options that the digests and band keys depend on."""
        names = ("dedup", *(_FIRST_PASS if self.is_near else ()))
        return {name: getattr(self.chosen, name) for name in names}

    def describe(self) -> dict[str, str]:
        """Return the line of the plan about duplicates."""
        if not self.is_near:
            return {"duplicates": "rows that equal an earlier row are dropped"}
        return {"near duplicates": checks.describe_bands(self.bands, self.chosen.near_words)}

    def list_rules(self) -> dict[str, str]:
        """Return the rule about equal rows, and the one about similar rows."""
        rules = {EXACT_RULE: f"--dedup {self.chosen.dedup}"}
        return rules | ({NEAR_RULE: f"--dedup {_NEAR}"} if self.is_near else {})

    def list_decisions(self) -> list[str]:
        """Return both rules: they need the whole dataset."""
        return [*self.list_rules()]

    def list_inputs(self) -> list[str]:
        """Return the column with the sizes of clusters, which an earlier curation has written."""
        return [CLUSTER_SIZE] if self.is_near else []

    def list_late_columns(self) -> dict[str, str]:
        """Return the column with the number of rows that a kept row stands for."""
        return {CLUSTER_SIZE: "int"} if self.is_near else {}

    def start(self) -> RunningDuplicates:
        """Return what computes digests and band keys."""
        return RunningDuplicates(self)

    def decide(self, dataset: WholeDataset) -> Counts:
        """Drop duplicates; return the figures of the search."""
        import numpy as np

        earlier = self._open_earlier()
        documents = ComparedRows(dataset.directory / self.name, dataset.source, earlier)
        finder = Search(
            documents,
            dataset.workers,
            dataset.start_server,
            partial(dataset.recall, self),
            partial(dataset.note, self),
            dataset.progress,
        )
        figures: Counts = {"rows": dataset.rows, "earlier_rows": documents.first_new}
        is_new = dataset.recall(self, WALK) is None
        if is_new:
            self._lay_out(dataset, documents)
            finder.find_copies()
        if self.is_near:
            weights = dataset.open(_WEIGHTS, np.int64)
            if is_new:
                finder.ignore_repeats(weights)
            figures |= finder.find_near(self._make_settings(dataset))
            figures["not_compared"] = dataset.recall(self, _NOT_COMPARED)
            figures["largest"] = [
                [size, document - documents.first_new, self._locate(dataset, documents, document)]
                for size, document in finder.measure_clusters(weights)
            ]
        self._write_decisions(dataset, documents)
        return figures

    def describe_earlier(self, number: int) -> dict[str, Any]:
        """Return the place of a row of an earlier dataset. number: from 1."""
        number -= 1
        for dataset in self._open_earlier():
            if number < dataset.count_rows():
                return dataset.describe_row(number)
            number -= dataset.count_rows()
        raise IndexError(number)

    def list_excerpts(self, dataset: WholeDataset) -> list[int]:
        """Return the kept rows of the largest clusters."""
        largest = dataset.counts_of(self).get("largest", ())
        return [row for _, row, _ in largest if row >= 0]

    def write_files(self, directory: Path, dataset: WholeDataset, counts: Counts) -> list[Path]:
        """Write the signatures of the kept rows, for --near-against of a later curation."""
        import numpy as np

        if not self.is_near:
            return []
        files = SignatureFiles(directory, dataset.source.splits)
        keys = [dataset.open(name, np.uint64) for name in self.list_keys()]
        digests = dataset.open(DIGESTS, np.uint64, 2)
        written = dict.fromkeys(dataset.source.splits, 0)
        for unit in dataset.source.units:
            rows = slice(unit.start, unit.start + unit.rows)
            copies = np.where(dataset.fates.values[rows] == 0, dataset.copies.values[rows], 0)
            is_kept = copies > 0
            first = np.cumsum(copies, dtype=np.int64) - copies + written[unit.split]
            written[unit.split] += int(copies.sum())
            values = {
                "keys": np.column_stack([array.values[rows][is_kept] for array in keys]),
                "digests": digests.values[rows][is_kept],
                "rows": first[is_kept].astype(np.uint64),
            }
            files.append(unit.split, values)
            for array in (*keys, digests):
                array.release()
            dataset.release()
        parameters = describe_parameters(self.chosen.near_words, self.bands)
        return files.finish(parameters, _identify_changes(dataset.changing))

    def summarize(self, counts: Counts) -> dict[str, Any]:
        """Return the figures of the search for near duplicates."""
        if not self.is_near:
            return {}
        return {"near": report.summarize(counts, self.bands, self.chosen.near_threshold)}

    def list_sections(self, counts: Counts) -> Iterator[Section]:
        """Yield the tables about near duplicates."""
        if self.is_near:
            yield from report.list_sections(counts, self.bands, self.chosen.near_threshold)

    def format_lines(self, counts: Counts) -> dict[str, str]:
        """Return the lines of the printed summary about near duplicates."""
        if not self.is_near:
            return {}
        return report.format_lines(counts, self.bands, self.chosen.near_threshold)

    def list_keys(self) -> list[str]:
        """Return the names of the sidecars with the keys of the bands."""
        return [f"keys.{band}" for band in range(self.bands.number)] if self.is_near else []

    def _locate(
        self, dataset: WholeDataset, documents: ComparedRows, document: int
    ) -> dict[str, Any]:
        """Return the place of a document."""
        row = document - documents.first_new
        return dataset.locate_row(row) if row >= 0 else self.describe_earlier(document + 1)

    def _open_earlier(self) -> tuple[EarlierDataset, ...]:
        return _open_datasets(tuple(self.chosen.near_against))

    def _make_settings(self, dataset: WholeDataset) -> NearSettings:
        """Return the settings of the search.

        If the rows of the earlier datasets were changed after their search, such as masked, the
        rows of this dataset are changed alike before they are compared with them.
        """
        chosen = self.chosen
        are_changed = any(earlier.changes for earlier in self._open_earlier())
        changing = dataset.changing if are_changed else ()
        return NearSettings(
            self.bands,
            chosen.near_words,
            chosen.near_threshold,
            chosen.near_candidates,
            chosen.near_members,
            changing,
        )

    def _lay_out(self, dataset: WholeDataset, documents: ComparedRows) -> None:
        """Write the arrays that the search reads."""
        import numpy as np

        documents.directory.mkdir(exist_ok=True)
        documents.create(LEADERS, np.int64)
        documents.create(SIMILARITIES, np.float32)
        omitted = documents.create(OMITTED, np.uint8)
        for first, fates in dataset.fates.blocks():
            own_rows = omitted.values[documents.first_new + first :]
            own_rows[: len(fates)][fates != 0] = search.DROPPED
        mixer = None
        if self.chosen.near_within == _SOURCE:
            mixer = documents.join_sources(dataset.open(_SOURCES, np.uint64))
        documents.join_digests(dataset.open(DIGESTS, np.uint64, 2), mixer)
        if self.is_near:
            open_keys = partial(dataset.open, dtype=np.uint64)
            missing = documents.join_keys(self.bands.number, open_keys, mixer)
            dataset.note(self, _NOT_COMPARED, missing)

    def _write_decisions(self, dataset: WholeDataset, documents: ComparedRows) -> None:
        """Drop the duplicates, and write how many rows each kept one stands for."""
        import numpy as np

        rules = {COPY: dataset.find_rule(EXACT_RULE)}
        if self.is_near:
            rules[NEAR] = dataset.find_rule(NEAR_RULE)
            cluster_sizes = DiskArray(dataset.directory / CLUSTER_SIZE, np.int64, (dataset.rows,))
            sizes = documents.open(SIZES, np.int64)
        omitted = documents.open(OMITTED, np.uint8)
        leaders = documents.open(LEADERS, np.int64)
        similarities = documents.open(SIMILARITIES, np.float32)
        before = documents.first_new
        for first, fates in dataset.fates.blocks():
            rows = slice(first, first + len(fates))
            own_rows = slice(before + first, before + first + len(fates))
            for value, rule in rules.items():
                is_dropped = omitted.values[own_rows] == value
                dataset.fates.values[rows][is_dropped] = rule
                dataset.values.values[rows][is_dropped] = similarities.values[own_rows][is_dropped]
                found = leaders.values[own_rows][is_dropped]
                # An earlier row has the number −1 to −before, a row of this dataset 1 and above.
                found = np.where(found > before, found - before, -found)
                dataset.leaders.values[rows][is_dropped] = found
            if self.is_near:
                stands_for = sizes.values[own_rows] + 1
                cluster_sizes.values[rows] = stands_for
                if self.chosen.near_keep == _UPSAMPLE:
                    steps = np.searchsorted([*_COPIES], stands_for, "right") - 1
                    dataset.copies.values[rows] = np.array([*_COPIES.values()])[steps]
            dataset.release()
            for array in (omitted, leaders, similarities):
                array.release()


class RunningDuplicates:
    """Computes the digest of each row, and for near duplicates its band keys."""

    def __init__(self, step: Duplicates) -> None:
        self._step = step

    def run(self, batch: RowBatch) -> StepResult:
        """Return the sidecars of a batch."""
        import numpy as np

        digests = b"".join(row.digest[-_DIGEST_BYTES:] for row in batch.rows)
        sidecars = {DIGESTS: np.maximum(np.frombuffer(digests, np.uint64).reshape(-1, 2), 1)}
        if self._step.is_near:
            keys = _compute_keys(batch, self._step.bands, self._step.chosen.near_words)
            names = self._step.list_keys()
            sidecars |= {name: keys[:, band].copy() for band, name in enumerate(names)}
        if self._step.chosen.near_within == _SOURCE:
            sources = [hash_source(row.source) for row in batch.rows]
            sidecars[_SOURCES] = np.array(sources, np.uint64)
        if self._step.is_near:
            earlier_sizes = batch.columns.get(CLUSTER_SIZE, [1 for _ in batch.rows])
            weights = [size if _is_size(size) else 1 for size in earlier_sizes]
            sidecars[_WEIGHTS] = np.array(weights, np.int64)
        return StepResult(sidecars=sidecars)

    def count(self) -> Counts:
        """Return nothing: `decide` returns the figures."""
        return {}


def _is_size(value: object) -> bool:
    """Return whether a value of the column `cluster_size` can be one; it may be of any origin."""
    return isinstance(value, int) and 1 <= value < _TOO_LARGE


def _compute_keys(batch: RowBatch, bands: Bands, words: int) -> np.ndarray:
    """Return the band keys (uint64 [rows, bands]); NO_KEY for a text too long to compare."""
    if all(map(_is_compared, batch.rows)):
        groups = batch.memo(WORDS, lambda rows: find_words(rows.texts))
    else:
        groups = find_words([row.text if _is_compared(row) else "" for row in batch.rows])
    return minhash.compute_keys(shingles.join_words(groups, words), bands)


def _is_compared(row: Row) -> bool:
    return row.is_whole and row.characters <= _MOST_CHARACTERS


def _identify_changes(changing: Iterable[ChangingStep]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for step in changing:
        changes |= step.identify()
    return changes


@cache
def _open_datasets(paths: tuple[Path, ...]) -> tuple[EarlierDataset, ...]:
    return tuple(map(EarlierDataset, paths))


def _default(field: str) -> Any:
    return getattr(DuplicateOptions(), field)
