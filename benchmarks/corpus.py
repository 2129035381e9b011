#!/usr/bin/env python3
"""Stages 01 and 02 against `datasets`, and against what this disk and these cores allow.

  python benchmarks/corpus.py
  python benchmarks/corpus.py --dir /scratch --workers 8 --lines-mb 2000 --repeat 3

Makes a corpus of small files and one of JSON Lines under --dir, runs stage 01 and 02 as a person
would (whole processes, start-up included) and `load_dataset` + `save_to_disk` with as many
processes in turn, and prints a table: the median of the runs, ratios, the share of the physical
limit, and the largest memory of the process tree. Nothing is kept but what is printed.

The limit: max(bytes in ÷ read rate, bytes out ÷ write rate, files ÷ (cores × open rate), CPU
seconds of the parse ÷ cores), each measured here, on the same files.
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
from tests.process_tree import resident, tree

_MB = 1_000_000
_PEER = """
import sys, datasets
from datasets import load_dataset
builder, folder, out, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
datasets.disable_progress_bars()
how = {"sample_by": "document"} if builder == "text" else {}
found = load_dataset(builder, data_dir=folder, cache_dir=out + ".cache", num_proc=workers, **how)
found["train"].save_to_disk(out, num_proc=workers)
"""


def words(draw: random.Random, size: int) -> str:
    """Return about `size` characters of text."""
    return " ".join(draw.choices(_VOCABULARY, k=max(1, size // 7)))


_VOCABULARY = [
    "".join(random.Random(i).choices("etaoinshrdlucmfwypvbgk", k=1 + i % 11)) for i in range(20_000)
]


def make_small(root: Path, files: int) -> None:
    """Make many text files of 1 to 8 kB in 100 directories."""
    draw = random.Random(0)
    for number in range(files):
        path = root / f"{number % 100:02d}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(draw, draw.randint(1000, 8000)))


def make_lines(root: Path, megabytes: int) -> None:
    """Make JSON Lines in files of about 250 MB, a document of 1 to 4 kB per line."""
    draw = random.Random(1)
    root.mkdir(parents=True)
    texts = [words(draw, draw.randint(1000, 4000)) for _ in range(5000)]
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


class Watch(threading.Thread):
    """Follows the memory (bytes, shared pages counted for each) and CPU of a process tree."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._peak = 0
        self._pid = pid
        self._ended = threading.Event()
        self._cpu: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        """Look every 20 ms."""
        while not self._ended.wait(0.02):
            processes = list(tree(self._pid))
            self._peak = max(self._peak, sum(map(resident, processes)))
            self._cpu |= {pid: cpu for pid in processes if (cpu := _cpu(pid))}

    def stop(self) -> tuple[int, float]:
        """Return the largest sum of resident memory, and the CPU seconds of all processes."""
        self._ended.set()
        self.join()
        return self._peak, sum(self._cpu.values())


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


class Run(NamedTuple):
    """What a command took. memory: bytes at the peak, of its process tree. cpu: seconds, of it."""

    seconds: float
    memory: int
    cpu: float


def run(command: list[object], cwd: Path) -> Run:
    """Run a command and return what it took; exits when it fails."""
    began = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    watch = Watch(process.pid)
    _, errors = process.communicate()
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"{command} failed:\n{errors[-2000:]}")
    return Run(seconds, *watch.stop())


def ours(source: Path, out: Path, workers: int) -> list[object]:
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


def peer(builder: str, source: Path, out: Path, workers: int) -> list[object]:
    """Return the command of `datasets`."""
    return [sys.executable, "-c", _PEER, builder, source, out, workers]


def clear(*paths: Path) -> None:
    """Delete results, and let the disk come to rest."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    os.sync()


def compete(contestants: dict[str, list[object]], out: Path, repeat: int) -> dict[str, Run]:
    """Run commands in turns; return the median seconds and CPU and the largest memory of each."""

    def run_alone(command: list[object]) -> Run:
        clear(out, Path(f"{out}.cache"))
        return run(command, out.parent)

    found = processes.in_turns(
        {name: partial(run_alone, command) for name, command in contestants.items()}, repeat
    )
    clear(out, Path(f"{out}.cache"))
    return {
        name: Run(
            statistics.median(run.seconds for run in runs),
            max(run.memory for run in runs),
            statistics.median(run.cpu for run in runs),
        )
        for name, runs in found.items()
    }


NOTES: list[str] = []


def row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def compare(
    what: str,
    source: Path,
    builder: str,
    args: argparse.Namespace,
    work: Path,
    against: bool = True,
) -> None:
    """Print one line: stage 02, datasets (if against it), the ratio and the share of the limit."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    out = work / "out"
    run(ours(source, out, args.workers), work)
    out_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    clear(out)
    contestants = {"ours": ours(source, out, args.workers)}
    if against:
        contestants["peer"] = peer(builder, source, out, args.workers)
    found = compete(contestants, out, args.repeat)
    least = limits.seconds(paths, out_bytes, work, args.workers, builder == "json")
    mine, memory, cpu = found["ours"]
    cells = ["-"] * 3
    cpu_note = f"stage 02 {cpu:.1f} s"
    if against:
        theirs, their_memory, their_cpu = found["peer"]
        cells = [f"{theirs:.2f} s", f"{their_memory / _MB:,.0f} MB", f"{theirs / mine:.1f}×"]
        cpu_note += f", datasets {their_cpu:.1f} s, {their_cpu / cpu:.1f}×"
    name, seconds = max(least.items(), key=lambda item: item[1])
    row(
        what,
        f"{mine:.2f} s",
        f"{size / mine / _MB:,.0f} MB/s, {len(paths) / mine:,.0f} files/s",
        f"{memory / _MB:,.0f} MB",
        *cells,
        f"{seconds:.2f} s ({name})",
        f"{seconds / mine:.2f}",
    )
    scaled = limits.own_cpu(source, work, args.workers)
    least["the stage's own CPU ÷ cores"] = scaled
    NOTES.append(
        f"{what}: "
        + ", ".join(f"{k} {v:.2f} s" for k, v in least.items())
        + f" ({scaled / mine:.2f} of stage 02). CPU of the process tree: {cpu_note}"
    )


