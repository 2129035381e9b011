# covers: lib/train/output/page_writer.py
"""report.html is written by a child process, which changes nothing about the run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lib.core.paths import Experiment
from lib.core.retry import poll
from lib.train.output import page_writer
from lib.train.output.page_writer import PageWriter
from tests.report.runs import make_row, write_run

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Return a run of some rows."""
    write_run(tmp_path / "exp", [make_row(step) for step in range(1, 2001)])
    return Experiment(tmp_path, "exp")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the warnings that follow."""
    lines: list[str] = []
    monkeypatch.setattr(page_writer.log, "warn", lines.append)
    return lines


def test_the_page_is_there_when_the_run_ends(experiment: Experiment, warnings: list[str]) -> None:
    writer = PageWriter(experiment, True)
    writer.finish()
    assert "exp is complete" in experiment.report.read_text()
    assert not warnings and not writer.is_failing
    assert not list(experiment.root.glob("*.tmp*"))


def test_other_ranks_and_a_bench_write_none(experiment: Experiment) -> None:
    writer = PageWriter(experiment, False)
    writer.start()
    writer.finish()
    assert not experiment.report.exists() and writer._process is None


def test_a_failing_page_is_one_warning(experiment: Experiment, warnings: list[str]) -> None:
    (experiment.report / "in the way").mkdir(parents=True)
    writer = PageWriter(experiment, True)
    for _ in range(2):
        writer.finish()
    assert writer.is_failing
    assert len(warnings) == 1 and "report.html cannot be written" in warnings[0]
    assert "directory" in warnings[0].lower()
    (experiment.report / "in the way").rmdir()
    experiment.report.rmdir()
    writer.finish()
    assert not writer.is_failing and experiment.report.is_file()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ValueError('a bug')", "ValueError: a bug"),
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); ", "no room"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_a_bug_and_a_full_disk_are_warnings(
    experiment: Experiment,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    reason: str,
) -> None:
    experiment.report.write_text("an earlier page")
    begin, run_module, end = page_writer._PROGRAM.partition("runpy.run_module")
    monkeypatch.setattr(page_writer, "_PROGRAM", begin + program + f"\n{run_module}{end}")
    PageWriter(experiment, True).finish()
    assert len(warnings) == 1 and reason in warnings[0], warnings
    assert experiment.report.read_text() == "an earlier page"
    assert not list(experiment.root.glob("*.tmp*"))


def test_a_page_that_takes_too_long_is_given_up(
    experiment: Experiment, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_writer, "_PROGRAM", SLEEP)
    monkeypatch.setattr(page_writer, "_PATIENCE_S", 0.1)
    writer = PageWriter(experiment, True)
    writer.start()
    first = writer._process
    writer.start()
    assert writer._process is first, "one child process at a time"
    writer.finish()
    assert first.wait(10) < 0, "the files have changed since it read them"
    assert "more than 0.1 s" in warnings[0]


def test_the_child_process_has_the_lowest_priority_and_a_time_limit(
    experiment: Experiment, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, _, _ = page_writer._PROGRAM.partition("runpy.run_module")
    monkeypatch.setattr(page_writer, "_PROGRAM", begin + SLEEP)
    monkeypatch.setattr(page_writer, "_LONGEST_S", 2)
    writer = PageWriter(experiment, True)
    writer.start()
    child = writer._process.pid
    assert poll(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19, every=0.02, patience=20)
    assert os.getsid(child) == child
    assert writer._process.wait(30) < 0, "the alarm ends it"


def test_a_killed_child_process_leaves_the_earlier_page(experiment: Experiment) -> None:
    PageWriter(experiment, True).finish()
    earlier = experiment.report.read_bytes()
    for attempt in range(6):
        writer = PageWriter(experiment, True)
        writer.start()
        time.sleep(0.1 * attempt)
        writer._process.kill()
        writer._process.wait()
        assert experiment.report.read_bytes() == earlier


def test_a_page_never_brings_a_deleted_run_back(experiment: Experiment) -> None:
    experiment.root.rename(experiment.root.with_name("moved"))
    PageWriter(experiment, True).finish()
    assert not experiment.root.exists()
