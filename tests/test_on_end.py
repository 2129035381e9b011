# covers: lib/train/output/end_watcher.py, launch/supervision/end_command.py, 04_train_fsdp.py
"""--on-end runs exactly once when a launch ends, for each way to end and each kind of launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.core.lease import Lease
from tests.conftest import ROOT, kill_all, run_stage, stage_command
from tests.trainer_stand_in import COMPLETE, KILLED, run_launcher, start_launcher
from tests.training import SMALL_RUN, metrics, read_events

SCRIPT = "04_train_fsdp.py"
TRAIN = (*SMALL_RUN, "-e", "run", "--eval-freq", 0, "-b", 2)
ENDLESS = (*TRAIN, "--max-steps", 50_000, "--ckpt-freq", 50_000)
# `sleep` shows a command that another one overtakes.
NOTE = 'echo "$EXP $STATUS $STEP ${LOSS:-none} $EXIT_CODE $REASON" >> ends; sleep 0.3'
ON_END = ("--on-end", NOTE)


def read_ends(project: Path) -> list[list[str]]:
    """Return the words of each call: EXP, STATUS, STEP, LOSS, EXIT_CODE and REASON."""
    path = project / "ends"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split(" ", 5) for line in lines]


def wait_for_ends(project: Path) -> list[list[str]]:
    """Wait for a call and for the end of all processes that could call again; return all calls."""
    deadline = time.monotonic() + 60
    while not read_ends(project) or find_watchers(project):
        assert time.monotonic() < deadline, "the command was not called"
        time.sleep(0.1)
    return read_ends(project)


def find_watchers(project: Path) -> list[int]:
    """Return the watchers that run in a directory."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_here = (entry / "cwd").readlink() == project
            if is_here and b"end_watcher" in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def find_ranks(project: Path) -> dict[int, int]:
    """Return the process of each rank of a launch."""
    ranks = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if (entry / "cwd").readlink() != project or b"-c" in command:
                continue
            rank = next(v for v in variables if v.startswith(b"RANK=")).removeprefix(b"RANK=")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if not any(name.endswith(b"04_train_fsdp.py") for name in command):
                continue
            siblings = Path(f"/proc/{parent}/environ").read_bytes()
            if b"\0RANK=" not in b"\0" + siblings:  # not a worker of a rank
                ranks[int(rank)] = int(entry.name)
        except (OSError, StopIteration):
            continue
    return ranks


def start_endless_run(
    project: Path, *options: object, ranks: int = 0, **more: object
) -> subprocess.Popen:
    """Start an endless run with a new interpreter, and wait for its third row."""
    command = stage_command(SCRIPT, *ENDLESS, *ON_END, *options, ranks=ranks)
    return start_command(project, command, **more)


def start_command(project: Path, command: list, **more: object) -> subprocess.Popen:
    """Start a command in a project, and wait for the third row of its run."""
    with (project / "printed").open("ab") as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=project, stdout=output, stderr=subprocess.STDOUT, **more
        )
    wait_for_rows(project, process)
    return process


def wait_for_rows(project: Path, process: subprocess.Popen, after: int = 0) -> None:
    path = project / "outputs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not path.exists() or len(path.read_text().splitlines()) < after + 3:
        assert process.poll() is None, (project / "printed").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_batch_job_does_not_print_the_command(tmp_path: Path) -> None:
    script = ROOT / "launch" / "slurm.sbatch"
    for words in (["--on-end", "curl https://a.b/s3cret"], ["--on_end=curl https://a.b/s3cret"]):
        job = ["bash", script, "--dry-run", "-e", "exp", "-d", "corpus", *words]
        printed = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "[redacted]" in printed.stdout and "s3cret" not in printed.stdout


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_complete_run_calls_once(project: Path, ranks: int) -> None:
    options = (*TRAIN, *ON_END, "--max-steps", 2)
    first = run_stage(SCRIPT, *options, cwd=project, ranks=ranks)
    loss = metrics(project, "run")[-1]["train/loss_mean"]
    assert read_ends(project) == [["run", "complete", "2", f"{loss:.6g}", "0", ""]]
    assert "the command of --on-end succeeded" in first.stdout
    [event] = read_events(project, "on_end", "on_end_failed")
    assert (event["event"], event["status"], event["step"]) == ("on_end", "complete", 2)
    run_stage(SCRIPT, *options, cwd=project, ranks=ranks)  # already complete
    run_stage(SCRIPT, *options, "--dry-run", cwd=project)
    run_stage(SCRIPT, *options, "--prepare-only", cwd=project)
    assert len(read_ends(project)) == 1
    assert not find_watchers(project)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_calls_once_and_again_after_the_resume(project: Path, ranks: int) -> None:
    options = (*TRAIN, *ON_END, "--max-steps", 4)
    stopped = run_stage(
        SCRIPT, *options, "--max-minutes", 1e-6, cwd=project, expect=None, ranks=ranks
    )
    assert stopped.returncode == (1 if ranks else 75)
    run_stage(SCRIPT, *options, cwd=project, ranks=ranks)
    first, second = read_ends(project)
    assert first[:3] == ["run", "preempted", "1"] and first[4] == "75"
    assert first[5].startswith("stopped by --max-minutes after step 1")
    assert second[:3] == ["run", "complete", "4"]


