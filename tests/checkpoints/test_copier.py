# covers: lib/checkpoints/copier.py, lib/checkpoints/copied_directory.py
"""The thread that copies checkpoints in the background, with its real child process."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.checkpoints import commit, copier, copies
from lib.checkpoints.copier import Copier
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from tests.checkpoint_harness import commit_checkpoint
from tests.conftest import wait_until
from tests.s3_server import BUCKET, S3Server, serve_s3

URL = f"s3://{BUCKET}/backup"
# After failures, both botocore and the copier wait longer and longer before they try again.
PATIENCE_S = 180.0


class Recorder:
    """Records events and the fields of state.json."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.state: dict[str, Any] = {}

    def note(self, event: str, step: int, **facts: Any) -> None:
        self.events.append((str(event.value), step, facts))

    def show(self, **facts: Any) -> None:
        self.state |= facts

    def steps(self, event: str) -> list[int]:
        return [step for name, step, _ in self.events if name == event]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path, "exp")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def new(
    run: Experiment, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Copier]]:
    """Return a function that makes a copier, which retries at once, and starts it."""
    copiers = []
    monkeypatch.setattr(copier, "_FIRST_PAUSE_S", 0.01)

    def make_copier(target: object, step: int = 0, prune: object = None) -> Copier:
        copiers.append(
            Copier(
                str(target),
                run,
                "18ab",
                note=recorder.note,
                show=recorder.show,
            )
        )
        copiers[-1].start(step, prune or (lambda step: None))
        return copiers[-1]

    yield make_copier
    for new_copier in copiers:
        new_copier.close()


def commit_steps(
    run: Experiment, *steps: int, copier: Copier | None = None, **facts: object
) -> None:
    for step in steps:
        commit_checkpoint(run.checkpoints, step, **facts)
    if copier:
        copier.wake()


def find_copies(target: object) -> list[int]:
    return sorted(copies.CopyPlace(str(target), "exp", "18ab").read_commits())


def test_each_checkpoint_is_copied_and_no_copy_is_deleted(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], tmp_path: Path
) -> None:
    target = tmp_path / "second"
    copying = new(target)
    for step in range(1, 8):
        commit_steps(run, step, copier=copying, eval_loss=step + 1)
        assert copying.wait(PATIENCE_S)
    assert find_copies(target) == recorder.steps("copy") == [1, 2, 3, 4, 5, 6, 7]
    assert recorder.state == {"copied": 7, "copy_error": ""}


def test_the_next_launch_copies_what_is_missing(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], tmp_path: Path
) -> None:
    """The newest is copied first, then only the checkpoints that retention keeps for long."""
    for step, loss in ((10, 3.0), (11, 1.0), (12, 2.0), (13, 4.0), (14, 5.0)):
        commit_steps(run, step, eval_loss=loss)
    first = new(tmp_path / "second", 14)
    assert first.wait(PATIENCE_S)
    assert recorder.steps("copy") == [14, 11]
    assert "another launch" in _refusal(run, tmp_path / "second")
    first.close()
    assert new(tmp_path / "second", 14).wait(PATIENCE_S)
    assert recorder.steps("copy") == [14, 11]


def test_a_slow_copy_skips_checkpoints_and_its_own_is_spared(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], server: S3Server
) -> None:
    """Retention of the run keeps two checkpoints, and a copy takes longer than three saves."""
    pruned = []

    def prune(step: int = 0) -> None:
        spared = copying.get_current()
        pruned.extend(commit.prune_checkpoints(run.checkpoints, 2, spared))

    copying = new(URL, prune=prune)
    assert copying.wait(PATIENCE_S)
    server.store.seconds = 0.3
    commit_steps(run, 1, copier=copying)
    wait_until(copying.get_current)
    for step in range(2, 8):
        commit_steps(run, step, copier=copying)
        prune()
    assert copying.get_current() == (1,), "it is still being copied"
    assert [c.step for c in commit.list_checkpoints(run.checkpoints)] == [7, 6, 1]
    assert copying.wait(PATIENCE_S)
    assert recorder.steps("copy") == [1, 7]
    assert [c.step for c in commit.list_checkpoints(run.checkpoints)] == [7, 6]
    assert not recorder.steps("copy_failed")


def test_a_checkpoint_that_is_deleted_during_its_copy_is_no_failure(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], server: S3Server
) -> None:
    """A full disk makes the run delete it."""
    copying = new(URL)
    assert copying.wait(PATIENCE_S)
    server.store.seconds = 0.3
    commit_steps(run, 1, copier=copying)
    wait_until(copying.get_current)
    commit_steps(run, 2)
    commit.delete_checkpoints([run.checkpoints / "step_00000001"])
    assert copying.wait(PATIENCE_S)
    assert recorder.steps("copy") == [2] and not recorder.steps("copy_failed")
    server.store.seconds = 0
    assert find_copies(URL) == [2]


