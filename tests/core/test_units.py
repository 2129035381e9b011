# covers: lib/core/units.py
"""Format and parse sizes, counts and durations."""

from __future__ import annotations

import pytest

from lib.core import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (5e9, "5.0 GB"),
        (2.5e12, "2.5 TB"),
        (7e15, "7000.0 TB"),
        (-2000, "-2.0 kB"),
    ],
)
def test_size(count: float, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (61.21 * 2**30, "61.2 GiB"),
        (2**30, "1.00 GiB"),
        (9.999 * 2**30, "10.0 GiB"),
        (2048, "2.0 KiB"),
        (24.5e6, "23.4 MiB"),
        (2000 * 2**30, "2,000.0 GiB"),
    ],
)
def test_memory(count: float, text: str) -> None:
    assert units.memory(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5_000_000_000),
        ("512MiB", 512 << 20),
        ("1000000", 1_000_000),
        ("1.5 kB", 1500),
        ("2k", 2000),
        ("1TiB", 1 << 40),
        (" 3 B ", 3),
        ("0", 0),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    assert units.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "5PB", "five", "1e9", "5 G B", "1,000"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_size(text)


@pytest.mark.parametrize("count", [0, 7, 1000, 25_000, 5_000_000, 5_000_000_000, 3_200_000_000_000])
def test_a_size_survives_the_round_trip(count: int) -> None:
    assert units.parse_size(units.size(count)) == count


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (3_212_749_824, "3.21B"),
        (70e12, "70T"),
        (12_345, "12.3K"),
    ],
)
def test_count(number: float, text: str) -> None:
    assert units.count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (42.4, "42 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (47 * 3600, "47 h 00 min"),
        (76 * 3600, "3 d 04 h"),
        (59.97, "1 min 00 s"),
        (239 * 3600, "9 d 23 h"),
        (999_999, "12 days"),
        (1e9, "11,574 days"),
        (0.04, "under 0.1 s"),
        (0, "under 0.1 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(999_700, "1M"), (999.6, "1K"), (99_950_000, "100M")])
def test_count_rounds_into_the_next_unit(number: float, text: str) -> None:
    assert units.count(number) == text


@pytest.mark.parametrize(("count", "text"), [(999_960, "1.0 MB"), (999.7, "1.0 kB")])
def test_size_rounds_into_the_next_unit(count: float, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, "file"), "1 file"),
        ((0, "file"), "0 files"),
        ((2034, "row"), "2,034 rows"),
        ((2, "process"), "2 processes"),
        ((1, "micro-batch"), "1 micro-batch"),
        ((2, "micro-batch"), "2 micro-batches"),
    ],
)
def test_counted_agrees_in_number(arguments: tuple, text: str) -> None:
    assert units.counted(*arguments) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(12_345.6, "12,346"), (99.96, "100"), (99.94, "99.9"), (0.01234, "0.0123"), (0.0, "0")],
)
def test_rate(number: float, text: str) -> None:
    assert units.rate(number) == text
