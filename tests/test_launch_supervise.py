# covers: launch/supervise.py, launch/supervision/*.py
"""Test which failures are retried, and that no process is left, with a stand-in for the trainer.

The stand-in ends in the ways that stage 04 under torchrun does.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests import control_group
from tests.trainer_stand_in import COMPLETE, KILLED, find_processes, run_launcher, start_launcher


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("fail('UsageError', 2, 'error: bad option')", 2),
        ("fail('ArtifactError', 3, 'error: damaged')", 3),
        ("state('disk_full'); fail('DiskFullError', 4, 'error: no room')", 4),
        ("state('disk_full'); sys.exit(1)", 4),
        ("fail('UsageError', 2, 'error: out of memory')", 2),
        ("fail('OutOfMemoryError', 1, 'Traceback\\nOutOfMemoryError: CUDA out of memory')", 2),
        ("state('preempted', 5); fail('Preempted', 75, 'stopped by --max-minutes')", 75),
        ("fail('ExperimentHeld', 2, 'error: another launch is training')", 2),
        ("state('complete', 9); os.abort()", 0),
        (COMPLETE, 0),
    ],
)
def test_a_final_failure_is_not_retried(tmp_path: Path, ending: str, code: int) -> None:
    returned, output, attempts = run_launcher(tmp_path, ending)
    assert (returned, len(attempts)) == (code, 1), output
    assert f"exit code {code}" in output


@pytest.mark.parametrize(
    "ending",
    [
        KILLED,
        "fail('StageError', 1, 'error: a collective timed out')",
        *(
            pytest.param(ending, marks=pytest.mark.slow)
            for ending in (
                "fail('Watchdog', 1, 'watchdog: the step has not ended')",
                "fail('DistStoreError', 1, 'Traceback\\ntorch.distributed.DistStoreError: socket')",
                "fail('RuntimeError', 1, "
                "'Traceback\\nRuntimeError: gloo: Connection reset by peer')",
            )
        ),
    ],
)
def test_failures_that_may_pass_are_retried(tmp_path: Path, ending: str) -> None:
    returned, output, attempts = run_launcher(tmp_path, ending, ending, COMPLETE)
    assert (returned, len(attempts)) == (0, 3), output
    assert "restart 1 of 3" in output and "restart 2 of 3" in output


def test_restarts_are_counted_since_the_newest_checkpoint(tmp_path: Path) -> None:
    returned, output, attempts = run_launcher(tmp_path, KILLED, options=("--max-restarts", 2))
    assert (returned, len(attempts)) == (1, 3), output
    assert "no restart is left" in output
    saves = "(root / 'checkpoints' / f'step_{number:08d}').mkdir(); " + KILLED
    returned, output, attempts = run_launcher(
        tmp_path, *[saves] * 5, COMPLETE, options=("--max-restarts", 1)
    )
    assert (returned, len(attempts)) == (0, 6), output


def test_a_bug_at_the_same_step_twice_ends_the_run(tmp_path: Path) -> None:
    bug = "state('failed', {}); fail('KeyError', 1, 'Traceback\\nKeyError: x')"
    returned, output, attempts = run_launcher(
        tmp_path, bug.format(5), bug.format(6), bug.format(6), COMPLETE
    )
    assert (returned, len(attempts)) == (1, 3), output
    assert "node 0: KeyError: x" in output


@pytest.mark.parametrize("error", ["", "sys.exit = id; fail('Preempted', 75, 'saved'); "])
def test_a_killed_torchrun_does_not_stop_the_run(tmp_path: Path, error: str) -> None:
    """Its ranks save and end, and state.json says preempted."""
    saves = "state('preempted', 5); " + error
    returned, output, attempts = run_launcher(tmp_path, saves + KILLED, COMPLETE)
    assert (returned, len(attempts)) == (0, 2), output
    assert "restart 1 of 3" in output


def test_the_state_of_an_earlier_launch_is_ignored(tmp_path: Path) -> None:
    assert run_launcher(tmp_path, "state('preempted', 5); sys.exit(1)")[0] == 75
    returned, output, attempts = run_launcher(tmp_path, KILLED, COMPLETE)
    assert (returned, len(attempts)) == (0, 2), output


def test_restarts_have_the_mark_of_their_launch(tmp_path: Path) -> None:
    _, _, (first, second) = run_launcher(tmp_path, KILLED, COMPLETE)
    _, _, (another,) = run_launcher(tmp_path, COMPLETE)
    assert first == second != another


def test_a_restart_waits_for_another_launch_that_still_holds_the_run(tmp_path: Path):
    held = "fail('ExperimentHeld', 2, 'error: another launch is training')"
    returned, output, attempts = run_launcher(tmp_path, KILLED, held, COMPLETE)
    assert (returned, len(attempts)) == (0, 3), output


@pytest.mark.slow
def test_processes_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    returned, output, _ = run_launcher(tmp_path, f"sleep_on('{mark}'); sys.exit(1)", COMPLETE)
    assert returned == 0 and not find_processes(mark), output
    process = start_launcher(
        tmp_path,
        f"{ignore}; sleep_on('{mark}'); print('up', flush=True); time.sleep(600)",
        options=("--save-seconds", 1),
    )
    while "up" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # the second signal does not wait for the save
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert not find_processes(mark) and not find_processes(str(tmp_path / "04_train"))


@pytest.mark.long  # the ranks have 20 seconds
def test_ranks_that_wait_for_a_failed_rank_are_ended(tmp_path: Path) -> None:
    waits = (
        "sys.exit = lambda code: time.sleep(600); "
        "fail('StageError', 1, 'error: a collective timed out')"
    )
    returned, output, attempts = run_launcher(tmp_path, waits, COMPLETE)
    assert (returned, len(attempts)) == (0, 2), output


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        pytest.param("SIGINT", marks=pytest.mark.slow),
        pytest.param("SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_passed_on_and_ends_with_75(tmp_path: Path, name: str) -> None:
    process = start_launcher(
        tmp_path,
        f"signal.signal(signal.{name}, lambda *_: (state('preempted', 5), "
        "print('saved', flush=True), sys.exit(1)));"
        "print('up', flush=True); time.sleep(600)",
    )
    while "up" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(getattr(signal, name))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and "saved" in output, output


@pytest.mark.parametrize(
    ("before", "ending", "code", "keyword"),
    [
        ("state('running')", "os._exit(1)", 143, "before they had saved"),
        ("state('running')", "fail('RuntimeError', 1, 'Traceback\\nbug')", 1, "the save failed"),
        (
            "state('running')",
            "state('disk_full'), fail('DiskFullError', 4, 'error: no room')",
            4,
            "disk full",
        ),
        ("0", "os._exit(1)", 143, "nothing to save"),
        ("(root / 'checkpoints/step_00000007').mkdir()", "os._exit(1)", 75, "step 7 was saved"),
    ],
)
def test_a_stop_without_a_save_does_not_end_with_75(
    tmp_path: Path, before: str, ending: str, code: int, keyword: str
) -> None:
    process = start_launcher(
        tmp_path,
        f"{before}; signal.signal(signal.SIGTERM, lambda *_: ({ending}));"
        "print('up', flush=True); time.sleep(600)",
    )
    while "up" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code and keyword in output, output


def test_the_command_receives_sigterm_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process = start_launcher(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: (state('preempted', 5), "
        "sys.exit(1))); print('up', flush=True); time.sleep(600)",
    )
    while "up" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=60)  # returns once no process has the other end of the pipe open
    assert json.loads((tmp_path / "outputs/run/state.json").read_text())["status"] == "preempted"


def test_a_kill_for_memory_by_the_kernel_is_not_retried(tmp_path: Path) -> None:
    hungry = "everything = [bytearray(b'x' * 10_000_000) for _ in range(200)]"
    with control_group.limit_memory(60_000_000) as join:
        returned, output, attempts = run_launcher(tmp_path, hungry, within=join)
    assert (returned, len(attempts)) == (2, 1), output
    assert "out of memory: " in output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nnodes", 2, "--node-rank", 2, "--head", "h"), "--node-rank 2: the run has 2 nodes"),
        (("--nnodes", 2), "--head is missing"),
        (("--nnodes", ""), "--nnodes: expected"),
        (("--node-rang", 1), "the nearest is --node-rank"),
    ],
)
def test_bad_options_are_errors_without_a_traceback(
    tmp_path: Path, options: tuple, says: str
) -> None:
    process = start_launcher(tmp_path, COMPLETE, options=options)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and says in output
    assert not (tmp_path / "attempts_0.txt").exists()