def organize(source: Path, work: Path, repeat: int) -> None:
    """Print how fast stage 01 places hard links."""
    directories = 0
    files = 0
    for _, below, names in os.walk(source):
        directories = directories + len(below)
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
    seconds, memory, cpu = compete({"ours": command}, work / "out", repeat)["ours"]
    made, linked = limits.kernel_seconds(source, work / "out", directories)
    print(
        f"\nStage 01, hard links: {files:,} files in {seconds:.2f} s, "
        f"{files / seconds:,.0f} files/s, {cpu:.2f} s of CPU, {memory / _MB:,.0f} MB of memory; "
        f"here mkdir takes {made * 1e6:.0f} µs and link {linked * 1e6:.0f} µs, so the "
        f"{20 * directories:,} directories alone take {20 * directories * made:.2f} s and the "
        f"links {files * linked:.2f} s of one core"
    )


def memory(work: Path, megabytes: int, workers: int) -> None:
    """Print memory and time of stage 02 for inputs of 1, 4 and 16 times a size."""
    print("\n| input | seconds | memory of the tree |\n|---|---|---|")
    for times in (1, 4, 16):
        source = work / "growing"
        make_lines(source, megabytes * times)
        seconds, peak, _ = run(ours(source, work / "out", workers), work)
        row(f"JSON Lines, {megabytes * times:,} MB", f"{seconds:.1f}", f"{peak / _MB:,.0f} MB")
        clear(source, work / "out")
    source.mkdir()
    with (source / "one.txt").open("w") as file:  # one line, one document
        for _ in range(megabytes * 16):
            file.write("A document in one line. " * 41_667)
    seconds, peak, _ = run(ours(source, work / "out", workers), work)
    row(f"one text file, {megabytes * 16:,} MB", f"{seconds:.1f}", f"{peak / _MB:,.0f} MB")
    clear(source, work / "out")


def chats(work: Path, megabytes: int, args: argparse.Namespace) -> None:
    """Print what conversations take as text and as conversations: of 3 kB in four turns."""
    source = work / "chats"
    draw = random.Random(2)
    source.mkdir()
    texts = [words(draw, draw.randint(50, 1400)) for _ in range(5000)]
    with (source / "a.jsonl").open("w") as file:
        while file.tell() < megabytes * _MB:
            turns = [
                {"role": role, "content": draw.choice(texts)}
                for role in ("user", "assistant") * draw.randint(1, 3)
            ]
            file.write(json.dumps({"id": str(draw.random()), "messages": turns}) + "\n")
    command = ours(source, work / "out", args.workers)
    found = compete(
        {name: [*command, "--format", name] for name in ("text", "chat")}, work / "out", args.repeat
    )
    print("\n| conversations as | seconds | rate | per core of CPU | memory |\n" + "|---" * 5 + "|")
    for name, (seconds, peak, cpu) in found.items():
        row(
            f"`--format {name}`, {megabytes:,} MB",
            f"{seconds:.1f}",
            f"{megabytes / seconds:,.0f} MB/s",
            f"{megabytes / cpu:,.0f} MB/s",
            f"{peak / _MB:,.0f} MB",
        )
    clear(source)


def print_notes() -> None:
    """Print what `compare` found besides its lines."""
    print("\nSeconds that the parts of the machine need:\n\n- " + "\n- ".join(NOTES), flush=True)
    NOTES.clear()


def large(args: argparse.Namespace, work: Path) -> None:
    """Print the same for inputs so large that the start of the processes hardly counts."""
    print("\nLarger, so that the start hardly counts:\n")
    make_lines(work / "lines", args.large * args.lines_mb)
    compare(f"JSON Lines, {args.large * args.lines_mb:,} MB", work / "lines", "json", args, work)
    clear(work / "lines")
    make_small(work / "small", 10 * args.files)
    compare(f"{10 * args.files:,} small files", work / "small", "text", args, work, False)
    print_notes()
    organize(work / "small", work, args.repeat)
    clear(work / "small")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to work (a temporary place)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--files", type=int, default=20_000, help="small files")
    parser.add_argument("--lines-mb", type=int, default=1000, help="megabytes of JSON Lines")
    parser.add_argument(
        "--large",
        type=int,
        default=4,
        metavar="TIMES",
        help="also measure so many times the JSON Lines, and ten times the files "
        "(without datasets), where the start no longer counts; 0: do not",
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
            chats(work, args.chats_mb, args)
            return
        make_small(work / "small", args.files)
        make_lines(work / "lines", args.lines_mb)
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {args.workers} workers, "
            f"Python {platform.python_version()}, median of {args.repeat}, "
            f"load before the start {os.getloadavg()[0]:.1f}\n"
        )
        row(
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
        row(*["---"] * 9)
        compare(f"{args.files:,} small files", work / "small", "text", args, work)
        compare(f"JSON Lines, {args.lines_mb:,} MB", work / "lines", "json", args, work)
        print_notes()
        organize(work / "small", work, args.repeat)
        clear(work / "lines", work / "small")
        if args.large:
            large(args, work)
        if args.memory_mb:
            memory(work, args.memory_mb, args.workers)


if __name__ == "__main__":
    main()
