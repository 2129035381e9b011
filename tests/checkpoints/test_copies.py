# covers: lib/checkpoints/copies.py, lib/checkpoints/copy_files.py
# covers: lib/checkpoints/copy_lease.py
"""Copies of checkpoints in a directory and in a bucket: complete, or they do not exist."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.checkpoints import commit, copier, copies, copy_lease
from lib.checkpoints.copies import CopyPlace
from lib.core import liveness
from lib.core.errors import ArtifactError, DiskFullError, StageError, UsageError
from lib.core.paths import Experiment
from lib.core.workers import Worker
from lib.hub import folder
from tests.checkpoint_harness import commit_checkpoint
from tests.fault_points import OPERATION_KINDS, Fault
from tests.s3_server import BUCKET, S3Server, serve_s3

RUN = "18ab"
folder_opener = folder._open_file_system


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        # All of a test's places in a bucket share one client, which takes a while to make.
        cached = functools.cache(lambda kind: folder_opener(kind, ""))
        monkeypatch.setattr(folder, "_open_file_system", lambda kind, where: cached(kind))
        yield server


@pytest.fixture(params=["directory", "bucket"])
def target(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/backup" if request.param == "bucket" else str(tmp_path / "second")


@pytest.fixture
def run(tmp_path: Path) -> Experiment:
    """Return a run with checkpoints of steps 1 to 4."""
    experiment = Experiment(tmp_path, "my run")
    for step in range(1, 5):
        commit_checkpoint(experiment.checkpoints, step, eval_loss=step)
    experiment.config.write_text("run: 18ab\n")
    experiment.metrics.write_text('{"step": 1}\n')
    (experiment.model / "code").mkdir(parents=True)
    (experiment.model / "code/a.py").write_text("x = 1\n")
    return experiment


def open_place(target: str) -> CopyPlace:
    """Return the place after a new process has opened it."""
    place = copies.CopyPlace(target, "my run", RUN)
    place.open()
    return place


def list_objects(target: str, server: S3Server) -> set[str]:
    """Return the paths of all files of the place, from its root."""
    if target.startswith("s3:"):
        start = f"backup/my run-{RUN}/"
        return {n.removeprefix(start) for n in server.store.objects if n.startswith(start)}
    root = Path(target) / f"my run-{RUN}"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def checkpoint(run: Experiment, step: int) -> commit.Checkpoint:
    return next(c for c in commit.list_checkpoints(run.checkpoints) if c.step == step)


def test_a_copy_has_the_files_of_its_checkpoint_and_can_be_restored(
    run: Experiment, target: str, server: S3Server, tmp_path: Path
) -> None:
    place = open_place(target)
    for step in (1, 3):
        place.copy(checkpoint(run, step))
    place.copy_run_files(run)
    again = open_place(target)
    assert {s: c["manifest"] for s, c in again.read_commits().items()} == {
        step: checkpoint(run, step).commit()["manifest"] for step in (1, 3)
    }
    names = {p.relative_to(run.root).as_posix() for p in run.root.rglob("*") if p.is_file()}
    assert list_objects(target, server) == {copies.LABEL} | {
        name for name in names if "step_00000002" not in name and "step_00000004" not in name
    }
    lost = Experiment(tmp_path / "new", "my run")
    restored = again.restore(3, lost.checkpoints)
    again.restore_run_files(lost)
    assert not restored.problems() and not restored.content_problems(0, 1)
    assert (lost.model / "code/a.py").read_text() == "x = 1\n"
    assert lost.config.read_bytes() == run.config.read_bytes()
    assert not (lost.root / copies.LABEL).exists()


def test_retention_deletes_whole_copies_only(
    run: Experiment, target: str, server: S3Server
) -> None:
    place = open_place(target)
    for step in (1, 2, 3):
        place.copy(checkpoint(run, step))
    place.delete([1, 3])
    assert [*open_place(target).read_commits()] == [2]
    assert not [n for n in list_objects(target, server) if "00000001" in n or "00000003" in n]


def test_a_copy_of_an_abandoned_line_is_kept_but_not_used(
    run: Experiment, target: str, server: S3Server
) -> None:
    place = open_place(target)
    for step in (1, 2):
        place.copy(checkpoint(run, step))
    place.retire([2])
    place = open_place(target)
    assert [*place.read_commits()] == place.list_steps() == [1]
    assert len([n for n in list_objects(target, server) if "step_00000002" in n]) >= 4
    shutil.rmtree(run.checkpoints / "step_00000002")
    commit_checkpoint(run.checkpoints, 2, tokens=7)  # the run reaches this step again
    place.copy(checkpoint(run, 2))
    assert open_place(target).read_commits()[2]["tokens"] == 7


def test_few_copies_of_abandoned_lines_are_kept(
    run: Experiment, target: str, server: S3Server
) -> None:
    place = open_place(target)
    for step in (1, 2, 3, 4):
        place.copy(checkpoint(run, step))
        if step > 1:
            place.retire([step])
    place = open_place(target)
    assert [*place.read_commits()] == [1]
    left = list_objects(target, server)
    assert not [name for name in left if "step_00000002" in name]
    assert all([n for n in left if f"step_{step:08d}" in n] for step in (3, 4))


def test_a_live_process_holds_the_place_and_a_dead_one_does_not(
    run: Experiment, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_lease, "BEAT_S", 0.1)
    monkeypatch.setattr(copy_lease, "_POLL_S", 0.1)
    monkeypatch.setattr(copy_lease, "PATIENCE_S", 1.0)
    place = open_place(target)
    held = copy_lease.PlaceLease(place)
    with pytest.raises(UsageError, match=r"writes the copies .*my run-18ab") as e:
        copy_lease.PlaceLease(open_place(target))
    assert f"process {os.getpid()} on" in e.value.found
    with monkeypatch.context() as elsewhere:  # another machine sees only the record
        elsewhere.setattr(copy_lease.liveness, "is_alive", lambda record: None)
        with pytest.raises(UsageError, match="another launch"):
            copy_lease.PlaceLease(open_place(target))
        held.require_held()
        held._ended.set()  # as if the machine was lost
        held._thread.join()
        later = copy_lease.PlaceLease(open_place(target))
    assert not held._is_own()
    with pytest.raises(UsageError, match="another launch"):
        held.require_held()
    held.release()
    later.require_held()
    later.release()
    copy_lease.PlaceLease(open_place(target)).release()


def test_a_run_keeps_its_place_between_two_copying_processes(run: Experiment, target: str) -> None:
    """After a failed copy, a new process starts after a pause."""
    here = liveness.process_record(os.getpid())
    for _ in range(2):
        worker = Worker("copies", copier._prepare_place, target, "my run", RUN, here)
        worker.send(("open",))
        worker.receive()
        worker.close()
    with pytest.raises(UsageError, match="another launch") as e:
        copy_lease.PlaceLease(open_place(target), liveness.process_record(os.getppid()))
    assert f"process {os.getpid()} on" in e.value.found


def test_a_place_that_is_not_ours_is_refused(run: Experiment, target: str) -> None:
    open_place(target).copy(checkpoint(run, 1))
    other = copies.CopyPlace(target, "my run", RUN)
    other._label |= {"run": "19"}
    with pytest.raises(UsageError, match="other than copies"):
        other.open()
    assert not other.is_ours()


def test_the_last_run_of_a_name_is_found(run: Experiment, target: str) -> None:
    for experiment, number in (("my run", "18"), ("my run", "a1"), ("my run", "9f"), ("my", "b2")):
        copies.CopyPlace(target, experiment, number).open()
    if not target.startswith("s3:"):
        (Path(target) / "my run-ff").mkdir()  # not made by us
        (Path(target) / "my run-").mkdir()
    assert copies.find_last_run(target, "my run") == "a1"
    assert copies.find_last_run(target, "my") == "b2"
    assert copies.find_last_run(target, "other") == ""
    assert copies.find_last_run(f"{target}-missing", "my run") == ""


@pytest.mark.parametrize("name", ["dcp/data", commit.MANIFEST, commit.COMMIT])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_copy_is_not_restored(
    run: Experiment, target: str, server: S3Server, tmp_path: Path, name: str, damage: str
) -> None:
    place = open_place(target)
    place.copy(checkpoint(run, 1))
    path = f"my run-{RUN}/checkpoints/step_00000001/{name}"
    if target.startswith("s3:"):
        content = server.store.objects.pop(f"backup/{path}")
    else:
        content = (Path(target) / path).read_bytes()
        (Path(target) / path).unlink()
    if damage == "changed":
        content = content[:5] + b"?" + content[6:]
        if target.startswith("s3:"):
            server.store.objects[f"backup/{path}"] = content
        else:
            (Path(target) / path).write_bytes(content)
    assert place.list_steps() == [1], "otherwise a lost run would start from step 0"
    with pytest.raises(ArtifactError):
        place.restore(1, tmp_path / "restored")
    assert not commit.list_checkpoints(tmp_path / "restored")
    assert [p for p in (tmp_path / "restored").glob("*")] == []


def test_a_copy_in_a_directory_that_lacks_a_file_is_written_again(
    run: Experiment, tmp_path: Path, server: S3Server
) -> None:
    target = str(tmp_path / "second")
    place = open_place(target)
    for copied in commit.list_checkpoints(run.checkpoints):
        place.copy(copied)
    folder = Path(place.where) / "checkpoints/step_00000004"
    victim = sorted(folder.glob("dcp/*"))[0]
    victim.unlink()
    assert sorted(open_place(target).read_commits()) == [1, 2, 3]
    place.copy(checkpoint(run, 4))
    assert sorted(place.read_commits()) == [1, 2, 3, 4] and victim.is_file()


def test_a_damaged_checkpoint_is_not_copied(run: Experiment, target: str, server: S3Server) -> None:
    data = run.checkpoints / "step_00000001/dcp/data"
    data.write_bytes(b"?" + data.read_bytes()[1:])
    place = open_place(target)
    with pytest.raises(ArtifactError, match="other content"):
        place.copy(checkpoint(run, 1))
    assert open_place(target).read_commits() == {}
    assert list_objects(target, server) == {copies.LABEL}


def test_a_checkpoint_deleted_during_its_copy_leaves_none(
    run: Experiment, target: str, server: S3Server
) -> None:
    (run.checkpoints / "step_00000001/dcp/data").unlink()
    with pytest.raises(FileNotFoundError):
        open_place(target).copy(checkpoint(run, 1))
    assert open_place(target).read_commits() == {}
    assert list_objects(target, server) == {copies.LABEL}


def test_a_damaged_object_is_not_committed(run: Experiment, server: S3Server) -> None:
    server.store.corrupts = "dcp/data"
    target = f"s3://{BUCKET}/backup"
    with pytest.raises(StageError, match="differs"):
        open_place(target).copy(checkpoint(run, 1))
    server.store.corrupts = "nothing"
    place = open_place(target)
    assert place.read_commits() == {}
    place.copy(checkpoint(run, 1))
    assert [*place.read_commits()] == [1]


def test_bytes_that_the_disk_changes_are_noticed(
    run: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are read again after they were written, before the copy gets its name."""
    settle = folder._settle

    def settle_badly(path: Path) -> None:
        settle(path)
        path.write_bytes(b"?" + path.read_bytes()[1:])

    monkeypatch.setattr(folder, "_settle", settle_badly)
    place = open_place(str(tmp_path / "second"))
    with pytest.raises(StageError, match="differs"):
        place.copy(checkpoint(run, 1))
    assert place.read_commits() == {}


