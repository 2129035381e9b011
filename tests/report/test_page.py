# covers: lib/report/__main__.py, lib/report/content.py, lib/report/summary.py
# covers: lib/report/report.html.j2
"""The page of one or more runs, from the files that they leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lib.core.errors import UsageError
from lib.pages.svg import COLUMNS
from lib.report.__main__ import main
from tests.conftest import ROOT
from tests.pages.test_svg import HOSTILE, StrictParser, check_page
from tests.report.runs import START, make_row, write_run

EVENTS = [
    {"time": START.format(5, 1), "event": "skip_step", "step": 301, "steps": 2, "reason": "NaN"},
    {"time": START.format(6, 1), "event": "resume", "step": 350, "path": "x", "ranks": 2},
    {"time": START.format(11, 40), "event": "complete", "step": 700},
]


def report(*runs: Path, out: Path | None = None) -> StrictParser:
    """Write the page of runs, check it, and return what it says."""
    main([*map(str, runs), *(["--out", str(out)] if out else [])])
    path = out or runs[0] / "report.html"
    assert path.stat().st_size < 2_000_000
    return check_page(path.read_text(encoding="utf-8"))


def make_rows(steps: int = 700, every: int = 1) -> list[dict]:
    return [make_row(step) for step in range(every, steps + 1, every)]


def test_the_page_of_a_run_says_what_it_did(tmp_path: Path) -> None:
    rows = make_rows()
    for row in rows[99::100]:
        row |= {"eval/loss": row["train/loss"], "eval/bits_per_byte": 1.25}
        row |= {"eval/wiki/bits_per_byte": 1.0625, "eval/copying/accuracy": 0.8125}
    rows[-1]["eval/loss"] = 5.0
    samples = [
        {"step": step, "prompt": "Once", "kind": kind, "text": f"{kind} text {step}"}
        for step in (100, 200, 300, 400, 500)
        for kind in ("greedy", "drawn")
    ]
    run = write_run(tmp_path / "exp", rows, EVENTS, samples, {"lr": 0.5})
    parsed = report(run)
    text = re.sub(r"\s+", " ", parsed.text)
    assert "complete: step 700 of 700" in text
    assert "1 restart, 2 skipped steps" in text
    assert "lowest at step" in text and "--step best" in text
    assert "The last reason: NaN." in text
    assert {"#event-1-2", "#train/loss_mean"} <= {*parsed.links}
    for words in ("training loss, mean", "validation loss", "gradient norm", "MFU", "forward"):
        assert f"{words}: last" in text, words
    assert "Once" not in text.partition("Problems")[2].partition("Curves")[0].partition("left")[2]
    assert "resumed from step 350" in text
    labels = re.findall(r"class=\"x\"[^>]*>([^<]*)<", (run / "report.html").read_text())
    assert labels[1:8:2] == ["0", "200", "400", "600"], labels[:8]
    assert "nats per token" in text and "tokens/s of all ranks" in text and "GiB" in text
    assert "wiki 1.062 at step 700" in text and "copying 0.8125 at step 700" in text
    assert "step 100 step 300 step 500" in text and "greedy text 300" in text
    assert "drawn text 200" not in text
    assert "11 min 30 s estimated after step 10, 11 min 30 s taken" in text
    assert "58.5 GiB estimated, 60.0 GiB at the peak, 80.0 GiB available" in text
    assert "--lr 0.5" in text and "--precision bf16 (chosen by stage 04)" in text
    assert "torch 2.13.0" in text and "commit 2c47abd5" in text and "--batch-size 4" in text


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp", make_rows(50), EVENTS)
    pages = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "lib.report", str(run)]
        environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"report: {run / 'report.html'}" in done.stdout
        pages.append((run / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "exp", make_rows(300), EVENTS)
    rows = [row | {"train/tokens_seen": 4096 * row["step"]} for row in make_rows(100)]
    second = write_run(tmp_path / "b" / "exp", rows, options={"lr": 0.25})
    parsed = report(first, second, first / ".." / "exp", out=tmp_path / "both.html")
    assert parsed.text.count(f"{first} is complete") == 1, "a run that is named twice counts once"
    assert not (first / "report.html").exists()
    page = (tmp_path / "both.html").read_text()
    for key in ("Loss: training loss, mean", "Gradient norm", "Time of a step: forward"):
        legend = page.partition(f"<h3>{key}</h3>")[2].partition("</figure>")[0]
        assert f"</svg>\n{first}</span>" in legend and f"</svg>\n{second}</span>" in legend, key
    page = page.partition("<h2>Curves</h2>")[2].partition("</figure>")[0]
    drawn = re.findall(r'class="s([01]) "><title>[^<]*</title>[^/]*<path d="[^"]*L(\d+),', page)
    ends = {int(style): int(column) for style, column in drawn}
    assert ends[0] == pytest.approx(COLUMNS * 3 / 4, abs=3), "300 of 400 K tokens"
    assert ends[1] == pytest.approx(COLUMNS, abs=3)


def test_each_of_many_runs_has_a_style_of_its_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run {n}" / "a'\"b", make_rows(60)) for n in range(16)]
    report(*runs, out=tmp_path / "all runs.html")
    page = (tmp_path / "all runs.html").read_text()
    styles = re.findall(r"\.(s\d+) \{ --c: var\((--\d)\)(; stroke-dasharray: [\d ]+)? \}", page)
    assert len(styles) == len({dashes for _, _, dashes in styles}) == 16, "not by colour alone"
    for name, _, _ in styles:
        assert f'class="{name} "' in page


def write_hostile_run(root: Path, text: str = HOSTILE) -> Path:
    """Write a run whose files are as large and odd as they may be."""
    rows = make_rows(30)
    rows[3] |= {"train/loss": "text", "train/grad_norm": None, "eval/loss": [1], "time/data": 1e300}
    rows[4] |= {f"eval/{text}{n}/bits_per_byte": float(n) for n in range(300)}
    rows[5] |= {"train/tokens_seen": -5, "perf/mfu": 10**400, "memory/total_gib": 0.0}
    events = [
        {"event": "failed", "step": n, "time": text, "reason": text, "ranks": text}
        for n in range(300)
    ]
    samples = [
        {"step": n, "prompt": [text] * 300, "text": text * 3000, "kind": {"a": text}}
        for n in range(5)
    ] + [{"step": 9, "prompt": f"{n}{text}", "text": text * 500} for n in range(90)]
    options = {f"option{n}": text * 100 for n in range(90)}
    run = write_run(root / "e<b>&", rows, events, samples, options)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n7\n{"step": true}\n{"step": 1e5}\n' + "[" * 9999 + '\n{"step": 31, "tr')
    state = {"status": HOSTILE, "step": "x", "total_steps": -1, "memory_estimate_gib": "y"}
    (run / "state.json").write_text(json.dumps(state))
    return run


def test_hostile_files_are_shown_and_do_nothing(tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path)
    parsed = report(run)
    assert "<script>alert(1)</script>\\u202e" in parsed.text
    assert "shows the first" in parsed.text
    report(run, write_hostile_run(tmp_path / "other"), out=tmp_path / "out.html")


@pytest.mark.slow
@pytest.mark.parametrize("text", [HOSTILE, pytest.param('"' * 40, marks=pytest.mark.long)])
def test_the_page_of_many_hostile_runs_stays_small(tmp_path: Path, text: str) -> None:
    runs = [write_hostile_run(tmp_path / str(n), text) for n in range(16)]
    parsed = report(*runs, out=tmp_path / "out.html")
    assert "charts are left out" in parsed.text


def test_a_run_without_rows_with_one_row_or_with_old_rows_has_a_page(tmp_path: Path) -> None:
    report(write_run(tmp_path / "empty", []))
    parsed = report(write_run(tmp_path / "one", [make_row(1)]))
    assert "step 1 of 700" in parsed.text
    keys = ("step", "train/loss", "train/grad_norm")
    old = [{key: row[key] for key in keys} for row in make_rows(20)]
    run = write_run(tmp_path / "old", old)
    for name in ("state.json", "config.yaml", "events.jsonl"):
        (run / name).unlink()
    parsed = report(run)
    assert "no status: step 20" in parsed.text
    assert "tokens" not in parsed.text.partition("Gradient norm")[0].partition("Curves")[2]


def test_runs_of_an_earlier_version_have_a_page(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "earlier.tar.xz") as archive:
        members = [m for m in archive if re.match(r"\./outputs/\w+/[^/]+$", m.name) and m.isfile()]
        archive.extractall(tmp_path, members, filter="data")
    runs = sorted((tmp_path / "outputs").iterdir())
    for run in runs:
        assert "Table: Loss" in report(run).text
    assert "Loss: training loss" in report(*runs, out=tmp_path / "all.html").text


def test_gaps_are_problems_and_a_torn_line_is_not(tmp_path: Path) -> None:
    rows = make_rows(60)
    rows[40] |= {"train/loss": None, "train/loss_mean": None}
    run = write_run(tmp_path / "exp", rows)
    text = (run / "metrics.jsonl").read_text()
    text = text.replace('"train/grad_norm": ', '"train/grad_norm": NaN, "x": ', 1)
    (run / "metrics.jsonl").write_text(text[:-100])
    parsed = report(run)
    assert "first at step 41" in parsed.text
    assert "first at step 1." in parsed.text
    assert "step 60" in parsed.text.partition("Problems")[0]


def test_many_rows_need_little_memory_and_keep_a_spike(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp", [])
    rows = [make_row(step) for step in range(1, 1001)]
    rows[500]["train/loss"] = 777.5
    lines = [json.dumps(row) for row in rows]
    with (run / "metrics.jsonl").open("w") as file:
        for block in range(60):
            for line in lines:
                file.write(line.replace('"step": ', f'"step": {block}') + "\n")
    program = (
        f"from lib.report.__main__ import main; main([{str(run)!r}]); "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 150 << 10, "KiB"
    assert "highest 777.5 at step" in check_page((run / "report.html").read_text()).text


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp", make_rows(3))
    with pytest.raises(UsageError, match="there is no run"):
        main([str(tmp_path)])
    with pytest.raises(UsageError, match="17 runs"):
        main([str(write_run(tmp_path / f"run{n}", [])) for n in range(17)])
    with pytest.raises(UsageError, match="directory"):
        main([str(run), "--out", str(tmp_path)])
    assert not list(run.glob("report*"))


def test_the_package_stays_small_and_nothing_imports_it() -> None:
    package = [*(ROOT / "lib" / "report").glob("*.py")]
    files = [*package, *(ROOT / "lib" / "report").glob("*.j2")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 860
    others = [*(ROOT / "lib").rglob("*.py"), *ROOT.glob("0*.py"), *(ROOT / "launch").rglob("*.py")]
    imports = re.compile(r"^\s*(from|import) lib\.report", re.MULTILINE)
    assert not [p for p in others if p not in package and imports.search(p.read_text())]
