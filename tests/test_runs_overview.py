# covers: launch/monitor.py, launch/runs/table.py, launch/runs/curves.py, lib/runs/run_list.py
"""launch/monitor.py lists all runs of a directory."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from lib.runs import run_list
from lib.train.config import list_changed_defaults
from tests.conftest import run_stage, start_stage
from tests.test_monitor import hold_run, make_row
from tests.training import SMALL_RUN

DAY = 86_400


def make_run(
    root: Path,
    status: str = "complete",
    steps: int = 100,
    age: float = 0.0,
    settled: dict | None = None,
    **options: object,
) -> Path:
    """Write the files of a run with a row at each tenth step. age: seconds since the last one."""
    root.mkdir(parents=True)
    chosen = {"experiment_name": root.name, "lr": 3e-4, "seq_length": 2048, **options}
    config = {
        "options": chosen,
        "settled": settled or {},
        "defaults": list_changed_defaults(chosen | (settled or {})),
        "versions": {"torch": "2.13.0"},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (root / "state.json").write_text(
        json.dumps({"status": status, "step": steps, "total_steps": 400})
    )
    (root / "metrics.jsonl").write_text("".join(map(make_row, range(10, steps + 1, 10))))
    (root / "events.jsonl").write_text(
        '{"time": "2026-01-02T03:04:05Z", "event": "start", "step": 0, "ranks": 16}\n'
    )
    for path in root.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return root


def run_monitor(cwd: Path, *arguments: object, expect: int = 0, **environment: str) -> str:
    environment.setdefault("COLUMNS", "120")  # whatever the terminal of this test has
    result = run_stage("launch/monitor.py", *arguments, cwd=cwd, expect=expect, env=environment)
    assert "Traceback" not in result.stderr
    return result.stdout if expect == 0 else result.stderr


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table, by the name of the run."""
    lines = text.split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line) for line in lines)}


def test_the_list_shows_each_run_with_the_options_that_differ(tmp_path: Path) -> None:
    assert "--log" in run_monitor(tmp_path, "--log", expect=2), "without a run"
    outputs = tmp_path / "outputs"
    make_run(outputs / "first", age=3 * 3600 + 5, lr=1e-3)
    make_run(outputs / "second run", "preempted", 200, age=2 * DAY + 5)
    make_run(outputs / "sweep" / "deep" / "third", "running", age=65)
    make_run(outputs / "fourth", "failed", age=30 * DAY, lr=1e-3, settled={"lr": 1e-3})
    held = make_run(outputs / "fifth", "running", 400, age=40)
    make_run(outputs / ".launch" / "hidden")
    with hold_run(held):
        text = run_monitor(tmp_path)
    rows = rows_of(text)
    assert list(rows) == ["run", "fifth", "sweep/deep/third", "first", "second run", "fourth"]
    assert rows["fifth"][:2] == ["running", "400/400 100 %"]
    assert rows["sweep/deep/third"][0] == "died"
    assert rows["first"][1:] == ["100/400", "25 %", "7.0500", "5,000", "3 h ago", "lr 0.001"]
    assert rows["second run"][:3] == ["preempted", "200/400", "50 %"]
    assert rows["second run"][-2:] == ["2 d ago", "lr 0.0003"]
    assert rows["fourth"][-1].startswith("202") and rows["fourth"][0] == "failed"
    assert "\nall: seq_length 2048" in text and "hidden" not in text
    assert "skipped" not in text


