# covers: launch/slurm.sbatch, launch/slurm_array.sbatch
"""Test the Slurm launchers in a real cluster: exit codes, preemption, node loss, time limit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.conftest import ROOT, run_stage
from tests.slurm_cluster import SlurmCluster, wait_until
from tests.training import SMALL_RUN, losses, metrics

LAUNCHERS = ("slurm.sbatch", "slurm_array.sbatch")
BATCH = ROOT / "launch" / "slurm.sbatch"
ARRAY = ROOT / "launch" / "slurm_array.sbatch"
STEPS = 40
RUN = (*SMALL_RUN, "-e", "exp", "-b", 2, "--lr", "1e-2", "--max-steps", STEPS, "--eval-freq", 0)

# A stand-in for a launcher whose run ends as a test asks for; prints its options.
FAKE = """#!/usr/bin/env bash
[[ " $* " != *" --dry-run "* ]] || exit 0
start=${SLURM_RESTART_COUNT:-0}
printf '%s\\n' "$PWD" "$@" > "told_${SLURM_NODEID}_$start"
trap 'touch "saved_$SLURM_NODEID"; exit 75' TERM USR1
touch "ready_${SLURM_NODEID}_$start"
"""


@pytest.fixture(scope="module")
def cluster_once() -> Iterator[SlurmCluster]:
    """Yield a cluster of three nodes, or skip."""
    if reason := slurm_cluster.find_missing_tools():
        pytest.skip(reason)
    with slurm_cluster.run_cluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_once: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Yield the cluster without jobs and with the environment of the test."""
    guard = ("NETWORK_GUARD_REPORT", "PYTHONPATH")
    cluster_once.environment |= {name: os.environ[name] for name in guard}
    yield cluster_once
    cluster_once.cancel_all()


@pytest.fixture
def faked(tmp_path: Path) -> Path:
    """Return a project whose launcher executes the file `behaviour` beside it."""
    launch = tmp_path / "the project" / "launch"
    launch.mkdir(parents=True)
    shutil.copy(BATCH, launch)
    (launch.parent / "04_train_fsdp.py").touch()
    fake = launch / "multi_node.sh"
    fake.write_text(FAKE + 'source "${0%/*}/behaviour"\n')
    fake.chmod(0o755)
    return launch


