#!/usr/bin/env python3
"""Measure --dedup near of lib.curate: speed, memory, and what it finds in a planted corpus.

  python benchmarks/near.py
  python benchmarks/near.py --dir /scratch --megabytes 2000 --workers 1 2 --grow 100

Makes JSON Lines of documents of 1 to 6 kB under --dir: pairs of all similarities, chains of ten
documents (each is similar to the one before), copies, one text in many slight variants, templates
with different content, and a licence with different names, alone and above other text. Stage 02
makes a dataset of them. Then the benchmark runs lib.curate with `--dedup none`, `exact` and `near`,
and prints the wall time, and the CPU time and memory of the process tree. It computes the Jaccard
similarity of the planted pairs from the words themselves, and compares dropped.jsonl with it.

--grow N also measures the memory for inputs of N, 4 N and 16 N megabytes. --members N also builds a
corpus of N variants of one text. --all adds a build with all rules, masks and test sets; with
--language-model, a further build also labels languages. --datatrove PYTHON runs datatrove with the
same settings on the same corpora, in another environment. All files are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.corpus import Run, print_row, run_command, stage_command
from benchmarks.parts.processes import ROOT

_MB = 1_000_000
_VOCABULARY = 30_000
_VARIANTS = 0.03  # share of the documents that are variants of one text
_BANDS = 20
_BAND_SIZE = 8
_THRESHOLD = 0.8
_LICENCES = 0.02
_LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 1.01)
_CHECKED = 5000


class Pair(NamedTuple):
    """Two documents, by their numbers, and their Jaccard similarity."""

    first: int
    second: int
    similarity: float


class Planter:
    """Writes documents to JSON Lines and remembers which are similar."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        root.mkdir(parents=True)
        self.pairs: list[Pair] = []
        self.documents = 0
        self.chains: list[list[int]] = []
        self.templates: list[int] = []
        self.licences: dict[str, list[int]] = {"a licence": [], "a licence above": []}
        self._draw = random.Random(seed)
        self._words = [
            "".join(self._draw.choices("etaoinshrdlucmfwypvbgk", k=1 + i % 11))
            for i in range(_VOCABULARY)
        ]
        self._file = (root / "planted.jsonl").open("w")
        self._famous = self._make_text()
        self._template = self._make_text()
        self._licence = (ROOT / "LICENSE").read_text().split()

    def fill(self, size: int) -> None:
        """Write about `size` bytes."""
        while self._file.tell() < size:
            kind = self._draw.random()
            if kind < _VARIANTS:
                self._write(self._change(self._famous, self._draw.randint(0, 3)))
            elif kind < 2 * _VARIANTS:
                half = self._template[: len(self._template) // 2]
                self.templates.append(self._write(half + self._make_text()[: len(half)]))
            elif kind < 0.12:
                self._write_pair()
            elif kind < 0.13:
                self._write_chain()
            elif kind < 0.13 + _LICENCES:
                self._write_licence()
            else:
                self._write(self._make_text())
        self._file.close()

    def _make_text(self) -> list[str]:
        return self._draw.choices(self._words, k=self._draw.randint(150, 900))

    def _change(self, words: list[str], count: int) -> list[str]:
        changed = list(words)
        for _ in range(count):
            changed[self._draw.randrange(len(changed))] = f"n{self._draw.randrange(10**9)}"
        return changed

    def _write(self, words: list[str]) -> int:
        self._file.write(json.dumps({"text": " ".join(words)}) + "\n")
        self.documents += 1
        return self.documents

    def _write_pair(self) -> None:
        one = self._make_text()
        two = self._change(one, self._draw.randint(0, len(one) // 12))
        self.pairs.append(Pair(self._write(one), self._write(two), compute_similarity(one, two)))

    def _write_chain(self) -> None:
        link = self._make_text()
        chain = [self._write(link)]
        for _ in range(9):
            link = self._change(link, max(1, len(link) // 60))
            chain.append(self._write(link))
        self.chains.append(chain)

    def _write_licence(self) -> None:
        """Write the licence with the name of another holder, alone or above other text."""
        licence = ["Copyright", *self._draw.choices(self._words, k=3), *self._licence]
        is_alone = self._draw.random() < 0.5
        name = "a licence" if is_alone else "a licence above"
        text = [] if is_alone else self._make_text()
        self.licences[name].append(self._write(licence + text))


def compute_similarity(one: list[str], two: list[str]) -> float:
    """Return the Jaccard similarity of the 5-grams of two documents."""
    sets = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one, two)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def print_findings(planter: Planter, name: str, dropped: Collection[int]) -> None:
    """Print which of the planted documents a tool dropped. dropped: their numbers."""
    print(
        f"\n| similarity of a planted pair | pairs | {name}: lost one | second dropped | expected |"
    )
    print("|---" * 5 + "|")
    for low, high in pairwise(_LEVELS):
        pairs = [pair for pair in planter.pairs if low <= pair.similarity < high]
        lost = sum(pair.first in dropped or pair.second in dropped for pair in pairs)
        second = sum(pair.second in dropped for pair in pairs)
        share = sum(
            1 - (1 - pair.similarity**_BAND_SIZE) ** _BANDS
            for pair in pairs
            if pair.similarity >= _THRESHOLD
        )
        print_row(f"{low:g} to {min(high, 1):g}", len(pairs), lost, second, f"{share:.1f}")
    counts_kept = Counter(sum(link not in dropped for link in chain) for chain in planter.chains)
    print(f"\nkept of a chain of ten: {dict(sorted(counts_kept.items()))} (documents: chains)")
    for kind, numbers in {"a template": planter.templates, **planter.licences}.items():
        lost = sum(number in dropped for number in numbers)
        print(f"documents with {kind}: {len(numbers):,}, dropped {lost:,}")
    print(f"{name} dropped {len(dropped):,} of {planter.documents:,} documents")


def check_dropped(source: Path, out: Path) -> set[int]:
    """Return the numbers of the documents that were dropped, after a check of some of them."""
    dropped = {}
    for line in (out / "dropped.jsonl").open():
        record = json.loads(line)
        dropped[record["row"] + 1] = record
    checked = set(random.Random(1).sample(sorted(dropped), min(_CHECKED, len(dropped))))
    needed = checked | {find_leader(dropped[number]) for number in checked}
    texts = {}
    with (source / "planted.jsonl").open() as lines:
        for number, line in enumerate(lines, 1):
            if number in needed:
                texts[number] = json.loads(line)["text"].split()
    values = [
        compute_similarity(texts[number], texts[find_leader(dropped[number])])
        for number in sorted(checked)
    ]
    kept_leaders = all(find_leader(record) not in dropped for record in dropped.values())
    print(
        f"\nlowest similarity of {len(values):,} dropped documents to the kept ones, computed "
        f"again: {min(values):.4f}; all named documents are kept: {kept_leaders}"
    )
    report = json.loads((out / "manifest.json").read_text())["summary"]["near"]
    counts = ("sharing_a_band", "compared_pairs", "candidates_reached", "members_reached")
    print(", ".join(f"{name} {report[name]:,}" for name in counts))
    print(f"largest clusters: {[cluster['size'] for cluster in report['largest'][:5]]}")
    return set(dropped)


def find_leader(record: Mapping[str, Any]) -> int:
    """Return the number of the document that a dropped one duplicates."""
    number: int = record["duplicate_of"]["row"] + 1
    return number


def run_curation(work: Path, workers: int, *options: str | Path) -> Run:
    """Curate the dataset `raw` into `out`; return the cost."""
    command = [sys.executable, "-m", "lib.curate", work / "raw", "--save-dir", work / "out"]
    return run_command([*command, "--num-workers", workers, "--no-progress", *options], ROOT)


def run_datatrove(python: Path, source: Path, work: Path) -> tuple[Run, set[int]]:
    """Run datatrove's MinHash on a directory; return its cost and the documents that it kept."""
    script = ROOT / "benchmarks/parts/datatrove_minhash.py"
    out = work / "datatrove"
    run = run_command([python, script, source, out, _BANDS, _BAND_SIZE], work)
    kept_rows = set()
    for path in (out / "kept").iterdir():
        with path.open() as lines:
            # datatrove numbers the lines of a file from 0.
            kept_rows |= {int(json.loads(line)["id"].rpartition("/")[2]) + 1 for line in lines}
    shutil.rmtree(out)
    return run, kept_rows


def measure_growth(work: Path, megabytes: int, workers: int) -> None:
    """Print the memory for growing inputs.

    They consist of copies of one corpus, each with other letters, which are made faster than texts.
    """
    Planter(work / "base").fill(megabytes * _MB)
    content = (work / "base/planted.jsonl").read_bytes()
    shutil.rmtree(work / "base")
    letters = string.ascii_lowercase.encode()
    print("\n| input | seconds | memory of the tree |\n|---|---|---|")
    for times in (1, 4, 16):
        source = work / "growing"
        source.mkdir()
        draw = random.Random(times)
        for number in range(times):
            others = bytes(draw.sample(letters, len(letters)))
            copy = content.translate(bytes.maketrans(letters, others))
            (source / f"{number:02}.jsonl").write_bytes(copy)
        run_command(stage_command(source, work / "raw", workers), work)
        run = run_curation(work, workers, "--dedup", "near")
        print_row(f"{megabytes * times:,} MB", f"{run.seconds:.1f}", f"{run.memory / _MB:,.0f} MB")
        for path in (source, work / "raw", work / "out"):
            shutil.rmtree(path)


def measure_members(work: Path, members: int, workers: int, datatrove: Path | None) -> None:
    """Print what becomes of a corpus in which every text is a variant of the same one."""
    source = work / "members"
    source.mkdir()
    words = Planter(work / "unused")._make_text()[:100]
    with (source / "members.jsonl").open("w") as file:
        for number in range(members):
            words[number % 100], before = f"n{number}", words[number % 100]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
            words[number % 100] = before
    run_command(stage_command(source, work / "raw", workers), work)
    run = run_curation(work, workers, "--dedup", "near")
    summary = json.loads((work / "out/manifest.json").read_text())["summary"]
    print(
        f"\n{members:,} variants of one text: {run.seconds:.1f} s, {run.cpu:.1f} s of CPU, "
        f"{run.memory / _MB:,.0f} MB; {summary['rows']:,} rows kept, "
        f"{summary['near']['compared_pairs']:,} pairs compared, --near-candidates reached by "
        f"{summary['near']['candidates_reached']:,} rows, --near-members "
        f"{summary['near']['members_reached']:,} times"
    )
    if datatrove:
        run, kept_rows = run_datatrove(datatrove, source, work)
        print(
            f"datatrove: {run.seconds:.1f} s, {run.cpu:.1f} s of CPU, {run.memory / _MB:,.0f} MB; "
            f"{len(kept_rows):,} rows kept"
        )
    for path in (source, work / "raw", work / "out"):
        shutil.rmtree(path)


def list_all_options(work: Path) -> list[str | Path]:
    """Return the options of a curation with all rules without models; write a test set."""
    draw = random.Random(2)
    test_sets = work / "test_sets"
    test_sets.mkdir()
    with (test_sets / "questions.jsonl").open("w") as file:
        for _ in range(10_000):
            question = " ".join(f"q{draw.randrange(10**6)}" for _ in range(40))
            file.write(json.dumps({"question": question}) + "\n")
    return [
        *("--dedup", "near", "--quality", "gopher,gopher-repetition,c4,fineweb"),
        *("--mask", "email,ip,phone,iban,card", "--decontaminate", str(test_sets)),
        *("--quality-set", "gopher.min_stop_words=0,c4.min_sentences=0"),
        *("--quality-set", "fineweb.min_end_mark_lines=0"),
    ]


def measure_builds(
    work: Path, megabytes: int, choices: Mapping[str, Sequence[str | Path]], workers: Sequence[int]
) -> None:
    """Print the cost of curations by the name of their options; `out` is left by the last one."""
    print("| --dedup | workers | seconds | rate | per core of CPU | memory |\n" + "|---" * 6 + "|")
    run = run_command(stage_command(work / "planted", work / "raw", 1), work)
    print_cost("stage 02", 1, megabytes, run)
    for count in workers:
        for name, options in choices.items():
            shutil.rmtree(work / "out", ignore_errors=True)
            os.sync()
            print_cost(name, count, megabytes, run_curation(work, count, *options))


def print_cost(name: str, workers: int, megabytes: int, run: Run) -> None:
    """Print a row of the table of costs."""
    print_row(
        name,
        workers,
        f"{run.seconds:.1f}",
        f"{megabytes / run.seconds:,.1f} MB/s",
        f"{megabytes / run.cpu:,.1f} MB/s",
        f"{run.memory / _MB:,.0f} MB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="scratch directory (default: a temporary one)")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--grow", type=int, default=0)
    parser.add_argument("--members", type=int, default=0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--language-model", type=Path)
    parser.add_argument("--datatrove", type=Path, metavar="PYTHON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        work = Path(name).resolve()
        planter = Planter(work / "planted")
        planter.fill(args.megabytes * _MB)
        print(f"{args.megabytes:,} MB, {planter.documents:,} documents; load {os.getloadavg()}\n")
        choices: dict[str, list[str | Path]] = {}
        if args.all:
            choices["all"] = list_all_options(work)
        if args.all and args.language_model:
            language = ["--language", "all", "--language-model", args.language_model.resolve()]
            choices["all, language"] = [*choices["all"], *language]
        choices |= {dedup: ["--dedup", dedup] for dedup in ("none", "exact", "near")}
        measure_builds(work, args.megabytes, choices, args.workers)
        dropped = check_dropped(work / "planted", work / "out")
        if args.datatrove:
            run, kept_rows = run_datatrove(args.datatrove, work / "planted", work)
            print_cost("datatrove", 1, args.megabytes, run)
            everything = set(range(1, planter.documents + 1))
            print_findings(planter, "datatrove", everything - kept_rows)
        print_findings(planter, "lib.curate", dropped)
        print(f"\nload at the end {os.getloadavg()}")
        for path in ("planted", "raw", "out"):
            shutil.rmtree(work / path)
        if args.members:
            measure_members(work, args.members, max(args.workers), args.datatrove)
        if args.grow:
            measure_growth(work, args.grow, max(args.workers))


if __name__ == "__main__":
    main()