def test_a_full_disk_and_a_read_only_directory_are_reported(
    run: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(str(tmp_path / "second"))
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(DiskFullError, match="no disk space"):
        place.copy(checkpoint(run, 1))
    monkeypatch.undo()
    for number, kinds in ((errno.ENOSPC, ("create", "write")), (errno.EROFS, OPERATION_KINDS)):
        if not (pid := os.fork()):
            act = errno.errorcode[number]
            Fault(str(tmp_path / "second"), 4, act, times=99, kinds=kinds).install()
            try:
                place.copy(checkpoint(run, 1))
            except OSError as error:
                os._exit(error.errno)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number
        if number == errno.ENOSPC:
            assert not list(tmp_path.glob("second/*/checkpoints/step_*")), "others need the space"
        assert open_place(str(tmp_path / "second")).read_commits() == {}


def test_a_directory_that_cannot_be_read_is_not_empty(
    run: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lost run would start from step 0."""
    place = open_place(str(tmp_path / "second"))
    place.copy(checkpoint(run, 1))
    scan = os.scandir

    def fail(path: object) -> object:
        if str(path).endswith("/checkpoints"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        place.list_steps()


@pytest.mark.parametrize("act", ["copy", "delete", "retire"])
def test_a_kill_at_any_operation_leaves_a_complete_copy_or_none(
    run: Experiment, tmp_path: Path, act: str
) -> None:
    second = tmp_path / "second"
    root = second / f"my run-{RUN}/checkpoints"
    at = 0
    is_killed = True
    while is_killed:
        at += 1
        place = open_place(str(second))
        for step in {1} - place.read_commits().keys():
            place.copy(checkpoint(run, step))
        if not (pid := os.fork()):
            Fault(str(second), at).install()
            place.copy(checkpoint(run, 2)) if act == "copy" else getattr(place, act)([1])
            os._exit(0)
        is_killed = bool(os.waitpid(pid, 0)[1])
        place = open_place(str(second))
        for copy in commit.list_checkpoints(root):
            if (copy.path / f"{commit.COMMIT}.superseded").exists():
                continue
            assert not copy.problems() and not copy.content_problems(0, 1)
        steps = set(place.read_commits())
        assert steps <= {1, 2} if act == "copy" else steps <= {1}
        left = {path.parent.name for path in root.glob("step_*/*")}
        assert left <= {"step_00000001", "step_00000002"}
        place.delete(steps - {1})
    assert at > {"copy": 12, "delete": 4, "retire": 1}[act]


@pytest.mark.slow
def test_leftovers_in_a_bucket_are_deleted_but_nothing_else(
    run: Experiment, server: S3Server
) -> None:
    """A process can be killed after each request."""
    target = f"s3://{BUCKET}/backup"
    open_place(target).copy(checkpoint(run, 1))
    start = f"backup/my run-{RUN}/checkpoints"
    complete = dict(server.store.objects)
    strange = {f"{start}/step_00000009/mine": b"", f"{start}/notes": b"", "elsewhere": b""}
    objects = server.store.objects
    for act in ("copy", "delete"):
        is_over = False
        allowed = 0
        while not is_over:
            objects.clear()
            objects |= complete | strange
            place = open_place(target)
            events = place._folder._fs.s3.meta.events
            requests = iter(range(allowed))

            def count(*_: object, requests: Iterator[int] = requests, **__: object) -> None:
                if next(requests, None) is None:
                    raise RuntimeError("killed")  # nothing more is sent

            events.register("before-send.s3", count)
            try:
                place.copy(checkpoint(run, 2)) if act == "copy" else place.delete([1])
                is_over = True
            except StageError as error:
                assert "killed" in error.problem
                allowed += 1
            events.unregister("before-send.s3", count)
            place = open_place(target)
            committed_steps = place.read_commits()
            for step in committed_steps:
                assert not place.restore(step, run.root / "check").content_problems(0, 1)
            shutil.rmtree(run.root / "check", ignore_errors=True)
            steps = {n.split("/")[3] for n in objects if f"{start}/step" in n}
            assert steps == {f"step_{step:08d}" for step in committed_steps} | {"step_00000009"}
            assert strange.items() <= objects.items()
        assert allowed > 5
        assert not [name for name in objects if ".unfinished" in name]


def test_a_run_file_cannot_lead_out_of_the_run(server: S3Server, tmp_path: Path) -> None:
    place = open_place(f"s3://{BUCKET}/backup")
    start = f"backup/my run-{RUN}/"
    for name in ("model/../../evil", "model/../evil", "lock.json", "logs/x", "model/config.json"):
        server.store.objects[start + name] = b"x"
    run = Experiment(tmp_path / "deep/outputs", "my run")
    place.restore_run_files(run)
    written = [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()]
    assert written == ["deep/outputs/my run/model/config.json"]


def test_the_label_of_a_place_says_whose_it_is(tmp_path: Path) -> None:
    open_place(str(tmp_path))
    label = json.loads((tmp_path / f"my run-{RUN}" / copies.LABEL).read_text())
    assert label == {"kind": "checkpoint copies/1", "experiment": "my run", "run": RUN}
    (tmp_path / f"my run-{RUN}" / copies.LABEL).write_text("{")
    with pytest.raises(UsageError, match="something other"):
        open_place(str(tmp_path))
    assert copies.CopyPlace("s3-directory", "a", "1").where == "s3-directory/a-1"
