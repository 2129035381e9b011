# covers: lib/checkpoints/commit.py
"""A checkpoint is complete or does not count: COMMIT, manifest, sizes, retention."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.checkpoints import commit
from lib.core import reading
from lib.core.errors import EXIT_BUG, EXIT_USAGE, DiskFullError, StageError
from tests.checkpoint_harness import commit_checkpoint
from tests.fault_points import Fault


def test_committed_checkpoints_are_listed_newest_first(tmp_path: Path):
    for step in (5, 20, 10):
        assert commit_checkpoint(tmp_path, step).problems() == []
    assert [c.step for c in commit.list_checkpoints(tmp_path)] == [20, 10, 5]
    assert commit.list_checkpoints(tmp_path)[0].commit()["world_size"] == 2


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path):
    assert commit.find_newest(tmp_path) is None
    for step in (5, 20, 10):
        commit_checkpoint(tmp_path, step)
    (tmp_path / "step_00000020" / commit.COMMIT).unlink()
    assert commit.find_newest(tmp_path).step == 10
    assert commit.find_newest(tmp_path, before=10).step == 10
    assert commit.find_newest(tmp_path, before=9).step == 5
    assert commit.find_newest(tmp_path, before=4) is None


@pytest.mark.parametrize("name", [commit.COMMIT, commit.MANIFEST, f"{commit.TENSORS}/data"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_wrong_sizes_and_missing_files_are_found_without_hashing(
    tmp_path: Path, name: str, damage: str
):
    path = commit_checkpoint(tmp_path, 1).path / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[:-3])
    assert commit.list_checkpoints(tmp_path)[0].problems()


def test_a_flipped_bit_and_a_changed_manifest_are_found(tmp_path: Path):
    checkpoint = commit_checkpoint(tmp_path, 1)
    data = checkpoint.path / commit.TENSORS / "data"
    data.write_bytes(bytes([255]) + data.read_bytes()[1:])
    assert checkpoint.problems() == [] and len(checkpoint.content_problems(0, 1)) == 1
    assert sum(len(checkpoint.content_problems(part, 2)) for part in range(2)) == 1
    text = (checkpoint.path / commit.MANIFEST).read_text()
    (checkpoint.path / commit.MANIFEST).write_text(text + " ")
    assert "does not match" in checkpoint.problems()[0]


def test_a_renamed_checkpoint_is_not_of_another_step(tmp_path: Path):
    checkpoint = commit_checkpoint(tmp_path, 1)
    checkpoint.path.rename(tmp_path / "step_00000009")
    assert commit.list_checkpoints(tmp_path)[0].problems() == ["COMMIT.json belongs to step 1"]


def test_pruning_keeps_the_newest_intact_checkpoints(tmp_path: Path):
    for step in range(1, 6):
        commit_checkpoint(tmp_path, step)
    (tmp_path / "step_00000005" / commit.COMMIT).unlink()
    assert commit.prune_checkpoints(tmp_path, keep=2) == [2, 1]
    assert [c.step for c in commit.list_checkpoints(tmp_path)] == [5, 4, 3]
    assert commit.prune_checkpoints(tmp_path, keep=0) == []
    assert commit.prune_checkpoints(tmp_path, keep=1) == []  # never fewer than two


def test_pruning_keeps_the_best_checkpoint(tmp_path: Path):
    losses = {1: 3.0, 2: None, 3: 1.5, 4: 2.0, 5: None, 6: 2.5, 7: None, 8: 1.6}
    for step, loss in losses.items():
        commit_checkpoint(tmp_path, step, eval_loss=loss)
    assert commit.prune_checkpoints(tmp_path, keep=2) == [6, 5, 4, 2, 1]
    assert [c.step for c in commit.list_checkpoints(tmp_path)] == [8, 7, 3]


def test_a_save_without_disk_space_does_not_start(tmp_path: Path, monkeypatch):
    commit.require_space(tmp_path)
    commit_checkpoint(tmp_path, 1)
    commit.require_space(tmp_path)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(DiskFullError, match="no disk space"):
        commit.require_space(tmp_path)


def test_leftovers_are_deleted(tmp_path: Path):
    commit.create_attempt(tmp_path, 3)
    (tmp_path / ".trash-step_00000001").mkdir()
    (tmp_path / "quarantine").mkdir()
    assert commit.list_checkpoints(tmp_path) == []
    commit.delete_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["quarantine"]


def test_directories_of_users_named_like_leftovers_are_kept(tmp_path: Path):
    mine = ["step_00000001.tmp-2025", "step_00000001.tmp-mine", ".trash-step_00000001", "old"]
    for name in mine:
        shutil.copytree(commit_checkpoint(tmp_path / "other", 1).path, tmp_path / name)
        shutil.rmtree(tmp_path / "other")
    for step in range(2, 6):
        commit_checkpoint(tmp_path, step)
    (tmp_path / "step_00000001").symlink_to(tmp_path / "old")
    commit.delete_leftovers(tmp_path)
    assert commit.prune_checkpoints(tmp_path, keep=2) == [3, 2]
    assert {p.name for p in tmp_path.iterdir()} == {
        *mine,
        "step_00000001",
        "step_00000004",
        "step_00000005",
    }
    assert all((tmp_path / name / commit.COMMIT).is_file() for name in mine)


def test_a_kill_during_a_deletion_leaves_no_damaged_checkpoint(tmp_path: Path):
    """A checkpoint remains complete, or it does not count and the next launch deletes it."""
    at = 0
    killed = True
    while killed:
        at += 1
        for step in {1, 2} - {c.step for c in commit.list_checkpoints(tmp_path)}:
            commit_checkpoint(tmp_path, step)
        if not (pid := os.fork()):
            Fault(str(tmp_path), at).install()
            commit.delete_checkpoints([tmp_path / "step_00000001"])
            os._exit(0)
        killed = bool(os.waitpid(pid, 0)[1])
        intact = [c.step for c in commit.list_checkpoints(tmp_path) if not c.problems()]
        assert intact == ([2, 1] if at < 2 else [2])
        assert not [c for c in commit.list_checkpoints(tmp_path) if c.problems()]
        commit.delete_leftovers(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} <= {"step_00000001", "step_00000002"}
    assert at > 5


def test_saving_a_damaged_step_again_quarantines_the_damaged_one(tmp_path: Path):
    (commit_checkpoint(tmp_path, 7).path / commit.COMMIT).unlink()
    assert commit_checkpoint(tmp_path, 7).problems() == []
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_failing_disk_is_not_reported_as_damage(tmp_path: Path, monkeypatch, number: int):
    """It is not reported as a missing file either, and nothing is deleted."""
    checkpoints = [commit_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    failing = {checkpoints[1].path / commit.COMMIT, tmp_path}

    def fail(self: Path, *args: object, **options: object) -> object:
        if self in failing:
            raise OSError(number, os.strerror(number), str(self))
        return usual[options.pop("of")](self, *args, **options)

    usual = {name: getattr(Path, name) for name in ("read_text", "iterdir")}
    for name in usual:
        monkeypatch.setattr(Path, name, partialmethod(fail, of=name))
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0,))
    with pytest.raises(StageError) as caught:
        commit.list_checkpoints(tmp_path)
    assert caught.value.code == (EXIT_USAGE if number == errno.EACCES else EXIT_BUG)
    failing.discard(tmp_path)
    for ask in (checkpoints[1].problems, lambda: commit.prune_checkpoints(tmp_path, 2)):
        with pytest.raises(StageError, match=r"cannot be read|denied"):
            ask()
    commit.require_space(tmp_path)
    failing.clear()
    assert [c.step for c in commit.list_checkpoints(tmp_path)] == [3, 2, 1]
