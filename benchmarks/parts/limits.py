"""Measure the limits of this disk and these cores, for benchmarks/corpus.py."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

_MB = 1_000_000


def measure_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds (user and system) of an action in this process."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    before = spent()
    work()
    return spent() - before


def read_files(paths: list[Path]) -> int:
    """Read files with as few Python calls as possible; return their bytes."""
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        while data := os.read(descriptor, 1 << 22):
            total += len(data)
        os.close(descriptor)
    return total


def parse_lines(paths: list[Path]) -> None:
    """Parse JSON Lines and extract their strings, without any other work."""
    import orjson

    from lib.corpus.text_documents import extract_strings

    for path in paths:
        with path.open("rb", buffering=1 << 20) as file:
            for line in file:
                "\n".join(extract_strings(orjson.loads(line))).encode()


def measure_write_rate(directory: Path, size: int) -> float:
    """Return the bytes per second of a sequential write with fdatasync."""
    path = directory / "written"
    block = os.urandom(4 * _MB)
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fdatasync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return max(1, size // len(block)) * len(block) / seconds


def measure_limits(
    paths: list[Path], out_bytes: int, directory: Path, workers: int, is_json_lines: bool
) -> dict[str, float]:
    """Return the least seconds that the machine needs for each part of the work."""
    read_files(paths)  # warm the page cache, as for the contestants
    began = time.monotonic()
    read_files(paths)
    reading = time.monotonic() - began
    rate = statistics.median(measure_write_rate(directory, out_bytes) for _ in range(3))
    limits = {"read": reading / (1 if is_json_lines else workers), "write": out_bytes / rate}
    if is_json_lines:
        limits["parse"] = measure_cpu(lambda: parse_lines(paths)) / workers
    else:
        limits["open"] = measure_cpu(lambda: read_files(paths)) / workers
    return limits


def measure_own_cpu(source: Path, directory: Path, workers: int) -> float:
    """Return the CPU seconds of the stage's work units ÷ workers, which perfect scaling needs."""
    import pyarrow  # noqa: F401  (its import is not part of the work)

    from lib.corpus import inputs, work_units
    from lib.corpus.row_options import RowOptions

    files, _ = inputs.find_inputs(source, False)
    units = work_units.cut_files(source, files, directory / "parts", RowOptions())

    def process() -> None:
        for unit in units:
            work_units.process_unit(unit)
            for part in unit.parts():
                part.unlink()

    process() if len(files) > 1000 else None  # warm
    return measure_cpu(process) / workers


def measure_kernel_calls(source: Path, out: Path, directories: int) -> tuple[float, float]:
    """Return the seconds to make a directory, and to make a hard link, on this file system."""
    out.mkdir()
    began = time.monotonic()
    for number in range(20 * directories):
        (out / str(number)).mkdir()
    seconds_to_make = (time.monotonic() - began) / (20 * directories)
    paths = [path for path in source.rglob("*") if path.is_file()][:20_000]
    began = time.monotonic()
    for number, path in enumerate(paths):
        os.link(path, f"{out}/{number % directories}/{number}")
    seconds_to_link = (time.monotonic() - began) / len(paths)
    shutil.rmtree(out)
    os.sync()
    return seconds_to_make, seconds_to_link