def run_script(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """Run a launcher with bash, as on a machine without Slurm."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM")
    }
    return subprocess.run(
        ["bash", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_help_and_dry_run_need_no_slurm(tmp_path: Path, name: str) -> None:
    script = ROOT / "launch" / name
    shown = run_script(script, "--help", cwd=tmp_path)
    assert shown.returncode == 0 and f"launch/{name}" in shown.stdout and not shown.stderr
    plan = run_script(script, "--dry-run", "-e", "a b", "--merge", cwd=tmp_path)
    assert plan.returncode == 0 and "'a b'" in plan.stdout and str(ROOT) in plan.stdout
    assert not list(tmp_path.iterdir())
    refused = run_script(script, "-e", "exp", "--merge", cwd=tmp_path)
    suggested = shlex.split(refused.stderr.splitlines()[-1])
    assert refused.returncode == 2 and suggested[:5] == ["run:", "sbatch", str(script), "-e", "exp"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_copy_without_its_project_names_the_variable_to_set(tmp_path: Path, name: str) -> None:
    copy = shutil.copy(ROOT / "launch" / name, tmp_path)
    refused = run_script(copy, "--dry-run", "-e", "exp", cwd=tmp_path)
    assert (
        refused.returncode == 2
        and "hint:     set PROJECT_DIR" in refused.stderr
        and "run:" not in refused.stderr
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROJECT_DIR", str(ROOT))
        assert run_script(copy, "--dry-run", "-e", "exp", cwd=tmp_path).returncode == 0


def test_a_container_is_chosen_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_IMAGE", "/images/train.sqsh")
    monkeypatch.setenv("CONTAINER_MOUNTS", "/fsx:/fsx")
    plan = run_script(BATCH, "--dry-run", "-e", "exp", cwd=tmp_path).stdout
    assert "--container-image=/images/train.sqsh" in plan
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path},/fsx:/fsx" in plan
    assert f"--container-workdir={tmp_path}" in plan


def test_hyperpod_resumes_within_the_step(tmp_path: Path) -> None:
    """A directory marks a HyperPod cluster; here only this command sees it."""
    if reason := slurm_cluster.find_missing_tools():
        pytest.skip(reason)
    assert "--auto-resume" not in run_script(BATCH, "--dry-run", "-e", "exp", cwd=tmp_path).stdout
    hyperpod = 'mount -t tmpfs none /opt && mkdir /opt/sagemaker_cluster && exec bash "$@"'
    plan = subprocess.run(
        [
            "unshare",
            "--mount",
            "bash",
            "-c",
            hyperpod,
            "bash",
            str(BATCH),
            "--dry-run",
            "-e",
            "exp",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "srun --cpu-bind=none" in plan.stdout and " --auto-resume=1 " in plan.stdout


def test_each_node_gets_its_rank_and_the_options(
    cluster: SlurmCluster, faked: Path, tmp_path: Path
) -> None:
    (faked / "behaviour").write_text('echo "$LAUNCHED_AS" > launched_as; exit 0')
    cwd = tmp_path / "some where"
    cwd.mkdir()
    cluster.run("sbatch", "--test-only", "-N", 2, faked / BATCH.name, "-e", "exp", cwd=cwd)
    job = cluster.submit(
        "-N",
        2,
        "../the project/launch/slurm.sbatch",
        "--nproc-per-node",
        3,
        "--",
        "-e",
        "a b",
        "-d",
        "x*",
        cwd=cwd,
    )
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0")
    port = str(20000 + int(job) % 10000)
    for rank in ("0", "1"):
        printed = (cwd / f"told_{rank}_0").read_text().splitlines()
        assert printed == [
            str(cwd),
            "--node-rank",
            rank,
            "--nnodes",
            "2",
            "--head",
            "127.0.0.1",
            "--port",
            port,
            "--nproc-per-node",
            "3",
            "--",
            "-e",
            "a b",
            "-d",
            "x*",
        ]
    typed = shlex.split((cwd / "launched_as").read_text())  # messages of the run use this name
    assert typed[:3] == ["sbatch", "-N", "2"]
    assert typed[-8:] == [
        str(faked / BATCH.name),
        "--nproc-per-node",
        "3",
        "--",
        "-e",
        "a b",
        "-d",
        "x*",
    ]
    assert "complete" in (cwd / f"slurm-{job}.out").read_text()
    logs = sorted(path.name for path in (cwd / f"slurm-{job}").iterdir())
    assert [name.partition("-")[0] for name in logs] == ["node0", "node1"]


def test_a_run_that_fails_fails_the_job_with_its_code(
    cluster: SlurmCluster, faked: Path, tmp_path: Path
) -> None:
    """Exit code 75 without a signal of Slurm means that the run itself was asked to stop."""
    (faked / "behaviour").write_text('echo this is why; exit "${!#}"')
    codes = 1, 2, 3, 4, 75
    jobs = [cluster.submit(faked / BATCH.name, "-e", code, cwd=tmp_path) for code in codes]
    for code, job in zip(codes, jobs, strict=True):
        facts = cluster.wait_for_end(job)
        assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", f"{code}:0")
        assert facts["Restarts"] == "0"
        printed = (tmp_path / f"slurm-{job}.out").read_text()
        assert ("sbatch command continues" if code == 75 else "this is why") in printed


def test_scancel_saves_and_ends(cluster: SlurmCluster, faked: Path, tmp_path: Path) -> None:
    (faked / "behaviour").write_text("while sleep 0.1; do :; done")
    job = cluster.submit("-N", 2, faked / BATCH.name, "-e", "exp", cwd=tmp_path)
    wait_until((tmp_path / "ready_1_0").exists, "node 1 is at work")
    wait_until((tmp_path / "ready_0_0").exists, "node 0 is at work")
    cluster.run("scancel", job)
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()


def test_the_warning_before_the_time_limit_saves_and_requeues(
    cluster: SlurmCluster, faked: Path, tmp_path: Path
) -> None:
    (faked / "behaviour").write_text("while [[ $start == 0 ]]; do sleep 0.1; done")
    job = cluster.submit("-N", 2, faked / BATCH.name, "-e", "exp", cwd=tmp_path)
    wait_until((tmp_path / "ready_1_0").exists, "node 1 is at work")
    wait_until((tmp_path / "ready_0_0").exists, "node 0 is at work")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()


@pytest.mark.long
def test_a_warning_that_slurm_does_not_send_is_replaced_by_the_clock(
    cluster: SlurmCluster, faked: Path, tmp_path: Path
) -> None:
    (faked / "behaviour").write_text("while [[ $start == 0 ]]; do sleep 0.1; done")
    job = cluster.submit(
        "--time=2", "--signal=B:CONT@1", faked / BATCH.name, "-e", "exp", cwd=tmp_path
    )
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert (tmp_path / "saved_0").exists()


@pytest.mark.slow
def test_a_job_with_a_lost_node_is_requeued(
    cluster: SlurmCluster, faked: Path, tmp_path: Path
) -> None:
    """Slurm may notice the loss only after minutes, but the job does not fail."""
    (faked / "behaviour").write_text("""
        [[ $start == 0 ]] || exit 0
        [[ $SLURM_NODEID == 1 ]] || until [[ -e lost ]]; do sleep 0.1; done
        exit 1""")
    job = cluster.submit("-N", 2, "-w", "n1,n2", faked / BATCH.name, "-e", "exp", cwd=tmp_path)
    wait_until(
        lambda: (
            "Exited" in (tmp_path / f"slurm-{job}.out").read_text()
            if (tmp_path / f"slurm-{job}.out").exists()
            else False
        ),
        "node 1 has ended",
    )
    cluster.kill_node("n2")
    (tmp_path / "lost").touch()
    try:
        wait_until(lambda: cluster.facts(job)["Restarts"] == "1", "the job is queued again")
    finally:
        cluster.start_node("n2")
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "a node is lost" in (tmp_path / f"slurm-{job}.out").read_text()


@pytest.mark.slow
def test_an_array_builds_the_dataset_of_one_machine(cluster: SlurmCluster, project: Path) -> None:
    options = (
        "--data-folder",
        "splits",
        "--save-dir",
        "hf_datasets/array",
        "--validation-percent",
        5,
    )
    job = cluster.submit("--array=0-2", ARRAY, *options, cwd=project)
    merge = cluster.submit(f"--dependency=afterok:{job}", ARRAY, *options, "--merge", cwd=project)
    assert cluster.wait_for_end(merge)["JobState"] == "COMPLETED"
    built, expected = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.arrow")}
        for folder in (project / "hf_datasets" / "array", project / "hf_datasets" / "corpus")
    )
    assert built and built == expected
    refused = cluster.submit(ARRAY, *options, cwd=project)
    assert cluster.wait_for_end(refused)["ExitCode"] == "2:0"


@pytest.mark.slow
def test_a_task_of_an_array_is_requeued_near_its_time_limit(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "02_build_hf_dataset.py").write_text("""
import os, pathlib, sys, time
pathlib.Path("told").write_text(" ".join(sys.argv[1:]))
time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 600)""")
    job = cluster.submit(
        "--array=3", ARRAY, "--fields", "a", cwd=tmp_path, PROJECT_DIR=str(tmp_path)
    )
    printed = tmp_path / "told"
    wait_until(lambda: printed.exists() and printed.read_text(), "the task is at work")
    assert printed.read_text() == "--num-workers 1 --fields a --only-splits 3"
    cluster.run("scancel", "--batch", "--signal=USR1", f"{job}_3")
    facts = cluster.wait_for_end(f"{job}_3")
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")


@pytest.fixture(scope="module")
def undisturbed(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the run on two ranks without Slurm."""
    root = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", *RUN, cwd=root, ranks=2)
    return losses(root, "exp")


