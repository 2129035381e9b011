# covers: launch/stop.py, lib/runs/run_files.py, lib/runs/processes.py
"""Test that launch/stop.py stops a running run or its launcher, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import monitor, stop
from lib.core import log
from lib.core.errors import UsageError
from lib.core.lease import Lease
from tests.trainer_stand_in import KILLED, start_launcher


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return outputs/exp, relative to the current directory."""
    monkeypatch.chdir(tmp_path)
    root = Path("outputs/exp")
    root.mkdir(parents=True)
    return root


def write_state(run: Path, status: str) -> None:
    (run / "state.json").write_text(
        json.dumps({"status": status, "step": 1500, "total_steps": 20_000})
    )


def run_stop(run: Path, capsys: pytest.CaptureFixture, *options: str) -> str:
    log.setup()  # with the console of this test
    stop.main([str(run), *options])
    return capsys.readouterr().out


@pytest.mark.parametrize("status", ["complete", "preempted", "failed", "disk_full", "running", ""])
def test_a_run_that_is_not_running_gets_no_stop_file(
    run: Path, status: str, capsys: pytest.CaptureFixture
) -> None:
    if status:
        write_state(run, status)
    (run / "stop").touch()  # from an earlier stop
    text = run_stop(run, capsys)
    assert (
        f"nothing to stop: {run} is not running ({'died' if status == 'running' else status}"
        in text
    )
    assert ("step 1,500 of 20,000" in text) == bool(status)
    assert not (run / "stop").exists()


def test_a_running_run_gets_a_stop_file(run: Path, capsys: pytest.CaptureFixture) -> None:
    write_state(run, "running")
    lease = Lease(run / "lock.json", lost=pytest.fail)
    try:
        assert "is running" in run_stop(run, capsys, "--dry-run") and not (run / "stop").exists()
        text = run_stop(run, capsys)
    finally:
        lease.release()
    assert "saves a checkpoint" in text and "step 1,500 of 20,000" in text and "75" in text
    assert (run / "stop").exists()


def test_a_launcher_that_is_about_to_restart_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    process = start_launcher(tmp_path, KILLED, options=("--backoff", 60))
    try:
        while "restart 1 of 3" not in process.stdout.readline():
            assert process.poll() is None
        text = run_stop(Path("outputs/run"), capsys)
        assert f"its launcher, process {process.pid}, which" in text and "asked to end" in text
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143  # nothing was saved
    assert "nothing to stop" in run_stop(Path("outputs/run"), capsys)
    assert not Path("outputs/run/stop").exists()


@pytest.mark.parametrize("status", ["complete", "failed", "preempted"])
def test_a_launcher_that_prepares_the_run_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, status: str
) -> None:
    """A stop file would not help, since a new launch deletes it."""
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/run")
    process = start_launcher(tmp_path, "print('preparing', flush=True); time.sleep(600)")
    try:
        while "preparing" not in process.stdout.readline():
            assert process.poll() is None
        write_state(run, status)
        (run / "stop").touch()
        assert "is asked to end" in run_stop(run, capsys, "--dry-run") and (run / "stop").exists()
        assert f"process {process.pid}" in run_stop(run, capsys) and not (run / "stop").exists()
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == {"complete": 0, "failed": 143, "preempted": 75}[status]


def test_a_launcher_that_prepares_the_run_for_the_first_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The run has no directory before its data is prepared, but `make status` shows it."""
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/run")
    process = start_launcher(
        tmp_path,
        "import shutil; shutil.rmtree('outputs'); print('preparing', flush=True); time.sleep(600)",
    )
    try:
        while "preparing" not in process.stdout.readline():
            assert process.poll() is None
        for name in ("run", "outputs/run"):
            monitor.main([name, "--once"])
            assert "being prepared by process" in capsys.readouterr().out
            assert f"its launcher, process {process.pid}" in run_stop(
                Path(name), capsys, "--dry-run"
            )
        assert "is asked to end" in run_stop(run, capsys)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143 and not run.exists()
    with pytest.raises(UsageError, match="there is no run"):
        stop.main(["run"])


def test_a_process_that_prepares_the_run_without_a_launcher_is_named(
    run: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "04_train_fsdp.py").write_text("import time; print(flush=True); time.sleep(600)")
    command = [sys.executable, "04_train_fsdp.py", "-d", "corpus"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as nameless,
        subprocess.Popen([*command, "-e", "exp"], stdout=subprocess.PIPE) as process,
    ):
        nameless.stdout.readline()
        process.stdout.readline()
        try:
            text = run_stop(run, capsys)
            assert f"process {process.pid} prepares it" in text and process.poll() is None
        finally:
            process.kill()
            nameless.kill()


@pytest.mark.parametrize("words", [("--config", "run.yaml"), ("--config=run.yaml",)])
def test_a_run_named_in_config_is_found_from_any_directory(
    run: Path,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    (tmp_path / "04_train_fsdp.py").write_text("import time; print(flush=True); time.sleep(600)")
    (tmp_path / "run.yaml").write_text("experiment_name: exp\ndataset_name: corpus\n")
    command = [sys.executable, "04_train_fsdp.py", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            text = run_stop(tmp_path / run, capsys)
            assert f"process {process.pid} prepares it" in text
        finally:
            process.kill()


def test_slurm_jobs_of_the_same_name_are_listed(
    run: Path, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(run, "preempted")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="squeue is not installed"):
        stop.main([str(run), "--slurm"])
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho "17 PENDING"\n')
    squeue.chmod(0o755)
    text = run_stop(run, capsys, "--slurm")
    assert "not running (preempted)" in text and "scancel 17" in text and "pending" in text
    squeue.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(stop, "SQUEUE_TIMEOUT_S", 0.2)
    with pytest.raises(UsageError, match="squeue has not answered"):
        stop.main([str(run), "--slurm"])


def test_an_unknown_run_is_an_error_that_lists_the_existing_ones(run: Path) -> None:
    with pytest.raises(UsageError, match="no run") as caught:
        stop.main(["outputs/exq"])
    assert "exp" in caught.value.render()