def test_the_list_is_narrow_and_shortens_long_names(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    make_run(outputs / f"run-{'x' * 150}-a", text_field="y" * 300)
    make_run(outputs / f"run-{'x' * 150}-b", "disk_full", 12_345_670 // 1000 * 10)
    for environment in ({}, {"COLUMNS": "100"}, {"COLUMNS": "60"}, {"PYTHONIOENCODING": "ascii"}):
        text = run_monitor(tmp_path, **environment)
        width = int(environment.get("COLUMNS", 120))
        assert all(len(line) <= width for line in text.splitlines()), text
        assert "-a " in text and "-b " in text and "disk full" in text
        assert text.isascii() == ("PYTHONIOENCODING" in environment)


def test_one_run_differs_from_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "only", dataset_name=["hf_datasets/corpus", "other"])
    text = run_monitor(tmp_path, "runs")
    assert rows_of(text)["run"][-1] == "last change" and "seq_length" not in text


@pytest.mark.parametrize("has_directory", [False, True])
def test_no_runs_name_the_next_command(tmp_path: Path, has_directory: bool) -> None:
    if has_directory:
        (tmp_path / "outputs" / "mine").mkdir(parents=True)
    text = run_monitor(tmp_path)
    assert "no runs in outputs/; next: " in text and "04_train_fsdp.py --help" in text
    assert ("skipped, no runs: mine" in text) == has_directory
    assert "there is no run" in run_monitor(tmp_path, "none", expect=2)


def test_damaged_and_foreign_directories_are_named(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    make_run(outputs / "good")
    (make_run(outputs / "torn") / "state.json").write_text('{"status": "comp')
    (make_run(outputs / "empty") / "config.yaml").write_bytes(b"\xff\x00: [")
    (make_run(outputs / "lost") / "config.yaml").unlink()
    run = make_run(outputs / "hostile\x1b[31m", "\x1b[2Jcomplete", lr="\x1b[5m\n\u202e")
    (run / "metrics.jsonl").write_text('{"step": 99999999999999999999999, "train/loss": "x"}\n[]\n')
    pipes = make_run(outputs / "pipes")
    for name in ("metrics.jsonl", "events.jsonl"):
        (pipes / name).unlink()
        os.mkfifo(pipes / name)  # nobody ever writes to it
    piped = make_run(outputs / "piped")
    (piped / "config.yaml").unlink()
    (piped / "logs").mkdir(exist_ok=True)
    for name in ("config.yaml", "logs/rank_00001.log"):
        os.mkfifo(piped / name)
    assert "complete" in run_monitor(tmp_path, "piped", "--once")
    assert json.loads(run_monitor(tmp_path, "piped", "--json"))["options"] == {}
    (outputs / "foreign" / "checkpoints").mkdir(parents=True)
    (outputs / "notes.txt").write_text("mine")
    (outputs / "loop").symlink_to(outputs)
    text = run_monitor(tmp_path)
    assert text.count("good") == 1
    assert rows_of(text)["pipes"][0] == "complete"
    assert rows_of(text)["torn"][0] == "unreadable" and rows_of(text)["good"][0] == "complete"
    assert "skipped, no runs: foreign" in text and "lost (no config.yaml)" in text
    assert text.isprintable() or not set(text) & {"\x1b", "\u202e", "\r"}
    values = json.loads(run_monitor(tmp_path, "--json"))
    assert {run["name"] for run in values["runs"]} >= {"good", "torn", "empty"}


def test_runs_can_be_named_as_the_list_names_them(tmp_path: Path) -> None:
    make_run(tmp_path / "outputs" / "sweep" / "a run")
    assert "a run" in run_monitor(tmp_path, "sweep/a run", "--once")
    assert json.loads(run_monitor(tmp_path, "sweep/a run", "--json"))["status"] == "complete"


def test_json_contains_plain_numbers(tmp_path: Path) -> None:
    odd = make_run(tmp_path / "b", lr=math.inf)
    values = json.loads(run_monitor(tmp_path, odd, "--json"), parse_constant=pytest.fail)
    assert values["options"]["lr"] is None
    run = make_run(tmp_path / "outputs" / "a", age=60)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(make_row(110, **{"train/loss_mean": math.nan, "eval/loss": 2.5}))
    assert rows_of(run_monitor(tmp_path))["a"][3] == "nan"
    [values] = json.loads(run_monitor(tmp_path, "--json"), parse_constant=pytest.fail)["runs"]
    assert values["loss"] is None and values["validation_loss"] == 2.5
    assert values["step"] == 110 and values["total_steps"] == 400 and values["ranks"] == 16
    assert values["options"] == {"lr": 3e-4, "seq_length": 2048}
    assert values["started"] == "2026-01-02T03:04:05Z"


def test_the_list_reads_only_the_end_of_long_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "outputs" / "long")
    line = make_row(5_000_000)
    with (run / "metrics.jsonl").open("w") as file:
        file.truncate(1 << 40)  # a hole, which would take minutes to read
        file.seek(0, os.SEEK_END)
        file.write(f"\n{line}")
    [summary], _ = run_list.list_runs(tmp_path / "outputs")
    assert summary.step == 5_000_000


@pytest.mark.slow
def test_real_runs_are_listed_while_they_train(project: Path) -> None:
    options = (*SMALL_RUN, "-b", 2, "--eval-freq", 2)
    run_stage("04_train_fsdp.py", *options, "-e", "a b", "--max-steps", 6, cwd=project, ranks=2)
    run_stage(
        "04_train_fsdp.py",
        *(*options, "-e", "c", "--save-dir", "outputs/nested", "--max-steps", 8, "--lr", 1e-3),
        cwd=project,
        ranks=3,
    )
    launch = start_stage(
        "04_train_fsdp.py", *options, "-e", "live", "--max-steps", 50_000, cwd=project
    )
    while not (project / "outputs/live/metrics.jsonl").exists():
        assert not launch.poll(0.05)
    rows = rows_of(text := run_monitor(project))
    launch.kill()
    launch.wait()
    assert rows["live"][0] == "running" and rows["a b"][0] == rows["nested/c"][0] == "complete"
    assert "8/8" in rows["nested/c"][1] and "lr 0.001" in rows["nested/c"][-1], text
    assert rows_of(run_monitor(project))["live"][0] == "died"
