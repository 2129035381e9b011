#!/usr/bin/env python3
"""Compare stages 01 and 02 to `datasets`, and to the limits of this disk and these cores.

  python benchmarks/corpus.py
  python benchmarks/corpus.py --dir /scratch --workers 8 --lines-mb 2000 --repeat 3

Makes a corpus of small files and one of JSON Lines under --dir. Then it runs stage 02, and
`load_dataset` + `save_to_disk` with as many processes, in alternation, start-up included. It prints
a table: the median of the runs, ratios, the share of the physical limit, and the largest memory of
the process tree. All files are deleted at the end.

The limit is the largest of: bytes in ÷ read rate, bytes out ÷ write rate, files ÷ (cores × open
rate), and CPU seconds of parsing ÷ cores. Each is measured on this machine with the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import limits, processes
from benchmarks.parts.processes import ROOT
from tests.process_tree import list_descendants, resident_bytes

_MB = 1_000_000
_DATASETS_SCRIPT = """
import sys, datasets
from datasets import load_dataset
builder, folder, out, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
datasets.disable_progress_bars()
how = {"sample_by": "document"} if builder == "text" else {}
found = load_dataset(builder, data_dir=folder, cache_dir=out + ".cache", num_proc=workers, **how)
found["train"].save_to_disk(out, num_proc=workers)
"""


def make_text(draw: random.Random, size: int) -> str:
    """Return about `size` characters of text."""
    return " ".join(draw.choices(_WORDS, k=max(1, size // 7)))


_WORDS = [
    "".join(random.Random(i).choices("etaoinshrdlucmfwypvbgk", k=1 + i % 11)) for i in range(20_000)
]


def make_small(root: Path, files: int) -> None:
    """Make many text files of 1 to 8 kB in 100 directories."""
    draw = random.Random(0)
    for number in range(files):
        path = root / f"{number % 100:02d}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_text(draw, draw.randint(1000, 8000)))


def make_lines(root: Path, megabytes: int) -> None:
    """Make JSON Lines in files of about 250 MB, a document of 1 to 4 kB per line."""
    draw = random.Random(1)
    root.mkdir(parents=True)
    texts = [make_text(draw, draw.randint(1000, 4000)) for _ in range(5000)]
    written = 0
    number = 0
    while written < megabytes * _MB:
        with (root / f"{number:03d}.jsonl").open("w") as file:
            while file.tell() < 250 * _MB and written + file.tell() < megabytes * _MB:
                line = {
                    "id": draw.randint(0, 1 << 40),
                    "text": draw.choice(texts)[draw.randint(0, 500) :],
                    "meta": {"url": f"https://example.org/{draw.random()}"},
                }
                file.write(json.dumps(line) + "\n")
            written += file.tell()
        number += 1


class ProcessWatch(threading.Thread):
    """Follows the memory and CPU time of a process tree.

    Memory is in bytes; a shared page counts for each process.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._peak = 0
        self._pid = pid
        self._ended = threading.Event()
        self._cpu: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        """Measure every 20 ms until `stop`."""
        while not self._ended.wait(0.02):
            processes = list(list_descendants(self._pid))
            self._peak = max(self._peak, sum(map(resident_bytes, processes)))
            self._cpu |= {pid: cpu for pid in processes if (cpu := _read_cpu_seconds(pid))}

    def stop(self) -> tuple[int, float]:
        """Return the largest sum of resident memory, and the CPU seconds of all processes."""
        self._ended.set()
        self.join()
        return self._peak, sum(self._cpu.values())


def _read_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


class Run(NamedTuple):
    """Cost of a command. memory: peak bytes of its process tree. cpu: CPU seconds of the tree."""

    seconds: float
    memory: int
    cpu: float


def run_command(command: list[object], cwd: Path) -> Run:
    """Run a command and return its cost; exits if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    watch = ProcessWatch(process.pid)
    _, errors = process.communicate()
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"{command} failed:\n{errors[-2000:]}")
    return Run(seconds, *watch.stop())


def stage_command(source: Path, out: Path, workers: int) -> list[object]:
    """Return the command of stage 02."""
    return [
        sys.executable,
        ROOT / "02_build_hf_dataset.py",
        "--data-folder",
        source,
        "--save-dir",
        out,
        "--num-workers",
        workers,
        "--no-progress",
    ]


def datasets_command(builder: str, source: Path, out: Path, workers: int) -> list[object]:
    """Return the command of `datasets`."""
    return [sys.executable, "-c", _DATASETS_SCRIPT, builder, source, out, workers]


def delete_results(*paths: Path) -> None:
    """Delete results, and wait until the disk has written its caches."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    os.sync()