def test_a_refused_launch_calls_unless_another_one_holds_the_run(project: Path) -> None:
    run_stage(SCRIPT, *TRAIN, *ON_END, "--max-steps", 2, "-d", "none", cwd=project, expect=3)
    [end] = read_ends(project)
    assert end[:5] == ["run", "failed", "0", "none", "3"] and "none" in end[5]
    assert not (project / "outputs").exists()
    (root := project / "outputs" / "run").mkdir(parents=True)
    lease = Lease(root / "lock.json", lambda text: None)
    run_stage(SCRIPT, *TRAIN, *ON_END, "--max-steps", 2, cwd=project, expect=2)
    lease.release()
    assert len(read_ends(project)) == 1


def fail_at_step_2(rank: int) -> None:
    """Raise an error in the second step, as a bug would."""
    from lib.train.output.meters import Meters

    begin = Meters.begin_step

    def begin_or_fail(self: Meters, step: int) -> None:
        if step == 2:
            raise RuntimeError("a bug")
        begin(self, step)

    Meters.begin_step = begin_or_fail


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bug_calls_once(project: Path, ranks: int) -> None:
    done = run_stage(
        SCRIPT,
        *(*TRAIN, *ON_END, "--max-steps", 4),
        cwd=project,
        ranks=ranks,
        expect=1,
        before=f"{__name__}:fail_at_step_2",
    )
    [end] = read_ends(project)
    assert (end[1], end[2], end[4], end[5]) == ("failed", "1", "1", "a bug")
    assert "RuntimeError: a bug" in done.stderr


@pytest.mark.parametrize(
    ("command", "reason"),
    [("exit 9", "exit code 9"), ("sleep 500", "it did not end within 1 s and was killed")],
)
@pytest.mark.parametrize("code", [0, 75])
def test_the_command_does_not_change_the_exit_code(
    project: Path, command: str, reason: str, code: int
) -> None:
    options = ("--max-minutes", 1e-6) if code else ()
    done = run_stage(
        SCRIPT,
        *(*TRAIN, "--max-steps", 2, "--on-end", command, "--on-end-seconds", 1, *options),
        cwd=project,
        expect=code,
    )
    assert f"the command of --on-end failed: {reason}" in done.stdout
    [event] = read_events(project, "on_end", "on_end_failed")
    assert event["reason"] == reason and event["seconds"] < 60


