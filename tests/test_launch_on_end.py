# covers: launch/supervision/on_end.py, lib/core/offline.py, lib/core/commands.py
"""The command of --on-end: its environment, its limits, and what is recorded about it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from launch.supervision import on_end
from launch.supervision.on_end import Ending
from lib.core import commands, log, offline
from lib.core.paths import Experiment
from lib.runs import row_files
from tests.trainer_stand_in import find_processes

COMPLETE = Ending("complete", 0)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    run = Experiment(tmp_path / "out puts", "exp 'é'")
    run.root.mkdir(parents=True)
    run.state.write_text('{"status": "complete", "step": 20}')
    run.metrics.write_text('{"step": 20, "train/loss": 2.5, "train/loss_mean": 2.123456789}\n')
    return run


def run_command(
    experiment: Experiment, command: str, seconds: float = 30.0, ending: Ending = COMPLETE
) -> str:
    return on_end.run_command(
        command, seconds, experiment, ending, offline.build_user_environment()
    )


def read_events(experiment: Experiment) -> list[dict]:
    return [json.loads(line) for line in experiment.events.read_text().splitlines()]


def test_the_command_gets_the_facts_about_the_run(experiment: Experiment, tmp_path: Path) -> None:
    names = "EXP STATUS STEP LOSS EXIT_CODE REASON SAVE_DIR"
    text = " ".join(f"${name}," for name in names.split())
    ending = Ending("failed", 2, "out of\nmemory")
    assert "succeeded" in run_command(
        experiment, f'printf "%s" "{text}" > "$SAVE_DIR/facts"', 30, ending
    )
    assert (tmp_path / "out puts" / "facts").read_text() == (
        f"exp 'é', failed, 20, 2.12346, 2, out of\\nmemory, {tmp_path / 'out puts'},"
    )
    [event] = read_events(experiment)
    assert (event["event"], event["step"], event["status"]) == ("on_end", 20, "failed")


def test_the_last_row_counts_if_a_rank_was_killed_after_it(experiment: Experiment) -> None:
    with experiment.metrics.open("a") as file:
        file.write('{"step": 25, "train/loss": NaN}\n')
        file.write('{"step": 27, "train/loss": "low"}\n{"step": -1, "train/loss": 1.0}\n[]\n')
        file.write('{"step": 26, "tra')
    facts = on_end.read_facts(experiment, Ending("failed", 1))
    assert (facts["STEP"], facts["LOSS"]) == ("25", "nan")
    experiment.metrics.unlink()
    facts = on_end.read_facts(experiment, Ending("failed", 1))
    assert (facts["STEP"], facts["LOSS"]) == ("20", "")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", "exit code 3"),
        ("no-such-command-here", "exit code 127"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("kill -35 $$", "killed by signal 35"),
        ("if", "exit code 2"),
    ],
)
def test_a_failure_is_an_event(experiment: Experiment, command: str, reason: str) -> None:
    assert f"failed: {reason}" in run_command(experiment, command)
    [event] = read_events(experiment)
    assert (event["event"], event["reason"]) == ("on_end_failed", reason)


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
def test_a_command_that_hangs_is_killed_with_its_children(
    experiment: Experiment, ignores: str, tmp_path: Path
) -> None:
    mark = f"31{os.getpid()}.{len(ignores)}"
    text = run_command(experiment, f"{ignores}sleep {mark} & sleep {mark}; sleep {mark}", 0.5)
    assert "0.5 s and was killed" in text
    deadline = time.monotonic() + 30
    while find_processes(f"sleep\0{mark}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_in_the_background_may_go_on(experiment: Experiment, tmp_path: Path) -> None:
    mark = tmp_path / "done"
    assert "succeeded" in run_command(experiment, f"(sleep 2; touch '{mark}') >/dev/null 2>&1 &")
    assert not mark.exists()
    while not mark.exists():
        time.sleep(0.05)


def test_endless_output_is_cut_and_there_is_no_input(experiment: Experiment) -> None:
    assert "did not end" in run_command(experiment, "echo begin; yes", 0.5)
    assert "succeeded" in run_command(experiment, "cat; echo to stderr >&2")
    text = (experiment.logs / "on_end.log").read_text()
    assert "failed: it did not end" in text
    assert "begin\ny\n" in text and text.endswith("to stderr\n") and len(text) < 70_000


def test_the_command_may_use_the_network_and_is_no_rank(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        **offline.OFFLINE_ENVIRONMENT,
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "TORCHELASTIC_RUN_ID": "x",
        "LAUNCH_MARK": "y",
        "LAUNCHED_AS": "z",
        "SLURM_JOB_ID": "7",
        "WANDB_MODE": "disabled",
    }.items():
        monkeypatch.setenv(name, value)
    run_command(experiment, f"env > '{tmp_path / 'env'}'")
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"SLURM_JOB_ID", "WANDB_MODE", "PATH"} <= names
    assert not names & {"RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    assert not names & {"LAUNCH_MARK", "LAUNCHED_AS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}


def test_nothing_is_created_for_a_run_that_does_not_exist(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "outputs", "exp")
    mark = tmp_path / "mark"
    ending = Ending("failed", 2, "no dataset")
    assert "succeeded" in run_command(
        experiment, f'echo "$STEP$LOSS$STATUS" > "{mark}"', 30, ending
    )
    assert mark.read_text() == "0failed\n" and not experiment.root.exists()


def test_files_that_cannot_be_written_change_nothing(
    experiment: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    log.ensure_setup()
    experiment.logs.touch()
    experiment.events.mkdir()
    assert "succeeded" in run_command(experiment, "true")


@pytest.mark.parametrize("words", [["--on-end", "X=s3cret ./a"], ["--on_end=curl -d s3cret a"]])
def test_a_printed_command_does_not_contain_it(words: list[str]) -> None:
    assert "s3cret" not in " ".join(commands.redact_argv(["x", *words, "-e", "exp"]))
    assert commands.shell("x", *words, "-e", "exp").endswith('"$ON_END" -e exp')


def test_the_tail_of_a_log_has_the_rows_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    rows = row_files.read_rows(path)
    for size in (1, 40, 500, 10**6):
        tail = row_files.read_tail(path, size)
        assert tail == rows[len(rows) - len(tail) :]
    assert len(row_files.read_tail(path, 10**6)) == 1000
    assert row_files.read_tail(tmp_path / "none", 9) == []
