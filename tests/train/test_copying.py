# covers: lib/train/copying.py
"""A run whose checkpoints are lost is restored from their copies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.checkpoints import commit, copies
from lib.core import lease, paths
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.paths import Experiment
from lib.train import copying
from tests.checkpoint_harness import commit_checkpoint
from tests.fault_points import Fault


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Return a lost run with copies of steps 1 and 2, and whose settings are the same now."""
    monkeypatch.setattr(copying, "_require_same_run", lambda *_: None)
    experiment = Experiment(tmp_path / "outputs", "exp")
    place = copies.CopyPlace(str(tmp_path / "second"), "exp", "18ab")
    for step in (1, 2):
        place.open()
        place.copy(commit_checkpoint(experiment.checkpoints, step))
    experiment.config.write_text("run: 18ab\n")
    experiment.metrics.write_text('{"step": 2}\n')
    place.copy_run_files(experiment)
    shutil.rmtree(experiment.root)
    return experiment


def config(run: Experiment, **values: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "ckpt_copy_to": str(run.root.parents[1] / "second"),
            "overwrite": False,
            "resume": "copies",
            "dry_run": False,
            "prepare_only": False,
            **values,
        }
    )


def list_steps(run: Experiment) -> list[int]:
    return [c.step for c in commit.list_checkpoints(run.checkpoints) if not c.problems()]


def test_the_newest_copy_and_the_files_of_the_run_are_restored(run: Experiment) -> None:
    copying.restore_lost_run(config(run), run)
    assert list_steps(run) == [2]
    assert run.config.read_text() == "run: 18ab\n" and run.metrics.exists()
    assert '"event": "restore", "step": 2' in run.events.read_text()
    assert not run.lock.exists()


@pytest.mark.parametrize(
    "values",
    [
        {"ckpt_copy_to": None, "resume": "auto"},
        {"overwrite": True},
        {"resume": "never"},
        {"resume": "outputs/other/checkpoints/step_00000001"},
        {"dry_run": True},
        {"prepare_only": True},
    ],
)
def test_nothing_is_restored_unasked(run: Experiment, values: dict[str, object]) -> None:
    copying.restore_lost_run(config(run, **values), run)
    assert not run.root.exists()


def test_a_run_with_a_checkpoint_or_without_copies_stays_as_it_is(run: Experiment) -> None:
    other = Experiment(run.root.parent, "other")
    copying.restore_lost_run(config(run), other)
    assert not other.root.exists()
    commit_checkpoint(run.checkpoints, 1)
    copying.restore_lost_run(config(run), run)
    assert list_steps(run) == [1]


def test_damaged_copies_leave_nothing_behind(run: Experiment) -> None:
    second = run.root.parents[1] / "second"
    for path in second.glob("*/checkpoints/*/dcp/data"):
        path.write_bytes(b"short")
    with pytest.raises(ArtifactError, match="none of its copies"):
        copying.restore_lost_run(config(run), run)
    assert [*run.root.iterdir()] == []
    for path in second.glob("*/checkpoints/step_00000001/dcp/data"):
        path.write_bytes(bytes(range(100)))
    copying.restore_lost_run(config(run), run)
    assert list_steps(run) == [1], "the older one"


def test_a_place_that_cannot_be_read_ends_the_launch(
    run: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If copies cannot be read, the launch fails, since the run would begin again at step 0."""
    for kind in (UsageError, StageError):

        def fail(*_: object, kind: type[StageError] = kind) -> None:
            raise kind("the bucket is gone")

        monkeypatch.setattr(copies, "find_last_run", fail)
        with pytest.raises(kind, match="cannot be read") as caught:
            copying.restore_lost_run(config(run), run)
        assert caught.value.found == "the bucket is gone" and "--resume never" in caught.value.run
        assert type(caught.value) is kind


def test_another_launch_that_trains_the_run_is_left_alone(run: Experiment) -> None:
    run.root.mkdir(parents=True)
    held = lease.Lease(run.lock, lambda text: None)
    copying.restore_lost_run(config(run), run)
    held.release()
    assert list_steps(run) == []


@pytest.mark.slow
def test_a_restoration_killed_at_any_operation_is_repeated(run: Experiment) -> None:
    at = 0
    is_killed = True
    while is_killed:
        at += 1
        shutil.rmtree(run.root.parent, ignore_errors=True)
        if not (pid := os.fork()):
            Fault(str(run.root.parent), at).install()
            copying.restore_lost_run(config(run), run)
            os._exit(0)
        is_killed = bool(os.waitpid(pid, 0)[1])
        assert list_steps(run) in ([], [2])
        copying.restore_lost_run(config(run), run)
        assert list_steps(run) == [2] and run.config.read_text() == "run: 18ab\n"
        checkpoint = commit.find_newest(run.checkpoints)
        assert checkpoint is not None and not checkpoint.content_problems(0, 1)
    assert at > 20


def test_a_place_whose_disk_is_not_mounted_is_refused(
    run: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lost run would start from step 0, and the copies would fill another disk."""
    second = run.root.parents[1] / "second"
    place = copies.CopyPlace(str(second), "exp", "18ab")
    place.open()
    checkpoint = commit_checkpoint(Experiment(second.parent, "source").checkpoints, 3)
    monkeypatch.setattr(paths, "find_missing_mount", lambda path: second)
    for act in (place.open, place.is_ours, lambda: place.copy(checkpoint)):
        with pytest.raises(UsageError, match=f"{second}, .*not mounted"):
            act()
    with pytest.raises(UsageError, match="is not mounted") as caught:
        copying.restore_lost_run(config(run), run)
    assert caught.value.run == f"mount {second}" and not run.root.exists()
    monkeypatch.undo()
    assert place.list_steps() == [2, 1]


@pytest.mark.parametrize(
    ("run_root", "expected"), [("", "on the same file system as"), ("/proc", "it is not mounted")]
)
def test_odd_disks_of_a_place_are_warned_about(
    run_root: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copying, "_ROOT", tmp_path)
    run = SimpleNamespace(root=Path(run_root or tmp_path))
    copying._warn_about_disk(SimpleNamespace(ckpt_copy_to=str(tmp_path)), run)  # type: ignore[arg-type]
    assert expected in caplog.text
