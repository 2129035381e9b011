"""Count rows for the report by length, source and language, and keep samples of dropped rows.

A tally has a bounded size for any input. It does not depend on how the input is divided among
workers, because the tallies of the work units are added in their order.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lib.core.data_names import find_source
from lib.core.errors import make_visible
from lib.core.paths import escape_path

if TYPE_CHECKING:
    import numpy as np

SAMPLES = 10  # samples of each rule
TEXT_CHARACTERS = 200  # characters of the text in a sample
# Characters of a row to mask before its sample is cut. Masks never shorten so many characters to a
# sample, so no sample ends inside a match.
READ_CHARACTERS = 20_000
_PER_DECADE = 5  # bins between a length and ten times that length
_DECADES = 13
_MOST_SOURCES = 1000
_MOST_LANGUAGES = 500
OTHERS = "(other directories)"
TOP_LEVEL = "(no directory)"
_OTHER_LANGUAGES = "(others)"
_TEXT = 500  # characters of any other text in a sample
# Names of the counts of a source. The last one is the prefix of the counts by rule.
_READ = "rows"
_BYTES = "bytes"
_DROPPED_BYTES = "dropped_bytes"
_DROPPED = "dropped: "


class DroppedSample(NamedTuple):
    """Describes a dropped row.

    key: see `make_key`. value: the measurement of the rule, as text. kept: the place of the kept
    row that this row duplicates, "" if there is none.
    """

    key: int
    path: str
    position: int
    value: str
    text: str
    kept: str = ""


@dataclass
class RowTally:
    """Counts rows.

    rows, bytes: size of the input, including dropped rows. lengths, dropped_lengths: number of rows
    by the bin of their length. dropped_bytes: bytes by rule. sources: counts of each top-level
    directory, see list_sources. languages, dropped_languages: number of rows by the column
    `language`. samples: by rule, the samples with the smallest keys. excerpts: the beginning of the
    kept row of each of the largest clusters, by the row's number. most_samples: samples to keep for
    each rule.
    """

    rows: int = 0
    bytes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    dropped_lengths: Counter[int] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    languages: Counter[str] = field(default_factory=Counter)
    dropped_languages: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[DroppedSample]] = field(default_factory=dict)
    excerpts: dict[str, str] = field(default_factory=dict)
    most_samples: int = SAMPLES

    def add_rows(self, source: str, sizes: Sequence[int] | np.ndarray) -> None:
        """Count rows that were read from a file.

        source: path of the file in the source directory. sizes: bytes of each row.
        """
        total = int(sum(sizes))
        self.rows += len(sizes)
        self.bytes += total
        self.lengths.update(_count_bins(sizes))
        counts = self._get_source(source)
        counts[_READ] += len(sizes)
        counts[_BYTES] += total

    def drop_rows(self, rule: str, source: str, sizes: Sequence[int] | np.ndarray) -> None:
        """Count rows of a file that a rule or decision drops."""
        total = int(sum(sizes))
        self.dropped_bytes[rule] += total
        self.dropped_lengths.update(_count_bins(sizes))
        counts = self._get_source(source)
        counts[_DROPPED_BYTES] += total
        counts[_DROPPED + rule] += len(sizes)

    def add_languages(self, counts: Mapping[Any, int], is_dropped: bool = False) -> None:
        """Count rows that were read, or rows that were dropped, by language (None: unknown)."""
        rows_by_language = self.dropped_languages if is_dropped else self.languages
        for language, count in counts.items():
            name = language or ""
            is_full = name not in self.languages and len(self.languages) >= _MOST_LANGUAGES
            rows_by_language[_OTHER_LANGUAGES if is_full else name] += count

    def takes_sample(self, rule: str, key: int) -> bool:
        """Return whether a row with this key would become a sample."""
        samples = self.samples.get(rule, [])
        return len(samples) < self.most_samples or key < samples[-1].key

    def add_sample(
        self,
        rule: str,
        key: int,
        path: str,
        position: int,
        value: Any,
        text: str,
        kept_place: str = "",
    ) -> None:
        """Keep a dropped row as a sample if its key is one of the smallest.

        path: the path of the file, not escaped. kept_place: the place of the kept row that it
        duplicates.
        """
        if self.takes_sample(rule, key):
            shown = (escape_path(path)[:_TEXT], position, format_value(value), cut_text(text))
            self._insert(rule, DroppedSample(key, *shown, kept_place[:_TEXT]))

    def add(self, other: RowTally) -> None:
        """Add the tally of later input."""
        for name in ("rows", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lengths", "dropped_lengths", "dropped_bytes"):
            getattr(self, name).update(getattr(other, name))
        self.add_languages(other.languages)
        self.add_languages(other.dropped_languages, is_dropped=True)
        for source, counts in other.sources.items():
            self._get_named_source(source).update(counts)
        for rule, samples in other.samples.items():
            for sample in samples:
                self._insert(rule, sample)
        self.excerpts |= other.excerpts

    def list_sources(self) -> list[dict[str, Any]]:
        """Return the `name`, `rows`, `bytes` and `dropped_bytes` of each source.

        `dropped` contains the number of dropped rows by rule.
        """
        return [
            {
                "name": name,
                **{key: counts[key] for key in (_READ, _BYTES, _DROPPED_BYTES)},
                "dropped": {
                    key.removeprefix(_DROPPED): count
                    for key, count in counts.items()
                    if key.startswith(_DROPPED)
                },
            }
            for name, counts in self.sources.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the tally as values for JSON."""
        return vars(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowTally:
        """Return the tally that `to_json` has converted."""
        tally = cls(**value)
        for name in ("lengths", "dropped_lengths"):
            setattr(tally, name, Counter({int(key): n for key, n in value[name].items()}))
        for name in ("dropped_bytes", "languages", "dropped_languages"):
            setattr(tally, name, Counter(value[name]))
        tally.sources = {name: Counter(counts) for name, counts in value["sources"].items()}
        tally.samples = {
            rule: [DroppedSample(*sample) for sample in samples]
            for rule, samples in value["samples"].items()
        }
        return tally

    def _insert(self, rule: str, sample: DroppedSample) -> None:
        samples = self.samples.setdefault(rule, [])
        insort(samples, sample)
        del samples[self.most_samples :]

    def _get_source(self, path: str) -> Counter[str]:
        return self._get_named_source(escape_path(find_source(path))[:_TEXT] or TOP_LEVEL)

    def _get_named_source(self, name: str) -> Counter[str]:
        if name not in self.sources and len(self.sources) >= _MOST_SOURCES:
            name = OTHERS
        return self.sources.setdefault(name, Counter())


def make_key(path: str, position: int) -> int:
    """Return the number that decides whether a row becomes a sample."""
    place = f"{path}\0{position}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(place, digest_size=6).digest(), "big")


def format_value(value: Any) -> str:
    """Return the measurement of a rule as text."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:_TEXT]


def cut_text(text: str) -> str:
    """Return the beginning of a text, with all control characters visible."""
    shown = make_visible(text[:TEXT_CHARACTERS])
    return f"{shown} …" if len(text) > TEXT_CHARACTERS else shown


def find_bin_start(number: float) -> float:
    """Return the length in bytes at which a bin begins."""
    return 10 ** (number / _PER_DECADE)


@cache
def _list_edges() -> np.ndarray:
    """Return the lengths at which the bins after the first one begin."""
    import numpy as np

    # Rounded to integers, so that no processor places a length differently.
    numbers = range(1, _DECADES * _PER_DECADE + 1)
    return np.array([round(find_bin_start(number)) for number in numbers], np.int64)


def _count_bins(sizes: Sequence[int] | np.ndarray) -> dict[int, int]:
    """Return the number of rows in each bin that is not empty."""
    import numpy as np

    bins = np.bincount(np.searchsorted(_list_edges(), np.asarray(sizes, np.int64), "right"))
    return {int(number): int(bins[number]) for number in bins.nonzero()[0]}
