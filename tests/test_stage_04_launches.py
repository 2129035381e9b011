# covers: 04_train_fsdp.py, lib/train/settle.py, lib/train/launches.py
"""Options and stop requests that act once per launch, however often it is restarted."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import StageRunner, kill_all, run_stage
from tests.test_stage_04_stop import start_endless_run
from tests.training import SEQ_LENGTH, list_saved_steps, read_log

TRAIN = (
    "-d",
    "corpus",
    "-m",
    "model",
    "-s",
    SEQ_LENGTH,
    "--precision",
    "fp32",
    "-b",
    2,
    "--ckpt-freq",
    1,
    "--eval-freq",
    0,
)
SCRIPT = "04_train_fsdp.py"


def list_runs(project: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (project / "outputs").iterdir())


@pytest.mark.parametrize(
    "first, again, another",
    [
        pytest.param(
            {"LAUNCH_MARK": "a"},
            {"LAUNCH_MARK": "a"},
            {"LAUNCH_MARK": "b"},
            marks=pytest.mark.long,
            id="a launcher",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "7"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            {"SLURM_JOB_ID": "7"},
            marks=pytest.mark.slow,
            id="Slurm",
        ),
    ],
)
def test_a_launch_overwrites_refuses_and_stops_only_once(
    project: Path, stage: StageRunner, first: dict, again: dict, another: dict
):
    def run(environment: dict, *options: object, expect: int = 0) -> str:
        done = stage(
            SCRIPT, "-e", "run", *TRAIN, *options, cwd=project, env=environment, expect=expect
        )
        return done.stdout + done.stderr

    stop = project / "outputs" / "run" / "stop"
    run({}, "--max-steps", 1)
    run(first, "--overwrite", "--max-steps", 2)
    assert list_runs(project) == ["run", "run.replaced"]
    printed = run(again, "--overwrite", "--max-steps", 3)
    assert "--overwrite acted when" in printed and "resumed from" in printed
    assert (
        list_runs(project) == ["run", "run.replaced"] and max(list_saved_steps(project, "run")) == 3
    )
    stop.touch()  # while the launcher waits before a restart
    assert "stop file after step 4" in run(again, "--max-steps", 9, expect=75)
    stop.touch()
    printed = run(another, "--max-steps", 6)
    assert f"{stop.relative_to(project)} was for" in printed
    assert not stop.exists() and "is never" in run({}, "--resume", "never", expect=2)
    run({}, "--overwrite", "--max-steps", 1)
    assert list_runs(project) == ["run", "run.replaced", "run.replaced"]
    assert list_saved_steps(project, "run") == [1]


def ask_while_preparing(rank: int) -> None:
    """Request a stop before the run starts, as a person may while text is tokenised."""
    from lib.train.sources.corpora import CorporaSource

    prepare = CorporaSource.prepare_samples

    def stop_and_prepare(*arguments: object) -> object:
        Path("outputs/run/stop").touch()
        return prepare(*arguments)

    CorporaSource.prepare_samples = stop_and_prepare


def test_a_stop_file_written_during_preparation_ends_the_launch(project: Path):
    """Files of users in the directory of the run stay; our own leftovers are deleted."""
    run_stage(SCRIPT, "-e", "run", *TRAIN, "--max-steps", 1, cwd=project)
    (notes := project / "outputs" / "run" / "notes.tmp-1").touch()
    (leftover := notes.with_name("state.json.tmp-1")).touch()
    done = run_stage(
        SCRIPT,
        "-e",
        "run",
        *TRAIN,
        "--max-steps",
        5,
        cwd=project,
        expect=75,
        before=f"{__name__}:ask_while_preparing",
    )
    assert "stop file after step 2" in done.stdout + done.stderr
    assert notes.exists() and not leftover.exists()


def test_a_launch_with_resume_never_resumes_after_a_restart(project: Path, stage: StageRunner):
    for steps in (1, 2):
        stage(
            SCRIPT,
            "-e",
            "run",
            *TRAIN,
            "--resume",
            "never",
            "--max-steps",
            steps,
            cwd=project,
            env={"LAUNCH_MARK": "a"},
        )
    assert list_saved_steps(project, "run") == [1, 2]


@pytest.mark.slow
def test_a_named_checkpoint_may_be_gone_once_the_run_has_resumed_from_it(
    project: Path, stage: StageRunner
):
    def run(name: str, steps: int, *options: object, expect: int = 0) -> str:
        done = stage(
            SCRIPT, "-e", name, *TRAIN, *options, "--max-steps", steps, cwd=project, expect=expect
        )
        return done.stdout + done.stderr

    run("base", 2)
    named = project / "outputs" / "base" / "checkpoints" / "step_00000002"
    assert "resumed from" in run("run", 3, "--resume", named)
    shutil.rmtree(named)
    assert "step 3 of 4" in run("run", 4, "--resume", named)
    assert "is not a checkpoint" in run(
        "run", 5, "--resume", named.with_name("step_00000001x"), expect=3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3))]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="before the first save"),
        pytest.param(("--ckpt-freq", 2), id="after a save", marks=pytest.mark.long),
    ],
)
def test_ranks_whose_torchrun_has_died_save_and_end(project: Path, ranks: int, options: tuple):
    process = start_endless_run(project, *options, ranks=ranks)
    process.send_signal(signal.SIGUSR1)  # torchrun does not catch it, so it dies at once
    printed = process.communicate(timeout=90)[0]  # until every rank has closed the pipe as well
    kill_all(process, project)
    assert process.returncode == -signal.SIGUSR1
    assert "end of its launcher" in printed, printed
    state = json.loads((project / "outputs" / "run" / "state.json").read_text())
    assert state["status"] == "preempted", printed
    assert list_saved_steps(project, "run")[-1] == state["step"], printed


@pytest.mark.slow
def test_an_open_batch_is_chosen_once_per_run(project: Path) -> None:
    command = (
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        SEQ_LENGTH,
        "--precision",
        "fp32",
        "-b",
        "auto",
        "--ckpt-freq",
        1,
        "--eval-batches",
        1,
    )
    run_stage("04_train_fsdp.py", "-e", "open", *command, "--max-steps", 1, cwd=project, ranks=2)
    log = read_log(project, "open")
    assert "--batch-size auto: 64 per process, 2,048 tokens" in log
    commit = json.loads(
        (project / "outputs/open/checkpoints/step_00000001/COMMIT.json").read_text()
    )
    assert commit["identity"]["options"]["global_batch_size"] == 128
    second = run_stage("04_train_fsdp.py", "-e", "open", *command, "--max-steps", 2, cwd=project)
    assert "divides the 128 samples" in read_log(project, "open")
    assert "step 1 of 2" in second.stdout
    done = run_stage("04_train_fsdp.py", "-e", "open", *command, "--max-steps", 2, cwd=project)
    assert "already done" in done.stdout
