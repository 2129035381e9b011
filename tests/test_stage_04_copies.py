# covers: 04_train_fsdp.py, lib/checkpoints/copier.py, lib/checkpoints/copies.py
# covers: lib/checkpoints/copy_lease.py, lib/checkpoints/copied_directory.py, lib/train/copying.py
# covers: lib/hub/folder.py
"""`--ckpt-copy-to`: copies of checkpoints in a second place, and runs restored from them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, run_stage, start_stage, wait_until
from tests.s3_server import BUCKET, S3Server, serve_s3
from tests.training import SMALL_RUN, assert_refused, list_saved_steps, losses, read_events

STEPS = 12
COMMON = (
    *SMALL_RUN,
    *("--global-batch-size", 6, "--lr", "1e-2", "--lr-scheduler", "constant"),
    *("--eval-freq", 0, "--ckpt-freq", 4, "--max-steps", STEPS),
)
URL = f"s3://{BUCKET}/backup"
IN_BUCKET = (*COMMON, "-e", "run", "--ckpt-copy-to", URL)
IN_DIRECTORY = (*COMMON, "-e", "run", "--ckpt-copy-to", "second")


def state(project: Path) -> dict[str, Any]:
    return json.loads((project / "outputs/run/state.json").read_text())


def copied_steps(server: S3Server) -> list[int]:
    return sorted(
        int(name.split("/")[3][5:]) for name in server.store.objects if name.endswith("COMMIT.json")
    )


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="module")
def once(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with a complete run of two ranks, which was copied to `second`."""
    root = tmp_path_factory.mktemp("copies")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", *IN_DIRECTORY, cwd=root, ranks=2)
    return root


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_a_run_that_cannot_use_its_local_disk_does_not_take_the_place_of_its_copies(
    project: Path,
) -> None:
    (project / "local").write_text("a file, no directory")
    refused = (*IN_DIRECTORY, "--ckpt-local-dir", "local")
    assert_refused(project, *refused, code=2, says="--ckpt-local-dir: ")
    assert not list((project / "second").rglob("LEASE.json"))