def run_in_turns(contestants: dict[str, list[object]], out: Path, repeat: int) -> dict[str, Run]:
    """Run commands in turn; return for each the median seconds and CPU and the largest memory."""

    def run_alone(command: list[object]) -> Run:
        delete_results(out, Path(f"{out}.cache"))
        return run_command(command, out.parent)

    results = processes.run_in_turns(
        {name: partial(run_alone, command) for name, command in contestants.items()}, repeat
    )
    delete_results(out, Path(f"{out}.cache"))
    return {
        name: Run(
            statistics.median(run.seconds for run in runs),
            max(run.memory for run in runs),
            statistics.median(run.cpu for run in runs),
        )
        for name, runs in results.items()
    }


NOTES: list[str] = []


def print_row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_comparison(
    title: str,
    source: Path,
    builder: str,
    args: argparse.Namespace,
    work: Path,
    with_datasets: bool = True,
) -> None:
    """Print one row: stage 02, `datasets` if asked, the ratio and the share of the limit."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    out = work / "out"
    run_command(stage_command(source, out, args.workers), work)
    out_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    delete_results(out)
    contestants = {"ours": stage_command(source, out, args.workers)}
    if with_datasets:
        contestants["peer"] = datasets_command(builder, source, out, args.workers)
    results = run_in_turns(contestants, out, args.repeat)
    limit_seconds = limits.measure_limits(paths, out_bytes, work, args.workers, builder == "json")
    our_seconds, memory, cpu = results["ours"]
    cells = ["-"] * 3
    cpu_note = f"stage 02 {cpu:.1f} s"
    if with_datasets:
        their_seconds, their_memory, their_cpu = results["peer"]
        cells = [
            f"{their_seconds:.2f} s",
            f"{their_memory / _MB:,.0f} MB",
            f"{their_seconds / our_seconds:.1f}×",
        ]
        cpu_note += f", datasets {their_cpu:.1f} s, {their_cpu / cpu:.1f}×"
    name, seconds = max(limit_seconds.items(), key=lambda item: item[1])
    print_row(
        title,
        f"{our_seconds:.2f} s",
        f"{size / our_seconds / _MB:,.0f} MB/s, {len(paths) / our_seconds:,.0f} files/s",
        f"{memory / _MB:,.0f} MB",
        *cells,
        f"{seconds:.2f} s ({name})",
        f"{seconds / our_seconds:.2f}",
    )
    own_cpu_seconds = limits.measure_own_cpu(source, work, args.workers)
    limit_seconds["the stage's own CPU ÷ cores"] = own_cpu_seconds
    NOTES.append(
        f"{title}: "
        + ", ".join(f"{k} {v:.2f} s" for k, v in limit_seconds.items())
        + f" ({own_cpu_seconds / our_seconds:.2f} of stage 02). CPU of the process tree: {cpu_note}"
    )


def measure_stage_01(source: Path, work: Path, repeat: int) -> None:
    """Print how fast stage 01 places hard links."""
    directories = 0
    files = 0
    for _, subdirectories, names in os.walk(source):
        directories = directories + len(subdirectories)
        files = files + len(names)
    command = [
        sys.executable,
        ROOT / "01_organize_data.py",
        "--src-dir",
        source,
        "--dst-root",
        work / "out",
        "--no-progress",
    ]
    seconds, memory, cpu = run_in_turns({"ours": command}, work / "out", repeat)["ours"]
    mkdir_seconds, link_seconds = limits.measure_kernel_calls(source, work / "out", directories)
    print(
        f"\nStage 01, hard links: {files:,} files in {seconds:.2f} s, "
        f"{files / seconds:,.0f} files/s, {cpu:.2f} s of CPU, {memory / _MB:,.0f} MB of memory; "
        f"mkdir takes {mkdir_seconds * 1e6:.0f} µs and link {link_seconds * 1e6:.0f} µs here, so "
        f"the {20 * directories:,} directories alone take {20 * directories * mkdir_seconds:.2f} s "
        f"and the links {files * link_seconds:.2f} s of one core"
    )


def measure_memory(work: Path, megabytes: int, workers: int) -> None:
    """Print memory and time of stage 02 for inputs of 1, 4 and 16 times `megabytes`."""
    print("\n| input | seconds | memory of the tree |\n|---|---|---|")
    for times in (1, 4, 16):
        source = work / "growing"
        make_lines(source, megabytes * times)
        seconds, peak, _ = run_command(stage_command(source, work / "out", workers), work)
        print_row(
            f"JSON Lines, {megabytes * times:,} MB", f"{seconds:.1f}", f"{peak / _MB:,.0f} MB"
        )
        delete_results(source, work / "out")
    source.mkdir()
    with (source / "one.txt").open("w") as file:  # one line, one document
        for _ in range(megabytes * 16):
            file.write("A document in one line. " * 41_667)
    seconds, peak, _ = run_command(stage_command(source, work / "out", workers), work)
    print_row(f"one text file, {megabytes * 16:,} MB", f"{seconds:.1f}", f"{peak / _MB:,.0f} MB")
    delete_results(source, work / "out")


def measure_chats(work: Path, megabytes: int, args: argparse.Namespace) -> None:
    """Compare --format text and --format chat on conversations of about 3 kB in four turns."""
    source = work / "chats"
    draw = random.Random(2)
    source.mkdir()
    texts = [make_text(draw, draw.randint(50, 1400)) for _ in range(5000)]
    with (source / "a.jsonl").open("w") as file:
        while file.tell() < megabytes * _MB:
            turns = [
                {"role": role, "content": draw.choice(texts)}
                for role in ("user", "assistant") * draw.randint(1, 3)
            ]
            file.write(json.dumps({"id": str(draw.random()), "messages": turns}) + "\n")
    command = stage_command(source, work / "out", args.workers)
    results = run_in_turns(
        {name: [*command, "--format", name] for name in ("text", "chat")}, work / "out", args.repeat
    )
    print("\n| conversations as | seconds | rate | per core of CPU | memory |\n" + "|---" * 5 + "|")
    for name, (seconds, peak, cpu) in results.items():
        print_row(
            f"`--format {name}`, {megabytes:,} MB",
            f"{seconds:.1f}",
            f"{megabytes / seconds:,.0f} MB/s",
            f"{megabytes / cpu:,.0f} MB/s",
            f"{peak / _MB:,.0f} MB",
        )
    delete_results(source)


def print_notes() -> None:
    """Print the notes of `print_comparison`, and forget them."""
    print("\nSeconds that each limit of the machine allows:\n\n- " + "\n- ".join(NOTES), flush=True)
    NOTES.clear()


def measure_large(args: argparse.Namespace, work: Path) -> None:
    """Repeat the comparison with inputs so large that start-up hardly counts."""
    print("\nLarger inputs, so that start-up hardly counts:\n")
    make_lines(work / "lines", args.large * args.lines_mb)
    print_comparison(
        f"JSON Lines, {args.large * args.lines_mb:,} MB", work / "lines", "json", args, work
    )
    delete_results(work / "lines")
    make_small(work / "small", 10 * args.files)
    print_comparison(f"{10 * args.files:,} small files", work / "small", "text", args, work, False)
    print_notes()
    measure_stage_01(work / "small", work, args.repeat)
    delete_results(work / "small")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=None,
        help="where to work (default: the system's temporary directory)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--files", type=int, default=20_000, help="small files")
    parser.add_argument("--lines-mb", type=int, default=1000, help="megabytes of JSON Lines")
    parser.add_argument(
        "--large",
        type=int,
        default=4,
        metavar="TIMES",
        help="also measure TIMES as many JSON Lines, and ten times the files without "
        "`datasets`, so that start-up hardly counts; 0: do not (default: 4)",
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each contestant")
    parser.add_argument(
        "--memory-mb",
        type=int,
        default=0,
        help="also measure memory at 1, 4 and 16 times this size",
    )
    parser.add_argument(
        "--chats-mb",
        type=int,
        default=0,
        help="measure conversations of this size, and nothing else",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="benchmark-") as place:
        work = Path(place)
        if args.chats_mb:
            measure_chats(work, args.chats_mb, args)
            return
        make_small(work / "small", args.files)
        make_lines(work / "lines", args.lines_mb)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {args.workers} workers, "
            f"Python {platform.python_version()}, median of {args.repeat}, "
            f"load before the start {os.getloadavg()[0]:.1f}\n"
        )
        print_row(
            "input",
            "stage 02",
            "rate",
            "memory",
            "datasets",
            "its memory",
            "ratio",
            "physical limit",
            "limit ÷ stage 02",
        )
        print_row(*["---"] * 9)
        print_comparison(f"{args.files:,} small files", work / "small", "text", args, work)
        print_comparison(f"JSON Lines, {args.lines_mb:,} MB", work / "lines", "json", args, work)
        print_notes()
        measure_stage_01(work / "small", work, args.repeat)
        delete_results(work / "lines", work / "small")
        if args.large:
            measure_large(args, work)
        if args.memory_mb:
            measure_memory(work, args.memory_mb, args.workers)


if __name__ == "__main__":
    main()