@pytest.mark.slow
def test_a_server_that_fails_is_tried_again(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], server: S3Server
) -> None:
    """Connections are refused, then requests; meanwhile the next checkpoint is saved."""
    copying = new(URL)
    assert copying.wait(PATIENCE_S)
    server.stop()
    commit_steps(run, 1, copier=copying)
    wait_until(lambda: recorder.steps("copy_failed"))
    assert "Could not connect" in recorder.state["copy_error"]
    assert recorder.state["copied"] is None and not copying.wait(0)
    server.store.status = 503
    server.start()
    wait_until(lambda: "Service Unavailable" in recorder.state["copy_error"])
    commit_steps(run, 2, copier=copying)
    server.store.status = 0
    assert copying.wait(PATIENCE_S)
    assert recorder.steps("copy") == [2], "the newest"
    assert recorder.state == {"copied": 2, "copy_error": ""}


def test_a_killed_child_process_is_replaced(
    run: Experiment,
    recorder: Recorder,
    new: Callable[..., Copier],
    tmp_path: Path,
    server: S3Server,
) -> None:
    copying = new(URL)
    assert copying.wait(PATIENCE_S)
    server.store.hangs = True
    commit_steps(run, 1, copier=copying)
    wait_until(copying.get_current)
    os.kill(copying._worker._process.pid, signal.SIGKILL)
    server.store.hangs = False
    assert copying.wait(PATIENCE_S)
    assert recorder.steps("copy") == [1] and find_copies(URL) == [1]
    (reason,) = [facts["reason"] for event, _, facts in recorder.events if event == "copy_failed"]
    assert "signal 9" in reason


def test_a_hanging_server_does_not_delay_the_end(
    run: Experiment, new: Callable[..., Copier], server: S3Server, capfd: pytest.CaptureFixture
) -> None:
    copying = new(URL)
    assert copying.wait(PATIENCE_S)
    server.store.hangs = True
    commit_steps(run, 1, copier=copying)
    wait_until(copying.get_current)
    copying.hurry(5)
    assert not copying.wait(0.1)
    copying.close()
    assert copying._thread.join(30) is None and not copying._thread.is_alive()


def test_at_the_end_three_failures_are_enough(
    run: Experiment, new: Callable[..., Copier], server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_FIRST_PAUSE_S", 1000.0)
    commit_steps(run, 1)
    server.stop()
    copying = new(URL)
    wait_until(lambda: copying._failures)
    assert not copying.has_given_up()
    monkeypatch.setattr(copier, "_FIRST_PAUSE_S", 0.01)
    copying.hurry(60)
    wait_until(copying.has_given_up)
    assert not copying.wait(0)
    server.start()


def test_copies_of_an_abandoned_line_are_not_used(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], tmp_path: Path
) -> None:
    """A rollback, and a launch that resumes from an earlier step."""
    target = tmp_path / "second"
    copying = new(target)
    for step in (1, 2, 3):
        commit_steps(run, step, copier=copying)
        assert copying.wait(PATIENCE_S)
    for step in (2, 3):
        shutil.rmtree(run.checkpoints / f"step_{step:08d}")
    copying.retire(1)
    assert copying.wait(PATIENCE_S)
    assert find_copies(target) == [1]
    commit_steps(run, 2, copier=copying, tokens=9)
    assert copying.wait(PATIENCE_S)
    copying.close()
    shutil.rmtree(run.checkpoints / "step_00000002")
    assert new(target, 1).wait(PATIENCE_S)
    assert find_copies(target) == [1]


def test_a_step_that_is_saved_again_is_copied_again(
    run: Experiment, recorder: Recorder, new: Callable[..., Copier], tmp_path: Path
) -> None:
    commit_steps(run, 1)
    copying = new(tmp_path / "second", 1)
    assert copying.wait(PATIENCE_S)
    shutil.rmtree(run.checkpoints / "step_00000001")
    commit_steps(run, 1, copier=copying, tokens=9)
    assert copying.wait(PATIENCE_S)
    place = copies.CopyPlace(str(tmp_path / "second"), "exp", "18ab")
    assert place.read_commits()[1]["tokens"] == 9


def test_places_that_need_a_person_are_refused_at_once(
    run: Experiment, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in _refusal(run, tmp_path / "file")
    # Not even root may make a directory there.
    assert re.search("Read-only|Permission denied|not permitted", _refusal(run, "/sys/copies"))
    assert "bucket does not exist" in _refusal(run, "s3://other/x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    assert "Access Key Id" in _refusal(run, URL)


def _refusal(run: Experiment, target: object) -> str:
    """Return the error with which a copier refuses a place."""
    note = Recorder().note
    copying = Copier(str(target), run, "18ab", note=note, show=Recorder().show)
    with pytest.raises(UsageError) as caught:
        copying.open()
    assert "--ckpt-copy-to cannot be used: " in caught.value.problem
    return caught.value.problem