@pytest.mark.slow
def test_a_copy_in_a_directory_is_a_run_for_all_commands(run: Path) -> None:
    (copy,) = (run / "second").iterdir()
    assert list_saved_steps(run, "run") == [4, 8, 12]
    assert state(run)["copied"] == 12 and state(run)["copy_error"] == ""
    assert read_events(run, "copy")[-1]["step"] == 12
    verify = [sys.executable, "-m", "lib.checkpoints", "verify", copy]
    done = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert " valid\n" in done.stdout
    page = [sys.executable, ROOT / "launch/monitor.py", run / "outputs/run", "--once"]
    done = subprocess.run(page, capture_output=True, text=True, timeout=100, check=True)
    assert "copies        step 12" in done.stdout
    expected = losses(run, "run")
    shutil.rmtree(run / "outputs")
    exported = run_stage(
        "05_export_checkpoint.py", "-e", copy.name, "--save-dir", "second", cwd=run
    )
    assert "step_00000012" in exported.stdout
    steps = sorted((copy / "checkpoints").glob("step_*"))
    resumed = (*COMMON, "-e", "other", "--resume", steps[0])
    run_stage("04_train_fsdp.py", *resumed, cwd=run, ranks=2)
    first = int(steps[0].name[5:])
    assert losses(run, "other") == {s: loss for s, loss in expected.items() if s > first}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        "the outputs",
        pytest.param("the checkpoints", marks=pytest.mark.long),
        "a file of each checkpoint",
    ],
)
def test_a_lost_run_is_restored_and_continues_with_the_same_losses(run: Path, lost: str) -> None:
    expected = losses(run, "run")
    (copy,) = (run / "second").iterdir()
    for newer in sorted((copy / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(newer)
    (remaining,) = (copy / "checkpoints").glob("step_*")
    if lost == "the outputs":
        shutil.rmtree(run / "outputs")
    elif lost == "the checkpoints":
        shutil.rmtree(run / "outputs/run/checkpoints")
    else:
        for path in (run / "outputs/run/checkpoints").glob("*/train_state.json"):
            path.unlink()
    resuming = ("--resume", "copies") if lost == "the outputs" else ()
    done = run_stage("04_train_fsdp.py", *IN_DIRECTORY, *resuming, cwd=run, ranks=2)
    step = int(remaining.name[5:])
    assert f"step {step} was restored" in done.stdout
    assert read_events(run, "restore")[-1]["step"] == step
    assert read_events(run, "resume")[-1]["step"] == step
    assert losses(run, "run") == expected
    assert [path.name for path in (run / "second").iterdir()] == [copy.name], "the same run"


@pytest.mark.slow
def test_after_damage_to_all_checkpoints_the_next_launch_restores_a_copy(run: Path) -> None:
    expected = losses(run, "run")
    for path in (run / "outputs/run/checkpoints").glob("*/train_state.json"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    more = (*IN_DIRECTORY[:-4], "--max-steps", STEPS + 1, *IN_DIRECTORY[-4:])
    done = run_stage("04_train_fsdp.py", *more, cwd=run, expect=3)
    assert "restores the newest copy" in done.stderr
    done = run_stage("04_train_fsdp.py", *more, cwd=run)
    assert f"step {STEPS} was restored" in done.stdout
    assert losses(run, "run") == expected | {STEPS + 1: losses(run, "run")[STEPS + 1]}


@pytest.mark.slow
def test_without_an_intact_copy_a_lost_run_does_not_start_anew(run: Path) -> None:
    for path in (run / "second").glob("*/checkpoints/*/dcp/*.distcp"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    shutil.rmtree(run / "outputs")
    resuming = (*IN_DIRECTORY, "--resume", "copies")
    done = run_stage("04_train_fsdp.py", *resuming, cwd=run, expect=3)
    assert "none of its copies" in done.stderr and "--resume never" in done.stderr
    done = run_stage("04_train_fsdp.py", *IN_DIRECTORY, "--resume", "never", cwd=run)
    assert "training loss" in done.stdout and len([*(run / "second").iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.long), 2])
def test_copies_of_another_run_of_the_same_name_are_not_taken_over(run: Path, ranks: int) -> None:
    shutil.rmtree(run / "outputs")
    code = 1 if ranks else 2
    done = run_stage("04_train_fsdp.py", *IN_DIRECTORY, cwd=run, ranks=ranks, expect=code)
    printed = done.stdout + done.stderr
    assert "--resume copies" in printed and "--resume never" in printed
    assert not (run / "outputs/run").exists()
    other = (*IN_DIRECTORY, "--seed", 5, "--resume", "copies")
    done = run_stage("04_train_fsdp.py", *other, cwd=run, ranks=ranks, expect=code)
    assert "other settings" in done.stdout + done.stderr
    assert not (run / "outputs/run").exists(), "nothing is restored before the comparison"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "ranks"),
    [
        ("second", 2),
        (URL, 0),
        pytest.param("second", 0, marks=pytest.mark.long),
        pytest.param(URL, 2, marks=pytest.mark.long),
    ],
)
def test_a_run_that_lives_keeps_its_copies(
    project: Path, server: S3Server, target: str, ranks: int
) -> None:
    """A second launch of the same run elsewhere is refused, also after a copy that failed."""
    environment = server.environment()
    words = ("04_train_fsdp.py", *COMMON, "-e", "run", "--ckpt-copy-to", target)
    first = start_stage(*words, "--max-steps", 50_000, cwd=project, env=environment, ranks=ranks)
    wait_until(lambda: (project / "outputs/run/state.json").exists() and state(project)["copied"])
    if target == URL:
        server.store.status = 503
        wait_until(lambda: bool(read_events(project, "copy_failed")))
        server.store.status = 0
    second = (*words, "--save-dir", "other", "--resume", "copies", "--max-steps")
    done = run_stage(
        *second, 50_000, cwd=project, env=environment, ranks=ranks, expect=1 if ranks else 2
    )
    assert "another launch" in done.stdout + done.stderr
    assert not (project / "other/run").exists()
    (project / "outputs/run/stop").touch()
    assert {*first.wait(300)} <= {75, 0}
    end = list_saved_steps(project, "run")[-1] + 1
    run_stage(*second, end, cwd=project, env=environment, ranks=ranks)
    rows = (project / "other/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == end


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_killed_during_a_copy_catches_up(project: Path, server: S3Server, ranks: int) -> None:
    environment = server.environment()
    server.store.seconds = 0.4  # a copy takes seconds
    launch = start_stage("04_train_fsdp.py", *IN_BUCKET, cwd=project, env=environment, ranks=ranks)
    wait_until(lambda: any("step_" in name for name in server.store.objects))
    launch.kill()
    assert not copied_steps(server)
    server.store.seconds = 0.0
    run_stage("04_train_fsdp.py", *IN_BUCKET, cwd=project, env=environment, ranks=ranks)
    assert copied_steps(server)[-1] == STEPS and not server.store.uploads
    assert not [name for name in server.store.objects if ".unfinished" in name]
    assert state(project)["copied"] == STEPS
    expected = losses(project, "run")
    if len(copied_steps(server)) > 1:  # a slow copy may have skipped all other steps
        for name in [n for n in server.store.objects if f"step_{STEPS:08d}" in n]:
            del server.store.objects[name]
    shutil.rmtree(project / "outputs")
    resuming = (*IN_BUCKET, "--resume", "copies")
    run_stage("04_train_fsdp.py", *resuming, cwd=project, env=environment, ranks=ranks)
    assert losses(project, "run") == expected
    assert read_events(project, "restore") and copied_steps(server)[-1] == STEPS


@pytest.mark.slow
def test_a_run_without_its_second_place_is_complete_and_copied_later(
    project: Path, server: S3Server
) -> None:
    """The server fails from the second step on, and answers again after the run."""
    environment = server.environment()
    launch = start_stage(
        *("04_train_fsdp.py", *IN_BUCKET),
        cwd=project,
        env=environment,
        output=project / "printed",
    )
    wait_until(lambda: any(name.endswith("COPIES.json") for name in server.store.objects))
    server.stop()
    assert launch.wait(300)[0] == 0
    printed = (project / "printed").read_text()
    assert "NOT COPIED" in printed and "cannot be copied" in printed
    assert state(project)["status"] == "complete" and state(project)["copy_error"]
    assert read_events(project, "copy_failed")[0]["reason"]
    server.start()
    done = run_stage("04_train_fsdp.py", *IN_BUCKET, cwd=project, env=environment)
    assert "already done" in done.stdout and "are copied to" in done.stdout
    assert copied_steps(server) == [STEPS]
    assert (state(project)["copied"], state(project)["copy_error"]) == (STEPS, "")
    secret = environment["AWS_SECRET_ACCESS_KEY"].encode()
    for path in [p for p in (project / "outputs").rglob("*") if p.is_file()]:
        assert secret not in path.read_bytes(), path
    assert not [name for name, content in server.store.objects.items() if secret in content]


@pytest.mark.slow
def test_a_stopped_run_finishes_its_copy(project: Path, server: S3Server) -> None:
    environment = server.environment()
    launch = start_stage("04_train_fsdp.py", *IN_BUCKET, cwd=project, env=environment, ranks=2)
    wait_until(lambda: read_events(project, "start"))
    (project / "outputs/run/stop").touch()
    assert {*launch.wait(300)} <= {75, 0}
    saved = list_saved_steps(project, "run")[-1]
    assert copied_steps(server)[-1] == saved == state(project)["copied"]


@pytest.mark.slow
def test_a_signal_to_any_rank_ends_the_wait_for_a_copy(project: Path, server: S3Server) -> None:
    launch = start_stage(
        *("04_train_fsdp.py", *IN_BUCKET),
        cwd=project,
        env=server.environment(),
        ranks=2,
        output=project / "printed",
    )
    wait_until(lambda: (project / "outputs/run/metrics.jsonl").exists())
    server.store.hangs = True
    wait_until(lambda: "waiting up to 30 min" in (project / "printed").read_text())
    launch.signal(signal.SIGTERM, 1)
    assert launch.wait(120) == [0, 0]
    assert "NOT COPIED" in (project / "printed").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "key", "expected_text"),
    [
        pytest.param("s3://other-bucket/x", {}, "bucket does not exist", marks=pytest.mark.long),
        (URL, {"key_id": "wrong"}, "Access Key Id does not exist"),
        ("model/config.json", {}, "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_training(
    project: Path, server: S3Server, target: str, key: dict[str, str], expected_text: str
) -> None:
    done = run_stage(
        "04_train_fsdp.py",
        *(*COMMON, "-e", "run", "--ckpt-copy-to", target),
        cwd=project,
        env=server.environment(**key),
        expect=2,
    )
    assert expected_text in done.stderr + done.stdout
    assert not (project / "outputs/run/metrics.jsonl").exists()