@pytest.mark.slow
def test_the_watchdog_does_not_end_a_rank_that_waits_for_the_command(project: Path) -> None:
    """The limit of the watchdog at the end is six times 0.03 minutes."""
    run_stage(
        SCRIPT,
        *(*TRAIN, "--max-steps", 2, "--on-end", "sleep 14", "--watchdog-minutes", 0.03),
        cwd=project,
        timeout=120,
    )
    assert len(read_events(project, "on_end")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "killed"),
    [
        (0, 0),
        (2, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 0), (2, 0), (3, 0), (3, 2))),
    ],
)
def test_a_killed_rank_calls_once(project: Path, ranks: int, killed: int) -> None:
    process = start_endless_run(project, ranks=ranks)
    pid = find_ranks(project)[killed] if ranks else process.pid
    os.kill(pid, signal.SIGKILL)
    process.wait(timeout=120)
    [end] = wait_for_ends(project)
    assert (end[0], end[1], end[4]) == ("run", "failed", "1")
    assert int(end[2]) >= 3 and float(end[3]) > 0
    assert len(read_events(project, "on_end")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_stop_signal_to_torchrun_calls_once(project: Path, ranks: int) -> None:
    process = start_endless_run(project, ranks=ranks)
    process.terminate()
    process.wait(timeout=120)
    [end] = wait_for_ends(project)
    assert (end[1], end[4]) == ("preempted", "75")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rank_whose_torchrun_was_killed_calls_once(project: Path, ranks: int) -> None:
    process = start_endless_run(project, ranks=ranks)
    process.kill()
    process.wait()
    [end] = wait_for_ends(project)
    assert end[1] == "preempted" and "the end of its launcher" in end[5]


@pytest.mark.slow
@pytest.mark.parametrize("is_killed_again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torchrun_that_restarts_calls_at_the_last_end(project: Path, is_killed_again: bool) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, ROOT / SCRIPT, *TRAIN, "--max-steps", 160, "--ckpt-freq", 40, *ON_END]
    process = start_command(project, command)
    first = find_ranks(project)
    os.kill(first[0], signal.SIGKILL)
    if is_killed_again:
        deadline = time.monotonic() + 120
        while len(read_events(project, "start", "resume")) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(find_ranks(project)[0], signal.SIGKILL)
    process.wait(timeout=240)
    [end] = wait_for_ends(project)
    assert end[1] == ("failed" if is_killed_again else "complete"), (
        project / "printed"
    ).read_text()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ((KILLED, KILLED, COMPLETE), ["run", "complete", "9", "none", "0", ""]),
        (("state('preempted', 5); sys.exit(1)",), ["run", "preempted", "5", "none", "75"]),
        (("state('disk_full', 5); sys.exit(1)",), ["run", "disk_full", "5", "none", "4"]),
        ((KILLED,), ["run", "failed", "0", "none", "1"]),
        (("fail('UsageError', 2, 'error: bad')",), ["run", "failed", "0", "none", "2"]),
        (("fail('ExperimentHeld', 2, 'error: held')",), None),
        (("",), None),
    ],
)
def test_the_launcher_calls_once_after_its_restarts(
    tmp_path: Path, plan: tuple, expected: list[str] | None
) -> None:
    code, output, attempts = run_launcher(
        tmp_path, *plan, options=("--max-restarts", 2), arguments=ON_END
    )
    ends = read_ends(tmp_path)
    assert [end[: len(expected or [])] for end in ends] == ([expected] if expected else []), output
    assert ("the command of --on-end succeeded" in output) == bool(expected)
    assert len(attempts) == (3 if KILLED in plan else 1)
    if expected:
        assert str(code) == ends[0][4]


def test_a_launcher_is_not_delayed_beyond_the_limit(tmp_path: Path) -> None:
    code, output, _ = run_launcher(
        tmp_path, COMPLETE, arguments=("--on-end", "sleep 500", "--on-end-seconds", "0.5")
    )
    assert code == 0 and "it did not end within 0.5 s and was killed" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(NOTE, marks=pytest.mark.long), f"{NOTE}; touch called; sleep 500"]
)
def test_only_the_launcher_of_node_0_calls_and_all_leave_after_it(
    tmp_path: Path, command: str
) -> None:
    options = ("--nnodes", 2, "--head", "127.0.0.1", "--interface", "lo")
    arguments = ("--on-end", command, "--on-end-seconds", "4")
    launchers = [
        start_launcher(
            tmp_path,
            COMPLETE,
            node=node,
            options=(*options, "--node-rank", node),
            arguments=arguments,
        )
        for node in (0, 1)
    ]
    if command != NOTE:
        while not (tmp_path / "called").exists():
            time.sleep(0.05)
        assert launchers[1].poll() is None  # Slurm would end the job 60 s after this one's end
    outputs = [launcher.communicate(timeout=90)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert [end[1] for end in read_ends(tmp_path)] == ["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", pytest.param("launcher", marks=pytest.mark.long)])
def test_a_real_launch_calls_once_after_a_kill(project: Path, victim: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "BACKOFF_SECONDS": "0.1"}
    launch = ["bash", ROOT / "launch" / "single_node.sh", "--nproc-per-node", 2, "--"]
    command = [*launch, *TRAIN, "--max-steps", 160, "--ckpt-freq", 40, *ON_END]
    process = start_command(project, command, env=environment)
    if victim == "rank":
        os.kill(find_ranks(project)[0], signal.SIGKILL)
    else:
        process.kill()
    process.wait(timeout=240)
    [end] = wait_for_ends(project)
    assert end[1] == ("complete" if victim == "rank" else "preempted")
    kill_all(process, project)