def trainers(project: Path) -> list[Path]:
    """Return the /proc entries of the ranks of a project's run."""
    entries = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if (
                b"04_train_fsdp.py" in command
                and b"launch/torchrun.py" not in command
                and (entry / "cwd").readlink() == project
            ):
                entries.append(entry)
    return entries


def send_signal(entries: list[Path], number: signal.Signals) -> None:
    """Send a signal to processes that may have ended."""
    for entry in entries:
        with suppress(ProcessLookupError):
            os.kill(int(entry.name), number)


def metrics_of(project: Path) -> list[dict]:
    """Return the rows that the run has logged so far."""
    is_there = (project / "outputs" / "exp" / "metrics.jsonl").exists()
    return metrics(project, "exp") if is_there else []


def has_signal(entry: Path) -> bool:
    """Return whether a stopped process has a pending signal, or has ended."""
    try:
        status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines())
    except OSError:
        return True
    return bool(int(status["ShdPnd"], 16))


def assert_as_undisturbed(project: Path, undisturbed: dict[int, float]) -> None:
    """Assert that the run was resumed and has the undisturbed losses in every step."""
    events = [
        json.loads(line)["event"]
        for line in (project / "outputs" / "exp" / "events.jsonl").read_text().splitlines()
    ]
    assert "resume" in events and events[-1] == "complete"
    assert losses(project, "exp") == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("partition", ["low", "low_at_once"])
def test_a_preempted_job_is_requeued_and_resumes(
    cluster: SlurmCluster, project: Path, undisturbed: dict[int, float], partition: str
) -> None:
    """The job resumes after it had time to save, and after Slurm itself ended and requeued it."""
    job = cluster.submit("-N", 2, "-p", partition, BATCH, *RUN, cwd=project)
    wait_until(lambda: metrics_of(project), "the run logs steps")
    send_signal(ranks := trainers(project), signal.SIGSTOP)  # stopped, so it cannot end earlier
    try:
        other = cluster.submit("-N", 3, "-p", "high", "--exclusive", "--wrap", "true", cwd=project)
        wait_until(
            lambda: (
                (now := cluster.facts(job))["JobState"] != "RUNNING" or now["PreemptTime"] != "None"
            ),
            "the job is preempted",
        )
    finally:
        send_signal(ranks, signal.SIGCONT)
    assert cluster.wait_for_end(other)["JobState"] == "COMPLETED"
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert_as_undisturbed(project, undisturbed)


@pytest.mark.long
def test_a_job_at_its_time_limit_is_requeued_and_resumes(
    cluster: SlurmCluster, project: Path, undisturbed: dict[int, float]
) -> None:
    """The limit is shortened once the run trains, however long its start took."""

    def limit(minutes: int) -> None:
        cluster.run("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")

    job = cluster.submit("-N", 2, "--time=60", "--signal=B:USR1@45", BATCH, *RUN, cwd=project)
    wait_until(lambda: metrics_of(project), "the run logs steps")
    send_signal(ranks := trainers(project), signal.SIGSTOP)
    try:
        hours, minutes, _ = map(int, cluster.facts(job)["RunTime"].split(":"))
        limit(60 * hours + minutes + 1)
        wait_until(lambda: any(has_signal(rank) for rank in ranks), "the warning arrives")
    finally:
        send_signal(ranks, signal.SIGCONT)
    wait_until(lambda: cluster.facts(job)["Restarts"] == "1", "the job is queued again")
    limit(60)
    facts = cluster.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert_as_undisturbed(project, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_job_with_a_dead_node_is_requeued_and_resumes(
    cluster: SlurmCluster, project: Path, undisturbed: dict[int, float], lost: str
) -> None:
    """The dead node is that of the batch script, or another; the third node replaces it."""
    job = cluster.submit("-N", 2, BATCH, *RUN, "--ckpt-freq", 10, cwd=project)
    saved = project / "outputs" / "exp" / "checkpoints"
    wait_until(lambda: list(saved.glob("step_????????/COMMIT.json")), "a checkpoint")
    send_signal(ranks := trainers(project), signal.SIGSTOP)
    try:
        assert cluster.facts(job)["NodeList"] == "n[1-2]"
        cluster.kill_node(lost)
        send_signal(ranks, signal.SIGCONT)
        facts = cluster.wait_for_end(job)
    finally:
        cluster.start_node(lost)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert lost[1] not in facts["NodeList"]
    assert_as_undisturbed(project, undisturbed)


@pytest.mark.long
def test_a_cancelled_job_continues_when_submitted_again(
    cluster: SlurmCluster, project: Path, undisturbed: dict[int, float]
) -> None:
    job = cluster.submit("-N", 2, BATCH, *RUN, cwd=project)
    wait_until(lambda: metrics_of(project), "the run logs steps")
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job)["JobState"] == "CANCELLED"
    state = json.loads((project / "outputs" / "exp" / "state.json").read_text())
    assert state["status"] == "preempted"
    second = cluster.submit("-N", 2, BATCH, *RUN, cwd=project)
    assert cluster.wait_for_end(second)["JobState"] == "COMPLETED"
    assert_as_undisturbed(project, undisturbed)


@pytest.mark.long
def test_a_job_whose_run_fails_is_failed(cluster: SlurmCluster, project: Path) -> None:
    job = cluster.submit("-N", 2, BATCH, *RUN[:2], "-d", "nowhere", *RUN[4:], cwd=project)
    facts = cluster.wait_for_end(job)
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] in ("2:0", "3:0")
    assert "nowhere" in (project / f"slurm-{job}.out").read_text()
